"""Muon, head by head, as Kimi K3 was trained: the steps of matrices are made orthogonal.

A matrix's step is its momentum M = U S Vᵀ with all singular values set to about 1: directions that the
gradient hardly uses move as far as those that it uses much. No decomposition is needed, five rounds of an
odd polynomial do it (Jordan et al., *Muon*, 2024, kellerjordan.github.io/posts/muon). Steps are scaled to
the size of AdamW's, so that both share a learning rate (Liu et al., *Muon is Scalable for LLM Training*,
2025, arXiv:2502.16982). Projections to queries, keys and values are treated **per head**: each head's rows
are a matrix of their own, so that no head's step depends on another's gradient (Kimi Team, 2026). That
report does not list the other matrices; we take those of the layers whole, except routers.
"""

from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from evolve.checks import require
from evolve.memory_layer import MemoryLayer
from evolve.mla import MultiHeadLatentAttention
from evolve.moe import Experts

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of s, s³ and s⁵: steep at 0, and near 1 from there on
ROUNDS = 5
MOMENTUM = 0.95
RMS = 0.2  # of AdamW's steps, in learning rates: what Muon's are scaled to


def orthogonalized(M: Tensor) -> Tensor:
    """U Vᵀ of matrices M = U S Vᵀ, [..., m, n], but for singular values between about 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    X = M.mT if M.shape[-2] > M.shape[-1] else M  # the small Gram matrix is the cheap one
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        G = X @ X.mT
        X = a * X + (b * G + c * G @ G) @ X
    return X.mT if M.shape[-2] > M.shape[-1] else X


def blocks_of(module: nn.Module) -> dict[str, int]:
    """Rows of a block of each parameter of ``module`` that holds several matrices, by its name."""
    if isinstance(module, Experts):  # the gate's rows, and those that it gates
        return {"gate_up_proj": module.down_proj.shape[-1]}
    if isinstance(module, MultiHeadLatentAttention):
        K, V = module.qk_nope_head_dim, module.v_head_dim
        queries = K + module.qk_rope_head_dim
        keys_and_values = K if K == V else K + V
        return {
            "q_proj.weight": queries, "q_b_proj.weight": queries, "kv_b_proj.weight": keys_and_values
        }  # fmt: skip
    if isinstance(module, MemoryLayer):
        K, V = module.head_dim, module.head_v_dim
        return {"q_proj.weight": K, "k_proj.weight": K, "v_proj.weight": V}
    return {}


def matrices(model: nn.Module) -> dict[str, int]:
    """The parameters of ``model.layers`` that Muon serves, and the rows of a block of each; 0 for the whole.

    Matrices [m, n], and stacks [E, m, n], of which no side is 1. Not the routers'.
    """
    rows = {
        f"{at}.{name}": n for at, module in model.named_modules() for name, n in blocks_of(module).items()
    }
    routers = {f"{at}.weight" for at, m in model.named_modules() if hasattr(m, "e_score_correction_bias")}
    return {
        name: rows.get(name, 0)
        for name, p in model.named_parameters()
        if p.requires_grad and name.startswith("layers.") and name not in routers
        if p.ndim in (2, 3) and min(p.shape[-2:]) > 1
    }


class Muon(torch.optim.Optimizer):
    """Muon for groups {"params": [...], "rows": of one block, 0 for whole matrices}.

    Raises ``ValueError`` for a parameter that is not made of matrices of so many rows.
    """

    def __init__(self, groups: Iterable[dict], *, lr: float, weight_decay: float = 0.1) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "rows": 0, "rate": 1.0})
        for group in self.param_groups:
            for p in group["params"]:
                fits = p.ndim >= 2 and (not group["rows"] or p.shape[-2] % group["rows"] == 0)
                require(
                    fits, f"params must be matrices in blocks of {group['rows']} rows, got {list(p.shape)}"
                )

    @torch.no_grad()
    def step(self) -> None:
        """One step for every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: Tensor, group: dict) -> None:
        average = self.state[p].setdefault("average", torch.zeros_like(p))
        average.lerp_(p.grad, 1 - MOMENTUM)
        ahead = p.grad.lerp(average, MOMENTUM)  # Nesterov's look ahead
        M = ahead.unflatten(-2, (-1, group["rows"] or p.shape[-2]))
        step = orthogonalized(M) * (RMS * max(M.shape[-2:]) ** 0.5)
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * step.flatten(-3, -2))


class Joined:
    """Several optimisers as one, with the part of their interface that a training loop uses."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.optimizers = dict(optimizers)

    @property
    def param_groups(self) -> list[dict]:
        return list(chain.from_iterable(o.param_groups for o in self.optimizers.values()))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.step()

    def state_dict(self) -> dict[str, dict]:
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: Mapping[str, dict]) -> None:
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])
