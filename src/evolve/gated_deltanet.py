"""Rung 4, the gated delta rule: the whole memory fades before each write.

The problem: a delta write erases only along its own key, so clearing an old context takes hundreds of
writes.
What changed: one decay α_t = exp(g_t) in (0, 1] per head and token multiplies the state first (Yang et al.,
2025, arXiv 2412.06464, eq. 10):

    S' = α_t S_{t-1}        S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ        o_t = S_tᵀ q_t

One step of online learning: the delta rule's SGD step with weight decay.
Shapes: q, k [B, T, H, K]; v, o [B, T, HV, V]; g (natural log, ≤ 0), beta [B, T, HV]; S [B, HV, K, V].
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolve.checks import check_shape
from evolve.chunking import from_chunks, to_chunks, unit_lower_inverse, walk_chunks
from evolve.deltanet import delta_rule_step
from evolve.memory_layer import Call, MemoryLayer, float32_parameter, initial_dt_bias
from evolve.memory_rule import per_sequence, prepare_rule, run_chunked, token_loop
from evolve.norms import GatedRMSNorm, at_least_float32, l2_normalize


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
        M = (I + A)⁻¹ diag(β)    Û = M V    W = M (e^G ⊙ K)    U = Û − W S
        O = e^G ⊙ (Q S) + tril(Q Kᵀ ⊙ Γ) U    S ← e^{G_C} S + (Γ_C ⊙ K)ᵀ U

    Args: as ``recurrent_gated_delta_rule``; chunk_size: C. backend: ``"torch"``, ``"triton"``, or
            ``None``: Triton kernels on CUDA tensors where they are installed, PyTorch elsewhere.
    Returns: as ``recurrent_gated_delta_rule``.
    Raises: ValueError on arguments that do not fit.
    """
    return run_chunked(
        _chunk_form,
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        gate="head",
        chunk_size=chunk_size,
        backend=backend,
    )


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
    M = unit_lower_inverse(A) * beta.mT  # (I + A)⁻¹ diag(β)
    K_out = Gamma[..., -1, :, None] * K  # what is left of each key when the chunk ends
    before, U, S = walk_chunks(S, M @ V, M @ (alpha * K), K_out, decay=alpha[..., -1:, :])
    O = alpha * (Q @ before) + ((Q @ K.mT) * Gamma) @ U
    return from_chunks(O, T), S


def gated_delta_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = −exp(A)·softplus(a + b) ≤ 0, after Mamba-2. a: [B, T, HV]; A_log, dt_bias: [HV] -> [B, T, HV]."""
    a = at_least_float32(a) + dt_bias
    return -at_least_float32(A_log).exp() * F.softplus(a, threshold=40.0)  # at 20 float64 loses digits


class GatedDeltaNet(MemoryLayer):
    """The layer of Yang et al., 2025, in Qwen3-Next's sizes and arithmetic with separate projections.

    DeltaNet's layer with a decay g from ``a_proj`` and an output gate: o_norm(o) · SiLU(W_g x).
    ``split_qwen3_next`` makes its weights from Qwen3-Next's fused ones. Sizes, arguments and cache: see
    ``MemoryLayer``.
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
        HV, V = self.num_v_heads, self.head_v_dim
        self.a_proj = nn.Linear(hidden_size, HV, bias=False)
        self.b_proj = nn.Linear(hidden_size, HV, bias=False)
        self.g_proj = nn.Linear(hidden_size, HV * V, bias=False)  # the output gate, not the decay
        self.A_log = float32_parameter(HV)
        self.dt_bias = float32_parameter(HV)
        self.o_norm = GatedRMSNorm(V, activation="silu", eps=norm_eps)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.A_log.uniform_(1, 16).log_()
        self.dt_bias.copy_(initial_dt_bias(self.num_v_heads))

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        q, k = l2_normalize(q), l2_normalize(k)
        g = gated_delta_gate(self.a_proj(x), self.A_log, self.dt_bias)
        beta = at_least_float32(self.b_proj(x)).sigmoid()
        return call.run(recurrent_gated_delta_rule, chunk_gated_delta_rule, q, k, v, g, beta)

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_norm(o, self.g_proj(x).view_as(o))


def split_qwen3_next(weights: dict[str, Tensor], layer: GatedDeltaNet) -> dict[str, Tensor]:
    """Qwen3-Next's ``linear_attn.*`` weights under this layer's names, for ``layer.load_state_dict``.

    Its fused matrices are ordered by key head: ``in_proj_qkvz`` holds [q | k | v | z] and ``in_proj_ba``
    holds [b | a] of one key head and the value heads it serves, then of the next.

    Args: weights: in_proj_qkvz, in_proj_ba, conv1d, norm, out_proj (.weight), A_log, dt_bias. layer: for its
        sizes.
    Raises: ValueError where a matrix has not the size that the layer asks for.
    """
    H, K, HV, V = layer.num_heads, layer.head_dim, layer.num_v_heads, layer.head_v_dim
    group = HV // H  # value heads per key head
    qkvz, ba = weights["in_proj_qkvz.weight"], weights["in_proj_ba.weight"]
    check_shape("in_proj_qkvz.weight", qkvz, rows=2 * (H * K + HV * V), D=layer.hidden_size)
    check_shape("in_proj_ba.weight", ba, rows=2 * HV, D=layer.hidden_size)
    q, k, v, z = qkvz.unflatten(0, (H, -1)).split([K, K, group * V, group * V], dim=1)
    b, a = ba.unflatten(0, (H, -1)).split([group, group], dim=1)
    projections = {"q_proj": q, "k_proj": k, "v_proj": v, "g_proj": z, "b_proj": b, "a_proj": a}
    split = {f"{name}.weight": W.flatten(0, 1) for name, W in projections.items()}
    convs = weights["conv1d.weight"].split([H * K, H * K, HV * V])  # these are ordered [q | k | v]
    split |= {f"{name}_conv1d.weight": w for name, w in zip("qkv", convs)}
    split |= {"o_norm.weight": weights["norm.weight"], "o_proj.weight": weights["out_proj.weight"]}
    return split | {name: weights[name] for name in ("A_log", "dt_bias")}
