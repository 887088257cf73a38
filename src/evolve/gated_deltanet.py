"""Rung 4, the gated delta rule: the whole memory fades before each write.

The problem: a delta write erases only along its own key, so clearing an old context takes hundreds of
writes.
What changed: one decay α_t = exp(g_t) in (0, 1] per head and token multiplies the state first (Yang et al.,
2025, arXiv 2412.06464, eq. 10):

    S' = α_t S_{t-1}        S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ        o_t = S_tᵀ q_t

One step of online learning: the delta rule's SGD step with weight decay.
Shapes: q, k [B, T, H, K]; v, o [B, T, HV, V]; g (natural log, ≤ 0), beta [B, T, HV]; S [B, HV, K, V].
"""

from torch import Tensor

from evolve.deltanet import delta_rule_step
from evolve.memory_rule import per_sequence, prepare_rule, token_loop


def gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """One token. q, k: [B, HV, K]; v: [B, HV, V]; g, beta: [B, HV]; S: [B, HV, K, V] -> (o, S)."""
    alpha = g.exp()
    S = alpha[..., None, None] * S  # decay first: the error is measured on what is left
    return delta_rule_step(q, k, v, beta, S)


def recurrent_gated_delta_rule(
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
    """The gated delta rule by its definition, a loop over tokens.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV], natural log of the decay, ≤ 0. beta: [B, T, HV], write strength.
        scale: multiplies q; K**-0.5 by default.
        initial_state: [B, HV, K, V]; [N, HV, K, V] with ``cu_seqlens``; zeros by default.
        cu_seqlens: [N+1] ends of N sequences packed into one row, B = 1.
    Returns: o [B, T, HV, V] in v's dtype; the last state, float32 (float64 for float64 inputs), or ``None``.
    Raises: ValueError on arguments that do not fit.
    """
    tokens, S = prepare_rule(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, gate="head"
    )
    o, S = per_sequence(token_loop(gated_delta_rule_step), tokens, S, cu_seqlens)
    return o.to(v.dtype), S if output_final_state else None
