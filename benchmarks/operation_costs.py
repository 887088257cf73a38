"""FLOPs of the attention and expert kernels from their launches' arguments; what to reach of the bounds."""

from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]

OPERATION_FLOPS: dict[str, Callable[[Arguments], int]] = {}

OPERATION_TARGET: dict[str, float] = {}
