"""MXFP4, the four-bit format that Kimi K3's routed experts are released in (OCP Microscaling Formats, 1.0).

A weight is one of sixteen codes (E2M1: a sign and the magnitudes 0, ½, 1, 1½, 2, 3, 4, 6) times a power of
two that 32 weights, consecutive along the input, share (E8M0: a byte e, for 2^(e − 127)). Two codes lie in a
byte, the one of the even input in its low half. 4 + 8 / 32 = 4.25 bits a weight.

    w[i] = code[i] · 2^(scale[i // 32] − 127)

Shapes: w [..., I], packed [..., I / 2] uint8, scale [..., I / 32] uint8.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from evolve.checks import check_float, check_tensor, require

BLOCK = 32  # weights that share a scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; with bit 3 set they are negative
LARGEST_EXPONENT = 2  # of a magnitude: 6 = 1.5 · 2²
NOT_A_NUMBER = 255  # the scale byte that stands for nan


def unpack(packed: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights [..., I] in ``dtype``. A scale byte of 255 makes its block nan.

    Every value of a code and scale is exact in bfloat16, float32 and float64, their ranges permitting.
    Raises: ValueError for tensors that are not uint8 or do not fit each other.
    """
    _check_packed(packed, scale)
    require(dtype.is_floating_point, f"dtype must be floating point, got {dtype}")
    values = torch.tensor([s * m for s in (1, -1) for m in MAGNITUDES], device=packed.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)  # of a byte: low half first
    w = F.embedding(packed.int(), pairs.to(dtype)).flatten(-2)
    sizes = F.embedding(scale.int(), _scale_values(packed.device)[:, None]).to(dtype)
    return (w.unflatten(-1, (-1, BLOCK)) * sizes).flatten(-2)


class PackedStack(Sequence):
    """E matrices [O, I] as their codes [E, O, I / 2] and scales [E, O, I / 32].

    Each is expanded to ``dtype`` when it is asked for, and not kept. A kernel reads the codes as they lie.
    """

    def __init__(self, packed: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.packed, self.scale, self.dtype = packed, scale, dtype

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, e: int) -> Tensor:
        return unpack(self.packed[e], self.scale[e], dtype=self.dtype)


def pack(w: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest weights that the format has: packed [..., I / 2] and scale [..., I / 32], for w [..., I].

    A block's scale gives its largest magnitude the exponent of the largest code (OCP, section 6.3), so what
    lies between 6 and 8 of it becomes 6. Codes are the nearest; between two, the even one. What is unpacked
    and packed again unpacks to the same numbers.
    Raises: ValueError unless w is finite floating point and I a multiple of 32.
    """
    check_float("w", w)
    fits = w.ndim >= 1 and w.shape[-1] % BLOCK == 0
    require(fits, f"w must be [..., I] with I a multiple of {BLOCK}, got {list(w.shape)}")
    require(bool(w.isfinite().all()), "w must be finite: a block with nan or inf has no scale")
    # In float64, where no scale is a denormal number: a process that trains flushes those to zero.
    blocks = w.detach().double().unflatten(-1, (-1, BLOCK))
    exponent = torch.frexp(blocks.abs().amax(-1)).exponent - 1 - LARGEST_EXPONENT  # frexp's mantissa: [½, 1)
    scale = (exponent + 127).clamp(0, NOT_A_NUMBER - 1).to(torch.uint8)
    codes = _nearest_codes(blocks / _scale_values(w.device)[scale.long(), None])
    low, high = codes.flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, scale


def _nearest_codes(x: Tensor) -> Tensor:
    """The code of the nearest magnitude; a value halfway between two takes the even code."""
    size, code = x.abs(), torch.zeros_like(x, dtype=torch.uint8)
    for lower, (a, b) in enumerate(pairwise(MAGNITUDES)):
        middle = (a + b) / 2
        code += size > middle if lower % 2 == 0 else size >= middle
    return code | x.signbit().to(torch.uint8) << 3


def _scale_values(device: torch.device) -> Tensor:
    """2^(e − 127) for every byte e, [256] in float64; nan for 255."""
    values = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    values[NOT_A_NUMBER] = torch.nan
    return values.to(device)


def _check_packed(packed: Tensor, scale: Tensor) -> None:
    for name, x in (("packed", packed), ("scale", scale)):
        check_tensor(name, x)
        require(x.dtype == torch.uint8 and x.ndim >= 1, f"{name} must be uint8 [..., n], got {x.dtype}")
    expected = [*packed.shape[:-1], packed.shape[-1] * 2 // BLOCK]
    fits = packed.shape[-1] * 2 % BLOCK == 0 and list(scale.shape) == expected
    require(fits, f"scale must be {expected} for packed {list(packed.shape)}, got {list(scale.shape)}")
