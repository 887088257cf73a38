"""Attention and experts as the benchmarks call them: a case makes its inputs and knows who else does it."""

from collections.abc import Callable
from typing import Any

import torch
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


OPERATIONS: dict[str, Operation] = {}
