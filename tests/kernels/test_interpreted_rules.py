"""The chunked kernels in Triton's interpreter against the PyTorch forms in float64, rung by rung."""

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from evolve_kernels.chunk_rule import chunk_rule
from tests.kernels.memory_guard import Guard, guarded
from tests.rule_cases import (
    DELTA,
    GATED,
    KDA,
    LINEAR,
    LINEAR_ELU,
    Rule,
    assert_blocks_close,
    assert_gradients_close,
    leaves,
    make,
)

FORWARD = {"chunk_prepare_kernel": 1, "chunk_walk_kernel": 1}
BOTH = {
    "chunk_prepare_kernel": 2,  # backward prepares and walks again
    "chunk_walk_kernel": 2,
    "chunk_walk_backward_kernel": 1,
    "state_gradients_kernel": 1,
    "chunk_prepare_backward_kernel": 1,
}
CHANNEL_ONLY = dataclasses.replace(KDA, name="channel-gate-only", inputs=("q", "k", "v", "g"))


def kernel(rule: Rule, x: dict, **options) -> tuple[Tensor, Tensor]:
    return chunk_rule(x["q"], x["k"], x["v"], x.get("g"), x.get("beta"), initial_state=x.get("S0"), **options)


def reference(rule: Rule, x: dict, **options) -> tuple[Tensor, Tensor]:
    """The PyTorch form; a gate per channel without erasing, which no rung has, by its definition."""
    options.pop("lower_bound", None)
    if rule is not CHANNEL_ONLY:
        return rule.run("chunk", x, **options)
    S, o = x["S0"], []
    for t in range(x["q"].shape[1]):
        S = x["g"][:, t].exp()[..., None] * S + x["k"][:, t, :, :, None] * x["v"][:, t, :, None]
        o.append(torch.einsum("bhkv,bhk->bhv", S, x["q"][:, t] * x["q"].shape[-1] ** -0.5))
    return torch.stack(o, 1), S


def compare(rule: Rule, sizes: dict, launches: dict, tolerance: float = 1e-5, **options) -> None:
    """Output, last state and every gradient of Σ w·o + Σ w'·S, all memory guarded."""
    x = make(rule, dtype=torch.float32, **sizes)
    exact = {name: t.double().requires_grad_() for name, t in x.items()}
    x = {name: guarded(t).requires_grad_() for name, t in x.items()}
    o_exact, S_exact = reference(rule, exact, **options)
    w, w_S = (guarded(torch.randn(y.shape)) for y in (o_exact, S_exact))
    want = torch.autograd.grad((o_exact * w).sum() + (S_exact * w_S).sum(), list(exact.values()))
    launches.clear()
    with Guard() as guard:
        o, S = kernel(rule, x, **options)
        got = torch.autograd.grad((o, S), list(x.values()), (w, w_S))
    guard.check()
    assert len(guard.buffers) > 20, "backward allocates under guard too"
    assert launches == BOTH
    assert o.dtype == S.dtype == torch.float32
    assert_blocks_close("output", o, o_exact, tolerance, time_axis=True)
    assert_blocks_close("state", S, S_exact, tolerance, time_axis=False)
    assert_gradients_close(list(x), list(got), list(want), 1e-4)


def case(rule: Rule, C: int, tolerance: float = 1e-5, lower_bound: float | None = None, **sizes):
    name = "-".join([rule.name, f"C{C}", *(f"{k}{v}" for k, v in sizes.items())]).replace(" ", "")
    bound = "" if lower_bound is None else "-bounded"
    return pytest.param(rule, C, tolerance, lower_bound, sizes, id=name + bound)


CASES = [
    case(KDA, 16, T=1, B=3, H=1),
    case(KDA, 16, T=15, B=1, H=2, HV=4, beta="two", gate="-1.5"),
    case(KDA, 16, T=17, B=1, H=1, K=60, V=70, gate="one at -1000"),
    case(KDA, 32, T=33, B=1, H=1, gate="-20"),
    case(KDA, 64, 5e-5, T=47, B=1, H=1),
    case(KDA, 64, T=129, B=1, H=1, K=16, V=16, gate="-1e-3", beta="one"),
    case(KDA, 16, lower_bound=-5.0, T=33, B=1, H=1, HV=2, gate="-5"),
    case(KDA, 64, lower_bound=-5.0, T=65, B=1, H=1, K=40, gate="-1.5"),
    case(KDA, 32, lower_bound=-5.0, T=2, B=2, H=1, gate="zero", beta="zero"),
    case(CHANNEL_ONLY, 16, T=17, B=1, H=1),
    case(GATED, 16, T=33, B=2, H=1, HV=2, beta="two"),
    case(GATED, 64, 5e-5, T=65, B=1, H=1, K=60, V=24),
    case(GATED, 16, T=16, B=1, H=1, gate="one at -1000"),
    case(GATED, 32, T=2, B=1, H=2, gate="-20", beta="zero"),
    case(DELTA, 16, T=33, B=1, H=1, HV=2, K=60),
    case(DELTA, 64, T=63, B=1, H=1, beta="two", V=40),
    case(DELTA, 32, T=1, B=2, H=2, beta="one"),
    case(LINEAR, 16, T=33, B=1, H=1, HV=2),
    case(LINEAR, 64, T=65, B=1, H=1, K=60, V=24),
]


