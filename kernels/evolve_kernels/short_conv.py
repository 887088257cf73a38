"""The short convolution of rungs 3 to 5 on a GPU, with its SiLU, over rows and over packed sequences.

    z_t = Σ_j w_j x_{t+j}      y_t = z_t sigmoid(z_t)      j = 0 … W − 1

x is one sequence behind its history: row e of x is an input before the sequence for e < W − 1, and token
e − (W − 1) after. One program takes C tokens and BD channels. Backward takes C rows of x,

    dz_t = dy_t (s_t + z_t s_t (1 − s_t)),  s = sigmoid(z)
    dx_e = Σ_j w_j dz_{e−j}      dw_j = Σ_e x_e dz_{e−j}

so that history gets its gradient as any input does. z is computed anew, at each of the W places that a
program needs: its inputs are in the first cache by then. dw comes in parts, one a chunk, added up afterwards.

Bytes per token: forward 2 D a, backward 3 D a and 4 W D / C for dw; a bytes of the dtype.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from evolve_kernels.launch import check_device, check_tensor, launch, tile
from evolve_kernels.spans import Spans, spans_of
from evolve_kernels.tiles import chunk_span, load_column, store_tile


@triton.jit
def load_inputs(u, history, n, start, e, real, cols, D, W: tl.constexpr):
    """Rows e of x, sequence n behind its history, where ``real``: [rows, cols] in float32, else zeros.

    ``start``: row of u that holds the sequence's first token. u [tokens, D]; history [N, W − 1, D] or None.
    """
    inside, token = real[:, None] & (cols < D)[None, :], (e >= W - 1)[:, None]
    at = (start + e - (W - 1))[:, None] * D + cols[None, :]
    x = tl.load(u + at, mask=inside & token, other=0.0).to(tl.float32)
    if history is not None:
        at = (tl.cast(n, tl.int64) * (W - 1) + e)[:, None] * D + cols[None, :]
        x += tl.load(history + at, mask=inside & (~token), other=0.0).to(tl.float32)
    return x


@triton.jit
def convolved(u, history, weight, n, start, t, real, cols, D, W: tl.constexpr):
    """z of the tokens t of sequence n, where ``real``: [tokens, cols]."""
    z = tl.zeros((t.shape[0], cols.shape[0]), tl.float32)
    for j in tl.static_range(W):
        x = load_inputs(u, history, n, start, t + j, real, cols, D, W)
        z += load_column(weight + j, 0, cols, D, W)[None, :] * x
    return z


@triton.jit
def short_conv_kernel(
    u, history, weight, y, starts, chunk_starts, chunk_rows,
    D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (D + BD - 1) // BD
    i, cols = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    n, r = tl.load(chunk_rows + i), tl.arange(0, C)
    start = tl.load(starts + n)
    first, count = chunk_span(i, starts, chunk_starts, chunk_rows, C)
    z = convolved(u, history, weight, n, start, first - start + r, r < count, cols, D, W)
    store_tile(y, z * tl.sigmoid(z), first, r, count, D, cols, D)


@triton.jit
def short_conv_backward_kernel(
    u, history, weight, d_y, d_u, d_history, parts, starts, chunk_starts, chunk_rows,
    D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The chunks here are of x: each sequence has W − 1 rows more, and ``starts`` counts them."""
    blocks: tl.constexpr = (D + BD - 1) // BD
    i, cols = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    n, r = tl.load(chunk_rows + i), tl.arange(0, C)
    begin = tl.load(starts + n)
    start = begin - tl.cast(n, tl.int64) * (W - 1)  # the first token's row in u
    length = tl.load(starts + n + 1) - begin - (W - 1)  # in tokens
    first, count = chunk_span(i, starts, chunk_starts, chunk_rows, C)
    e = first - begin + r
    x = load_inputs(u, history, n, start, e, r < count, cols, D, W)
    dx = tl.zeros((C, BD), tl.float32)
    for j in tl.static_range(W):
        t = e - j  # the token whose j-th input is e
        real = (t >= 0) & (t < length) & (r < count)
        z = convolved(u, history, weight, n, start, t, real, cols, D, W)
        s = tl.sigmoid(z)
        at = (start + t)[:, None] * D + cols[None, :]
        inside = real[:, None] & (cols < D)[None, :]
        dz = tl.load(d_y + at, mask=inside, other=0.0).to(tl.float32) * (s + z * s * (1.0 - s))
        dx += load_column(weight + j, 0, cols, D, W)[None, :] * dz
        tl.store(parts + (tl.cast(i, tl.int64) * W + j) * D + cols, tl.sum(x * dz, axis=0), mask=cols < D)
    token, inside = (e >= W - 1)[:, None], (r < count)[:, None] & (cols < D)[None, :]
    at = (start + e - (W - 1))[:, None] * D + cols[None, :]
    tl.store(d_u + at, dx.to(d_u.dtype.element_ty), mask=inside & token)
    if history is not None:
        at = (tl.cast(n, tl.int64) * (W - 1) + e)[:, None] * D + cols[None, :]
        tl.store(d_history + at, dx.to(d_history.dtype.element_ty), mask=inside & (~token))


class ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u: Tensor, weight: Tensor, history: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        (B, T, D), W = u.shape, weight.shape[-1]
        y, C = torch.empty_like(u), min(32, triton.next_power_of_2(max(T, 1)))
        given = {"u": u, "history": history, "weight": weight, "y": y}
        start(short_conv_kernel, given, spans_of(B, T, C, cu_seqlens, u.device), D, W, C, tile(D, 128))
        ctx.save_for_backward(u, weight, history, cu_seqlens)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y: Tensor) -> tuple[Tensor | None, ...]:
        u, weight, history, cu_seqlens = ctx.saved_tensors
        (B, T, D), W = u.shape, weight.shape[-1]
        C = min(64, triton.next_power_of_2(max(T + W - 1, 1)))
        ends = cu_seqlens  # of x, where each sequence has W − 1 rows more
        if ends is not None:
            ends = ends + torch.arange(len(ends), device=ends.device) * (W - 1)
        spans = spans_of(B, T + W - 1, C, ends, u.device)
        d_u = torch.empty_like(u)
        d_history = None if history is None else torch.empty_like(history)
        parts = u.new_empty(spans.NT, W, D, dtype=torch.float32)
        given = {"u": u, "history": history, "weight": weight, "d_y": d_y.contiguous(), "d_u": d_u}
        given |= {"d_history": d_history, "parts": parts}
        start(short_conv_backward_kernel, given, spans, D, W, C, tile(D, 64), num_warps=8)
        return d_u, parts.sum(0).mT[:, None].to(weight.dtype), d_history, None


def start(kernel, given: dict, spans: Spans, D: int, W: int, C: int, BD: int, num_warps: int = 4) -> None:
    """Launch a kernel for every chunk and block of channels."""
    constants = {"D": D, "W": W, "C": C, "BD": BD}
    launch(kernel, spans.NT * -(-D // BD), given | vars(spans) | constants, num_warps=num_warps, num_stages=1)


def last_inputs(u: Tensor, history: Tensor, starts: Tensor) -> Tensor:
    """The last W − 1 rows of every sequence behind its history: [N, W − 1, D], a few small copies."""
    N, rows, D = history.shape
    if u.numel() == 0 or history.numel() == 0:
        return history.clone()
    e = starts.diff()[:, None] + torch.arange(rows, device=u.device)  # in x, as above
    new = u.flatten(0, 1)[(starts[:-1, None] + e - rows).clamp(min=0)]
    old = history.gather(1, e.clamp(max=rows - 1)[..., None].expand(N, rows, D))
    return torch.where((e >= rows)[..., None], new, old)


def short_conv(
    u: Tensor, weight: Tensor, history: Tensor | None = None, *, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution and SiLU, differentiable in u, weight and history.

    Args:
        u: [B, T, D]. weight: [D, 1, W]. float32, float16 or bfloat16.
        history: [B, W − 1, D], or [N, W − 1, D] with ``cu_seqlens``; zeros by default.
        cu_seqlens: [N+1] ends of N sequences packed into one row, B = 1. Rising from 0 to T; unchecked here.
    Returns: y [B, T, D] in u's dtype; the history for the call after this one, in u's dtype.
    Raises: ValueError on shapes, dtypes (float64 among them) or a device that the kernels cannot take.
    """
    check_device(u.device)
    if u.ndim != 3 or weight.ndim != 3:
        raise ValueError(
            f"u must be [B, T, D] and weight [D, 1, W], got {list(u.shape)} and {list(weight.shape)}"
        )
    (B, T, D), W = u.shape, weight.shape[-1]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    u = check_tensor("u", u, u.device, B, T, D)
    weight = check_tensor("weight", weight, u.device, D, 1, W)
    if history is not None:
        history = check_tensor("history", history.to(u.dtype), u.device, N, W - 1, D)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(u.device, torch.int64)
    y = ShortConv.apply(u, weight, history if W > 1 else None, cu_seqlens)
    starts = torch.arange(B + 1, device=u.device) * T if cu_seqlens is None else cu_seqlens
    return y, last_inputs(u, u.new_zeros(N, W - 1, D) if history is None else history, starts)
