"""What stands between the large products of Kimi K3, as the benchmarks call it.

Attention Residuals, SiTU-GLU and the short convolution.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operation_cases import Inputs, Operation, normal


@dataclass(frozen=True)
class DepthReadCase(Operation):
    """S sites read M finished blocks of N tokens (phase 1)."""

    M: int = 8
    S: int = 24
    N: int = 8192
    D: int = 7168
    backward: bool = True

    def checked(self) -> "DepthReadCase":
        return replace(self, M=3, S=4, N=10, D=150)

    def inputs(self, device: str, dtype: torch.dtype) -> Inputs:
        sources = normal(device, dtype, self.M, self.N, self.D)
        return {"sources": sources, "folded": normal(device, dtype, self.S, self.D) / self.D**0.5}

    def ours(self, given: Inputs) -> Tensor:
        from evolve_kernels.attention_residuals import depth_read

        return depth_read(**given)[0]

    def reference(self, given: Inputs) -> Tensor:
        from evolve.attention_residuals import read_sources

        read = read_sources(list(given["sources"]), given["folded"], 1e-5)
        return read.o / read.l[..., None]


@dataclass(frozen=True)
class DepthAddCase(Operation):
    """One site takes the sum so far in (phase 2): its earlier sources are one here."""

    N: int = 8192
    D: int = 7168
    backward: bool = True

    def checked(self) -> "DepthAddCase":
        return replace(self, N=10, D=150)

    def inputs(self, device: str, dtype: torch.dtype) -> Inputs:
        h, lse = normal(device, torch.float32, self.N, self.D), normal(device, torch.float32, self.N)
        v, folded = normal(device, dtype, self.N, self.D), normal(device, dtype, self.D) / self.D**0.5
        return {"h": h, "lse": lse, "v": v, "folded": folded}

    def ours(self, given: Inputs) -> Tensor:
        from evolve_kernels.attention_residuals_add import depth_add

        return depth_add(**given)

    def reference(self, given: Inputs) -> Tensor:
        from evolve.attention_residuals import Read, add_source

        read = Read(given["h"][None], given["lse"][None], torch.ones_like(given["lse"])[None])
        read = add_source(read, given["v"], given["folded"][None], 1e-5)
        return read.o[0] / read.l[0, ..., None]


@dataclass(frozen=True)
class ActivationCase(Operation):
    """SiTU-GLU of N tokens, gate and up the halves of one product's output."""

    N: int = 8192
    F: int = 6144
    backward: bool = True

    def checked(self) -> "ActivationCase":
        return replace(self, N=7, F=150)

    def inputs(self, device: str, dtype: torch.dtype) -> Inputs:
        return {"gate_up": 4 * normal(device, dtype, self.N, 2 * self.F)}

    def ours(self, given: Inputs) -> Tensor:
        from evolve_kernels.situ_glu import situ_glu

        return situ_glu(*given["gate_up"].chunk(2, dim=-1))

    def reference(self, given: Inputs) -> Tensor:
        from evolve.moe import situ_glu

        return situ_glu(*given["gate_up"].chunk(2, dim=-1))


@dataclass(frozen=True)
class ConvolutionCase(Operation):
    """The short convolution and SiLU in front of a memory, behind a history."""

    T: int = 8192
    D: int = 12288
    W: int = 4
    B: int = 1
    backward: bool = True

    def checked(self) -> "ConvolutionCase":
        return replace(self, B=2, T=70, D=150)

    def inputs(self, device: str, dtype: torch.dtype) -> Inputs:
        u = normal(device, dtype, self.B, self.T, self.D)
        weight = normal(device, torch.float32, self.D, 1, self.W)
        return {"u": u, "weight": weight, "history": normal(device, dtype, self.B, self.W - 1, self.D)}

    def ours(self, given: Inputs) -> Tensor:
        from evolve_kernels.short_conv import short_conv

        return short_conv(**given)[0]

    def reference(self, given: Inputs) -> Tensor:
        from evolve.short_conv import short_conv

        return short_conv(**given, backend="torch")[0]

    def peers(self, given: Inputs) -> dict[str, Callable[[], Tensor]]:
        def conv1d() -> Tensor:
            x = torch.cat([given["history"], given["u"]], dim=1).mT
            return F.silu(F.conv1d(x, given["weight"].to(x.dtype), groups=self.D)).mT

        return {"torch conv1d and silu": conv1d}


LAYERS: dict[str, Operation] = {
    "AttnRes reads, K3": DepthReadCase(),
    "AttnRes sum so far, K3": DepthAddCase(),
    "SiTU-GLU, K3": ActivationCase(),
    "short convolution, K3": ConvolutionCase(),
}
