"""How every kernel of this package is started: where, in which precision, and written down if asked.

Tests and the ahead-of-time compiler read the record, so that what is compiled and counted is what a call
really launches, argument by argument.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1 when triton was imported

HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF)


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its number of programs, its arguments by name and its compile options."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


_record: list[Launch] | None = None


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within, launches are written down; tensors on ``meta`` are then welcome, and nothing runs for them."""
    global _record
    before, _record = _record, []
    try:
        yield _record
    finally:
        _record = before


def launch(kernel: Any, programs: int, arguments: dict[str, Any], **options: int) -> None:
    """Start ``programs`` programs of ``kernel``; none at all where there is nothing to do."""
    device = next(x.device for x in arguments.values() if isinstance(x, Tensor))
    if _record is not None:
        _record.append(Launch(kernel, programs, arguments, options))
    if programs == 0 or device.type == "meta":
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(programs,)](**arguments, **options)


def check_form(name: str, x: Tensor, device: torch.device, *sizes: int) -> None:
    """x must have the sizes, a dtype that the kernels know and the device of the others."""
    if list(x.shape) != list(sizes):
        raise ValueError(f"{name} must be {list(sizes)}, got {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be float32, float16 or bfloat16 in a Triton kernel, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")


def check_tensor(name: str, x: Tensor, device: torch.device, *sizes: int) -> Tensor:
    """x, contiguous, once its form is checked."""
    check_form(name, x, device, *sizes)
    return x.contiguous()


def check_mask(key_mask: Tensor, B: int, S: int, device: torch.device) -> Tensor:
    """``key_mask`` as the kernels read it, uint8, once it is bool [B, S] on the device of the others."""
    if list(key_mask.shape) != [B, S] or key_mask.dtype != torch.bool or key_mask.device != device:
        got = f"{key_mask.dtype} {list(key_mask.shape)} on {key_mask.device}"
        raise ValueError(f"key_mask must be bool [B, S] = {[B, S]} on {device}, got {got}")
    return key_mask.contiguous().view(torch.uint8)


def check_device(device: torch.device) -> None:
    """A kernel runs on a GPU, or in Triton's interpreter; ``meta`` only while launches are recorded."""
    fits = device.type == "cuda" or (device.type == "cpu" and INTERPRETED)
    if not (fits or (device.type == "meta" and _record is not None)):
        raise ValueError(f"a Triton kernel needs CUDA tensors (or TRITON_INTERPRET=1), got {device}")


def precision(dtype: torch.dtype) -> str:
    """How ``tl.dot`` multiplies float32 tiles: in TF32 where the inputs are rounded coarser still.

    For float32 inputs three TF32 products stand for one, which leaves float32's digits. Exact products
    ("ieee") leave the tensor cores, and took minutes to compile. AMD has exact ones in its matrix cores.
    """
    if torch.version.hip is not None:
        return "ieee"
    return "tf32" if dtype in HALF else "tf32x3"


def operand(dtype: torch.dtype) -> tl.dtype:
    """The type of the tiles that ``tl.dot`` takes where both sides are inputs: their own, summed in float32.

    The interpreter multiplies bfloat16 wrongly: there its tiles are widened first.
    """
    if dtype == torch.bfloat16:
        return tl.float32 if INTERPRETED else tl.bfloat16
    return tl.float16 if dtype == torch.float16 else tl.float32


def tile(n: int, most: int | None = None) -> int:
    """The side of a tile over n channels: a power of two, at least 16 for ``tl.dot``."""
    side = max(16, triton.next_power_of_2(n))
    return side if most is None else min(side, most)
