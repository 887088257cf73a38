"""One decoded token of a KDA layer in one launch: everything between its projections.

    conv and SiLU → L2 norm of q and k → decay gate, β → S ← Diag(α) S, S ← S + β k (v − Sᵀk)ᵀ → o = Sᵀq
    → RMS norm · gain · sigmoid(output gate)

One program takes one value head of one row. Its whole state [K, V] is one tile: it is loaded once, changed in
registers and stored once, and every small operation around it happens while it is there. Value heads of one
group compute the convolution of their q and k anew; the first of them stores the new history.

Bytes per row and value head: 8 K V for the state, in and out in float32; everything else together is less
than a tenth of that. K3: 128 KiB a head, 12 MiB a layer and token, 2.6 µs at 4.8 TB/s. FLOPs: 7 K V.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from evolve_kernels.launch import check_device, check_tensor, launch, tile


@triton.jit
def convolve(u, history, weight, new_history, b, channels, inside, D, W: tl.constexpr, WRITE):
    """SiLU(Σ_j w_j x_j) over a row's last W inputs; with WRITE their last W − 1 are the new history."""
    at = tl.cast(b, tl.int64) * D + channels  # in u; a row of history has W − 1 times as many
    past = tl.cast(b, tl.int64) * D * (W - 1) + channels
    y = tl.zeros(channels.shape, tl.float32)
    for j in tl.static_range(W):
        if j < W - 1:
            x = tl.load(history + past + j * D, mask=inside, other=0.0)
        else:
            x = tl.load(u + at, mask=inside, other=0.0)
        y += tl.load(weight + channels * W + j, mask=inside, other=0.0).to(tl.float32) * x.to(tl.float32)
        if j > 0:
            tl.store(new_history + past + (j - 1) * D, x, mask=inside & WRITE)
    return y * tl.sigmoid(y)


