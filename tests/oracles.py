"""What the rules are held against: a float64 loop in another algebraic form, FLA's and transformers' code."""

import importlib
import inspect
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.rule_cases import Rule

GOLDENS = Path(__file__).parent / "goldens"


def oracle(rule: Rule, x: dict, scale: float | None = None) -> tuple[Tensor, Tensor | tuple]:
    """The rule in float64 as a chain of matrices: S_t = (I − β k kᵀ) Diag(α) S_{t−1} + β k vᵀ, o = Sᵀ q.

    Differentiable in every input. Linear attention is the chain without the bracket and with β = α = 1.
    """
    q, k, v = (x[n].double() for n in "qkv")
    (B, T, H, K), HV = q.shape, v.shape[2]
    elu, normalize = rule.options.get("feature_map") == "elu1", rule.options.get("normalize", False)
    if elu:
        q, k = (torch.nn.functional.elu(u) + 1 for u in (q, k))
    q = q * ((1.0 if elu else K**-0.5) if scale is None else scale)
    heads = [h * H // HV for h in range(HV)]  # value head -> its key head
    q, k = q[:, :, heads], k[:, :, heads]
    beta = x["beta"].double() if "beta" in x else torch.ones(B, T, HV, dtype=torch.float64)
    g = x["g"].double() if "g" in x else torch.zeros(B, T, HV, dtype=torch.float64)
    alpha = (g if g.ndim == 4 else g[..., None].expand(B, T, HV, K)).exp()
    erase = 1.0 if "beta" in x else 0.0
    S, z = x["S0"] if normalize else (x["S0"], None)
    S, eye, o = S.double(), torch.eye(K, dtype=torch.float64), []
    for t in range(T):
        kt, bt = k[:, t, :, :, None], beta[:, t, :, None, None]  # [B, HV, K, 1], [B, HV, 1, 1]
        M = (eye - erase * bt * (kt @ kt.mT)) * alpha[:, t, :, None, :]  # (I − β k kᵀ) Diag(α)
        S = M @ S + bt * (kt @ v[:, t, :, None, :])
        o_t = (S.mT @ q[:, t, :, :, None])[..., 0]
        if normalize:
            z = z + k[:, t]
            o_t = o_t / (q[:, t] * z).sum(-1, keepdim=True)
        o.append(o_t)
    o = torch.stack(o, 1) if o else v
    return o, ((S, z) if normalize else S)


@contextmanager
def without(package: str):
    """Make ``import package`` fail, as on a machine that lacks it."""
    hidden = {n: m for n, m in sys.modules.items() if n == package or n.startswith(f"{package}.")}
    for name in hidden:
        del sys.modules[name]
    sys.modules[package] = None
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(hidden)


def transformers_model(name: str) -> ModuleType:
    """transformers' modelling module; it picks FLA's GPU kernels on import unless FLA is out of sight."""
    pytest.importorskip("transformers", reason="transformers is an oracle of these tests")
    with without("fla"):
        return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def transformers_function(model: str, name: str):
    """One of its pure-PyTorch functions, without the dispatch around it."""
    return inspect.unwrap(getattr(transformers_model(model), name))


def fla_function(module: str, name: str):
    """One of FLA's naive references: ``fla.ops.<module>.naive.<name>``. They compute in float32."""
    pytest.importorskip("fla", reason="flash-linear-attention is an oracle of these tests (pip --no-deps)")
    return getattr(importlib.import_module(f"fla.ops.{module}.naive"), name)
