"""Routed experts whose matrices are not there as floating-point numbers, until one of them is needed.

``PackedExperts`` keeps all of them in memory as MXFP4, 4.25 bits a weight, and expands one matrix at a time,
of the experts that a token chose. It takes the place of ``Experts`` in a ``LatentMoE``. Gradients pass
through it to its input; it has no parameters to learn: ``parameters()`` of a packed model leaves its experts
out (``evolve.lab.accounting`` counts them).

Shapes: x [N, D]; u [N, D]; of E experts packed [E, n_out, n_in / 2] and scale [E, n_out, n_in / 32], uint8.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from evolve import mxfp4
from evolve.decoder import Activation, activation_name
from evolve.moe import Experts, LatentMoE, Routing, grouped_experts

KINDS = ("packed", "scale")


class OnDemand(Sequence):
    """E matrices, each made by ``make(e)`` when it is asked for, and not kept."""

    def __init__(self, num_experts: int, make: Callable[[int], Tensor]) -> None:
        self.num_experts, self.make = num_experts, make

    def __len__(self) -> int:
        return self.num_experts

    def __getitem__(self, e: int) -> Tensor:
        return self.make(e)


class PackedExperts(nn.Module):
    """E networks D -> F -> D in MXFP4: (x [N, D], routing) -> u [N, D] in float32 at least.

    In a ``state_dict`` each has its released names: ``N.w1.weight_packed``, ``N.w1.weight_scale``, …
    ``backend`` as in ``Experts``: the kernel expands the codes tile by tile, PyTorch matrix by matrix.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        expert_size: int,
        activation: Activation,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.backend = activation, backend
        shapes = {"gate_up": (2 * expert_size, hidden_size), "down": (hidden_size, expert_size)}
        for name, (n_out, n_in) in shapes.items():
            for kind, n in zip(KINDS, (n_in // 2, n_in // mxfp4.BLOCK)):
                stack = torch.zeros(num_experts, n_out, n, dtype=torch.uint8)
                self.register_buffer(f"{name}_{kind}", stack)

    def extra_repr(self) -> str:
        E, F, D = self.gate_up_packed.shape
        name = activation_name(self.activation)
        return f"{E} x ({2 * D} -> {F // 2} -> {2 * D}), MXFP4, activation={name}"

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        gate_up = mxfp4.PackedStack(self.gate_up_packed, self.gate_up_scale, x.dtype)
        down = mxfp4.PackedStack(self.down_packed, self.down_scale, x.dtype)
        return grouped_experts(x, routing, gate_up, down, self.activation, backend=self.backend)

    @property
    def packed_parameters(self) -> int:
        """Weights that the codes stand for."""
        return 2 * (self.gate_up_packed.numel() + self.down_packed.numel())

    def named_matrices(self) -> Iterator[tuple[str, Tensor]]:
        """Codes and scales by their released names."""
        for kind in KINDS:
            stacks = getattr(self, f"gate_up_{kind}"), getattr(self, f"down_{kind}")
            for e, (gate_up, down) in enumerate(zip(*stacks)):
                w1, w3 = gate_up.chunk(2)
                for name, matrix in (("w1", w1), ("w2", down), ("w3", w3)):
                    yield f"{e}.{name}.weight_{kind}", matrix

    # By name into the stacks and out of them, as the unpacked ones.
    _save_to_state_dict = Experts._save_to_state_dict
    _load_from_state_dict = Experts._load_from_state_dict

    @property
    def down_proj(self) -> Tensor:
        """Where loading looks whether there is any memory."""
        return self.down_packed


def pack_experts(model: nn.Module) -> nn.Module:
    """Put packed experts in the place of all experts of a model, in place; weights there are become codes."""
    for moe in _layers(model, Experts):
        experts = moe.experts
        E, D, F = experts.down_proj.shape
        with torch.device(experts.down_proj.device):
            packed = PackedExperts(E, D, F, experts.activation, backend=experts.backend)
        if not experts.down_proj.is_meta:
            for name, stack in (("gate_up", experts.gate_up_proj), ("down", experts.down_proj)):
                for kind, t in zip(KINDS, mxfp4.pack(stack)):
                    getattr(packed, f"{name}_{kind}").copy_(t)
        moe.experts = packed
    return model


@torch.no_grad()
def expand_experts(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Undo ``pack_experts`` in place: experts that can learn, layer by layer, their codes freed at once."""
    for moe in _layers(model, PackedExperts):
        packed = moe.experts
        E, D, F = packed.gate_up_packed.shape[0], packed.down_packed.shape[1], packed.down_packed.shape[2] * 2
        with torch.device("meta"):
            experts = Experts(E, D, F, packed.activation, backend=packed.backend).to(dtype)
        experts.to_empty(device=packed.down_packed.device)
        for name, stack in (("gate_up", experts.gate_up_proj), ("down", experts.down_proj)):
            for e in range(E):
                codes, scale = (getattr(packed, f"{name}_{kind}")[e] for kind in KINDS)
                stack[e] = mxfp4.unpack(codes, scale, dtype=dtype)
        moe.experts = experts.train(moe.training)
    return model


def _layers(model: nn.Module, kind: type) -> list[LatentMoE]:
    return [m for m in model.modules() if isinstance(m, LatentMoE) and isinstance(m.experts, kind)]
