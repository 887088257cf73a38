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

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolve.backends import set_backend
from evolve.checks import check_float, check_shape, require
from evolve.chunking import (
    from_chunks,
    pairs,
    power_of_two,
    stack_triangle,
    to_chunks,
    unit_lower_inverse,
    walk_chunks,
)
from evolve.deltanet import delta_rule_step
from evolve.memory_layer import Call, LayerCache, MemoryLayer, float32_parameter, initial_dt_bias
from evolve.memory_rule import per_sequence, prepare_rule, run_chunked, runs_on_triton, token_loop
from evolve.norms import GatedRMSNorm, at_least_float32, l2_normalize

FILLED = ("state", "q_conv", "k_conv", "v_conv")  # what a cache holds after a prompt


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
    check_lower_bound("lower_bound", lower_bound)
    dtype = torch.promote_types(z.dtype, torch.float32)
    z = z.to(dtype) + dt_bias.to(dtype).view(HV, K)
    A = A_log.to(dtype).exp()[:, None]  # one A per head
    if lower_bound is None:
        return -A * F.softplus(z, threshold=40.0)  # the default threshold, 20, costs float64 its digits
    return lower_bound * torch.sigmoid(A * z)


def check_lower_bound(name: str, x: object) -> None:
    """The bound of the decay gate: ``None`` for the unbounded gate, or a finite number below 0."""
    fits = x is None or (isinstance(x, int | float) and not isinstance(x, bool) and -math.inf < x < 0)
    require(fits, f"{name} must be below 0 and finite, or None, got {x!r}")


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


