"""Rung 7 on a GPU: what the sites of a block read from the finished blocks, all at once (phase 1).

    r_i = 1 / sqrt(mean v_i² + eps)    s_ji = r_i f_j·v_i    p_j = softmax_i(s_j)    h_j = Σ_i p_ji v_i

of M sources v_i [N, D] for S sites with f_j = γ_j w_j. One program takes one token: all its sources and all
sites, D in tiles, twice; first every score, [S, M], then every mix. Beside h it writes lse_j, the logarithm
of Σ_i e^s_ji, with which ``attention_residuals_add`` takes one source more in (phase 2). A lone site with
all of its sources is the plain mix.

Backward computes the scores anew; with dp_ji = dh_j·v_i and g_ji = r_i ds_ji:

    ds_ji = p_ji (dp_ji − Σ_i p_ji dp_ji + dlse_j)
    dv_i = Σ_j p_ji dh_j + Σ_j g_ji f_j − (Σ_j ds_ji s_ji) r_i² v_i / D        df_j = Σ_tokens Σ_i g_ji v_i

df sums over tokens: a second kernel multiplies the stored g [S, M·N] with the sources [M·N, D].

Bytes per token: 2 M D of the sources, 4 S D of h; a program's second pass finds its sources in the L2 cache.
FLOPs: 4 S M D, on tiles of at least 16 × 16. K3: 8 blocks and 24 sites, 0.8 MB a token, most of it h.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from evolve_kernels.launch import check_device, check_tensor, launch, precision, tile
from evolve_kernels.tiles import load_tile

MOST_SCORES = 8192  # padded sites times padded sources, which a program keeps in registers
MOST_PARTS = 64  # how many programs share the sum over tokens, for each tile of D


@triton.jit
def load_sources(x, n, i, many, N, cols, D):
    """Token n of the slices i of x [many, N, D]: [i, cols] in float32, zeros beyond."""
    at = (i.to(tl.int64) * N + n)[:, None] * D + cols[None, :]
    return tl.load(x + at, mask=(i < many)[:, None] & (cols < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_sources(x, rows, n, i, many, N, cols, D):
    """The counterpart of ``load_sources``."""
    at = (i.to(tl.int64) * N + n)[:, None] * D + cols[None, :]
    tl.store(x + at, rows.to(x.dtype.element_ty), mask=(i < many)[:, None] & (cols < D)[None, :])


@triton.jit
def depth_read_kernel(
    sources, folded, h, lse, M, S, N, eps,
    D: tl.constexpr, MP: tl.constexpr, SP: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, i, j = tl.program_id(0), tl.arange(0, MP), tl.arange(0, SP)
    dots = tl.zeros((SP, MP), tl.float32)
    squares = tl.zeros((MP,), tl.float32)
    for start in range(0, D, BD):
        cols = start + tl.arange(0, BD)
        v = load_sources(sources, n, i, M, N, cols, D)
        f = load_tile(folded, 0, j, S, D, cols, D)
        dots += tl.dot(f, tl.trans(v), input_precision=PRECISION)
        squares += tl.sum(v * v, axis=1)
    scores = tl.where((i < M)[None, :], dots * tl.rsqrt(squares / D + eps)[None, :], -float("inf"))
    m = tl.max(scores, axis=1)
    p = tl.exp(scores - m[:, None])
    l = tl.sum(p, axis=1)
    p /= l[:, None]
    for start in range(0, D, BD):
        cols = start + tl.arange(0, BD)
        v = load_sources(sources, n, i, M, N, cols, D)
        store_sources(h, tl.dot(p, v, input_precision=PRECISION), n, j, S, N, cols, D)
    tl.store(lse + j.to(tl.int64) * N + n, m + tl.log(l), mask=j < S)


@triton.jit
def depth_read_backward_kernel(
    sources, folded, lse, d_h, d_lse, d_sources, g, M, S, N, eps,
    D: tl.constexpr, MP: tl.constexpr, SP: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv of all sources of one token, and g [S, M, N] for df."""
    n, i, j = tl.program_id(0), tl.arange(0, MP), tl.arange(0, SP)
    dots = tl.zeros((SP, MP), tl.float32)
    dp = tl.zeros((SP, MP), tl.float32)
    squares = tl.zeros((MP,), tl.float32)
    for start in range(0, D, BD):
        cols = start + tl.arange(0, BD)
        v = load_sources(sources, n, i, M, N, cols, D)
        f = load_tile(folded, 0, j, S, D, cols, D)
        dh = load_sources(d_h, n, j, S, N, cols, D)
        dots += tl.dot(f, tl.trans(v), input_precision=PRECISION)
        dp += tl.dot(dh, tl.trans(v), input_precision=PRECISION)
        squares += tl.sum(v * v, axis=1)
    r = tl.where(i < M, tl.rsqrt(squares / D + eps), 0.0)
    scores = dots * r[None, :]
    site = j.to(tl.int64) * N + n
    total = tl.load(lse + site, mask=j < S, other=0.0)
    real = (j < S)[:, None] & (i < M)[None, :]
    p = tl.where(real, tl.exp(scores - total[:, None]), 0.0)
    change = tl.load(d_lse + site, mask=j < S, other=0.0) - tl.sum(p * dp, axis=1)
    ds = p * (dp + change[:, None])
    g_rows = ds * r[None, :]
    tl.store(g + (j.to(tl.int64)[:, None] * M + i[None, :]) * N + n, g_rows, mask=real)
    shrink = tl.sum(ds * scores, axis=0) * r * r / D
    for start in range(0, D, BD):
        cols = start + tl.arange(0, BD)
        v = load_sources(sources, n, i, M, N, cols, D)
        f = load_tile(folded, 0, j, S, D, cols, D)
        dh = load_sources(d_h, n, j, S, N, cols, D)
        dv = tl.dot(tl.trans(p), dh, input_precision=PRECISION)
        dv += tl.dot(tl.trans(g_rows), f, input_precision=PRECISION)
        store_sources(d_sources, dv - shrink[:, None] * v, n, i, M, N, cols, D)


