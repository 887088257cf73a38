"""Rung 5, Kimi Delta Attention (KDA): every key channel fades at its own pace.

The problem: one decay per head cannot change the ratio of two stored memories, so facts and scratch die
together.
What changed: the decay becomes a vector α_t = exp(g_t) in (0, 1]^K, one entry per key channel (Kimi Linear,
arXiv 2510.26692, eq. 1):

    S' = Diag(α_t) S_{t-1}        S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ        o_t = S_tᵀ q_t

One step of online learning: the delta rule's SGD step with a weight decay per channel.
Shapes: q, k [B, T, H, K]; v, o [B, T, HV, V]; g (natural log, ≤ 0) [B, T, HV, K]; beta [B, T, HV];
S [B, HV, K, V].
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from evolve.checks import check_float, check_shape, require
from evolve.deltanet import delta_rule_step
from evolve.memory_rule import per_sequence, prepare_rule, token_loop


def kda_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None = None) -> Tensor:
    """The log decay g ≤ 0 of every channel from its raw gate z.

    ``lower_bound=None``: g = −exp(A)·softplus(z + b), unbounded (Kimi Linear, after Mamba-2).
    ``lower_bound=−5.0``: g = −5·sigmoid(exp(A)·(z + b)), inside (−5, 0) (Kimi K3): another function, not a
    clamp of the first.

    Args: z: [B, T, HV, K]. A_log: [HV]. dt_bias: [HV·K], head-major.
    Returns: g [B, T, HV, K] in float32 (float64 for float64 z).
    Raises: ValueError on shapes that do not fit, or a lower bound that is not below 0.
    """
    check_shape("z", z, B=None, T=None, HV=None, K=None)
    HV, K = z.shape[2:]
    check_shape("A_log", A_log, HV=HV)
    check_shape("dt_bias", dt_bias, **{"HV*K": HV * K})
    for name, x in {"z": z, "A_log": A_log, "dt_bias": dt_bias}.items():
        check_float(name, x)
    require(lower_bound is None or lower_bound < 0, f"lower_bound must be below 0, got {lower_bound}")
    dtype = torch.promote_types(z.dtype, torch.float32)
    z = z.to(dtype) + dt_bias.to(dtype).view(HV, K)
    A = A_log.to(dtype).exp()[:, None]  # one A per head
    if lower_bound is None:
        return -A * F.softplus(z, threshold=40.0)  # the default threshold, 20, costs float64 its digits
    return lower_bound * torch.sigmoid(A * z)


def kda_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token. q, k, g: [B, HV, K]; v: [B, HV, V]; beta: [B, HV]; S: [B, HV, K, V] -> (o, S)."""
    alpha = g.exp()
    S = alpha[..., None] * S  # Diag(α) S: decay first, then the delta rule on what is left
    return delta_rule_step(q, k, v, beta, S)


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """KDA by its definition, a loop over tokens.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV, K], natural log of the decay, ≤ 0. beta: [B, T, HV], write strength.
        scale: multiplies q; K**-0.5 by default.
        initial_state: [B, HV, K, V]; [N, HV, K, V] with ``cu_seqlens``; zeros by default.
        cu_seqlens: [N+1] ends of N sequences packed into one row, B = 1.
    Returns: o [B, T, HV, V] in v's dtype; the last state, float32 (float64 for float64 inputs), or ``None``.
    Raises: ValueError on arguments that do not fit.
    """
    tokens, S = prepare_rule(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, gate="channel"
    )
    o, S = per_sequence(token_loop(kda_step), tokens, S, cu_seqlens)
    return o.to(v.dtype), S if output_final_state else None