def chunk_kda(
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
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """KDA in chunks of C tokens (Kimi Linear, section 3).

    The gated rule's derivation with a decay per channel, Γ_ri = e^{G_r − G_i} in R^K. The decay no longer
    factors out of the product of two keys and moves into it (``decayed_products``):

        A = strict_tril(diag(β) Σ_c K_rc Γ_ric K_ic)        A_q = tril(Σ_c Q_rc Γ_ric K_ic)
        M = (I + A)⁻¹ diag(β)    Û = M V    W = M (e^G ⊙ K)    U = Û − W S
        O = (e^G ⊙ Q) S + A_q U    S ← Diag(e^{G_C}) S + (e^{G_C − G} ⊙ K)ᵀ U

    Args: as ``recurrent_kda``; chunk_size: C. backend: ``"torch"``, ``"triton"``, or
            ``None``: Triton kernels on CUDA tensors where they are installed, PyTorch elsewhere.
        lower_bound: the bound of the gate that made g, if it has one (``kda_gate``): from −5.8 up, the
            kernels then take 16 tokens in one product. PyTorch's form has no use for it.
    Returns: as ``recurrent_kda``.
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
        gate="channel",
        chunk_size=chunk_size,
        backend=backend,
        lower_bound=lower_bound,
    )


def _chunk_form(
    C: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    T = q.shape[1]
    Q, K, V, g, beta = (to_chunks(x, C) for x in (q, k, v, g, beta[..., None]))
    products, since_start, until_end = decayed_products(torch.stack([K, Q]), K, g.exp())
    A_k, A_q = products
    M = unit_lower_inverse(beta * A_k) * beta.mT  # (I + A)⁻¹ diag(β)
    W = M @ (since_start * K)
    before, U, S = walk_chunks(S, M @ V, W, until_end * K, decay=since_start[..., -1, :, None])
    O = (since_start * Q) @ before + A_q @ U
    return from_chunks(O, T), S


def decayed_products(x: Tensor, y: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tril(Σ_c x_rc Γ_ric y_ic) with Γ_ric = α_{i+1,c} ⋯ α_rc, by doubling blocks of 1, 2, 4, … tokens.

    Two finished blocks side by side lack only the products of the later one's x with the earlier one's y.
    Every such decay passes the border between them, so it splits in two there:

        Γ_ri = since_r · until_i        since_r: from the border to r; until_i: from after i to the border

    and the missing square is one matrix product. Both factors are ≤ 1 whatever the gates, so nothing can
    overflow, and both lie between i and r, so no later gate can touch an earlier output. The more common
    single product per tile, (x e^G)(y e^−G)ᵀ, is the reason for K3's numbers: e^−G must stay below float32's
    3e38 = e^88, and gates above −5 reach at most e^80 in a tile of 16 tokens. It has no answer for unbounded
    gates; this one needs no bound.

    Args: x: [..., C, K], with any axes in front of y's. y, alpha: [..., C, K], alpha in [0, 1].
    Returns: the products [..., C, C], zero above the diagonal; the decay from the chunk's start up to and
        with each token, and from after each token until the chunk's end, [..., C, K] each.
    """
    C, size = y.shape[-2], 1  # size: tokens per block
    x, y = _pad_tokens(x, 0.0), _pad_tokens(y, 0.0)
    since = _pad_tokens(alpha, 1.0)[..., None, :]  # [..., blocks, size, K]
    until = torch.ones_like(since)
    products = (x * y).sum(-1)[..., None, None]  # [..., blocks, size, size]
    while size < C:
        _, x_2 = pairs(x.unflatten(-2, (-1, size)))
        y_1, _ = pairs(y.unflatten(-2, (-1, size)))
        since_1, since_2 = pairs(since)
        until_1, until_2 = pairs(until)
        products_1, products_2 = pairs(products)
        square = (x_2 * since_2) @ (y_1 * until_1).mT
        products = stack_triangle(products_1, square, products_2)
        until = torch.cat([until_1 * since_2[..., -1:, :], until_2], -2)
        since = torch.cat([since_1, since_1[..., -1:, :] * since_2], -2)
        size = 2 * size
    return products[..., 0, :C, :C], since[..., 0, :C, :], until[..., 0, :C, :]


def _pad_tokens(x: Tensor, value: float) -> Tensor:
    """Fill the tokens up to a power of two. x: [..., C, K]."""
    C = x.shape[-2]
    missing = power_of_two(C) - C
    return F.pad(x, (0, 0, 0, missing), value=value) if missing else x


class KimiDeltaAttention(MemoryLayer):
    """The layer of Kimi Linear and of Kimi K3, by the released checkpoints' names.

    GatedDeltaNet's layer with a decay per channel through a low-rank f_b(f_a(x)) and a sigmoid output gate.
    Kimi Linear: ``gate_lower_bound=None, full_rank_gate=False``; K3: ``-5.0, True``.

    Args:
        gate_lower_bound: the bound of the decay gate g, or ``None`` for the unbounded one (``kda_gate``).
        full_rank_gate: one matrix ``g_proj`` for the output gate instead of ``g_a_proj``, ``g_b_proj``.
        backend: as in ``chunk_kda``, the convolutions' too; one decoded token is then one kernel.
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
        gate_lower_bound: float | None = None,
        full_rank_gate: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            head_dim,
            num_v_heads=num_v_heads,
            head_v_dim=head_v_dim,
            conv_size=conv_size,
        )
        HV, K, V = self.num_v_heads, head_dim, self.head_v_dim
        check_lower_bound("gate_lower_bound", gate_lower_bound)
        self.gate_lower_bound = gate_lower_bound
        self.f_a_proj = nn.Linear(hidden_size, V, bias=False)
        self.f_b_proj = nn.Linear(V, HV * K, bias=False)
        self.b_proj = nn.Linear(hidden_size, HV, bias=False)
        self.A_log = float32_parameter(HV)
        self.dt_bias = float32_parameter(HV * K)
        self.g_proj = nn.Linear(hidden_size, HV * V, bias=False) if full_rank_gate else None
        self.g_a_proj = None if full_rank_gate else nn.Linear(hidden_size, V, bias=False)
        self.g_b_proj = None if full_rank_gate else nn.Linear(V, HV * V, bias=False)
        self.o_norm = GatedRMSNorm(V, activation="sigmoid", eps=norm_eps)
        set_backend(self, backend)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.gate_lower_bound is None:
            self.A_log.uniform_(1, 16).log_()
        else:
            self.A_log.zero_()
        self.dt_bias.copy_(initial_dt_bias(self.dt_bias.numel()))

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """As ``MemoryLayer.forward``; with Triton, one token without gradient is one fused kernel."""
        if self._decodes_in_a_kernel(x, cache, attention_mask):
            return self._decode(x, cache)
        return super().forward(x, cache, attention_mask)

    def _decodes_in_a_kernel(
        self, x: Tensor, cache: LayerCache | None, attention_mask: Tensor | None
    ) -> bool:
        """One real token a row, a filled cache, every convolution there, and nothing to differentiate."""
        one_token = x.ndim == 3 and x.shape[1] == 1 and x.shape[0] > 0 and not torch.is_grad_enabled()
        if not one_token or cache is None or any(cache.get(n) is None for n in FILLED):
            return False
        if max(self.head_dim, self.head_v_dim) > 256 or self.q_conv1d is None:
            return False
        is_real = attention_mask is None or bool(attention_mask.all())
        return is_real and runs_on_triton(self.backend, (x, *(cache.get(n) for n in FILLED)))

    def _decode(self, x: Tensor, cache: LayerCache) -> Tensor:
        from evolve_kernels.kda_decode import kda_decode

        x, B, HV = x[:, 0], x.shape[0], self.num_v_heads
        gate = self.g_proj(x) if self.g_proj is not None else self.g_b_proj(self.g_a_proj(x))
        decoded = kda_decode(
            *(getattr(self, f"{name}_proj")(x).unflatten(-1, (-1, self.head_dim)) for name in "qk"),
            self.v_proj(x).unflatten(-1, (HV, self.head_v_dim)),
            self.f_b_proj(self.f_a_proj(x)).view(B, HV, self.head_dim),
            self.b_proj(x),
            gate.view(B, HV, self.head_v_dim),
            cache.get("state"),
            tuple(cache.get(f"{name}_conv") for name in "qkv"),
            tuple(getattr(self, f"{name}_conv1d").weight for name in "qkv"),
            self.A_log,
            self.dt_bias,
            self.o_norm.weight,
            lower_bound=self.gate_lower_bound,
            eps=self.o_norm.eps,
        )
        y = self.o_proj(decoded.y.flatten(1))[:, None]
        for name, entry in zip(FILLED, (decoded.state, *decoded.histories)):
            cache[name] = entry
        return y

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        q, k = l2_normalize(q), l2_normalize(k)
        beta = at_least_float32(self.b_proj(x)).sigmoid()
        chunk = partial(chunk_kda, lower_bound=self.gate_lower_bound)
        return call.run(recurrent_kda, chunk, q, k, v, self.log_decays(x), beta)

    def log_decays(self, x: Tensor) -> Tensor:
        """g of every channel, a function of the token alone: [B, T, D] -> [B, T, HV, K]."""
        z = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (-1, self.head_dim))
        return kda_gate(z, self.A_log, self.dt_bias, lower_bound=self.gate_lower_bound)

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        gate = self.g_proj(x) if self.g_proj is not None else self.g_b_proj(self.g_a_proj(x))
        return self.o_norm(o, gate.view_as(o))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        """Accept A_log as released: [1, 1, HV, 1] (Kimi Linear), or padded with zeros to head_dim (K3)."""
        name = f"{prefix}A_log"
        if name in state_dict:
            A_log, HV = state_dict[name].flatten(), self.num_v_heads
            is_padding = A_log.is_meta or not A_log[HV:].any()
            state_dict[name] = A_log[:HV] if is_padding else A_log
        super()._load_from_state_dict(state_dict, prefix, *args)
