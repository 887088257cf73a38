"""The normalisations of the series. All compute in float32 at least; float64 stays float64.

x: [..., D] is normalised over its last axis.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Literal["sigmoid", "silu"]


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or unchanged where it is float64 already."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x² + eps), without a gain, in float32 at least (Zhang & Sennrich, 2019, eq. 4)."""
    x = at_least_float32(x)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(Σ x² + eps), in float32 at least.

    eps is added to the sum: ``F.normalize`` takes a maximum instead, and an RMSNorm would need eps / D.
    """
    x = at_least_float32(x)
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


class RMSNorm(nn.Module):
    """y = weight · cast(x / sqrt(mean x² + eps)), cast back to x's dtype before the gain."""

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * rms_norm(x, self.eps).to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """y = cast(weight · x / sqrt(mean x² + eps) · activation(gate)): the gate comes after the gain."""

    def __init__(self, dim: int, *, activation: Activation, eps: float = 1e-5) -> None:
        super().__init__(dim, eps=eps)
        # The gain of a memory's output norm is float32 in the checkpoints, whatever the default dtype.
        self.weight = nn.Parameter(at_least_float32(self.weight.detach()))
        self.activation = {"sigmoid": torch.sigmoid, "silu": F.silu}[activation]

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = self.weight * rms_norm(x, self.eps) * self.activation(at_least_float32(gate))
        return y.to(x.dtype)
