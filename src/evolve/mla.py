"""Rung 6, multi-head latent attention (MLA): look back at everything, through a compressed cache.

The problem: a state of fixed size cannot hold exact detail. Softmax attention can, but rung 1 stores
H·(K + V) numbers a token.
What changed: keys and values of all heads are linear in one short vector, the latent c_t, and only c_t is
stored, with a key part k_s that the heads share (DeepSeek-V2, arXiv 2405.04434, section 2.1). Per head h:

    c_t = RMSNorm(W_c x_t)    k = [W_k^h c | k_s]    v = W_v^h c    o = softmax(scale q·k) v   (expanded)

W_k and W_v are linear, so they can change sides: q_n·(W_k c) = (W_kᵀ q_n)·c and Σ p W_v c = W_v Σ p c. Then
the cache is read as it lies, by every head, and never expanded (absorbed). Both are the same function.

There is no positional encoding (NoPE): in the hybrid the KDA layers supply the order. The "rope" channels of
the checkpoints, which the shared key part holds, are ordinary channels here and are not rotated.

Shapes: x [B, T, D]; q [B, T, H, Kn + Kr]; latent [B, S, R + Kr], c and k_s side by side; kv_b
[H·(Kn + V), R], each head's W_k above its W_v; o [B, T, H, V]. R latent rank, Kn per-head and Kr shared key
channels, S keys: all tokens so far.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolve.cache import LayerCache, extend_key_mask
from evolve.checks import check_count, check_float, check_shape, require
from evolve.full_attention import (
    attention_by_hand,
    check_scale,
    fast_form,
    softmax_attention,
    visible_keys,
)
from evolve.memory_rule import check_cu_seqlens, runs_on_triton
from evolve.norms import RMSNorm

LATENT_NORM_EPS = 1e-6  # of the two latent norms, whatever the model's other norms use


def expanded_mla(
    q: Tensor,
    latent: Tensor,
    kv_b: Tensor,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """MLA by its definition: every head's keys and values are made from the latents, then attended to.

    Args:
        q: [B, T, H, Kn + Kr]. latent: [B, S, R + Kr], the last T of them the queries' own tokens.
        kv_b: [H·(Kn + V), R].
        scale: (Kn + Kr)**-0.5 by default: the whole width of a head, shared channels included.
        key_mask: [B, S] bool, true for real tokens. What the others hold never matters.
        cu_seqlens: [N+1] ends of N sequences packed into one row, B = 1, T = S: none sees another.
        backend: ``"torch"``, ``"triton"``, or ``None``: Triton on a GPU where it is installed.
    Returns: o [B, T, H, V]; zeros for a query that sees no key.
    Raises: ValueError on arguments that do not fit.
    """
    return _attend(_expanded, q, latent, kv_b, scale, key_mask, cu_seqlens, backend)


def absorbed_mla(
    q: Tensor,
    latent: Tensor,
    kv_b: Tensor,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The same without expanding: queries are taken into the latent space, and results out of it.

    For decoding: a step reads R + Kr numbers a cached token once for all heads. Arguments, result and errors
    as ``expanded_mla``; where a gradient is wanted, PyTorch runs whatever ``backend`` says.
    """
    return _attend(_absorbed, q, latent, kv_b, scale, key_mask, cu_seqlens, backend)


def _expanded(
    q: Tensor,
    latent: Tensor,
    kv_b: Tensor,
    scale: float | None,
    key_mask: Tensor | None,
    backend: str | None,
) -> Tensor:
    c, k_s = latent.split([kv_b.shape[-1], latent.shape[-1] - kv_b.shape[-1]], dim=-1)
    H, Kn = q.shape[2], q.shape[3] - k_s.shape[-1]
    k_n, v = F.linear(c, kv_b).unflatten(-1, (H, -1)).tensor_split([Kn], dim=-1)
    k = torch.cat([k_n, k_s[:, :, None].expand(-1, -1, H, -1)], dim=-1)  # one k_s for all heads
    return softmax_attention(q, k, v, scale=scale, key_mask=key_mask, backend=fast_form(backend))


