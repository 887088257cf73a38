"""One decode step of multi-head latent attention over its cache as it lies: latents, never expanded.

    x_s = scale (q_c·c_s + q_k·k_s)      o = Σ_s softmax(x)_s c_s      per head and token, in the latent space

q is absorbed already: q_c = W_kᵀ q_n is as wide as the latent c, q_k meets the key part k_s that all heads
share. All heads and tokens of a batch row read one list of latents, so they are the M = T·H rows of a tile,
and a latent is both key and value.

A single token has few rows, and a GPU many processors: the context is split. One program of ``mla_part``
takes BM rows and one split's latents and writes their softmax average and log Σ exp x; one program of
``mla_combine`` takes a row and weighs the splits, o = Σ_j exp(lse_j − max) o_j / Σ_j exp(lse_j − max).

Bytes: the latents once (again from the L2 cache for every BM rows), 2 (R + Kr) a token in bfloat16, 1,152 at
K3's sizes; the parts, 4 M R a split, are small beside a long context. FLOPs: 2 (2R + Kr) a row and latent.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from evolve_kernels.launch import (
    HALF,
    check_device,
    check_mask,
    check_tensor,
    launch,
    operand,
    precision,
    tile,
)
from evolve_kernels.online_softmax import add_keys, averages, load_real, real_keys
from evolve_kernels.tiles import load_tile, store_tile

WIDEST = 512  # channels of a latent
MOST_SPLITS = 64


@triton.jit
def mla_part_kernel(
    q, latent, key_mask, parts, lse, T, S, span, splits, scale,
    H: tl.constexpr, R: tl.constexpr, KR: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
    BKR: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T * H, BM)
    row, j = tl.program_id(0) // splits, tl.program_id(0) % splits
    b, i = row // tiles, row % tiles
    r, cols, shared = tl.arange(0, BM), tl.arange(0, BR), tl.arange(0, BKR)
    first, count = b * T * H + i * BM, T * H - i * BM
    last = (i * BM + r) // H + (S - T)  # the last key that a row's token sees: its own
    q_c = load_tile(q, first, r, count, R + KR, cols, R).to(OPERAND)
    q_k = load_tile(q + R, first, r, count, R + KR, shared, KR).to(OPERAND)
    m = tl.full((BM,), -float("inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BR), tl.float32)
    for start in range(j * span, tl.minimum((j + 1) * span, S), BS):
        s = start + tl.arange(0, BS)
        real = real_keys(key_mask, b, s, S)
        c_rows = load_real(latent, b * S, s, real, R + KR, cols, R).to(OPERAND)
        x = tl.dot(q_c, tl.trans(c_rows), input_precision=PRECISION)
        if KR > 0:
            k_rows = load_real(latent + R, b * S, s, real, R + KR, shared, KR).to(OPERAND)
            x += tl.dot(q_k, tl.trans(k_rows), input_precision=PRECISION)
        seen = real[None, :] & (s[None, :] <= last[:, None])
        m, l, acc = add_keys(tl.where(seen, scale * x, -float("inf")), c_rows, m, l, acc, PRECISION)
    o_rows, sums = averages(m, l, acc)
    at = tl.cast(first, tl.int64) * splits + j  # rows of ``parts`` [B, M, splits, R]
    store_tile(parts + at * R, o_rows, 0, r, count, splits * R, cols, R)
    tl.store(lse + at + r * splits, sums, mask=r < count)


@triton.jit
def mla_combine_kernel(
    parts, lse, o, splits, R: tl.constexpr, BR: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.cast(tl.program_id(0), tl.int64)
    cols, j = tl.arange(0, BR), tl.arange(0, SPLITS)
    sums = tl.load(lse + row * splits + j, mask=j < splits, other=-float("inf"))
    m = tl.max(sums, axis=0)
    m = tl.where(m == -float("inf"), 0.0, m)  # a row that sees no key at all: weights 0, output 0
    total = tl.sum(tl.exp(sums - m), axis=0)
    acc = tl.zeros((BR,), tl.float32)
    for part in range(0, splits):
        weight = tl.exp(tl.load(lse + row * splits + part) - m)
        acc += weight * tl.load(parts + (row * splits + part) * R + cols, mask=cols < R, other=0.0)
    acc /= tl.where(total == 0, 1.0, total)
    tl.store(o + row * R + cols, acc.to(o.dtype.element_ty), mask=cols < R)


def splits_of(S: int, tile_of_keys: int, programs: int) -> tuple[int, int]:
    """(splits, keys a split): about 256 programs in all, a split of at least four tiles, whole tiles."""
    wanted = max(1, min(MOST_SPLITS, 256 // max(programs, 1), S // (4 * tile_of_keys)))
    span = triton.cdiv(triton.cdiv(max(S, 1), wanted), tile_of_keys) * tile_of_keys
    return triton.cdiv(max(S, 1), span), span


def mla_decode(
    q: Tensor,
    latent: Tensor,
    R: int,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """What every head reads from the latents of all tokens so far. No gradient.

    Args:
        q: [B, T, H, R + Kr], absorbed. latent: [B, S, R + Kr], the last T of them the queries' own tokens.
        R: width of the latent proper. scale: multiplies the scores (K**-0.5 of the heads *before* absorbing).
        key_mask: [B, S] bool, true for real tokens. splits: of the context; by default what fills a GPU.
    Returns: o [B, T, H, R] in q's dtype; zeros for a query that sees no token.
    Raises: ValueError on shapes, dtypes (float64 among them) or a device that the kernels cannot take.
    """
    check_device(q.device)
    if q.ndim != 4 or latent.ndim != 3:
        raise ValueError(f"q must have four axes and latent three, got {q.ndim} and {latent.ndim}")
    (B, T, H, width), S = q.shape, latent.shape[1]
    KR = width - R
    if not (0 < R <= WIDEST and 0 <= KR <= WIDEST) or T > S:
        raise ValueError(f"R and Kr must be at most {WIDEST}, T at most S; got R={R}, Kr={KR}, T={T}, S={S}")
    q = check_tensor("q", q, q.device, B, T, H, width)
    latent = check_tensor("latent", latent, q.device, B, S, width)
    if key_mask is not None:
        key_mask = check_mask(key_mask, B, S, q.device)
    BM, BS = 16, 32 if q.dtype in HALF else 16
    programs = B * triton.cdiv(T * H, BM)
    splits, span = (
        splits_of(S, BS, programs) if splits is None else (splits, triton.cdiv(S, splits * BS) * BS)
    )
    parts = q.new_empty(B, T * H, splits, R, dtype=torch.float32)
    lse = q.new_empty(B, T * H, splits, dtype=torch.float32)
    o = q.new_empty(B, T, H, R)
    arguments = {"q": q, "latent": latent, "key_mask": key_mask, "parts": parts, "lse": lse, "T": T, "S": S}
    arguments |= {"span": span, "splits": splits, "scale": float(scale), "H": H, "R": R, "KR": KR, "BM": BM}
    arguments |= {"BS": BS, "BR": tile(R), "BKR": tile(KR)}
    arguments |= {"OPERAND": operand(q.dtype), "PRECISION": precision(q.dtype)}
    options = {"num_warps": 4, "num_stages": 2} if q.dtype in HALF else {"num_warps": 8, "num_stages": 1}
    launch(mla_part_kernel, programs * splits, arguments, **options)
    arguments = {"parts": parts, "lse": lse, "o": o, "splits": splits, "R": R, "BR": tile(R)}
    arguments["SPLITS"] = triton.next_power_of_2(splits)
    launch(mla_combine_kernel, B * T * H, arguments, num_warps=4, num_stages=1)
    return o
