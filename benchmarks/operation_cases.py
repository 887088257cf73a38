"""Attention and experts as the benchmarks call them: a case makes its inputs and knows who else does it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

Inputs = dict[str, Tensor]


class Operation:
    """One call at one model's sizes. ``backward`` asks for the gradients of its floating-point inputs too."""

    backward: bool = False

    def inputs(self, device: str, dtype: torch.dtype) -> Inputs:
        raise NotImplementedError

    def ours(self, given: Inputs) -> Tensor:
        """The kernel's result."""
        raise NotImplementedError

    def reference(self, given: Inputs) -> Tensor:
        """The PyTorch form's, in the precision of its inputs."""
        raise NotImplementedError

    def peers(self, given: Inputs) -> dict[str, Callable[[], Tensor]]:
        """Calls of others that do the same."""
        return {}

    def checked(self) -> "Operation":
        """The same at sizes at which float64 fits."""
        return self

    def run(self, form: Callable[[], Tensor], given: Inputs) -> Callable[[], Any]:
        """A function that makes a call, forward and, where the case has one, backward."""
        leaves = [x.requires_grad_() for x in given.values() if self.backward and x.is_floating_point()]

        def both() -> Any:
            o = form()
            return torch.autograd.grad(o, leaves, o) if leaves else o

        return both

    def call(self, device: str, dtype: torch.dtype) -> Callable[[], Any]:
        given = self.inputs(device, dtype)
        return self.run(lambda: self.ours(given), given)


def normal(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


@dataclass(frozen=True)
class AttentionCase(Operation):
    """Causal softmax attention; S keys, of which the last T are the queries' own tokens."""

    H: int
    K: int
    V: int
    T: int
    S: int
    B: int = 1
    backward: bool = False

    def checked(self) -> "AttentionCase":
        return replace(self, B=1, H=min(self.H, 2), T=100, S=200)

    def inputs(self, device: str, dtype: torch.dtype) -> Inputs:
        B, T, S, H, K, V = self.B, self.T, self.S, self.H, self.K, self.V
        shapes = {"q": (B, T, H, K), "k": (B, S, H, K), "v": (B, S, H, V)}
        return {name: normal(device, dtype, *shape) for name, shape in shapes.items()}

    def ours(self, given: Inputs) -> Tensor:
        from evolve_kernels.full_attention import softmax_attention

        return softmax_attention(**given)

    def reference(self, given: Inputs) -> Tensor:
        from evolve.full_attention import softmax_attention

        return softmax_attention(**given, backend="torch")

    def peers(self, given: Inputs) -> dict[str, Callable[[], Tensor]]:
        q, k, v = (x.transpose(1, 2) for x in given.values())
        mask = torch.ones(self.T, self.S, dtype=torch.bool, device=q.device).tril(self.S - self.T)
        how = {"is_causal": True} if self.T == self.S else {"attn_mask": mask}
        return {"sdpa": lambda: F.scaled_dot_product_attention(q, k, v, **how)}


@dataclass(frozen=True)
class MlaDecodeCase(Operation):
    """T new tokens over S latents of R + Kr numbers, the queries absorbed already."""

    H: int
    R: int
    Kr: int
    S: int
    T: int = 1
    B: int = 1

    SCALE: ClassVar[float] = 192**-0.5

    def checked(self) -> "MlaDecodeCase":
        return replace(self, B=2, S=300)

    def inputs(self, device: str, dtype: torch.dtype) -> Inputs:
        q = normal(device, dtype, self.B, self.T, self.H, self.R + self.Kr)
        return {"q": q, "latent": normal(device, dtype, self.B, self.S, self.R + self.Kr)}

    def ours(self, given: Inputs) -> Tensor:
        from evolve_kernels.mla_decode import mla_decode

        return mla_decode(**given, R=self.R, scale=self.SCALE)

    def reference(self, given: Inputs) -> Tensor:
        from evolve.full_attention import attention_by_hand, visible_keys

        q, latent = given.values()
        visible = visible_keys(self.T, self.S, True, None, q.device)
        visible = visible if visible is None else visible.repeat_interleave(self.H, dim=2)
        keys = latent[:, :, None]
        o = attention_by_hand(q.flatten(1, 2)[:, :, None], keys, keys[..., : self.R], self.SCALE, visible)
        return o.view(*q.shape[:3], self.R)

    def peers(self, given: Inputs) -> dict[str, Callable[[], Tensor]]:
        q, latent = given.values()
        rows, keys = q.flatten(1, 2)[:, None], latent[:, None]
        form = F.scaled_dot_product_attention
        return (
            {"sdpa": lambda: form(rows, keys, keys[..., : self.R], scale=self.SCALE)} if self.T == 1 else {}
        )


@dataclass(frozen=True)
class ExpertsCase(Operation):
    """One grouped product, O x I an expert: ``tokens`` that each chose k of E experts at random.

    ``packed``: the weights are MXFP4, codes and scales at random. What the router sorts is not timed.
    """

    E: int
    k: int
    O: int
    I: int
    tokens: int
    packed: bool = False
    backward: bool = False

    def checked(self) -> "ExpertsCase":
        return replace(self, E=5, k=2, O=70, I=96, tokens=60)

    def inputs(self, device: str, dtype: torch.dtype) -> Inputs:
        E, O, I, S = self.E, self.O, self.I, self.tokens * self.k
        expert = torch.randint(E, (S,), device=device).sort().values
        places = torch.arange(E, device=device)
        given = {"x": normal(device, dtype, S, I)}
        given["ends"] = torch.searchsorted(expert, places, right=True, out_int32=True)
        if not self.packed:
            return given | {"w": I**-0.5 * normal(device, dtype, E, O, I)}
        codes = {"low": 0, "high": 256, "dtype": torch.uint8, "device": device}
        given["w"] = torch.randint(size=(E, O, I // 2), **codes)
        given["scale"] = torch.randint(size=(E, O, I // 32), **codes | {"low": 118, "high": 124})
        return given

    def ours(self, given: Inputs) -> Tensor:
        from evolve_kernels.moe import grouped_product

        return grouped_product(**given)

    def reference(self, given: Inputs) -> Tensor:
        from evolve.moe import expert_products
        from evolve.mxfp4 import PackedStack

        x, w = given["x"], given["w"]
        w = PackedStack(w, given["scale"], x.dtype) if self.packed else w
        return expert_products(x, w, given["ends"], backend="torch")

    def peers(self, given: Inputs) -> dict[str, Callable[[], Tensor]]:
        if self.packed:
            return {}
        return {"grouped_mm": lambda: F.grouped_mm(given["x"], given["w"].mT, offs=given["ends"])}


OPERATIONS: dict[str, Operation] = {
    "attention, GPT-2": AttentionCase(H=12, K=64, V=64, T=1024, S=1024, B=8, backward=True),
    "MLA prefill, K3": AttentionCase(H=96, K=192, V=128, T=8192, S=8192, backward=True),
    "MLA decode, K3": MlaDecodeCase(H=96, R=512, Kr=64, S=131072),
    "experts, Kimi Linear": ExpertsCase(E=256, k=8, O=2048, I=2304, tokens=8192, backward=True),
    "MXFP4 experts, K3": ExpertsCase(E=896, k=16, O=6144, I=3584, tokens=8192, packed=True),
    "MXFP4 experts, K3, one token": ExpertsCase(E=896, k=16, O=6144, I=3584, tokens=1, packed=True),
}