@pytest.mark.parametrize(("rule", "C", "tolerance", "bound", "sizes"), CASES)
def test_kernels_equal_the_pytorch_form(rule, C, tolerance, bound, sizes, launches) -> None:
    compare(rule, sizes, launches, tolerance, chunk_size=C, lower_bound=bound)


@pytest.mark.parametrize(("K", "V"), [(100, 130), (256, 20)])
def test_wide_heads(K: int, V: int, launches) -> None:
    compare(KDA, {"T": 18, "B": 1, "H": 1, "K": K, "V": V}, launches, chunk_size=16)


@pytest.mark.parametrize("rule", [KDA, GATED, DELTA, LINEAR], ids=lambda r: r.name)
def test_packed_sequences_equal_the_pytorch_form(rule: Rule, launches) -> None:
    """Sequences of 5, 0, 16 and 12 tokens in one row: every one has its own state."""
    ends = torch.tensor([0, 5, 5, 21, 33])
    x = make(rule, T=33, B=1, H=1, HV=2, dtype=torch.float32) | {"S0": torch.randn(4, 2, 12, 20)}
    exact = {name: t.double().requires_grad_() for name, t in x.items()}
    x = {name: guarded(t).requires_grad_() for name, t in x.items()}
    with Guard() as guard:
        o, S = kernel(rule, x, chunk_size=16, cu_seqlens=ends)
        w, w_S = torch.randn(o.shape), torch.randn(S.shape)
        got = torch.autograd.grad((o * w).sum() + (S * w_S).sum(), list(x.values()))
    guard.check()
    assert launches == BOTH
    o_exact, S_exact = rule.run("chunk", exact, chunk_size=16, cu_seqlens=ends)
    want = torch.autograd.grad((o_exact * w).sum() + (S_exact * w_S).sum(), list(exact.values()))
    assert_blocks_close("output", o, o_exact, 1e-5, time_axis=True)
    assert_blocks_close("state", S, S_exact, 1e-5, time_axis=False)
    assert_gradients_close(list(x), list(got), list(want), 1e-4)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("rule", [KDA, GATED], ids=lambda r: r.name)
def test_the_future_never_touches_the_past(rule: Rule, bound: float | None) -> None:
    """Bit for bit forward, exact zeros backward; with the future's gates at their extremes."""
    if rule is GATED and bound is not None:
        pytest.skip("a gate per head has no bounded form")
    x = make(rule, T=37, B=1, H=1, gate="-1.5", dtype=torch.float32)
    options = {"chunk_size": 32, "lower_bound": bound}
    with torch.no_grad():
        o, _ = kernel(rule, x, **options)
        for t in (1, 7, 16, 21, 33):
            other = {name: y.clone() for name, y in x.items()}
            for name in rule.inputs:
                other[name][:, t:] = -5.0 if name == "g" else torch.randn_like(other[name][:, t:])
            assert torch.equal(kernel(rule, other, **options)[0][:, :t], o[:, :t])
    x = {name: t.requires_grad_() for name, t in x.items()}
    o, _ = kernel(rule, x, **options)
    grads = torch.autograd.grad(o[:, :21].square().sum(), [x[name] for name in rule.inputs])
    for name, d in zip(rule.inputs, grads):
        assert torch.count_nonzero(d[:, 21:]) == 0, name
        assert torch.count_nonzero(d[:, :21]) > 0, name


def test_splitting_a_sequence_changes_nothing() -> None:
    x = make(KDA, T=40, B=1, H=1, gate="-1.5", dtype=torch.float32)
    whole, S_whole = kernel(KDA, x, chunk_size=16)
    first = {name: t if name == "S0" else t[:, :23] for name, t in x.items()}
    o_1, S = kernel(KDA, first, chunk_size=16)
    rest = {name: S if name == "S0" else t[:, 23:] for name, t in x.items()}
    o_2, S = kernel(KDA, rest, chunk_size=16)
    assert_blocks_close("output", torch.cat([o_1, o_2], 1), whole, 1e-5, time_axis=True)
    assert_blocks_close("state", S, S_whole, 1e-5, time_axis=False)


def test_views_of_any_stride_are_taken() -> None:
    x = make(KDA, T=19, B=2, H=2, dtype=torch.float32)
    turned = {name: t.transpose(0, -1).contiguous().transpose(0, -1) for name, t in x.items()}
    turned["beta"] = torch.full((1, 1, 1), 0.5).expand(2, 19, 2)
    x["beta"] = turned["beta"].contiguous()
    assert not turned["q"].is_contiguous()
    for a, b in zip(kernel(KDA, turned, chunk_size=16), kernel(KDA, x, chunk_size=16)):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_half_precision_inputs(dtype: torch.dtype, tolerance: float, launches) -> None:
    """Rounded inputs, float32 inside: the error is that of a few roundings (which truncate bf16 here)."""
    x = make(KDA, T=35, B=1, H=1, gate="-1.5", dtype=torch.float32)
    x = {name: t.to(dtype) if name in "qkv" else t for name, t in x.items()}
    exact = {name: t.double().requires_grad_() for name, t in x.items()}
    x = {name: t.requires_grad_() for name, t in x.items()}
    o, S = kernel(KDA, x, chunk_size=16, lower_bound=-5.0)
    assert (o.dtype, S.dtype) == (dtype, torch.float32)
    w = torch.randn(o.shape)
    got = torch.autograd.grad((o.float() * w).sum(), [x[n] for n in KDA.inputs])
    o_exact, S_exact = KDA.run("chunk", exact)
    want = torch.autograd.grad((o_exact * w).sum(), [exact[n] for n in KDA.inputs])
    assert launches == BOTH
    for name, a, b in [("o", o, o_exact), ("S", S, S_exact), *zip(KDA.inputs, got, want)]:
        error = (a.double() - b).abs().max() / b.abs().max()
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("rule", [LINEAR, LINEAR_ELU, DELTA, GATED, KDA], ids=lambda r: r.name)
def test_backend_triton_runs_the_kernels(rule: Rule, launches) -> None:
    """Through ``evolve``'s own functions, feature map and normaliser included."""
    x = make(rule, T=19, B=2, H=1, HV=2, dtype=torch.float32)
    inputs = [t.requires_grad_() for t in leaves(x)]
    losses = []
    for backend in ("triton", "torch"):
        o, S = rule.run("chunk", x, chunk_size=16, backend=backend)
        S = S if isinstance(S, tuple) else (S,)
        loss = o.square().sum() + sum(s.square().sum() for s in S)
        losses.append((o, *S, *torch.autograd.grad(loss, inputs)))
    assert launches == BOTH
    for a, b in zip(*losses):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_what_the_kernels_cannot_take_is_refused_by_name() -> None:
    x = make(KDA, T=5, B=1, H=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="chunk_size must be one of"):
        KDA.run("chunk", x, chunk_size=24, backend="triton")
    with pytest.raises(ValueError, match="takes no float64"):
        KDA.run("chunk", {name: t.double() for name, t in x.items()}, backend="triton")
    with pytest.raises(ValueError, match="q must be float32, float16 or bfloat16"):
        kernel(KDA, {name: t.double() for name, t in x.items()})
    with pytest.raises(ValueError, match=r"beta must be \[1, 5, 1\], got \[1, 4, 1\]"):
        kernel(KDA, x | {"beta": x["beta"][:, :4]})
    with pytest.raises(ValueError, match="K at most 256"):
        kernel(KDA, make(KDA, T=2, B=1, H=1, K=300, dtype=torch.float32))


@pytest.mark.parametrize("B", [0, 2])
def test_nothing_to_do(B: int, launches) -> None:
    """No row, or no token: the state is handed over as it is."""
    x = make(KDA, T=0 if B else 4, B=B, H=1, dtype=torch.float32)
    o, S = kernel(KDA, x)
    assert o.shape == x["v"].shape
    assert torch.equal(S, x["S0"])


def test_cpu_tensors_need_the_interpreter(monkeypatch) -> None:
    monkeypatch.setattr("evolve_kernels.launch.INTERPRETED", False)
    with pytest.raises(ValueError, match=r"needs CUDA tensors \(or TRITON_INTERPRET=1\), got cpu"):
        kernel(KDA, make(KDA, T=4, B=1, H=1, dtype=torch.float32))