@triton.jit
def site_gradients_kernel(
    sources, g, parts, rows, S,
    D: tl.constexpr, SP: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """df in parts [PARTS, S, D]: one program sums every PARTS-th block of BR rows of sources [rows, D]."""
    blocks: tl.constexpr = (D + BD - 1) // BD
    part, cols = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    j = tl.arange(0, SP)
    df = tl.zeros((SP, BD), tl.float32)
    for first in range(part * BR, rows, PARTS * BR):
        r = tl.arange(0, BR)
        count = rows - first
        at = j.to(tl.int64)[:, None] * rows + (first + r)[None, :]
        g_rows = tl.load(g + at, mask=(j < S)[:, None] & (r < count)[None, :], other=0.0)
        df += tl.dot(g_rows, load_tile(sources, first, r, count, D, cols, D), input_precision=PRECISION)
    at = (part * S + j).to(tl.int64)[:, None] * D + cols[None, :]
    tl.store(parts + at, df, mask=(j < S)[:, None] & (cols < D)[None, :])


class DepthRead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, sources: Tensor, folded: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        (M, N, D), S = sources.shape, len(folded)
        h, lse = sources.new_empty(S, N, D, dtype=dtype), sources.new_empty(S, N, dtype=torch.float32)
        ctx.options = {"M": M, "S": S, "N": N, "eps": eps} | tiles_of(M, S, D)
        ctx.options["PRECISION"] = precision(sources.dtype)
        given = {"sources": sources, "folded": folded, "h": h, "lse": lse}
        launch(depth_read_kernel, N, given | ctx.options, num_warps=4, num_stages=2)
        ctx.save_for_backward(sources, folded, lse)
        return h, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_h: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        sources, folded, lse = ctx.saved_tensors
        (M, N, D), S = sources.shape, len(folded)
        d_sources, g = torch.empty_like(sources), sources.new_empty(S, M, N, dtype=torch.float32)
        given = {"sources": sources, "folded": folded, "lse": lse, "d_h": d_h.contiguous()}
        given |= {"d_lse": d_lse.contiguous(), "d_sources": d_sources, "g": g}
        launch(depth_read_backward_kernel, N, given | ctx.options, num_warps=4, num_stages=1)
        shared = {name: ctx.options[name] for name in ("S", "D", "SP", "BD", "PRECISION")}
        BR = 64
        PARTS = max(1, min(MOST_PARTS, -(-M * N // BR)))
        parts = sources.new_empty(PARTS, S, D, dtype=torch.float32)
        given = {"sources": sources, "g": g, "parts": parts, "rows": M * N, "BR": BR, "PARTS": PARTS}
        launch(
            site_gradients_kernel, PARTS * -(-D // shared["BD"]), given | shared, num_warps=4, num_stages=2
        )
        return d_sources, parts.sum(0).to(folded.dtype), None, None


def tiles_of(M: int, S: int, D: int) -> dict[str, int]:
    """Sources and sites padded for ``tl.dot``, and the columns that go with them into the registers."""
    MP, SP = tile(M), tile(S)
    return {"D": D, "MP": MP, "SP": SP, "BD": max(16, min(128, tile(D), 4096 // max(MP, SP)))}


def fits(M: int, S: int) -> bool:
    """Whether the scores of S sites for M sources find room in a program."""
    return tile(M) * tile(S) <= MOST_SCORES


def depth_read(
    sources: Tensor, folded: Tensor, *, eps: float = 1e-5, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """S sites read the same M sources (phase 1), differentiable in both.

    Args: sources: [M, ..., D]. folded: [S, D], γ·w of every site. dtype: of the mixes.
    Returns: the mixes h [S, ..., D]; lse [S, ...] in float32, log Σ e^s.
    Raises: ValueError on shapes, dtypes (float64 among them) or a device that the kernels cannot take.
    """
    check_device(sources.device)
    if sources.ndim < 2 or folded.ndim != 2 or 0 in (len(sources), len(folded), sources.shape[-1]):
        raise ValueError(f"sources must be [M, ..., D] and folded [S, D], none of them empty, "
                         f"got {list(sources.shape)} and {list(folded.shape)}")  # fmt: skip
    M, D, S = len(sources), sources.shape[-1], len(folded)
    if not fits(M, S):
        raise ValueError(f"{S} sites cannot read {M} sources at once: at most {MOST_SCORES} scores")
    sources = check_tensor("sources", sources, sources.device, *sources.shape)
    folded = check_tensor("folded", folded, sources.device, S, D)
    h, lse = DepthRead.apply(sources.view(M, -1, D) if sources.numel() else sources.new_empty(M, 0, D),
                             folded, float(eps), dtype)  # fmt: skip
    return h.view(S, *sources.shape[1:]), lse.view(S, *sources.shape[1:-1])
