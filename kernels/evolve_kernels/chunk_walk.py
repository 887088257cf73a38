"""The walk from chunk to chunk: all that has to happen in order, and the only place where the state lives.

One program takes BV columns of one head's state through one sequence, from its first chunk to its last; the
state [K, BV] stays in registers, in float32, and columns of a state never meet. Per chunk, with
``chunk_prepare``'s parts:

    u ← u − w S        o = q_in S + a_q u        S ← decay ⊙ S + k_outᵀ u

A rung differs from another only in what is left out: without erasing u is v, without a gate decay is 1.

``KEEP`` is the run that backward needs: it stores S before each chunk and u − w S, and no output.

Bytes per chunk and value head, with a = bytes of q's dtype, times V / BV programs where marked *: reads
(2K + C) C a*, 4 C K* for w, 4 C V for u, 4 K*; writes C V a for o. The programs of one head run side by
side, so the L2 cache serves what is marked, and device memory sees it once. K3: 105 KiB in, 16 KiB out.
"""

import triton
import triton.language as tl

from evolve_kernels.tiles import chunk_span, load_tile, store_tile


@triton.jit
def chunk_walk_kernel(
    q_in, k_out, w, u, a_q, decay, first_state, o, last_state, states, u_new, starts, chunk_starts,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, ERASE: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (V + BV - 1) // BV
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    n, hv = head // HV, head % HV
    first, end = tl.load(starts + n), tl.load(starts + n + 1)
    i_first, i_end = tl.load(chunk_starts + n), tl.load(chunk_starts + n + 1)
    r, keys, cols = tl.arange(0, C), tl.arange(0, BK), block * BV + tl.arange(0, BV)
    state = tl.cast(head, tl.int64) * K * V
    S = tl.zeros((BK, BV), tl.float32)
    if first_state is not None:
        S = load_tile(first_state + state, 0, keys, K, V, cols, V)
    for i in range(i_first, i_end):
        at = first + (i - i_first) * C  # the chunk's first token
        count = tl.minimum(end - at, C).to(tl.int32)
        chunk = tl.cast(i, tl.int64) * HV + hv
        k_rows = load_tile(k_out + hv * K, at, r, count, HV * K, keys, K)
        u_rows = load_tile(u + hv * V, at, r, count, HV * V, cols, V)
        if ERASE:
            w_rows = load_tile(w + hv * K, at, r, count, HV * K, keys, K)
            u_rows -= tl.dot(w_rows, S, input_precision=PRECISION)
        if KEEP:
            store_tile(states + chunk * K * V, S, 0, keys, K, V, cols, V)
            if ERASE:
                store_tile(u_new + hv * V, u_rows, at, r, count, HV * V, cols, V)
        else:
            q_rows = load_tile(q_in + hv * K, at, r, count, HV * K, keys, K)
            a_rows = load_tile(a_q + chunk * C * C, 0, r, C, C, r, C)
            o_rows = tl.dot(q_rows, S, input_precision=PRECISION)
            o_rows += tl.dot(a_rows, u_rows, input_precision=PRECISION)
            store_tile(o + hv * V, o_rows, at, r, count, HV * V, cols, V)
        if GATE == "channel":
            S *= tl.load(decay + chunk * K + keys, mask=keys < K, other=0.0)[:, None]
        if GATE == "head":
            S *= tl.load(decay + chunk)
        S += tl.dot(tl.trans(k_rows), u_rows, input_precision=PRECISION)
    if not KEEP:
        store_tile(last_state + state, S, 0, keys, K, V, cols, V)


@triton.jit
def chunk_walk_backward_kernel(
    q_in, k_out, w, a_q, decay, d_o, d_last_state, d_first_state, d_states, d_u, starts, chunk_starts,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, ERASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The walk from the last chunk to the first, dS in the state's place.

        du = a_qᵀ do + k_out dS        dS ← decay ⊙ dS + q_inᵀ do − wᵀ du

    Stores dS after each chunk (before it is changed) and du; the rest waits for ``state_gradients_kernel``.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    n, hv = head // HV, head % HV
    first, end = tl.load(starts + n), tl.load(starts + n + 1)
    i_first, i_end = tl.load(chunk_starts + n), tl.load(chunk_starts + n + 1)
    r, keys, cols = tl.arange(0, C), tl.arange(0, BK), block * BV + tl.arange(0, BV)
    state = tl.cast(head, tl.int64) * K * V
    dS = load_tile(d_last_state + state, 0, keys, K, V, cols, V)
    for back in range(0, i_end - i_first):
        i = i_end - 1 - back
        at = first + (i - i_first) * C  # the chunk's first token
        count = tl.minimum(end - at, C).to(tl.int32)
        chunk = tl.cast(i, tl.int64) * HV + hv
        store_tile(d_states + chunk * K * V, dS, 0, keys, K, V, cols, V)
        do_rows = load_tile(d_o + hv * V, at, r, count, HV * V, cols, V)
        a_rows = load_tile(a_q + chunk * C * C, 0, r, C, C, r, C)
        k_rows = load_tile(k_out + hv * K, at, r, count, HV * K, keys, K)
        du_rows = tl.dot(tl.trans(a_rows), do_rows, input_precision=PRECISION)
        du_rows += tl.dot(k_rows, dS, input_precision=PRECISION)
        store_tile(d_u + hv * V, du_rows, at, r, count, HV * V, cols, V)
        if GATE == "channel":
            dS *= tl.load(decay + chunk * K + keys, mask=keys < K, other=0.0)[:, None]
        if GATE == "head":
            dS *= tl.load(decay + chunk)
        q_rows = load_tile(q_in + hv * K, at, r, count, HV * K, keys, K)
        dS += tl.dot(tl.trans(q_rows), do_rows, input_precision=PRECISION)
        if ERASE:
            w_rows = load_tile(w + hv * K, at, r, count, HV * K, keys, K)
            dS -= tl.dot(tl.trans(w_rows), du_rows, input_precision=PRECISION)
    store_tile(d_first_state + state, dS, 0, keys, K, V, cols, V)


@triton.jit
def state_gradients_kernel(
    states, d_states, d_o, u_new, d_u, dq_in, dk_out, d_w, d_decay, starts, chunk_starts, chunk_rows,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, ERASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What sums over the state's columns, for all chunks at once: one program takes BK channels of one chunk.

    dq_in = do Sᵀ    dk_out = u dSᵀ    dw = −du Sᵀ    ddecay = Σ_v S ⊙ dS
    """
    blocks: tl.constexpr = (K + BK - 1) // BK
    chunk, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i, hv = chunk // HV, chunk % HV
    at, count = chunk_span(i, starts, chunk_starts, chunk_rows, C)
    r = tl.arange(0, C)
    keys = block * BK + tl.arange(0, BK)
    state = tl.cast(chunk, tl.int64) * K * V
    dq = tl.zeros((C, BK), tl.float32)
    dk = tl.zeros((C, BK), tl.float32)
    dw = tl.zeros((C, BK), tl.float32)
    dd = tl.zeros((BK,), tl.float32)
    for start in range(0, V, BV):
        cols = start + tl.arange(0, BV)
        S = load_tile(states + state, 0, keys, K, V, cols, V)
        dS = load_tile(d_states + state, 0, keys, K, V, cols, V)
        do_rows = load_tile(d_o + hv * V, at, r, count, HV * V, cols, V)
        u_rows = load_tile(u_new + hv * V, at, r, count, HV * V, cols, V)
        dq += tl.dot(do_rows, tl.trans(S), input_precision=PRECISION)
        dk += tl.dot(u_rows, tl.trans(dS), input_precision=PRECISION)
        if ERASE:
            du_rows = load_tile(d_u + hv * V, at, r, count, HV * V, cols, V)
            dw -= tl.dot(du_rows, tl.trans(S), input_precision=PRECISION)
        if GATE != "none":
            dd += tl.sum(S * dS, axis=1)
    store_tile(dq_in + hv * K, dq, at, r, count, HV * K, keys, K)
    store_tile(dk_out + hv * K, dk, at, r, count, HV * K, keys, K)
    if ERASE:
        store_tile(d_w + hv * K, dw, at, r, count, HV * K, keys, K)
    if GATE != "none":
        tl.store(d_decay + tl.cast(chunk, tl.int64) * K + keys, dd, mask=keys < K)