@triton.jit
def softplus(x):
    """log(1 + eˣ), with all its digits for small eˣ as well."""
    e = tl.exp(-tl.abs(x))
    log1p = tl.where(e < 1e-2, e * (1.0 - e * (0.5 - e * (1.0 / 3 - 0.25 * e))), tl.log(1.0 + e))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def l2_normalized(x):
    return x / tl.sqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def kda_decode_kernel(
    q, k, v, z, b, gate, state, q_history, k_history, v_history, q_weight, k_weight, v_weight, A_log, dt_bias,
    gain, y, new_state, new_q, new_k, new_v, scale, lower_bound, eps,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    row, hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    head = tl.cast(tl.program_id(0), tl.int64)
    h = hv // (HV // H)
    keys, cols = tl.arange(0, BK), tl.arange(0, BV)
    has_k, has_v = keys < K, cols < V
    at = head * K * V + keys[:, None] * V + cols[None, :]
    inside = has_k[:, None] & has_v[None, :]
    S = tl.load(state + at, mask=inside, other=0.0).to(tl.float32)

    writes = hv % (HV // H) == 0  # one value head of each group
    q_row = convolve(q, q_history, q_weight, new_q, row, h * K + keys, has_k, H * K, W, writes)
    k_row = convolve(k, k_history, k_weight, new_k, row, h * K + keys, has_k, H * K, W, writes)
    v_row = convolve(v, v_history, v_weight, new_v, row, hv * V + cols, has_v, HV * V, W, hv < HV)
    q_row, k_row = l2_normalized(q_row) * scale, l2_normalized(k_row)

    raw = tl.load(z + head * K + keys, mask=has_k, other=0.0).to(tl.float32)
    raw += tl.load(dt_bias + hv * K + keys, mask=has_k, other=0.0).to(tl.float32)
    A = tl.exp(tl.load(A_log + hv).to(tl.float32))
    g = lower_bound * tl.sigmoid(A * raw) if BOUNDED else -A * softplus(raw)
    beta = tl.sigmoid(tl.load(b + head).to(tl.float32))

    S *= tl.exp(g)[:, None]  # decay first: the error is measured on what is left
    error = v_row - tl.sum(S * k_row[:, None], axis=0)
    S += k_row[:, None] * (beta * error)[None, :]
    tl.store(new_state + at, S, mask=inside)
    o = tl.sum(S * q_row[:, None], axis=0)

    o = o / tl.sqrt(tl.sum(o * o, axis=0) / V + eps)
    o *= tl.load(gain + cols, mask=has_v, other=0.0).to(tl.float32)
    o *= tl.sigmoid(tl.load(gate + head * V + cols, mask=has_v, other=0.0).to(tl.float32))
    tl.store(y + head * V + cols, o.to(y.dtype.element_ty), mask=has_v)


@dataclass(frozen=True)
class Decoded:
    """y [B, HV, V] in v's dtype, the state after the token [B, HV, K, V], the three new histories."""

    y: Tensor
    state: Tensor
    histories: tuple[Tensor, Tensor, Tensor]


def sizes_of(B: int, H: int, HV: int, K: int, V: int, W: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that ``kda_decode`` takes, in its order."""
    sizes = {"q": (B, H, K), "k": (B, H, K), "v": (B, HV, V), "z": (B, HV, K), "b": (B, HV)}
    sizes |= {"gate": (B, HV, V), "state": (B, HV, K, V)}
    widths = {"q": H * K, "k": H * K, "v": HV * V}
    sizes |= {f"{name}_history": (B, W - 1, D) for name, D in widths.items()}
    sizes |= {f"{name}_weight": (D, 1, W) for name, D in widths.items()}
    sizes |= {"A_log": (HV,), "dt_bias": (HV * K,), "gain": (V,)}
    return sizes


def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    gate: Tensor,
    state: Tensor,
    histories: tuple[Tensor, Tensor, Tensor],
    conv_weights: tuple[Tensor, Tensor, Tensor],
    A_log: Tensor,
    dt_bias: Tensor,
    gain: Tensor,
    *,
    lower_bound: float | None,
    eps: float = 1e-5,
    scale: float | None = None,
) -> Decoded:
    """One token for every row of a batch, from the layer's projections of it. No gradient.

    Args:
        q, k: [B, H, K]. v: [B, HV, V], before their convolutions. z: [B, HV, K], the raw decay gate.
        b: [B, HV], β before its sigmoid. gate: [B, HV, V], the output gate before its sigmoid.
        state: [B, HV, K, V] float32. histories: [B, W − 1, channels] of q, k and v, left unchanged.
        conv_weights: [channels, 1, W] each. A_log: [HV]. dt_bias: [HV·K]. gain: [V], of the output norm.
        lower_bound: of the decay gate, ``None`` for the unbounded one. eps: of the output norm.
    Raises: ValueError on shapes, dtypes (float64 among them) or a device that the kernel cannot take.
    """
    check_device(q.device)
    if q.ndim != 3 or v.ndim != 3 or conv_weights[0].ndim != 3:
        raise ValueError("q and v must be [B, heads, channels], conv_weights [channels, 1, W]")
    (B, H, K), (HV, V), W = q.shape, v.shape[1:], conv_weights[0].shape[-1]
    if H == 0 or HV % H != 0 or not (0 < K <= 256 and 0 < V <= 256):
        raise ValueError(f"HV must be a multiple of H, K and V at most 256; got H={H}, HV={HV}, K={K}, V={V}")
    sizes = sizes_of(B, H, HV, K, V, W)
    given = dict(
        zip(sizes, (q, k, v, z, b, gate, state, *histories, *conv_weights, A_log, dt_bias, gain), strict=True)
    )
    given = {name: check_tensor(name, x, q.device, *sizes[name]) for name, x in given.items()}
    new = {f"new_{name}": torch.empty_like(given[f"{name}_history"]) for name in "qkv"}
    new |= {"y": torch.empty_like(given["v"]), "new_state": given["state"].new_empty(B, HV, K, V)}
    numbers = {"scale": K**-0.5 if scale is None else float(scale), "eps": float(eps)}
    numbers["lower_bound"] = 0.0 if lower_bound is None else float(lower_bound)
    constants = {"H": H, "HV": HV, "K": K, "V": V, "W": W, "BK": tile(K), "BV": tile(V)}
    constants["BOUNDED"] = lower_bound is not None
    warps = max(1, min(16, constants["BK"] * constants["BV"] // 1024))  # 32 numbers of the state a thread
    launch(kda_decode_kernel, B * HV, given | new | numbers | constants, num_warps=warps, num_stages=1)
    return Decoded(new["y"], new["new_state"], (new["new_q"], new["new_k"], new["new_v"]))
