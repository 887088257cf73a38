"""Backward of ``chunk_prepare``: from the gradients of a chunk's parts to those of q, k, v, g and β.

One program takes one chunk of one value head. With M = X diag(β), k_in = e^G ⊙ k and the strict lower
triangle of A:

    dM = du vᵀ + dw k_inᵀ        dv = Mᵀ du        dk_in = Mᵀ dw
    dA = −Xᵀ (dM diag(β)) Xᵀ     da_q = do uᵀ

and back through the decayed products, level by level as they were made. A gate needs no derivation of its
own: every term of a chunk holds e^{G_r} where its row is used and e^{−G_i} where its column is, so

    dG_r = row side ⊙ its gradient − column side ⊙ its gradient        dg_t = Σ_{r ≥ t} dG_r

Two of the sums are taken from their own end, so that nothing has to cancel: k_out fades from t on (Σ_{i <
t}), and decay holds every gate of the chunk.

Bytes per chunk and value head, a = bytes of q's dtype: reads (2K + 2V) C a for q, k, v, do, 4 C (K + 1) for g
and β, 8 C V for u and du, 12 C K for dq_in, dk_out and dw, 4 C² for X, 8 K; writes (2K + V) C a, 4 C (K + 1).
K3: 273 KiB in, 80 KiB out. With grouped values dq and dk are float32, one a value head, summed by PyTorch.
"""

import triton
import triton.language as tl

from evolve_kernels.tiles import (
    chunk_span,
    gated_product_gradients,
    load_column,
    load_tile,
    pairwise_decay,
    product_gradients,
    since_start,
    store_tile,
    until_end,
)


