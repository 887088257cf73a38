"""Rung 2, linear attention: every key and value added into one matrix.

The problem: softmax attention keeps every key and value, so cache and decode cost grow with each token.
What changed: the exponential of q·k becomes a plain product φ(q)·φ(k), which can be summed once for all
queries to come (Katharopoulos et al., 2020, arXiv 2006.16236, eqs. 16 to 20):

    S_t = S_{t-1} + φ(k_t) v_tᵀ        z_t = z_{t-1} + φ(k_t)
    o_t = S_tᵀ φ(q_t)                  or, normalised, S_tᵀ φ(q_t) / z_tᵀ φ(q_t)

One step of online learning: the Hebbian step, the gradient of −⟨Sᵀk, v⟩.
Shapes: q, k [B, T, H, K]; v, o [B, T, HV, V]; S [B, HV, K, V]; z [B, HV, K].
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolve.checks import check_shape, require
from evolve.chunking import from_chunks, to_chunks
from evolve.memory_layer import Call, MemoryLayer
from evolve.memory_rule import Tensors, outer, per_sequence, prepare_rule, read, run_chunked, token_loop
from evolve.norms import RMSNorm

State = Tensor | tuple[Tensor, Tensor]


def elu1(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1 > 0 (eq. 7), as exp(x) below 0 so that small values keep all their digits."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def linear_attention_step(q: Tensor, k: Tensor, v: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token: write, then read. q, k: [B, HV, K]; v: [B, HV, V]; S: [B, HV, K, V] -> (o, S)."""
    S = S + outer(k, v)  # S_t = S_{t-1} + k vᵀ
    return read(S, q), S  # o_t = S_tᵀ q


def recurrent_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    feature_map: str | None = None,
    normalize: bool = False,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    """Linear attention by its definition, a loop over tokens (eqs. 18 to 20).

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H.
        scale: multiplies q; K**-0.5 by default, 1 with a feature map.
        feature_map: ``None`` or ``"elu1"`` (φ = elu + 1, applied here to q and k).
        normalize: divide by z·φ(q); the state is then the pair (S, z).
        initial_state: S [B, HV, K, V], or (S, z) with z [B, HV, K]; [N, ...] with ``cu_seqlens``.
        cu_seqlens: [N+1] ends of N sequences packed into one row, B = 1.
    Returns: o [B, T, HV, V] in v's dtype; the last state, float32 (float64 for float64 inputs), or ``None``.
    Raises: ValueError on arguments that do not fit.
    """
    tokens, S = _prepare(q, k, v, scale, feature_map, normalize, initial_state, cu_seqlens)
    o, S = per_sequence(token_loop(linear_attention_step), tokens, S, cu_seqlens)
    return _finish(o, S, v.dtype, normalize, output_final_state)


def chunk_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    feature_map: str | None = None,
    normalize: bool = False,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    backend: str | None = None,
) -> tuple[Tensor, State | None]:
    """Linear attention in chunks of C tokens, where the sum over a chunk's past is one product.

        O = Q S + tril(Q Kᵀ) V        S ← S + Kᵀ V

    with the chunk's rows stacked into Q, K [C, K] and V [C, V], and S the state before the chunk.

    Args: as ``recurrent_linear_attention``; chunk_size: C. backend: ``"torch"``, ``"triton"``, or
            ``None``: Triton kernels on CUDA tensors where they are installed, PyTorch elsewhere.
    Returns: as ``recurrent_linear_attention``.
    Raises: ValueError on arguments that do not fit.
    """
    tokens, S = _prepare(
        q, k, v, scale, feature_map, normalize, initial_state, cu_seqlens, chunk_size, backend
    )
    how = {"cu_seqlens": cu_seqlens, "chunk_size": chunk_size, "backend": backend}
    o, S = run_chunked(
        _chunk_form, *tokens, scale=1.0, initial_state=S, output_final_state=True, gate="none", **how
    )
    return _finish(o, S, v.dtype, normalize, output_final_state)


def _chunk_form(C: int, q: Tensor, k: Tensor, v: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    T = q.shape[1]
    Q, K, V = (to_chunks(x, C) for x in (q, k, v))
    writes = torch.cat([S[:, :, None], K.mT @ V], dim=2)  # the first state, then Kᵀ V of every chunk
    before, last = writes.cumsum(2).split([Q.shape[2], 1], dim=2)  # S before each chunk, and after all
    O = Q @ before + (Q @ K.mT).tril() @ V
    return from_chunks(O, T), last.squeeze(2).clone()  # a view would keep every chunk's state alive


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    feature_map: str | None,
    normalize: bool,
    state: State | None,
    cu_seqlens: Tensor | None,
    chunk_size: int = 64,
    backend: str | None = None,
) -> tuple[Tensors, Tensor]:
    """Check, apply φ, and with ``normalize`` extend v and S: z is what S stores for the value 1."""
    require(feature_map in (None, "elu1"), f'feature_map must be None or "elu1", got {feature_map!r}')
    S, z = _split_state(state, normalize)
    tokens, S = prepare_rule(
        q, k, v, initial_state=S, cu_seqlens=cu_seqlens, scale=1.0, chunk_size=chunk_size, backend=backend
    )
    q, k, v = tokens
    if feature_map is not None:
        q, k = elu1(q), elu1(k)
    if scale is None:
        scale = q.shape[-1] ** -0.5 if feature_map is None else 1.0
    if normalize:
        N, HV, K, _ = S.shape
        if z is not None:
            check_shape("initial_state's z", z, N=N, HV=HV, K=K)
        z = S.new_zeros(N, HV, K) if z is None else z.to(S.dtype)
        S = torch.cat([S, z[..., None]], dim=-1)  # [S | z]
        v = F.pad(v, (0, 1), value=1.0)  # [v | 1]
    return (q * scale, k, v), S


def _split_state(state: State | None, normalize: bool) -> tuple[Tensor | None, Tensor | None]:
    if not normalize:
        require(not isinstance(state, tuple), "initial_state must be S alone without normalize, got a tuple")
        return state, None
    is_pair = state is None or (isinstance(state, tuple) and len(state) == 2)
    require(is_pair, f"initial_state must be the pair (S, z) with normalize, got {type(state).__name__}")
    return (None, None) if state is None else state


def _finish(
    o: Tensor, S: Tensor, dtype: torch.dtype, normalize: bool, output_final_state: bool
) -> tuple[Tensor, State | None]:
    """Divide by z·φ(q), the last column, and hand the state over as S or (S, z)."""
    if normalize:
        n = o[..., -1:]  # exactly 0 only where nothing has been stored, or where exp has underflowed
        o = o[..., :-1] / n.where(n != 0, 1.0)
        S = (S[..., :-1], S[..., -1])
    return o.to(dtype), S if output_final_state else None


class LinearAttention(MemoryLayer):
    """The layer of Katharopoulos et al.: φ = elu + 1, normalised, and no convolution unless asked for.

    Without the normaliser the output grows with the number of tokens, so an RMSNorm takes its place
    (``o_norm``). Sizes, arguments and cache: see ``MemoryLayer``.
    """

    silu_without_conv = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = None,
        feature_map: str | None = "elu1",
        normalize: bool = True,
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
        self.feature_map, self.normalize = feature_map, normalize
        self.o_norm = nn.Identity() if normalize else RMSNorm(self.head_v_dim, eps=norm_eps)

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return call.run(
            recurrent_linear_attention,
            chunk_linear_attention,
            q,
            k,
            v,
            feature_map=self.feature_map,
            normalize=self.normalize,
        )

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_norm(o)
