"""All of a chunk that does not wait for the state: decays, products of keys, the triangular inverse.

One program takes one chunk of C tokens of one value head and turns it into what ``chunk_walk`` needs, the
same for every rung (in the letters of ``evolve.kda.chunk_kda``; Γ is 1 without a gate):

    q_in = e^G ⊙ q·scale [C, K]    k_out = e^{G_C − G} ⊙ k [C, K]    decay = e^{G_C} [K]
    a_q = tril(Σ_c q_rc·scale Γ_ric k_ic) [C, C]
    X = (I + A)⁻¹ [C, C] with A = strict_tril(diag(β) Σ_c k_rc Γ_ric k_ic)
    w = X diag(β) (e^G ⊙ k) [C, K]    u = X diag(β) v [C, V]              (a rule that erases)

The channels come in blocks of BK, so registers hold the [C, C] products and slices, never all of q, k and g.
w and u stay float32, since u − w S is the small difference that the delta rule is about; q_in, k_out and a_q
are rounded like q and k themselves.

Bytes per chunk and value head, a = bytes of q's dtype: reads (2K + V) C a and 4 C (K + 1) for g and β; writes
(2K + C) C a, 4 C (K + V) for w and u, 4 K. K3 (K = V = 128, C = 64, bf16): 80 KiB in, 105 KiB out; X is 16
KiB more when training. k and g are read a second time, from the L2 cache.
"""

import triton
import triton.language as tl

from evolve_kernels.tiles import (
    chunk_span,
    gated_products,
    load_column,
    load_tile,
    pairwise_decay,
    since_start,
    store_tile,
    unit_lower_inverse,
    until_end,
)


@triton.jit
def chunk_prepare_kernel(
    q, k, v, g, beta, q_in, k_out, w, u, a_q, inverse, decay, starts, chunk_starts, chunk_rows, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, ERASE: tl.constexpr, FIRST: tl.constexpr,
    LEVELS: tl.constexpr, KEEP_INVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    first, count = chunk_span(i, starts, chunk_starts, chunk_rows, C)
    r = tl.arange(0, C)
    q += hv // (HV // H) * K  # the key head that serves this value head
    k += hv // (HV // H) * K
    chunk = (tl.cast(i, tl.int64) * HV + hv) * C * C  # of this program's [C, C] matrices
    p_k, p_q = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    if GATE == "head":
        g_rows = load_column(g + hv, first, r, count, HV)
        g_next = load_column(g + hv, first + 1, r, count - 1, HV)
        since = tl.exp(tl.cumsum(g_rows, axis=0))[:, None]
        until = tl.exp(tl.cumsum(g_next, axis=0, reverse=True))[:, None]
        tl.store(decay + tl.cast(i, tl.int64) * HV + hv, tl.exp(tl.sum(g_rows, axis=0)))

    for start in range(0, K, BK):
        cols = start + tl.arange(0, BK)
        q_rows = load_tile(q, first, r, count, H * K, cols, K) * scale
        k_rows = load_tile(k, first, r, count, H * K, cols, K)
        if GATE == "channel":
            g_rows = load_tile(g + hv * K, first, r, count, HV * K, cols, K)
            g_next = load_tile(g + hv * K, first + 1, r, count - 1, HV * K, cols, K)
            more_k, more_q = gated_products(q_rows, k_rows, g_rows, g_next, C, FIRST, LEVELS, PRECISION)
            p_k += more_k
            p_q += more_q
            q_rows, k_rows = q_rows * tl.exp(since_start(g_rows, C)), k_rows * tl.exp(until_end(g_next, C))
            to_decay = decay + (tl.cast(i, tl.int64) * HV + hv) * K + cols
            tl.store(to_decay, tl.exp(tl.sum(g_rows, axis=0)), mask=cols < K)
        else:
            if ERASE:
                p_k += tl.dot(k_rows, tl.trans(k_rows), input_precision=PRECISION)
            p_q += tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION)
        if GATE == "head":
            q_rows, k_rows = q_rows * since, k_rows * until
        store_tile(q_in + hv * K, q_rows, first, r, count, HV * K, cols, K)
        store_tile(k_out + hv * K, k_rows, first, r, count, HV * K, cols, K)

    if GATE == "head":
        gamma = pairwise_decay(g_rows, C)
        p_k, p_q = p_k * gamma, p_q * gamma
    if GATE == "none":
        p_q = tl.where(r[:, None] >= r[None, :], p_q, 0.0)
    square = chunk + r[:, None] * C + r[None, :]
    tl.store(a_q + square, p_q.to(a_q.dtype.element_ty))

    if ERASE:
        strength = load_column(beta + hv, first, r, count, HV)
        A = tl.where(r[:, None] > r[None, :], strength[:, None] * p_k, 0.0)
        x = unit_lower_inverse(A, C, LOG_C, PRECISION)
        if KEEP_INVERSE:
            tl.store(inverse + square, x)
        m = x * strength[None, :]  # (I + A)⁻¹ diag(β)
        for start in range(0, K, BK):
            cols = start + tl.arange(0, BK)
            k_rows = load_tile(k, first, r, count, H * K, cols, K)
            if GATE == "channel":
                k_rows *= tl.exp(since_start(load_tile(g + hv * K, first, r, count, HV * K, cols, K), C))
            if GATE == "head":
                k_rows *= since
            w_rows = tl.dot(m, k_rows, input_precision=PRECISION)
            store_tile(w + hv * K, w_rows, first, r, count, HV * K, cols, K)
        for start in range(0, V, BV):
            cols = start + tl.arange(0, BV)
            v_rows = load_tile(v + hv * V, first, r, count, HV * V, cols, V)
            u_rows = tl.dot(m, v_rows, input_precision=PRECISION)
            store_tile(u + hv * V, u_rows, first, r, count, HV * V, cols, V)
