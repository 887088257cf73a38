"""The four memory rules under one interface, and the cases they are tried on.

Code under test is looked up at the time of the call, so that a test can be run against changed code.
"""

import importlib
import itertools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

GATES = ("zero", "-1e-3", "-1.5", "-5", "-20", "mixed", "one at -1000")
BETAS = ("zero", "one", "uniform", "two")


@dataclass(frozen=True)
class Rule:
    name: str
    module: str
    stem: str  # of the functions' names
    inputs: tuple[str, ...]
    gate: str = "none"
    options: dict = field(default_factory=dict)

    def form(self, kind: str):
        return getattr(importlib.import_module(f"evolve.{self.module}"), f"{kind}_{self.stem}")

    def run(self, kind: str, x: dict, **how) -> tuple[Tensor, Tensor | tuple]:
        """``kind`` is "recurrent" or "chunk"; x as ``make`` returns it. Returns o and the last state."""
        if kind == "recurrent":
            how.pop("chunk_size", None)
        tokens = [x[name] for name in self.inputs]
        how = {"initial_state": x.get("S0"), "output_final_state": True, **self.options, **how}
        return self.form(kind)(*tokens, **how)


QKV = ("q", "k", "v")
LINEAR = Rule("linear", "linear_attention", "linear_attention", QKV)
LINEAR_ELU = Rule(
    "linear-elu",
    "linear_attention",
    "linear_attention",
    QKV,
    options={"feature_map": "elu1", "normalize": True},
)
DELTA = Rule("delta", "deltanet", "delta_rule", (*QKV, "beta"))
GATED = Rule("gated", "gated_deltanet", "gated_delta_rule", (*QKV, "g", "beta"), gate="head")
KDA = Rule("kda", "kda", "kda", (*QKV, "g", "beta"), gate="channel")
RULES = (LINEAR, LINEAR_ELU, DELTA, GATED, KDA)
GATED_RULES = (GATED, KDA)


def make_gate(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Log decays of one kind; shape [B, T, HV] or [B, T, HV, K]."""
    if kind == "mixed":  # a different pace for every entry, with exact zeros and −20s among them
        g = -torch.exp(torch.empty(shape, dtype=torch.float64).uniform_(-9.2, 3.0))
        u = torch.rand(shape)
        return torch.where(u < 0.15, 0.0, torch.where(u > 0.85, -20.0, g))
    if kind == "one at -1000":
        g = torch.full(shape, -0.01, dtype=torch.float64)
        if len(shape) == 4:
            g[..., 0] = -1000.0  # one channel
        else:
            g[:, shape[1] // 2 :: 17] = -1000.0  # one token in 17
        return g
    return torch.full(shape, 0.0 if kind == "zero" else float(kind), dtype=torch.float64)


def make(
    rule: Rule,
    *,
    T: int,
    B: int = 2,
    H: int = 2,
    HV: int | None = None,
    K: int = 12,
    V: int = 20,
    gate: str = "mixed",
    beta: str = "uniform",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Inputs for ``rule``, drawn in float64, representable in float32; keys of unit length; a first state."""
    torch.manual_seed(seed)
    HV = H if HV is None else HV

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    x = {"q": normal(B, T, H, K), "k": F.normalize(normal(B, T, H, K), dim=-1), "v": normal(B, T, HV, V)}
    x["g"] = make_gate(gate, (B, T, HV, K) if rule.gate == "channel" else (B, T, HV))
    x["beta"] = {"zero": 0.0, "one": 1.0, "two": 2.0}.get(beta, torch.rand(B, T, HV, dtype=torch.float64))
    x["beta"] = x["beta"] + torch.zeros(B, T, HV, dtype=torch.float64)
    x["S0"] = normal(B, HV, K, V)
    x = {name: t.float().to(dtype) for name, t in x.items() if name in (*rule.inputs, "S0")}
    if rule.options.get("normalize"):
        x["S0"] = (x["S0"], torch.rand(B, HV, K).to(dtype))  # z ≥ 0, as a sum of positive features is
    return x


def pairwise_cases(**axes: tuple) -> list[dict]:
    """Few cases in which every two values of every two axes meet: take what covers most open pairs."""
    names = list(axes)
    pairs = itertools.combinations(names, 2)
    missing = {((a, x), (b, y)) for a, b in pairs for x in axes[a] for y in axes[b]}
    cases = []
    while missing:
        case = dict(min(missing, key=repr))
        for name in names:
            options = [case | {name: value} for value in axes[name]]
            case = case if name in case else max(options, key=lambda c: len(missing & _pairs_of(c, names)))
        missing -= _pairs_of(case, names)
        cases.append(case)
    return cases


def _pairs_of(case: dict, names: list[str]) -> set:
    items = [(name, case[name]) for name in names if name in case]
    return set(itertools.combinations(items, 2))


def as_tuple(state: Tensor | tuple) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def leaves(x: dict) -> list[Tensor]:
    """Every input tensor of ``make``, to ask gradients for."""
    return [t for value in x.values() for t in as_tuple(value)]


def assert_blocks_close(name: str, got: Tensor, want: Tensor, tolerance: float, time_axis: bool) -> None:
    """Relative to the largest |want| of each (row, head, block of 16 tokens): none hides behind another.

    1e-30 is far below anything but a state that has faded out of float32's range.
    """
    got, want = got.double(), want.double()
    assert got.shape == want.shape, f"{name}: {list(got.shape)} is not {list(want.shape)}"
    blocks = (
        zip(got.split(16, dim=1), want.split(16, dim=1)) if time_axis else [(got[:, None], want[:, None])]
    )
    for n, (a, b) in enumerate(blocks):  # [B, block, HV, V], or [B, 1, HV, K, V]
        error = (a - b).abs().flatten(3).amax((1, 3))
        size = b.abs().flatten(3).amax((1, 3))
        worst = (error / size.clamp(min=1e-30)).max().item() if error.numel() else 0.0
        assert bool((error <= tolerance * size + 1e-30).all()), (
            f"{name}, block {n}: {worst:.1e} > {tolerance:.0e}"
        )


def assert_gradients_close(names: list[str], got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """Within tolerance · max(1, max |want|), for every input."""
    for name, a, b in zip(names, got, want):
        error = (a.double() - b.double()).abs().max().item() if b.numel() else 0.0
        bound = tolerance * max(1.0, b.abs().max().item() if b.numel() else 0.0)
        assert error <= bound, f"gradient of {name}: {error:.1e} > {bound:.1e}"
