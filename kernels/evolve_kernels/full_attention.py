"""Rung 1 on a GPU: softmax attention whose weights [T, S] are never written down.

    x_ts = scale q_t·k_s      o_t = Σ_s exp(x_ts − lse_t) v_s      lse_t = log Σ_s exp(x_ts)

Causal: query t sees the keys up to t + S − T, so the last query is the last key's. One program takes BT
queries of one value head and walks over the keys that they see, BS at a time, with the softmax of
``online_softmax``. Keys and values may differ in width, as in MLA: 192 and 128 at K3's sizes; 192 channels
lie in a tile of 256, a fifth more products than needed.

It reads q, k, v once a tile of queries (k and v from the L2 cache but for the first) and writes o and, where
a gradient is wanted, lse. FLOPs: 2 (K + V) a pair of query and key. Value heads of one group compute the
scores of their key head anew. The backward is ``full_attention_backward``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from evolve_kernels.full_attention_backward import attention_gradients
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

WIDEST = 256  # channels of a head


@triton.jit
def attention_kernel(
    q, k, v, key_mask, o, lse, T, S, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T, BT)
    head, i = tl.program_id(0) // tiles, tiles - 1 - tl.program_id(0) % tiles  # the longest walks first
    b, hv = head // HV, head % HV
    h = hv // (HV // H)
    r, keys, cols = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    first, count, t = b * T + i * BT, T - i * BT, i * BT + r
    q_rows = load_tile(q + h * K, first, r, count, H * K, keys, K).to(OPERAND)
    m = tl.full((BT,), -float("inf"), tl.float32)
    l = tl.zeros((BT,), tl.float32)
    acc = tl.zeros((BT, BV), tl.float32)
    end = S + tl.minimum((i + 1) * BT - T, 0) if CAUSAL else S
    for start in range(0, end, BS):
        s = start + tl.arange(0, BS)
        real = real_keys(key_mask, b, s, S)
        k_rows = load_real(k + h * K, b * S, s, real, H * K, keys, K).to(OPERAND)
        v_rows = load_real(v + hv * V, b * S, s, real, HV * V, cols, V).to(OPERAND)
        x = scale * tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION)
        seen = real[None, :]
        if CAUSAL:
            seen = seen & (s[None, :] <= t[:, None] + (S - T))
        m, l, acc = add_keys(tl.where(seen, x, -float("inf")), v_rows, m, l, acc, PRECISION)
    o_rows, sums = averages(m, l, acc)
    store_tile(o + hv * V, o_rows, first, r, count, HV * V, cols, V)
    if lse is not None:
        tl.store(lse + tl.cast(first, tl.int64) * HV + (hv + r * HV), sums, mask=r < count)


def token_tiles(channels: int, dtype: torch.dtype) -> dict[str, int]:
    """How many queries and keys a program holds: what fits the shared memory of every compiled target."""
    if dtype in HALF:
        return {"BT": 64, "BS": 32 if channels > 128 else 64}
    side = 16 if channels > 128 else 32
    return {"BT": side, "BS": side}


class Attention(torch.autograd.Function):
    """o, kept in float32 for the backward: what rounding o would do to Σ o do is a bias in every score."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, options: dict) -> Tensor:
        (B, T, HV), V = (*q.shape[:2], v.shape[2]), v.shape[3]
        keeps = options["keeps"]
        o = v.new_empty(B, T, HV, V, dtype=torch.float32 if keeps else v.dtype)
        lse = q.new_empty(B, T, HV, dtype=torch.float32) if keeps else None
        given = {"q": q, "k": k, "v": v, "key_mask": key_mask, "o": o, "lse": lse}
        arguments = given | options["numbers"]
        tiles = triton.cdiv(T, arguments["BT"])
        wide = max(arguments["BK"], arguments["BV"]) > 128
        stages = 2 if v.dtype in HALF else 1
        launch(attention_kernel, B * HV * tiles, arguments, num_warps=8 if wide else 4, num_stages=stages)
        ctx.save_for_backward(q, k, v, key_mask, o, lse)
        ctx.numbers = options["numbers"]
        return o.to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o: Tensor) -> tuple[Tensor | None, ...]:
        return *attention_gradients(d_o.contiguous(), *ctx.saved_tensors, ctx.numbers), None, None


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
) -> Tensor:
    """o = softmax(scale q kᵀ + mask) v, differentiable in q, k and v.

    Args:
        q: [B, T, H, K]. k: [B, S, H, K]. v: [B, S, HV, V], HV a multiple of H. float32, float16 or bfloat16.
        scale: K**-0.5 by default. causal: query t sees the keys up to t + S − T.
        key_mask: [B, S] bool, true for real keys; what the others hold never matters.
    Returns: o [B, T, HV, V] in v's dtype, summed in float32; zeros for a query that sees no key.
    Raises: ValueError on shapes, dtypes (float64 among them) or a device that the kernel cannot take.
    """
    check_device(q.device)
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q and v must have four axes, got {list(q.shape)} and {list(v.shape)}")
    (B, T, H, K), (S, HV, V) = q.shape, v.shape[1:]
    if (HV % H if H else HV) != 0 or not (0 < K <= WIDEST and V <= WIDEST):
        rule = f"HV must be a multiple of H, K and V at most {WIDEST}"
        raise ValueError(f"{rule}; got H={H}, HV={HV}, K={K}, V={V}")
    q = check_tensor("q", q, q.device, B, T, H, K)
    k = check_tensor("k", k, q.device, B, S, H, K)
    v = check_tensor("v", v, q.device, B, S, HV, V)
    if key_mask is not None:
        key_mask = check_mask(key_mask, B, S, q.device)
    numbers = {"T": T, "S": S, "scale": K**-0.5 if scale is None else float(scale), "CAUSAL": causal}
    numbers |= {"H": H, "HV": HV, "K": K, "V": V, "BK": tile(K), "BV": tile(V)}
    numbers |= token_tiles(max(numbers["BK"], numbers["BV"]), q.dtype)
    numbers |= {"OPERAND": operand(q.dtype), "PRECISION": precision(q.dtype)}
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return Attention.apply(q, k, v, key_mask, {"keeps": keeps, "numbers": numbers})
