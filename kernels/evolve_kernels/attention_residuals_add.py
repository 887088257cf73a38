"""Rung 7 on a GPU: one source more for a site whose other sources have been read already (phase 2).

    s = f·v r,  r = 1 / sqrt(mean v² + eps)      b = e^s / (e^lse + e^s)      y = (1 − b) h + b v

h and lse are the site's of ``attention_residuals``, v is the sum so far of the present block. One program
takes one token and holds its whole row. Backward, with dy·(v − h) = t and ds = b (1 − b) t:

    dh = (1 − b) dy      dlse = −ds      dv = b dy + ds (r f − s r² v / D)      df = Σ_tokens ds r v

There a program takes several tokens and sums its part of df; the parts are added up afterwards.

Bytes per token: 4 D for h, 2 D each for v and y. At K3's width 57 KB, 12 ns at 4.8 TB/s; f stays cached.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from evolve_kernels.launch import check_device, check_tensor, launch, tile

WIDEST = 32768  # channels: a program holds a token's row
MOST_PROGRAMS = 528  # of the backward: four for each multiprocessor of an H200


@triton.jit
def load_row(x, n, cols, D):
    """Row n of x [N, D] in float32."""
    return tl.load(x + tl.cast(n, tl.int64) * D + cols, mask=cols < D, other=0.0).to(tl.float32)


@triton.jit
def store_row(x, row, n, cols, D):
    tl.store(x + tl.cast(n, tl.int64) * D + cols, row.to(x.dtype.element_ty), mask=cols < D)


@triton.jit
def score(v, f, eps, D):
    """(s, r) of one source."""
    r = tl.rsqrt(tl.sum(v * v, axis=0) / D + eps)
    return tl.sum(f * v, axis=0) * r, r


@triton.jit
def shares(s, lse):
    """What the earlier sources and the new one get: (1 − b, b), neither a difference."""
    top = tl.maximum(s, lse)
    a, b = tl.exp(lse - top), tl.exp(s - top)
    return a / (a + b), b / (a + b)


@triton.jit
def depth_add_kernel(h, lse, v, folded, y, eps, D: tl.constexpr, BD: tl.constexpr):
    n, cols = tl.program_id(0), tl.arange(0, BD)
    v_row = load_row(v, n, cols, D)
    s, _ = score(v_row, load_row(folded, 0, cols, D), eps, D)
    a, b = shares(s, tl.load(lse + n))
    store_row(y, a * load_row(h, n, cols, D) + b * v_row, n, cols, D)


@triton.jit
def depth_add_backward_kernel(
    h, lse, v, folded, d_y, d_h, d_lse, d_v, parts, N, eps,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first, cols = tl.program_id(0) * ROWS, tl.arange(0, BD)
    f = load_row(folded, 0, cols, D)
    df = tl.zeros((BD,), tl.float32)
    for n in range(first, tl.minimum(first + ROWS, N)):
        v_row, h_row, dy = load_row(v, n, cols, D), load_row(h, n, cols, D), load_row(d_y, n, cols, D)
        s, r = score(v_row, f, eps, D)
        a, b = shares(s, tl.load(lse + n))
        ds = a * b * tl.sum(dy * (v_row - h_row), axis=0)
        store_row(d_h, a * dy, n, cols, D)
        tl.store(d_lse + n, -ds)
        store_row(d_v, b * dy + ds * (r * f - s * r * r / D * v_row), n, cols, D)
        df += ds * r * v_row
    store_row(parts, df, tl.program_id(0), cols, D)


class DepthAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, h: Tensor, lse: Tensor, v: Tensor, folded: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        N, D = v.shape
        y = v.new_empty(N, D, dtype=dtype)
        given = {"h": h, "lse": lse, "v": v, "folded": folded, "y": y}
        ctx.options = {"eps": eps, "D": D, "BD": tile(D)}
        warps = max(1, min(16, ctx.options["BD"] // 1024))
        launch(depth_add_kernel, N, given | ctx.options, num_warps=warps, num_stages=1)
        ctx.save_for_backward(h, lse, v, folded)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y: Tensor) -> tuple[Tensor | None, ...]:
        h, lse, v, folded = ctx.saved_tensors
        N, D = v.shape
        ROWS = max(1, -(-N // MOST_PROGRAMS))
        programs = -(-N // ROWS)
        d_h, d_lse, d_v = (torch.empty_like(x) for x in (h, lse, v))
        parts = v.new_empty(programs, D, dtype=torch.float32)
        given = {"h": h, "lse": lse, "v": v, "folded": folded, "d_y": d_y.contiguous(), "d_h": d_h}
        given |= {"d_lse": d_lse, "d_v": d_v, "parts": parts, "N": N, "ROWS": ROWS}
        warps = max(1, min(16, ctx.options["BD"] // 512))  # it holds twice as many rows as the forward
        launch(depth_add_backward_kernel, programs, given | ctx.options, num_warps=warps, num_stages=1)
        return d_h, d_lse, d_v, parts.sum(0).to(folded.dtype), None, None


def depth_add(
    h: Tensor, lse: Tensor, v: Tensor, folded: Tensor, *, eps: float = 1e-5, dtype: torch.dtype | None = None
) -> Tensor:
    """The mix of one site once v is among its sources (phase 2), differentiable in all four.

    Args:
        h: [..., D], lse: [...], one site's of ``depth_read``. v: [..., D]. folded: [D], γ·w of the site.
        dtype: of the mix; v's by default.
    Returns: y [..., D].
    Raises: ValueError on shapes, dtypes (float64 among them) or a device that the kernels cannot take.
    """
    check_device(v.device)
    D = v.shape[-1] if v.ndim else 0
    if not 0 < D <= WIDEST:
        raise ValueError(f"v must be [..., D] with D from 1 to {WIDEST}, got {list(v.shape)}")
    given = {"h": (h, v.shape), "lse": (lse, v.shape[:-1]), "v": (v, v.shape), "folded": (folded, (D,))}
    h, lse, v, folded = (check_tensor(name, x, v.device, *sizes) for name, (x, sizes) in given.items())
    N = v.numel() // D
    rows = (h.view(N, D), lse.view(N), v.view(N, D), folded)
    return DepthAdd.apply(*rows, float(eps), dtype or v.dtype).view(v.shape)
