"""Memory that shows a kernel's mistakes: what lies around a tensor is 1e30, what it has not written is NaN.

The interpreter checks no bounds, and a GPU rarely faults for a read a few rows too far.
"""

import torch
from torch import Tensor

BAND = 1 << 15  # numbers on each side; a tile that runs over reads or writes these first


def bands(x: Tensor) -> float:
    if x.is_floating_point():
        return min(1e30, torch.finfo(x.dtype).max / 4)
    return min(1 << 20, torch.iinfo(x.dtype).max)


def banded(like: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """A contiguous tensor as ``like``, full of ``fill``, inside a buffer of 1e30s; and that buffer."""
    buffer = torch.full((like.numel() + 2 * BAND,), bands(like), dtype=like.dtype)
    inner = buffer[BAND : BAND + like.numel()].view(like.shape)
    return inner.fill_(fill), buffer


def guarded(x: Tensor) -> Tensor:
    """x again, between guard bands."""
    inner, _ = banded(x, 0.0)
    return inner.copy_(x.detach()).requires_grad_(x.requires_grad)


class Guard:
    """Within, what PyTorch allocates uninitialised is full of NaN, between bands that ``check`` sees.

    The functions are replaced, since a ``TorchFunctionMode`` is off while ``torch.autograd.grad`` runs.
    """

    PLACES = ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"))

    def __enter__(self) -> "Guard":
        self.buffers: list[Tensor] = []
        self.originals = [getattr(place, name) for place, name in self.PLACES]
        for (place, name), original in zip(self.PLACES, self.originals):
            setattr(place, name, self.guarding(original))
        return self

    def __exit__(self, *error) -> None:
        for (place, name), original in zip(self.PLACES, self.originals):
            setattr(place, name, original)

    def guarding(self, allocate):
        def guarded_allocation(*args, **kwargs):
            made = allocate(*args, **kwargs)
            if not made.is_floating_point():
                return made
            inner, buffer = banded(made, float("nan"))
            self.buffers.append(buffer)
            return inner

        return guarded_allocation

    def check(self) -> None:
        """No kernel has written outside its tensors."""
        assert self.buffers, "nothing was allocated under guard"
        for buffer in self.buffers:
            edges = torch.cat([buffer[:BAND], buffer[-BAND:]])
            assert bool((edges == bands(buffer)).all()), f"written beyond a tensor of {buffer.numel()}"
