"""The calls whose kernels are compiled and timed: real models' shapes, on ``meta`` or on a device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.layer_cases import LAYERS
from benchmarks.operation_cases import OPERATIONS, Operation
from evolve_kernels.chunk_rule import chunk_rule
from evolve_kernels.kda_decode import kda_decode
from evolve_kernels.launch import Launch, recorded


@dataclass(frozen=True)
class Case:
    """One rule at one model's sizes; ``backward`` asks for its gradients too."""

    gate: str = "channel"
    erase: bool = True
    lower_bound: float | None = None
    H: int = 96
    HV: int = 96
    K: int = 128
    V: int = 128
    T: int = 8192
    B: int = 1
    backward: bool = True
    decode: bool = False


CASES: dict[str, Case | Operation] = {
    "KDA, K3": Case(lower_bound=-5.0),
    "decode, K3": Case(lower_bound=-5.0, T=1, decode=True),
    "KDA, Kimi Linear": Case(H=32, HV=32, backward=False),
    "gated delta rule, Qwen3-Next": Case("head", H=16, HV=32),
    "delta rule": Case("none", H=16, HV=16, backward=False),
    "linear attention": Case("none", erase=False, H=16, HV=16, backward=False),
} | OPERATIONS
CASES |= LAYERS


def rule_inputs(case: Case, device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor | None]:
    """q, k (unit length), v in ``dtype``; g, beta and the first state in float32."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32)

    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    g = {"channel": (B, T, HV, K), "head": (B, T, HV), "none": None}[case.gate]
    x = {name: torch.nn.functional.normalize(normal(B, T, H, K), dim=-1).to(dtype) for name in "qk"}
    x |= {"v": normal(B, T, HV, V).to(dtype)}
    x["g"] = None if g is None else -5.0 * normal(*g).sub(4).sigmoid()  # slow decays, inside the bound
    x["beta"] = normal(B, T, HV).sigmoid() if case.erase else None
    x["initial_state"] = normal(B, HV, K, V)
    return x


def decode_inputs(case: Case, device: str, dtype: torch.dtype = torch.bfloat16, W: int = 4) -> dict[str, Any]:
    """What ``kda_decode`` takes for one token of each row."""

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)

    B, H, HV, K, V = case.B, case.H, case.HV, case.K, case.V
    widths, float32 = (H * K, H * K, HV * V), {"dtype": torch.float32}
    return {
        "q": normal(B, H, K),
        "k": normal(B, H, K),
        "v": normal(B, HV, V),
        "z": normal(B, HV, K),
        "b": normal(B, HV),
        "gate": normal(B, HV, V),
        "state": normal(B, HV, K, V, **float32),
        "histories": tuple(normal(B, W - 1, D) for D in widths),
        "conv_weights": tuple(normal(D, 1, W, **float32) for D in widths),
        "A_log": normal(HV, **float32),
        "dt_bias": normal(HV * K, **float32),
        "gain": normal(V, **float32),
        "lower_bound": case.lower_bound,
    }


def call(case: Case | Operation, device: str, dtype: torch.dtype = torch.bfloat16) -> Callable[[], Any]:
    """A function that makes the case's call, forward and, where it has one, backward."""
    if isinstance(case, Operation):
        return case.call(device, dtype)
    if case.decode:
        given = decode_inputs(case, device, dtype)
        return lambda: kda_decode(**given)
    given = rule_inputs(case, device, dtype)
    leaves = [x.requires_grad_(case.backward) for x in given.values() if x is not None]

    def run() -> Any:
        o, S = chunk_rule(**given, lower_bound=case.lower_bound)
        return torch.autograd.grad((o, S), leaves, (o, S)) if case.backward else (o, S)

    return run


def launches_of(name: str, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """Every launch of a case, recorded on ``meta``: nothing runs and nothing is allocated."""
    with recorded() as launches:
        call(CASES[name], "meta", dtype)()
    return launches
