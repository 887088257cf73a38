"""What the chunked kernels share, all on a tile of C tokens: loads, decays, the triangular inverse.

A decay between two tokens of a chunk, Γ_ri = exp(g_{i+1} + … + g_r), is never a difference of two running
sums over the chunk: the sums keep few digits of a small gate beside a large one. Blocks of 1, 2, 4, …
tokens are paired instead, as in ``evolve.kda.decayed_products``: two tokens meet at exactly one level, in
two blocks side by side, and between them lies the border of the blocks,

    Γ_ri = exp(since_r) · exp(until_i)      since_r: from the border to r;  until_i: after i to the border

so that every level is one masked product, with factors at most 1 and gates between i and r only.
"""

import triton
import triton.language as tl


@triton.jit
def chunk_span(i, starts, chunk_starts, chunk_rows, C: tl.constexpr):
    """The first token of chunk i (int64), and how many it has: at most C, fewer at its sequence's end."""
    n = tl.load(chunk_rows + i)
    first = tl.load(starts + n) + (i - tl.load(chunk_starts + n)) * C
    return first, tl.minimum(tl.load(starts + n + 1) - first, C).to(tl.int32)


@triton.jit
def load_tile(x, first, r, count, stride, cols, width):
    """Rows first + r of x, r below ``count``, and columns below ``width``; zeros elsewhere, in float32.

    ``first`` · ``stride`` is one int64 product; inside a tile 32 bits do, and cost half the registers.
    """
    mask = (r < count)[:, None] & (cols < width)[None, :]
    at = x + tl.cast(first, tl.int64) * stride
    return tl.load(at + (r[:, None] * stride + cols[None, :]), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(x, tile, first, r, count, stride, cols, width):
    """The counterpart of ``load_tile``; values are rounded to x's dtype."""
    mask = (r < count)[:, None] & (cols < width)[None, :]
    at = x + tl.cast(first, tl.int64) * stride
    tl.store(at + (r[:, None] * stride + cols[None, :]), tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_column(x, first, r, count, stride):
    """One number per row, as ``load_tile``: [rows]."""
    at = x + tl.cast(first, tl.int64) * stride
    return tl.load(at + r * stride, mask=r < count, other=0.0).to(tl.float32)


@triton.jit
def since_start(g, SIZE: tl.constexpr):
    """Sums of g from the first token of each block of SIZE up to and with each token. g: [C, X] -> [C, X]."""
    blocks = tl.reshape(g, (g.shape[0] // SIZE, SIZE, g.shape[1]))
    return tl.reshape(tl.cumsum(blocks, axis=1), g.shape)


@triton.jit
def until_end(g_next, SIZE: tl.constexpr):
    """Sums of the gates after each token until its block ends; g_next holds each next token's gate."""
    r = tl.arange(0, g_next.shape[0])
    g_next = tl.where((r % SIZE == SIZE - 1)[:, None], 0.0, g_next)
    blocks = tl.reshape(g_next, (g_next.shape[0] // SIZE, SIZE, g_next.shape[1]))
    return tl.reshape(tl.cumsum(blocks, axis=1, reverse=True), g_next.shape)


@triton.jit
def meet(C: tl.constexpr, SIZE: tl.constexpr):
    """Which pairs (r, i) meet at this level: r in the second, i in the first of two neighbouring blocks."""
    block = tl.arange(0, C) // SIZE
    return (block[:, None] == block[None, :] + 1) & (block % 2 == 1)[:, None]


@triton.jit
def diagonal(C: tl.constexpr):
    r = tl.arange(0, C)
    return r[:, None] == r[None, :]


@triton.jit
def same_tile(C: tl.constexpr, SIZE: tl.constexpr):
    """Which pairs i ≤ r lie in one tile of SIZE tokens."""
    r = tl.arange(0, C)
    return (r[:, None] // SIZE == r[None, :] // SIZE) & (r[:, None] >= r[None, :])


@triton.jit
def since_first_row(g, SIZE: tl.constexpr):
    """Sums of g since each tile's first row, whose own gate is left out: the anchor of bounded gates."""
    r = tl.arange(0, g.shape[0])
    return since_start(tl.where((r % SIZE == 0)[:, None], 0.0, g), SIZE)


@triton.jit
def pairwise_decay(g, C: tl.constexpr):
    """Γ [C, C] of one gate per head, g [C]: each entry sums its own gates, zero above the diagonal."""
    r = tl.arange(0, C)
    sums = tl.cumsum(tl.where(r[:, None] > r[None, :], g[:, None], 0.0), axis=0)
    return tl.where(r[:, None] >= r[None, :], tl.exp(sums), 0.0)


@triton.jit
def gated_products(q, k, g, g_next, C: tl.constexpr, FIRST: tl.constexpr, LEVELS: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """Σ_c k_rc Γ_ric k_ic below the diagonal and Σ_c q_rc Γ_ric k_ic with it, for some channels: [C, C].

    Levels double blocks of FIRST tokens up to C. FIRST = 1 asks nothing of the gates. FIRST = 16 is for gates
    above −5.8 and takes the four levels inside a 16-token tile in one product, (x e^a)(y e^−a)ᵀ with a the
    gates since the tile's first row: e^−a stays below float32's 3e38, and no gate after r is in e^{a_r}.
    """
    if FIRST == 1:
        p_k = tl.zeros((C, C), tl.float32)
        p_q = tl.where(diagonal(C), tl.sum(q * k, axis=1)[:, None], 0.0)
    else:
        a = since_first_row(g, FIRST)
        y = tl.trans(k * tl.exp(-a))
        p_k = tl.dot(k * tl.exp(a), y, input_precision=PRECISION)
        p_q = tl.dot(q * tl.exp(a), y, input_precision=PRECISION)
        p_k = tl.where(same_tile(C, FIRST) & ~diagonal(C), p_k, 0.0)
        p_q = tl.where(same_tile(C, FIRST), p_q, 0.0)
    for level in tl.static_range(LEVELS):
        since = tl.exp(since_start(g, FIRST << level))
        y = tl.trans(k * tl.exp(until_end(g_next, FIRST << level)))
        p_k += tl.where(meet(C, FIRST << level), tl.dot(k * since, y, input_precision=PRECISION), 0.0)
        p_q += tl.where(meet(C, FIRST << level), tl.dot(q * since, y, input_precision=PRECISION), 0.0)
    return p_k, p_q


@triton.jit
def product_gradients(q, k, beta_k, d_a, d_q, since, until, PRECISION: tl.constexpr):
    """The gradients of one masked product: rows z_k = d_a Γ k and z_q = d_q Γ k, and the columns'."""
    y = k * until
    z_k = since * tl.dot(d_a, y, input_precision=PRECISION)
    z_q = since * tl.dot(d_q, y, input_precision=PRECISION)
    columns = tl.dot(tl.trans(d_a), beta_k * since, input_precision=PRECISION)
    columns += tl.dot(tl.trans(d_q), q * since, input_precision=PRECISION)
    return z_k, z_q, until * columns


@triton.jit
def gated_product_gradients(q, k, beta_k, g, g_next, d_a, d_q, C: tl.constexpr, FIRST: tl.constexpr,
                            LEVELS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Backward of ``gated_products``, level by level: d_a [C, C] for diag(β) p_k, d_q for p_q.

    Returns Σ_i d_a Γ k_i and Σ_i d_q Γ k_i for the rows r, Σ_r Γ (d_a β_r k_r + d_q q_r) for the columns i.
    """
    if FIRST == 1:
        d = tl.sum(tl.where(diagonal(C), d_q, 0.0), axis=1)[:, None]
        z_k, z_q, columns = tl.zeros_like(k), d * k, d * q
    else:
        a = since_first_row(g, FIRST)
        within = same_tile(C, FIRST)
        inside_a = tl.where(within & ~diagonal(C), d_a, 0.0)
        inside_q = tl.where(within, d_q, 0.0)
        z_k, z_q, columns = product_gradients(
            q, k, beta_k, inside_a, inside_q, tl.exp(a), tl.exp(-a), PRECISION
        )
    for level in tl.static_range(LEVELS):
        since = tl.exp(since_start(g, FIRST << level))
        until = tl.exp(until_end(g_next, FIRST << level))
        met_a = tl.where(meet(C, FIRST << level), d_a, 0.0)
        met_q = tl.where(meet(C, FIRST << level), d_q, 0.0)
        more_k, more_q, more = product_gradients(q, k, beta_k, met_a, met_q, since, until, PRECISION)
        z_k += more_k
        z_q += more_q
        columns += more
    return z_k, z_q, columns


@triton.jit
def unit_lower_inverse(A, C: tl.constexpr, LOG_C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)⁻¹, A [C, C] strictly lower, by doubling: X ← X − X A_s X, A_s where blocks of s meet.

    TF32 leaves three digits of it. One step of Newton, X ← X + X (I − (I + A) X), squares the error away, and
    only its residual has to be exact: three TF32 products for one there.
    """
    identity = tl.where(diagonal(C), 1.0, 0.0)
    x = identity - tl.where(meet(C, 1), A, 0.0)
    for level in tl.static_range(1, LOG_C):
        square = tl.where(meet(C, 1 << level), A, 0.0)
        x -= tl.dot(x, tl.dot(square, x, input_precision=PRECISION), input_precision=PRECISION)
    if PRECISION == "tf32":
        residual = identity - x - tl.dot(A, x, input_precision="tf32x3")
        x += tl.dot(x, residual, input_precision=PRECISION)
    return x
