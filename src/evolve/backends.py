"""Which code runs a model's operations: PyTorch's forms, or the Triton kernels.

Every module whose operation has a kernel has an attribute ``backend``: ``"torch"`` or ``"triton"`` force one,
``None`` takes the kernel on a GPU where Triton is installed and the PyTorch form elsewhere. Both are the same
function. On a CPU, ``"triton"`` needs Triton's interpreter: ``TRITON_INTERPRET=1`` before the first import.
"""

from typing import TypeVar

from torch import nn

from evolve.memory_rule import check_backend

Model = TypeVar("Model", bound=nn.Module)


def set_backend(model: Model, backend: str | None) -> Model:
    """Set ``backend`` on the model itself and on every part of it that has one, in place; returns the model.

    It is no part of a folder or a ``state_dict``: set it after loading. Raises: ValueError for another name.
    """
    check_backend(backend)
    for module in modules_with_backend(model).values():
        module.backend = backend
    return model


def modules_with_backend(model: nn.Module) -> dict[str, nn.Module]:
    """By their names in the model, the modules whose operation has a kernel."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "backend")}
