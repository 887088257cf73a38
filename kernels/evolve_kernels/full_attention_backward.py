"""The gradients of softmax attention, from its inputs, o and lse: the weights are computed again, not kept.

    p = exp(x − lse)      δ_t = Σ_v do_tv o_tv      dx = p ⊙ (do vᵀ − δ)

    dq = scale dx k       dk = scale dxᵀ q       dv = pᵀ do          (Dao, 2023, algorithm 2)

Two kernels, so that every sum has one owner and no result depends on who came first: one takes BT queries
and walks over their keys for dq (and stores δ), the other BS keys and walks over the queries that see them
for dk and dv. The price is x and dx computed twice: 5 products of K or V channels a pair become 7.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from evolve_kernels.launch import launch
from evolve_kernels.online_softmax import load_real, real_keys
from evolve_kernels.tiles import load_column, load_tile, store_tile


@triton.jit
def weights(q_rows, k_rows, sums, t, s, real, offset, scale, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """p [queries, keys]; 0 where a query does not look. offset: S − T. sums: lse, +inf for blind queries."""
    x = scale * tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION)
    seen = real[None, :]
    if CAUSAL:
        seen = seen & (s[None, :] <= t[:, None] + offset)
    return tl.exp(tl.where(seen, x - sums[:, None], -float("inf")))


@triton.jit
def load_sums(lse, first, r, count, HV: tl.constexpr):
    """lse of some queries; +inf, so that every weight is 0, for those that saw nothing or do not exist."""
    at = lse + tl.cast(first, tl.int64) * HV + r * HV
    sums = tl.load(at, mask=r < count, other=-float("inf"))
    return tl.where(sums == -float("inf"), float("inf"), sums)


@triton.jit
def query_gradient_kernel(
    q, k, v, key_mask, o, lse, d_o, delta, dq, T, S, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T, BT)
    head, i = tl.program_id(0) // tiles, tiles - 1 - tl.program_id(0) % tiles
    b, hv = head // HV, head % HV
    h = hv // (HV // H)
    r, keys, cols = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    first, count, t = b * T + i * BT, T - i * BT, i * BT + r
    q_rows = load_tile(q + h * K, first, r, count, H * K, keys, K).to(OPERAND)
    do_rows = load_tile(d_o + hv * V, first, r, count, HV * V, cols, V)
    shares = tl.sum(do_rows * load_tile(o + hv * V, first, r, count, HV * V, cols, V), axis=1)
    tl.store(delta + tl.cast(first, tl.int64) * HV + (hv + r * HV), shares, mask=r < count)
    do_rows = do_rows.to(OPERAND)
    sums = load_sums(lse + hv, first, r, count, HV)
    dq_rows = tl.zeros((BT, BK), tl.float32)
    end = S + tl.minimum((i + 1) * BT - T, 0) if CAUSAL else S
    for start in range(0, end, BS):
        s = start + tl.arange(0, BS)
        real = real_keys(key_mask, b, s, S)
        k_rows = load_real(k + h * K, b * S, s, real, H * K, keys, K).to(OPERAND)
        v_rows = load_real(v + hv * V, b * S, s, real, HV * V, cols, V).to(OPERAND)
        p = weights(q_rows, k_rows, sums, t, s, real, S - T, scale, CAUSAL, PRECISION)
        dx = p * (tl.dot(do_rows, tl.trans(v_rows), input_precision=PRECISION) - shares[:, None])
        dq_rows += tl.dot(dx.to(OPERAND), k_rows, input_precision=PRECISION)
    store_tile(dq + hv * K, scale * dq_rows, first, r, count, HV * K, keys, K)


@triton.jit
def key_gradients_kernel(
    q, k, v, key_mask, lse, d_o, delta, dk, dv, T, S, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, BS)
    head, i = tl.program_id(0) // tiles, tl.program_id(0) % tiles  # the first keys are seen by most
    b, hv = head // HV, head % HV
    h = hv // (HV // H)
    r, keys, cols = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    s = i * BS + tl.arange(0, BS)
    real = real_keys(key_mask, b, s, S)
    k_rows = load_real(k + h * K, b * S, s, real, H * K, keys, K).to(OPERAND)
    v_rows = load_real(v + hv * V, b * S, s, real, HV * V, cols, V).to(OPERAND)
    dk_rows = tl.zeros((BS, BK), tl.float32)
    dv_rows = tl.zeros((BS, BV), tl.float32)
    begin = tl.maximum(i * BS - (S - T), 0) // BT * BT if CAUSAL else 0
    for start in range(begin, T, BT):
        first, count, t = b * T + start, T - start, start + r
        q_rows = load_tile(q + h * K, first, r, count, H * K, keys, K).to(OPERAND)
        do_rows = load_tile(d_o + hv * V, first, r, count, HV * V, cols, V).to(OPERAND)
        sums = load_sums(lse + hv, first, r, count, HV)
        p = weights(q_rows, k_rows, sums, t, s, real, S - T, scale, CAUSAL, PRECISION)
        dv_rows += tl.dot(tl.trans(p.to(OPERAND)), do_rows, input_precision=PRECISION)
        shares = load_column(delta + hv, first, r, count, HV)
        dx = p * (tl.dot(do_rows, tl.trans(v_rows), input_precision=PRECISION) - shares[:, None])
        dk_rows += tl.dot(tl.trans(dx.to(OPERAND)), q_rows, input_precision=PRECISION)
    store_tile(dk + hv * K, scale * dk_rows, b * S + i * BS, tl.arange(0, BS), S - i * BS, HV * K, keys, K)
    store_tile(dv + hv * V, dv_rows, b * S + i * BS, tl.arange(0, BS), S - i * BS, HV * V, cols, V)


def attention_gradients(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    o: Tensor,
    lse: Tensor,
    numbers: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in their dtypes. A key head's are the sum over the value heads that it serves."""
    (B, T, H, K), (S, HV) = q.shape, v.shape[1:3]
    per_head = q.dtype if H == HV else torch.float32
    dq = q.new_empty(B, T, HV, K, dtype=per_head)
    dk = k.new_empty(B, S, HV, K, dtype=per_head)
    dv, delta = torch.empty_like(v), torch.empty_like(lse)
    given = {"q": q, "k": k, "v": v, "key_mask": key_mask, "lse": lse, "d_o": d_o, "delta": delta}
    blocks = B * HV
    options = {"num_warps": 8 if max(numbers["BK"], numbers["BV"]) > 64 else 4, "num_stages": 1}
    rows = triton.cdiv(T, numbers["BT"])
    launch(query_gradient_kernel, blocks * rows, given | {"o": o, "dq": dq} | numbers, **options)
    columns = triton.cdiv(S, numbers["BS"])
    launch(key_gradients_kernel, blocks * columns, given | {"dk": dk, "dv": dv} | numbers, **options)
    if H != HV:
        dq, dk = (x.unflatten(2, (H, HV // H)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv
