"""Rung 3, the delta rule: read first, and write only what was missing.

The problem: linear attention adds. A key written twice returns the sum of both values, and every pair
answers a little to every other key.
What changed: before writing v_t the memory is asked for k_t, and the difference is written with strength
β_t in (0, 2) (Schlag et al., 2021, arXiv 2102.11174, eq. 24; Yang et al., 2024, arXiv 2406.06484, eq. 4):

    S_t = S_{t-1} + β_t k_t (v_t − S_{t-1}ᵀ k_t)ᵀ        o_t = S_tᵀ q_t

One step of online learning: one SGD step on ½‖Sᵀk − v‖² with rate β.
Shapes: q, k [B, T, H, K]; v, o [B, T, HV, V]; beta [B, T, HV]; S [B, HV, K, V].
"""

from torch import Tensor

from evolve.memory_rule import outer, per_sequence, prepare_rule, read, token_loop


def delta_rule_step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token. q, k: [B, HV, K]; v: [B, HV, V]; beta: [B, HV]; S: [B, HV, K, V] -> (o, S)."""
    error = v - read(S, k)  # v − Sᵀk
    S = S + outer(k, beta[..., None] * error)  # S_t = S_{t-1} + β k (v − Sᵀk)ᵀ
    return read(S, q), S  # o_t = S_tᵀ q


def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule by its definition, a loop over tokens.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. beta: [B, T, HV], write strength.
        scale: multiplies q; K**-0.5 by default.
        initial_state: [B, HV, K, V]; [N, HV, K, V] with ``cu_seqlens``; zeros by default.
        cu_seqlens: [N+1] ends of N sequences packed into one row, B = 1.
    Returns: o [B, T, HV, V] in v's dtype; the last state, float32 (float64 for float64 inputs), or ``None``.
    Raises: ValueError on arguments that do not fit.
    """
    tokens, S = prepare_rule(
        q, k, v, beta=beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    o, S = per_sequence(token_loop(delta_rule_step), tokens, S, cu_seqlens)
    return o.to(v.dtype), S if output_final_state else None
