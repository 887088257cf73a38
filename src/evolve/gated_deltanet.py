"""Rung 4, the gated delta rule: the whole memory fades before each write.

The problem: a delta write erases only along its own key, so clearing an old context takes hundreds of
writes.
What changed: one decay α_t = exp(g_t) in (0, 1] per head and token multiplies the state first (Yang et al.,
2025, arXiv 2412.06464, eq. 10):

    S' = α_t S_{t-1}        S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ        o_t = S_tᵀ q_t

One step of online learning: the delta rule's SGD step with weight decay.
Shapes: q, k [B, T, H, K]; v, o [B, T, HV, V]; g (natural log, ≤ 0), beta [B, T, HV]; S [B, HV, K, V].
"""

from functools import partial

import torch
from torch import Tensor

from evolve.chunking import from_chunks, solve_unit_lower, to_chunks, walk_chunks
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


def chunk_gated_delta_rule(
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
    chunk_size: int = 64,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule in chunks of C tokens (Yang et al., 2025, section 3.3).

    The delta rule's derivation, with what was written at token i fading until it is read at token r:
    S_r = e^{G_r} S + Σ_{i≤r} Γ_ri k_i u_iᵀ, where G_r = g_1 + … + g_r inside the chunk and
    Γ_ri = e^{G_r − G_i}:

        A = strict_tril(diag(β) (K Kᵀ ⊙ Γ))
        Û = (I + A)⁻¹ diag(β) V    W = (I + A)⁻¹ diag(β e^G) K    U = Û − W S
        O = e^G ⊙ (Q S) + tril(Q Kᵀ ⊙ Γ) U    S ← e^{G_C} S + (Γ_C ⊙ K)ᵀ U

    Args: as ``recurrent_gated_delta_rule``; chunk_size: C. backend: ``None`` or ``"torch"``.
    Returns: as ``recurrent_gated_delta_rule``.
    Raises: ValueError on arguments that do not fit.
    """
    tokens, S = prepare_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        gate="head",
        chunk_size=chunk_size,
        backend=backend,
    )
    o, S = per_sequence(partial(_chunk_form, chunk_size), tokens, S, cu_seqlens)
    return o.to(v.dtype), S if output_final_state else None


def pairwise_decay(g: Tensor) -> Tensor:
    """Γ_ri = exp(g_{i+1} + … + g_r) for i ≤ r, and 0 above the diagonal. g: [..., C] -> [..., C, C].

    Each entry sums its own gates: the difference of two running sums G_r − G_i would lose the digits of a
    small sum beside a large one, and is ∞ − ∞ once a gate is −∞. Zero above the diagonal is put in before
    the exponential; after it, 0 · ∞ would make the gradient NaN.
    """
    C = g.shape[-1]
    past = torch.ones(C, C, dtype=torch.bool, device=g.device).tril()
    G = g[..., :, None].expand(*g.shape, C).masked_fill(~past.tril(-1), 0).cumsum(-2)
    return G.masked_fill(~past, float("-inf")).exp()


def _chunk_form(
    C: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    T = q.shape[1]
    Q, K, V, beta = (to_chunks(x, C) for x in (q, k, v, beta[..., None]))
    g = to_chunks(g, C)
    alpha = g.cumsum(-1).exp()[..., None]  # e^G, the decay since the chunk began
    Gamma = pairwise_decay(g)
    A = beta * (K @ K.mT) * Gamma
    U, W = solve_unit_lower(A, beta * V, beta * alpha * K)
    K_out = Gamma[..., -1, :, None] * K  # what is left of each key when the chunk ends
    before, U, S = walk_chunks(S, U, W, K_out, decay=alpha[..., -1:, :])
    O = alpha * (Q @ before) + ((Q @ K.mT) * Gamma) @ U
    return from_chunks(O, T), S