@triton.jit
def chunk_prepare_backward_kernel(
    q, k, v, g, beta, inverse, decay, d_o, u_new, d_u, dq_in, dk_out, d_w, d_decay, dq, dk, dv, dg, d_beta,
    starts, chunk_starts, chunk_rows, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, GATE: tl.constexpr, ERASE: tl.constexpr, FIRST: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    i, hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    first, count = chunk_span(i, starts, chunk_starts, chunk_rows, C)
    r = tl.arange(0, C)
    q += hv // (HV // H) * K
    k += hv // (HV // H) * K
    chunk = tl.cast(i, tl.int64) * HV + hv
    if GATE == "head":
        g_rows = load_column(g + hv, first, r, count, HV)
        g_next = load_column(g + hv, first + 1, r, count - 1, HV)
        since = tl.exp(tl.cumsum(g_rows, axis=0))[:, None]
        until = tl.exp(tl.cumsum(g_next, axis=0, reverse=True))[:, None]

    # the two [C, C] gradients, summed over values and keys
    da_q, d_m = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    strength = tl.full((C,), 1.0, tl.float32)
    if ERASE:
        strength = load_column(beta + hv, first, r, count, HV)
        x = load_tile(inverse + chunk * C * C, 0, r, C, C, r, C)
        m_t = tl.trans(x * strength[None, :])
    for start in range(0, V, BV):
        cols = start + tl.arange(0, BV)
        do_rows = load_tile(d_o + hv * V, first, r, count, HV * V, cols, V)
        u_rows = load_tile(u_new + hv * V, first, r, count, HV * V, cols, V)
        da_q += tl.dot(do_rows, tl.trans(u_rows), input_precision=PRECISION)
        du_rows = load_tile(d_u + hv * V, first, r, count, HV * V, cols, V)
        if ERASE:
            v_rows = load_tile(v + hv * V, first, r, count, HV * V, cols, V)
            d_m += tl.dot(du_rows, tl.trans(v_rows), input_precision=PRECISION)
            du_rows = tl.dot(m_t, du_rows, input_precision=PRECISION)
        store_tile(dv + hv * V, du_rows, first, r, count, HV * V, cols, V)
    d_a = tl.zeros((C, C), tl.float32)
    d_strength = tl.zeros((C,), tl.float32)
    if ERASE:
        for start in range(0, K, BK):
            cols = start + tl.arange(0, BK)
            k_in = load_tile(k, first, r, count, H * K, cols, K)
            if GATE == "channel":
                k_in *= tl.exp(since_start(load_tile(g + hv * K, first, r, count, HV * K, cols, K), C))
            if GATE == "head":
                k_in *= since
            dw_rows = load_tile(d_w + hv * K, first, r, count, HV * K, cols, K)
            d_m += tl.dot(dw_rows, tl.trans(k_in), input_precision=PRECISION)
        d_strength += tl.sum(d_m * x, axis=0)
        right = tl.dot(d_m * strength[None, :], tl.trans(x), input_precision=PRECISION)
        d_a -= tl.dot(tl.trans(x), right, input_precision=PRECISION)
        d_a = tl.where(r[:, None] > r[None, :], d_a, 0.0)
    if GATE == "head":
        gamma = pairwise_decay(g_rows, C)
        d_a, da_q = d_a * gamma, da_q * gamma
    if GATE == "none":
        da_q = tl.where(r[:, None] >= r[None, :], da_q, 0.0)

    # back through the products of q and k, some channels at a time
    head_sums = tl.zeros((C,), tl.float32)
    for start in range(0, K, BK):
        cols = start + tl.arange(0, BK)
        q_rows = load_tile(q, first, r, count, H * K, cols, K) * scale
        k_rows = load_tile(k, first, r, count, H * K, cols, K)
        beta_k = strength[:, None] * k_rows
        if GATE == "channel":
            g_rows = load_tile(g + hv * K, first, r, count, HV * K, cols, K)
            g_next = load_tile(g + hv * K, first + 1, r, count - 1, HV * K, cols, K)
            z_k, z_q, columns = gated_product_gradients(
                q_rows, k_rows, beta_k, g_rows, g_next, d_a, da_q, C, FIRST, LEVELS, PRECISION
            )
        else:
            z_k, z_q, columns = product_gradients(q_rows, k_rows, beta_k, d_a, da_q, 1.0, 1.0, PRECISION)
        through_q = load_tile(dq_in + hv * K, first, r, count, HV * K, cols, K)
        through_k = load_tile(dk_out + hv * K, first, r, count, HV * K, cols, K)
        through_w = tl.zeros((C, BK), tl.float32)
        if ERASE:
            dw_rows = load_tile(d_w + hv * K, first, r, count, HV * K, cols, K)
            through_w = tl.dot(m_t, dw_rows, input_precision=PRECISION)
            d_strength += tl.sum(k_rows * z_k, axis=1)
        if GATE == "channel":
            fade_in = tl.exp(since_start(g_rows, C))
            through_q, through_w = fade_in * through_q, fade_in * through_w
            through_k *= tl.exp(until_end(g_next, C))
        if GATE == "head":
            through_q, through_k, through_w = since * through_q, until * through_k, since * through_w
        dq_rows = z_q + through_q
        row_side = strength[:, None] * z_k + through_w
        store_tile(dq + hv * K, scale * dq_rows, first, r, count, HV * K, cols, K)
        store_tile(dk + hv * K, row_side + columns + through_k, first, r, count, HV * K, cols, K)
        if GATE != "none":
            faded = k_rows * through_k
            sums = tl.cumsum(q_rows * dq_rows + k_rows * (row_side - columns), axis=0, reverse=True)
            sums += tl.cumsum(faded, axis=0) - faded
            dd = tl.load(d_decay + chunk * K + cols, mask=cols < K, other=0.0)
            if GATE == "channel":
                dd *= tl.load(decay + chunk * K + cols, mask=cols < K, other=0.0)
                store_tile(dg + hv * K, sums + dd[None, :], first, r, count, HV * K, cols, K)
            else:
                head_sums += tl.sum(sums, axis=1) + tl.sum(dd, axis=0) * tl.load(decay + chunk)
    if GATE == "head":
        tl.store(dg + first * HV + hv + r * HV, head_sums.to(dg.dtype.element_ty), mask=r < count)
    if ERASE:
        tl.store(d_beta + first * HV + hv + r * HV, d_strength.to(d_beta.dtype.element_ty), mask=r < count)
