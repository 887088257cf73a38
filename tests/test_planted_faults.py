"""Planted faults: one-line changes of the code, each of which must turn a named test red.

What keeps the list honest: the changed code imports and runs, the test fails on a numeric assert (not on a
shape, a dtype or another exception), and the unchanged code passes the same test in the same harness.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

FRESH = (
    "evolve",
    "tests.rule_cases",
    "tests.oracles",
    "tests.test_memory",
    "tests.test_moe",
    "tests.test_balancing",
    "tests.test_k3",
    "tests.test_mxfp4",
)


class Planter(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module with one line of its source changed."""

    def __init__(self, module: str, old: str, new: str) -> None:
        path = importlib.util.find_spec(module).origin
        importlib.machinery.SourceFileLoader.__init__(self, module, path)
        self.old, self.new = old, new

    def find_spec(self, name: str, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def get_code(self, name: str):
        source = self.get_data(self.path).decode()
        found = source.count(self.old)
        assert found == 1, f"{self.old!r} must stand once in {self.name}, found {found} times"
        return compile(source.replace(self.old, self.new), self.path, "exec")


@contextmanager
def planted(module: str, old: str, new: str):
    """Within, everything imported anew from the package and the suites sees the change."""
    planter = Planter(module, old, new)
    kept = {name: m for name, m in sys.modules.items() if name.startswith(FRESH)}
    for name in kept:
        del sys.modules[name]
    sys.meta_path.insert(0, planter)
    try:
        yield
    finally:
        sys.meta_path.remove(planter)
        for name in [n for n in sys.modules if n.startswith(FRESH)]:
            del sys.modules[name]
        sys.modules.update(kept)


Sentinel = Callable[[], None]


def rules(test: str, rule: str | None = None, *args) -> Sentinel:
    """A test of the rules' suites; ``rule`` is the name of a rule in ``tests.rule_cases``."""

    def run() -> None:
        for suite in ("tests.test_memory_rules", "tests.test_memory_rules_edges"):
            function = getattr(importlib.import_module(suite), test, None)
            if function is not None:
                given = (getattr(importlib.import_module("tests.rule_cases"), rule),) if rule else ()
                return function(*given, *args)
        raise LookupError(test)

    return run


def layers(test: str, *args) -> Sentinel:
    """A test of the layers' suite."""
    return lambda: getattr(importlib.import_module("tests.test_memory_layers"), test)(*args)


def experts(test: str, *args) -> Sentinel:
    """A test of the mixture of experts."""
    return lambda: getattr(importlib.import_module("tests.test_moe"), test)(*args)


def balancing(test: str, *args) -> Sentinel:
    """A test of the balancing rules."""
    return lambda: getattr(importlib.import_module("tests.test_balancing"), test)(*args)


def k3(test: str, *args) -> Sentinel:
    """A test of Kimi K3 or of its four-bit format."""

    def run() -> None:
        suites = (importlib.import_module(f"tests.{name}") for name in ("test_k3", "test_mxfp4"))
        return next(getattr(suite, test) for suite in suites if hasattr(suite, test))(*args)

    return run


CASE = {"steps": "3C-1", "B": 1, "heads": (2, 4), "K": 12, "C": 16, "gate": "mixed", "beta": "uniform"}


def chunk(rule: str, **change) -> Sentinel:
    return rules("test_chunk_equals_oracle", rule, CASE | change)


def loop(rule: str) -> Sentinel:
    return rules("test_recurrent_equals_oracle", rule, torch.float64)


@dataclass(frozen=True)
class Fault:
    what: str
    module: str
    old: str
    new: str
    sentinel: Sentinel


READ = 'torch.einsum("bhkv,bhk->bhv", S, k)'
BY_HAND = experts("test_a_layer_is_the_formula_token_by_token", {"scaling": 2.0})
OFFICIAL = experts("test_equals_the_official_codes_feed_forward_networks")
QUANTILE = balancing("test_quantile_is_its_definition", 100, 8, 2)
PARITY = k3("test_every_sublayer_equals_the_official_one", "tiny", False)
PARITY_PACKED = k3("test_every_sublayer_equals_the_official_one", "tiny-mxfp4", False)
RUNNING_SUMS = "(g.cumsum(-1)[..., :, None] - g.cumsum(-1)[..., None, :])"
FAULTS = [
    # the definitions
    Fault(
        "error taken before the decay",
        "gated_deltanet",
        "S = alpha[..., None, None] * S",
        f"v, S = v - (1 - alpha[..., None]) * {READ}, alpha[..., None, None] * S",
        loop("GATED"),
    ),
    Fault(
        "decay on the value axis",
        "kda",
        "S = alpha[..., None] * S",
        "S = alpha.mean(-1)[..., None, None] * S",
        loop("KDA"),
    ),
    Fault(
        "read before write",
        "deltanet",
        "    S = S + outer",
        "    q, S = q - k * (q * k).sum(-1, keepdim=True), S + outer",
        loop("DELTA"),
    ),
    Fault("write without beta", "deltanet", "beta[..., None] * error", "error", loop("DELTA")),
    Fault("query not scaled", "memory_rule", "tokens[0] * scale", "tokens[0]", loop("DELTA")),
    Fault(
        "key heads tiled",
        "memory_rule",
        "x.repeat_interleave(HV // x.shape[2], dim=2)",
        "x.repeat(1, 1, HV // x.shape[2], 1)",
        rules("test_grouped_heads_equal_repeated_heads", "DELTA", "recurrent"),
    ),
    Fault(
        "half-precision recurrence",
        "memory_rule",
        "for x in given), torch.float32)",
        "for x in given), torch.bfloat16)",
        rules("test_the_error_is_taken_before_rounding", None, "recurrent"),
    ),
    Fault(
        "autocast let in",
        "memory_rule",
        "return torch.autocast(device.type, enabled=False)",
        "return nullcontext()",
        rules("test_autocast_leaves_the_recurrence_alone", "DELTA", "chunk"),
    ),
    Fault(
        "packed sequences all start from the first state",
        "memory_rule",
        "S[n : n + 1])",
        "S[:1])",
        rules("test_packed_rows_equal_separate_rows", "DELTA", "chunk"),
    ),
    Fault(
        "normaliser stores zeros",
        "linear_attention",
        "F.pad(v, (0, 1), value=1.0)",
        "F.pad(v, (0, 1), value=0.0)",
        chunk("LINEAR_ELU"),
    ),
    # the chunked forms
    Fault(
        "own token left out",
        "linear_attention",
        "(Q @ K.mT).tril() @ V",
        "(Q @ K.mT).tril(-1) @ V",
        chunk("LINEAR"),
    ),
    Fault(
        "beta left out of U",
        "deltanet",
        "M @ V, M @ K, K)",
        "unit_lower_inverse(A) @ V, M @ K, K)",
        chunk("DELTA"),
    ),
    Fault("old state not erased", "chunking", "torch.baddbmm(U_n, W_n, S, alpha=-1)", "U_n", chunk("DELTA")),
    Fault(
        "output mask without decay",
        "gated_deltanet",
        "((Q @ K.mT) * Gamma) @ U",
        "(Q @ K.mT).tril() @ U",
        chunk("GATED"),
    ),
    Fault(
        "Gram matrix without decay",
        "gated_deltanet",
        "A = beta * (K @ K.mT) * Gamma",
        "A = beta * (K @ K.mT)",
        chunk("GATED"),
    ),
    Fault("W without decay", "gated_deltanet", "M @ (alpha * K)", "M @ K", chunk("GATED")),
    Fault(
        "decay since the start instead of until the end",
        "gated_deltanet",
        "K_out = Gamma[..., -1, :, None] * K",
        "K_out = alpha * K",
        chunk("GATED"),
    ),
    Fault(
        "a token fades by its own gate",
        "gated_deltanet",
        "masked_fill(~past.tril(-1), 0)",
        "masked_fill(~past, 0)",
        chunk("GATED"),
    ),
    Fault(
        "future not masked",
        "gated_deltanet",
        'G.masked_fill(~past, float("-inf")).exp()',
        "G.exp()",
        rules("test_future_never_touches_the_past", "GATED", "chunk", 7),
    ),
    Fault(
        "masked after the exponential",
        "gated_deltanet",
        'return G.masked_fill(~past, float("-inf")).exp()',
        f"return {RUNNING_SUMS}.exp().masked_fill(~past, 0)",
        rules("test_strong_decay_has_finite_right_gradients", "GATED", "chunk", -20.0),
    ),
    Fault(
        "digits lost to running sums",
        "gated_deltanet",
        'return G.masked_fill(~past, float("-inf")).exp()',
        f'return {RUNNING_SUMS}.masked_fill(~past, float("-inf")).exp()',
        chunk("GATED", C=64),
    ),
    Fault("exp2 for exp", "kda", "Q]), K, g.exp())", "Q]), K, g.exp2())", chunk("KDA")),
    Fault(
        "border of a block off by one",
        "kda",
        "until_1 * since_2[..., -1:, :]",
        "until_1 * since_2[..., :1, :]",
        chunk("KDA"),
    ),
    Fault("decay restarts in each block", "kda", "since_1[..., -1:, :] * since_2", "since_2", chunk("KDA")),
    Fault(
        "first decay of the chunk for the last",
        "kda",
        "since_start[..., -1, :, None]",
        "since_start[..., 0, :, None]",
        chunk("KDA"),
    ),
    Fault(
        "decay in the wrong factor",
        "kda",
        "(x_2 * since_2) @ (y_1 * until_1).mT",
        "(x_2 * since_2) @ (y_1 * since_1).mT",
        chunk("KDA"),
    ),
    Fault("old state read without decay", "kda", "(since_start * Q) @ before", "Q @ before", chunk("KDA")),
    # gates, convolution, norms, layers
    Fault(
        "bounded gate as a clamp",
        "kda",
        "return lower_bound * torch.sigmoid(A * z)",
        "return (-A * F.softplus(z)).clamp(min=lower_bound)",
        rules("test_kda_gates"),
    ),
    Fault("softplus cut at 20", "kda", "softplus(z, threshold=40.0)", "softplus(z)", rules("test_kda_gates")),
    Fault(
        "convolution backwards",
        "short_conv",
        "w[:, j] * u",
        "w[:, W - 1 - j] * u",
        layers("test_short_conv_is_the_formula"),
    ),
    Fault(
        "convolution forgets the call before",
        "short_conv",
        "torch.cat([history.to(dtype), u], dim=1)",
        "torch.cat([torch.zeros_like(history), u], dim=1)",
        layers("test_prefill_and_decode_equal_the_full_pass", "delta"),
    ),
    Fault(
        "L2 norm over the mean",
        "norms",
        "x.square().sum(-1, keepdim=True)",
        "x.square().mean(-1, keepdim=True)",
        layers("test_norms_are_the_formulas"),
    ),
    Fault(
        "padding ignored",
        "memory_layer",
        "mask = None if mask.all() else mask",
        "mask = None",
        layers("test_padding_never_matters", "k3", "left"),
    ),
    Fault(
        "wrong output gate",
        "gated_deltanet",
        'activation="silu"',
        'activation="sigmoid"',
        layers("test_gated_deltanet_equals_qwen3_next", 7, 2, 6),
    ),
    Fault(
        "a and b swapped in the converter",
        "gated_deltanet",
        '"b_proj": b, "a_proj": a',
        '"b_proj": a, "a_proj": b',
        layers("test_gated_deltanet_equals_qwen3_next", 7, 2, 6),
    ),
    # experts and their balance
    Fault("router's bias in the weights", "moe", "scores.gather(1", "(scores + bias).gather(1", BY_HAND),
    Fault(
        "weights by subtracting the bias",
        "moe",
        "scores.gather(1, indices)",
        "(scores + bias).gather(1, indices) - bias[indices]",
        experts("test_the_bias_chooses_and_never_weighs"),
    ),
    Fault("bias left out of the choice", "moe", "(scores + bias).topk", "scores.topk", BY_HAND),
    Fault("weights not scaled", "moe", "weights * scaling", "weights", BY_HAND),
    Fault("sigmoid of g/β", "moe", "torch.sigmoid(g)", "torch.sigmoid(g / beta)", OFFICIAL),
    Fault("no latent norm", "moe", "self.routed_expert_norm(u)", "u", OFFICIAL),
    Fault(
        "latent norm before the sum",
        "moe",
        "routing.weights[..., None] * at_least_float32(y)",
        "routing.weights[..., None] * F.rms_norm(at_least_float32(y), y.shape[-1:])",
        OFFICIAL,
    ),
    Fault("gate and up swapped", "moe", "w1, w3 = gate_up", "w3, w1 = gate_up", OFFICIAL),
    Fault("rows of other tokens", "moe", "order // k", "order % len(x)", BY_HAND),
    Fault("results not put back in order", "moe", "order.argsort()", "order", BY_HAND),
    Fault(
        "router in half precision",
        "moe",
        "F.linear(at_least_float32(x), at_least_float32(self.weight))",
        "F.linear(x, self.weight).float()",
        experts("test_the_router_is_exact_in_half_precision_and_under_autocast"),
    ),
    Fault("last choice for the cutoff", "balancing", ".topk(top_k + 1", ".topk(top_k", QUANTILE),
    Fault("quantile from the other end", "balancing", "(m - 1) * k / E", "(m - 1) * (E - k) / E", QUANTILE),
    Fault(
        "bias not centred",
        "balancing",
        "lerp(lacking[min(below + 1, m - 1)], place - below)",
        "lerp(lacking[min(below + 1, m - 1)], place - below) + 1; return new",
        QUANTILE,
    ),
    Fault(
        "sign turned round",
        "balancing",
        "counts.double().mean() - counts",
        "counts - counts.double().mean()",
        balancing("test_the_sign_rule_moves_by_its_rate_towards_the_mean"),
    ),
    Fault(
        "histogram forgets the bins before",
        "balancing",
        "(share - before)",
        "share",
        balancing("test_histogram_is_right_to_a_bins_width", 4096, 64, 4, 1000),
    ),
    # Kimi K3
    Fault("blocks counted in sub-layers", "k3", "block_size=2 * config", "block_size=config", PARITY),
    Fault(
        "border of a depth block off by one",
        "attention_residuals",
        "if i % self.block_size == 0:",
        "if i == 0 or i % self.block_size == 1:",
        PARITY,
    ),
    Fault(
        "the two sites' queries swapped",
        "attention_residuals",
        '("self_attention_res", "mlp_res")',
        '("mlp_res", "self_attention_res")',
        PARITY,
    ),
    Fault(
        "router's bias in the released model's weights",
        "moe",
        "scores.gather(1",
        "(scores + bias).gather(1",
        PARITY,
    ),
    Fault("padding of the decay rates for the rates", "kda", "A_log[:HV] if", "A_log[-HV:] if", PARITY),
    Fault("latent norm left out of the model", "moe", "self.routed_expert_norm(u)", "u", PARITY),
    Fault(
        "first layer after the dense ones",
        "k3",
        "layer <= config.first_k_dense_replace",
        "layer < config.first_k_dense_replace",
        k3("test_layers_are_those_of_the_configuration"),
    ),
    Fault(
        "weights over the largest, not the sum",
        "moe",
        "weights.sum(-1, keepdim=True) + 1e-20",
        "weights.amax(-1, keepdim=True) + 1e-20",
        k3("test_a_lone_choice_keeps_its_score", 2),
    ),
    Fault(
        "lone choice renormalised",
        "k3",
        "config.moe_renormalize and config.num_experts_per_token > 1",
        "config.moe_renormalize",
        k3("test_a_lone_choice_keeps_its_score", 1),
    ),
    Fault(
        "halves of a byte swapped",
        "mxfp4",
        "[values.repeat(16), values.repeat_interleave(16)]",
        "[values.repeat_interleave(16), values.repeat(16)]",
        PARITY_PACKED,
    ),
    Fault(
        "halves swapped both ways",
        "mxfp4",
        "return low | high << 4, scale",
        "return high | low << 4, scale",
        k3("test_the_nearest_code_and_the_even_one_between_two", 0.26, 1),
    ),
    Fault(
        "ties away from zero",
        "mxfp4",
        "size > middle if lower % 2 == 0 else size >= middle",
        "size >= middle",
        k3("test_the_nearest_code_and_the_even_one_between_two", 0.25, 0),
    ),
    Fault(
        "scale one power off", "mxfp4", "torch.arange(256) - 127", "torch.arange(256) - 126", PARITY_PACKED
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.what)
def test_planted_fault_turns_its_sentinel_red(fault: Fault) -> None:
    with planted(f"evolve.{fault.module}", fault.old, fault.old):
        fault.sentinel()  # the unchanged code passes here
    with (
        planted(f"evolve.{fault.module}", fault.old, fault.new),
        pytest.raises(AssertionError) as failure,
    ):
        fault.sentinel()
    message = str(failure.value).splitlines()[0]
    assert not re.search(r"shape|dtype|torch\.|must stand once", message), f"not a numeric failure: {message}"
