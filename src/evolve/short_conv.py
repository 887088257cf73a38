"""The short convolution in front of a memory: each channel sees its own last few inputs.

y_t = SiLU(Σ_j w_j u_{t−W+1+j}), j = 0 … W − 1, separately for every channel. It lets a key hold the token
before it, which no single-token projection can. Shapes: u, y [B, T, D]; weight [D, 1, W] (the checkpoints'
layout); history [B, W − 1, D], the last inputs of the call before, zeros at a sequence's start.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolve.checks import check_shape, require
from evolve.memory_rule import check_backend, check_cu_seqlens, per_sequence, runs_on_triton
from evolve.norms import at_least_float32


def short_conv(
    u: Tensor,
    weight: Tensor,
    history: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution and SiLU, in float32 at least.

    Args:
        u: [B, T, D]. weight: [D, 1, W].
        history: [B, W − 1, D], or [N, W − 1, D] with ``cu_seqlens``; zeros by default.
        cu_seqlens: [N+1] ends of N sequences packed into one row, B = 1: none sees another.
        backend: ``"torch"``, ``"triton"``, or ``None``: Triton on a GPU where it is installed.
    Returns: y [B, T, D] in u's dtype; the history for the call after this one, in u's dtype.
    Raises: ValueError on shapes or ``cu_seqlens`` that do not fit.
    """
    check_shape("u", u, B=None, T=None, D=None)
    D, W = u.shape[2], weight.shape[-1]
    check_shape("weight", weight, D=D, one=1, W=None)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *u.shape[:2])
    N = u.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if history is None:
        history = u.new_zeros(N, W - 1, D)
    check_shape("history", history, N=N, **{"W-1": W - 1}, D=D)
    check_backend(backend)
    if runs_on_triton(backend, (u, weight, history)):
        from evolve_kernels.short_conv import short_conv as kernel

        return kernel(u, weight, history, cu_seqlens=cu_seqlens)

    def form(u: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        T, dtype = u.shape[1], u.dtype
        u = torch.cat([history.to(dtype), u], dim=1)  # row t + W − 1 is token t
        w = at_least_float32(weight)[:, 0]
        one_token = T == 1  # then one product does instead of W
        y = (w.mT * u).sum(1, keepdim=True) if one_token else sum(w[:, j] * u[:, j : j + T] for j in range(W))
        return F.silu(y).to(dtype), u[:, T:].clone()  # a view would keep all of u alive in a cache

    return per_sequence(form, (u,), history, cu_seqlens)


class ShortConvolution(nn.Module):
    """``short_conv`` with its weight [D, 1, W], float32 as in the checkpoints when it is built.

    ``backend``: as in ``short_conv``.
    """

    def __init__(self, dim: int, kernel_size: int = 4, *, backend: str | None = None) -> None:
        super().__init__()
        check_backend(backend)
        self.backend = backend
        require(kernel_size > 0, f"kernel_size must be positive, got {kernel_size}")
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.weight = nn.Parameter(torch.empty(dim, 1, kernel_size, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self, u: Tensor, history: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return short_conv(u, self.weight, history, cu_seqlens=cu_seqlens, backend=self.backend)