def _absorbed(
    q: Tensor,
    latent: Tensor,
    kv_b: Tensor,
    scale: float | None,
    key_mask: Tensor | None,
    backend: str | None,
) -> Tensor:
    (B, T, H, width), (S, R) = q.shape, (latent.shape[1], kv_b.shape[-1])
    Kn = width - (latent.shape[-1] - R)
    W_k, W_v = kv_b.unflatten(0, (H, -1)).tensor_split([Kn], dim=1)  # [H, Kn, R], [H, V, R]
    q_n, q_s = q.tensor_split([Kn], dim=-1)
    q = torch.cat([torch.einsum("bthn,hnr->bthr", q_n, W_k), q_s], dim=-1)  # as wide as what is stored
    scale = width**-0.5 if scale is None else scale
    if _decodes_in_a_kernel(backend, q, latent, kv_b):
        from evolve_kernels.mla_decode import mla_decode

        return torch.einsum("bthr,hvr->bthv", mla_decode(q, latent, R, scale=scale, key_mask=key_mask), W_v)
    # All heads read one and the same list, so they are further queries of a single head.
    visible = visible_keys(T, S, True, key_mask, q.device)
    visible = visible if visible is None else visible.repeat_interleave(H, dim=2)
    o = attention_by_hand(
        q.flatten(1, 2)[:, :, None], latent[:, :, None], latent[:, :, None, :R], scale, visible
    )
    return torch.einsum("bthr,hvr->bthv", o.view(B, T, H, R), W_v)


def _decodes_in_a_kernel(backend: str | None, q: Tensor, latent: Tensor, kv_b: Tensor) -> bool:
    """Whether the kernel of the absorbed form takes these: it has no gradient, and latents of at most 512."""
    inputs = (q, latent, kv_b)
    differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    fits = backend is not None or max(kv_b.shape[-1], latent.shape[-1] - kv_b.shape[-1]) <= 512
    return runs_on_triton(backend, inputs) and fits and not differentiates


