"""The softmax over keys that come tile by tile, shared by attention and by the decode step of MLA.

    m = max over s of x_s      l = Σ_s exp(x_s − m)      acc = Σ_s exp(x_s − m) v_s      o = acc / l

of all scores x_s so far (Milakov and Gimelshein, 2018, algorithm 3): a larger m fades what l and acc hold.
A row that sees no key keeps m = −inf, l = 0 and acc = 0; its output is 0 and its log Σ exp x is −inf.
"""

import triton
import triton.language as tl


@triton.jit
def real_keys(key_mask, b, s, S):
    """Which of the keys s of row b exist and are not hidden; ``key_mask`` [B, S] is uint8, or ``None``."""
    real = s < S
    if key_mask is not None:
        real = tl.load(key_mask + tl.cast(b, tl.int64) * S + s, mask=real, other=0) != 0
    return real


@triton.jit
def load_real(x, first, r, real, stride, cols, width):
    """Rows first + r of x, zeros for those not real: their weight is 0, but 0 · nan would still be nan."""
    at = x + tl.cast(first, tl.int64) * stride
    mask = real[:, None] & (cols < width)[None, :]
    return tl.load(at + (r[:, None] * stride + cols[None, :]), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def add_keys(x, v_rows, m, l, acc, PRECISION: tl.constexpr):
    """(m, l, acc) with one more tile: x [rows, keys], −inf where nothing is seen; v_rows [keys, columns]."""
    m_new = tl.maximum(m, tl.max(x, axis=1))
    base = tl.where(m_new == -float("inf"), 0.0, m_new)  # nothing seen yet: −inf − (−inf) would be nan
    p = tl.exp(x - base[:, None])
    faded = tl.exp(m - base)
    acc *= faded[:, None]
    acc += tl.dot(p.to(v_rows.dtype), v_rows, input_precision=PRECISION)
    return m_new, l * faded + tl.sum(p, axis=1), acc


@triton.jit
def averages(m, l, acc):
    """o [rows, columns], and log Σ exp x [rows]."""
    blind = l == 0
    l = tl.where(blind, 1.0, l)
    return acc / l[:, None], tl.where(blind, -float("inf"), m + tl.log(l))
