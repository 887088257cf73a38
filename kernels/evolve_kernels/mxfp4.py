"""MXFP4 weights as a kernel reads them: four-bit codes and the scales of 32, expanded in registers.

    w[i] = ± max(m/2, m − 2, 2m − 8) · 2^(scale[i // 32] − 127)      m: the code's lower three bits

A code's eighth bit is its sign. The magnitudes 0, ½, 1, 1½, 2, 3, 4, 6 lie on three straight lines, each
above the other two where it counts. The power of two is written as a float32's bits: its exponent is the
scale byte, but for 0, which would be 2^−127 (a denormal number), and 255, which stands for nan.
"""

import triton
import triton.language as tl


@triton.jit
def load_bytes(x, first, r, count, stride, cols):
    """Rows first + r of the bytes x, r below ``count``, columns below ``stride``; zeros elsewhere: int32."""
    mask = (r < count)[:, None] & (cols < stride)[None, :]
    at = x + tl.cast(first, tl.int64) * stride
    return tl.load(at + (r[:, None] * stride + cols[None, :]), mask=mask, other=0).to(tl.int32)


@triton.jit
def load_expanded(packed, scale, first, r, count, start, I: tl.constexpr, SIZE: tl.constexpr):
    """SIZE weights from ``start`` on, multiples of 32, of rows first + r: [rows, SIZE] in float32."""
    pairs, blocks = start // 2 + tl.arange(0, SIZE // 2), start // 32 + tl.arange(0, SIZE // 32)
    codes = load_bytes(packed, first, r, count, I // 2, pairs)
    s = load_bytes(scale, first, r, count, I // 32, blocks)
    code = tl.interleave(codes & 15, codes >> 4)  # the even input's code is the lower half
    m = (code & 7).to(tl.float32)
    w = tl.maximum(tl.maximum(0.5 * m, m - 2.0), 2.0 * m - 8.0)
    w = tl.where(code < 8, w, -w)
    bits = tl.where(s == 0, 1 << 22, tl.where(s == 255, 0x7FC00000, s << 23))
    sizes = bits.to(tl.float32, bitcast=True)
    w = tl.reshape(w, (w.shape[0], SIZE // 32, 32)) * sizes[:, :, None]
    return tl.reshape(w, (w.shape[0], SIZE))