def _attend(
    form: Callable[..., Tensor],
    q: Tensor,
    latent: Tensor,
    kv_b: Tensor,
    scale: float | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> Tensor:
    """Check, hide what is masked, and run ``form`` on the batch, or on each packed sequence alone."""
    _check_operands(q, latent, kv_b, key_mask)
    check_scale(scale)
    known = backend in (None, "torch", "triton")
    require(known, f'backend must be None, "torch" or "triton", got {backend!r}')
    if cu_seqlens is not None:
        T, S = q.shape[1], latent.shape[1]
        require(T == S and key_mask is None, f"cu_seqlens needs T = S and no key_mask, got {T} and {S}")
        check_cu_seqlens(cu_seqlens, q.shape[0], T)
        spans = pairwise(cu_seqlens.tolist())
        rows = [form(q[:, a:b], latent[:, a:b], kv_b, scale, None, backend) for a, b in spans if b > a]
        return torch.cat(rows, dim=1) if rows else form(q, latent, kv_b, scale, None, backend)
    if key_mask is not None:  # a hidden key has weight 0, but 0 · nan would still be nan
        latent = latent.masked_fill(~key_mask[:, :, None], 0)
    return form(q, latent, kv_b, scale, key_mask, backend)


def _check_operands(q: Tensor, latent: Tensor, kv_b: Tensor, key_mask: Tensor | None) -> None:
    check_shape("q", q, B=None, T=None, H=None, **{"Kn+Kr": None})
    B, T, H, width = q.shape
    check_shape("latent", latent, B=B, S=None, **{"R+Kr": None})
    check_shape("kv_b", kv_b, **{"H*(Kn+V)": None}, R=None)
    S, (rows, R) = latent.shape[1], kv_b.shape
    Kn = width - (latent.shape[2] - R)
    fits = R >= 1 and 0 <= Kn <= width and H >= 1 and rows % H == 0 and rows // H > Kn
    require(
        fits,
        f"kv_b must be [H*(Kn+V), R] for q {list(q.shape)} and latent {list(latent.shape)}, got {[rows, R]}",
    )
    require(T <= S, f"latent must hold the queries' own tokens: S >= T = {T}, got S = {S}")
    for name, x in (("q", q), ("latent", latent), ("kv_b", kv_b)):
        check_float(name, x)
        require(x.dtype == q.dtype, f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        require(x.device == q.device, f"{name} must be on q's device {q.device}, got {x.device}")
    if key_mask is not None:
        check_shape("key_mask", key_mask, B=B, S=S)
        require(key_mask.dtype == torch.bool, f"key_mask must be bool, got {key_mask.dtype}")
        require(key_mask.device == q.device, f"key_mask must be on q's device, got {key_mask.device}")


class MultiHeadLatentAttention(nn.Module):
    """The layer of Kimi Linear and of Kimi K3 (and of DeepSeek-V3 without its rotation), by their names.

    Kimi Linear: ``q_lora_rank=None, output_gate=False``. K3: queries through a latent of their own, and a
    sigmoid gate of the layer's input on what is read.

    Args:
        hidden_size: D. num_heads: H. kv_lora_rank: R. qk_nope_head_dim: Kn. qk_rope_head_dim: Kr, of the key
            part that all heads share (0 is allowed). v_head_dim: V.
        q_lora_rank: rank of the queries' latent; ``None`` projects them directly.
        output_gate: y = W_o (o ⊙ sigmoid(W_g x)).
        backend: ``"torch"``, ``"triton"``, or ``None``: Triton on a GPU where it is installed.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        output_gate: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "kv_lora_rank": kv_lora_rank}
        for name, n in (sizes | {"v_head_dim": v_head_dim}).items():
            check_count(name, n)
        for name, n in {"qk_nope_head_dim": qk_nope_head_dim, "qk_rope_head_dim": qk_rope_head_dim}.items():
            check_count(name, n, 0)
        if q_lora_rank is not None:
            check_count("q_lora_rank", q_lora_rank)
        self.hidden_size, self.num_heads, self.kv_lora_rank = hidden_size, num_heads, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.v_head_dim, self.q_lora_rank = v_head_dim, q_lora_rank
        width = qk_nope_head_dim + qk_rope_head_dim
        require(width > 0, "qk_nope_head_dim + qk_rope_head_dim must be at least 1, got 0")

        def linear(n_in: int, n_out: int) -> nn.Linear:
            return nn.Linear(n_in, n_out, bias=False)

        if q_lora_rank is None:
            self.q_proj = linear(hidden_size, num_heads * width)
        else:
            self.q_a_proj = linear(hidden_size, q_lora_rank)
            self.q_a_layernorm = RMSNorm(q_lora_rank, eps=LATENT_NORM_EPS)
            self.q_b_proj = linear(q_lora_rank, num_heads * width)
        self.kv_a_proj_with_mqa = linear(hidden_size, kv_lora_rank + qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, eps=LATENT_NORM_EPS)
        self.kv_b_proj = linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim))
        self.g_proj = linear(hidden_size, num_heads * v_head_dim) if output_gate else None
        self.o_proj = linear(num_heads * v_head_dim, hidden_size)

    def reset_parameters(self) -> None:
        """Draw every parameter anew; call it after ``to_empty`` on a layer built on ``meta``."""
        for child in self.children():
            child.reset_parameters()

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Run the layer over x, going on from ``cache`` and adding the new tokens' latents to it.

        Args:
            x: [B, T, D].
            cache: this layer's slot of a ``Cache``; it keeps "latent" [B, length, R + Kr]. As everywhere, new
                tokens count from ``Cache.advance`` on, which a model calls at the end of a forward pass.
            attention_mask: [B, T] bool, true for real tokens. What padding holds cannot matter; its outputs
                are zeros.
        Returns: y [B, T, D].
        Raises: ValueError on arguments that do not fit; the cache then counts no more than before.
        """
        check_shape("x", x, B=None, T=None, D=self.hidden_size)
        check_float("x", x)
        B, T = x.shape[:2]
        slot_fits = cache is None or isinstance(cache, LayerCache)
        require(slot_fits, f"cache must be a slot of a Cache, got {type(cache).__name__}")
        key_mask = extend_key_mask(cache.owner if cache is not None else None, attention_mask, B, T)
        if attention_mask is not None:
            x = x.masked_fill(~attention_mask[..., None], 0)
        latent = self.latents(x)
        if cache is not None:
            latent = cache.append("latent", latent)
        absorb = self.absorbing_is_cheaper(T, latent.shape[1])
        attend = absorbed_mla if absorb else expanded_mla
        q = self.queries(x)
        kv_b = self.kv_b_proj.weight.to(q.dtype)
        o = attend(q, latent, kv_b, key_mask=key_mask, backend=self.backend).flatten(2)
        if self.g_proj is not None:
            o = o * self.g_proj(x).sigmoid()
        y = self.o_proj(o)
        return y if attention_mask is None else y.masked_fill(~attention_mask[..., None], 0)

    def queries(self, x: Tensor) -> Tensor:
        """q [B, T, H, Kn + Kr], each head's own channels before those for the shared key part."""
        if self.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q.unflatten(-1, (self.num_heads, -1))

    def latents(self, x: Tensor) -> Tensor:
        """What is stored of every token, [B, T, R + Kr]: the normed latent c, and k_s, which has no norm."""
        c, k_s = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        return torch.cat([self.kv_a_layernorm(c).to(k_s.dtype), k_s], dim=-1)  # autocast: norms are wider

    def absorbing_is_cheaper(self, T: int, S: int) -> bool:
        """Whether T new tokens after S − T cached ones cost fewer products in the absorbed form.

        Per head: expanding costs S R (Kn + V) and a pair of query and key Kn + Kr + V; absorbing costs
        T R (Kn + V) and a pair 2R + Kr. With a long past the two are equal at
        T = R (Kn + V) / (2R − Kn − V), 170.7 tokens at K3's sizes; without a past expanding is cheaper.
        """
        R, heads = self.kv_lora_rank, self.qk_nope_head_dim + self.v_head_dim
        return T * R * heads + T * S * (2 * R - heads) < S * R * heads
