"""Rung 8 on a GPU: every expert's matrix times its own rows, in one launch.

    y_r = W_e x_r      dx_r = W_eᵀ dy_r      dW_e = Σ_{r of e} dy_r x_rᵀ

Rows are sorted by expert: those of e end at ends[e]. The tiles of at most BM rows begin anew with every
expert, so that a tile multiplies by one matrix; ``row_tiles`` lists them on the device, and nobody waits for
the counts. One program of ``grouped_product`` takes one tile of rows and BN columns of the result and walks
along what is summed over. The same kernel computes dx, with W read across. One program of
``weight_gradient`` takes a tile of one expert's matrix and walks over that expert's rows; without rows it
writes zeros. Weights may come as MXFP4 (``evolve_kernels.mxfp4``) and are expanded tile by tile: they have no
gradient, but pass one on to x.

Bytes: x and y once (x again from the L2 cache for every BN columns), the matrices of experts that have rows
once for every BM of them. FLOPs: 2 I O a row in the product, as many in each gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from evolve_kernels.launch import HALF, check_device, check_tensor, launch, operand, precision
from evolve_kernels.mxfp4 import load_expanded
from evolve_kernels.tiles import load_tile, store_tile

BLOCK = 32  # weights that share a scale in MXFP4


@triton.jit
def load_weights(w, scale, expert, o, start, O: tl.constexpr, I: tl.constexpr, SIZE: tl.constexpr):
    """Rows o and SIZE columns from ``start`` on of one expert's matrix [O, I]: [rows, SIZE]."""
    if scale is not None:
        return load_expanded(w, scale, expert * O, o, O, start, I, SIZE)
    else:
        return load_tile(w, expert * O, o, O, I, start + tl.arange(0, SIZE), I)


@triton.jit
def grouped_product_kernel(
    x, w, scale, table, y,
    O: tl.constexpr, I: tl.constexpr, ACROSS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = I if ACROSS else O  # columns of the result
    K: tl.constexpr = O if ACROSS else I  # what is summed over
    i, column = tl.program_id(0) // tl.cdiv(N, BN), tl.program_id(0) % tl.cdiv(N, BN) * BN
    expert, first, count = tl.load(table + 3 * i), tl.load(table + 3 * i + 1), tl.load(table + 3 * i + 2)
    r, cols = tl.arange(0, BM), column + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, tl.where(count > 0, K, 0), BK):
        k = start + tl.arange(0, BK)
        x_rows = load_tile(x, first, r, count, K, k, K).to(OPERAND)
        if ACROSS:
            w_tile = load_weights(w, scale, expert, k, column, O, I, BN)
        else:
            w_tile = tl.trans(load_weights(w, scale, expert, cols, start, O, I, BK))
        acc += tl.dot(x_rows, w_tile.to(OPERAND), input_precision=PRECISION)
    store_tile(y, acc, first, r, count, N, cols, N)


