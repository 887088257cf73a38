"""Rung 3, the delta rule: read first, and write only what was missing.

The problem: linear attention adds. A key written twice returns the sum of both values, and every pair
answers a little to every other key.
What changed: before writing v_t the memory is asked for k_t, and the difference is written with strength
β_t in (0, 2) (Schlag et al., 2021, arXiv 2102.11174, eq. 24; Yang et al., 2024, arXiv 2406.06484, eq. 4):

    S_t = S_{t-1} + β_t k_t (v_t − S_{t-1}ᵀ k_t)ᵀ        o_t = S_tᵀ q_t

One step of online learning: one SGD step on ½‖Sᵀk − v‖² with rate β.
Shapes: q, k [B, T, H, K]; v, o [B, T, HV, V]; beta [B, T, HV]; S [B, HV, K, V].
"""

from torch import Tensor, nn

from evolve.chunking import from_chunks, to_chunks, unit_lower_inverse, walk_chunks
from evolve.memory_layer import Call, MemoryLayer
from evolve.memory_rule import outer, per_sequence, prepare_rule, read, run_chunked, token_loop
from evolve.norms import RMSNorm, at_least_float32, l2_normalize


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


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule in chunks of C tokens (the WY/UT form, Yang et al., 2024, sections 3.1 and 3.2).

    Token r of a chunk writes u_r = β_r (v_r − S_{r-1}ᵀ k_r) under k_r, so S_{r-1} = S + Σ_{i<r} k_i u_iᵀ with
    S the state before the chunk. Put the second into the first and stack the rows, U [C, V]:

        U = diag(β) (V − K S) − strict_tril(diag(β) K Kᵀ) U
        (I + A) U = diag(β) (V − K S)        A = strict_tril(diag(β) K Kᵀ)

    One triangular solve replaces the loop over tokens, and only the second part of U waits for S:

        M = (I + A)⁻¹ diag(β)      Û = M V      W = M K      U = Û − W S
        O = Q S + tril(Q Kᵀ) U     S ← S + Kᵀ U

    Args: as ``recurrent_delta_rule``; chunk_size: C. backend: ``"torch"``, ``"triton"``, or
            ``None``: Triton kernels on CUDA tensors where they are installed, PyTorch elsewhere.
    Returns: as ``recurrent_delta_rule``.
    Raises: ValueError on arguments that do not fit.
    """
    return run_chunked(
        _chunk_form,
        q,
        k,
        v,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        gate="none",
        chunk_size=chunk_size,
        backend=backend,
    )


def _chunk_form(C: int, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    T = q.shape[1]
    Q, K, V, beta = (to_chunks(x, C) for x in (q, k, v, beta[..., None]))
    A = beta * (K @ K.mT)
    M = unit_lower_inverse(A) * beta.mT  # (I + A)⁻¹ diag(β)
    before, U, S = walk_chunks(S, M @ V, M @ K, K)  # S before each chunk, U = Û − W S
    O = Q @ before + (Q @ K.mT).tril() @ U
    return from_chunks(O, T), S


class DeltaNet(MemoryLayer):
    """The layer of Yang et al., 2024: SiLU and L2 norm on q and k, β = sigmoid(W_b x), RMSNorm on the output.

    Sizes, arguments and cache: see ``MemoryLayer``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = 4,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            head_dim,
            num_v_heads=num_v_heads,
            head_v_dim=head_v_dim,
            conv_size=conv_size,
        )
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.o_norm = RMSNorm(self.head_v_dim, eps=norm_eps)

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        q, k = l2_normalize(q), l2_normalize(k)
        beta = at_least_float32(self.b_proj(x)).sigmoid()
        return call.run(recurrent_delta_rule, chunk_delta_rule, q, k, v, beta)

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_norm(o)