@triton.jit
def weight_gradient_kernel(
    x, d_y, ends, d_w,
    O: tl.constexpr, I: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BR: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(O, BO) * tl.cdiv(I, BI)
    expert, at = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    o = at // tl.cdiv(I, BI) * BO + tl.arange(0, BO)
    i = at % tl.cdiv(I, BI) * BI + tl.arange(0, BI)
    r = tl.arange(0, BR)
    end = tl.load(ends + expert)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    acc = tl.zeros((BO, BI), tl.float32)
    for first in range(begin, end, BR):
        x_rows = load_tile(x, first, r, end - first, I, i, I).to(OPERAND)
        dy_rows = load_tile(d_y, first, r, end - first, O, o, O).to(OPERAND)
        acc += tl.dot(tl.trans(dy_rows), x_rows, input_precision=PRECISION)
    store_tile(d_w, acc, expert * O, o, O, I, i, I)


def row_tiles(ends: Tensor, S: int, BM: int) -> Tensor:
    """The tiles of rows, [tiles, 3] int32: expert, first row, number of rows.

    There are at most S // BM full ones and one more for each expert that has rows; those that are not needed
    have no rows.
    """
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    tiles = (ends - starts + (BM - 1)) // BM
    tile_ends = tiles.cumsum(0)
    i = torch.arange(S // BM + min(len(ends), S), device=ends.device)
    expert = torch.searchsorted(tile_ends, i, right=True).clamp(max=len(ends) - 1)
    first = starts[expert] + (i - (tile_ends - tiles)[expert]) * BM
    count = (ends[expert] - first).clamp(0, BM)
    return torch.stack([expert, first, count], dim=1).int()


def product(x: Tensor, w: Tensor, scale: Tensor | None, ends: Tensor, O: int, I: int, across: bool) -> Tensor:
    """[S, I] -> [S, O] with every row's own matrix, or ``across`` it, [S, O] -> [S, I]."""
    S, N, half = len(x), I if across else O, x.dtype in HALF
    BM = (64 if half else 32) if 32 * len(ends) <= S else 16  # few rows an expert: small tiles
    table = row_tiles(ends, S, BM)
    y = x.new_empty(S, N)
    arguments = {"x": x, "w": w, "scale": scale, "table": table, "y": y, "O": O, "I": I, "ACROSS": across}
    arguments |= {"BM": BM, "BN": 128 if half else 64, "BK": 64}
    arguments |= {"OPERAND": operand(x.dtype), "PRECISION": precision(x.dtype)}
    programs = len(table) * triton.cdiv(N, arguments["BN"])
    launch(grouped_product_kernel, programs, arguments, num_warps=4, num_stages=2 if half else 1)
    return y


def weight_gradient(x: Tensor, d_y: Tensor, ends: Tensor, shape: torch.Size) -> Tensor:
    (E, O, I), half = shape, x.dtype in HALF
    d_w = x.new_empty(shape)
    arguments = {"x": x, "d_y": d_y, "ends": ends, "d_w": d_w, "O": O, "I": I}
    arguments |= {"BO": 64, "BI": 128 if half else 64, "BR": 32}
    arguments |= {"OPERAND": operand(x.dtype), "PRECISION": precision(x.dtype)}
    programs = E * triton.cdiv(O, arguments["BO"]) * triton.cdiv(I, arguments["BI"])
    launch(weight_gradient_kernel, programs, arguments, num_warps=4, num_stages=2 if half else 1)
    return d_w


class GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, scale: Tensor | None, ends: Tensor, O: int, I: int) -> Tensor:
        ctx.save_for_backward(x, w, scale, ends)
        ctx.sizes = O, I
        return product(x, w, scale, ends, O, I, across=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y: Tensor) -> tuple[Tensor | None, ...]:
        (x, w, scale, ends), d_y = ctx.saved_tensors, d_y.contiguous()
        needs_x, needs_w = ctx.needs_input_grad[:2]
        d_x = product(d_y, w, scale, ends, *ctx.sizes, across=True) if needs_x else None
        d_w = weight_gradient(x, d_y, ends, w.shape) if needs_w else None
        return d_x, d_w, None, None, None, None


def grouped_product(x: Tensor, w: Tensor, ends: Tensor, *, scale: Tensor | None = None) -> Tensor:
    """y_r = W_e x_r for rows sorted by expert, differentiable in x and in w.

    Args:
        x: [S, I], float32, float16 or bfloat16. w: [E, O, I] of the same dtype; as MXFP4 the codes
            [E, O, I / 2] in uint8, with ``scale`` [E, O, I / 32] in uint8. ends: [E] int32, ascending: where
            each expert's rows end, the last at S (not checked: that would wait for the device).
    Returns: y [S, O] in x's dtype, summed in float32.
    Raises: ValueError on shapes, dtypes (float64 among them) or a device that the kernels cannot take.
    """
    check_device(x.device)
    if x.ndim != 2 or w.ndim != 3 or 0 in w.shape:
        raise ValueError(f"x must be [S, I] and w [E, O, I], got {list(x.shape)} and {list(w.shape)}")
    (S, I), (E, O) = x.shape, w.shape[:2]
    x = check_tensor("x", x, x.device, S, I)
    if scale is None:
        w = check_tensor("w", w, x.device, E, O, I)
        if w.dtype != x.dtype:
            raise ValueError(f"w must have x's dtype {x.dtype}, got {w.dtype}")
    else:
        w, scale = check_codes("w", w, x.device, E, O, I, 2), check_codes("scale", scale, x.device, E, O, I)
    if list(ends.shape) != [E] or ends.dtype != torch.int32 or ends.device != x.device:
        got = f"{ends.dtype} {list(ends.shape)} on {ends.device}"
        raise ValueError(f"ends must be int32 [E] = {[E]} on {x.device}, got {got}")
    return GroupedProduct.apply(x, w, scale, ends.contiguous(), O, I)


def check_codes(
    name: str, x: Tensor, device: torch.device, E: int, O: int, I: int, a_byte: int = BLOCK
) -> Tensor:
    """x, contiguous, once it is uint8 with ``a_byte`` of I weights to a byte, I a multiple of 32."""
    sizes = [E, O, I // a_byte]
    if list(x.shape) != sizes or I % BLOCK or x.dtype != torch.uint8 or x.device != device:
        rule = f"{name} must be uint8 {sizes} on {device}, {BLOCK} dividing I = {I}"
        raise ValueError(f"{rule}; got {x.dtype} {list(x.shape)} on {x.device}")
    return x.contiguous()
