"""Rung 1, full attention: store every key and value, read with a softmax over all of them.

    o_t = sum_{s <= t} p_ts v_s,    p_t = softmax_s(scale q_t . k_s)        (Vaswani et al., 2017, eq. 1)

What is stored: every k_s and v_s. Update: append. Read: compare the query with every key. Nothing is
forgotten, and nothing is cheap: token t reads t keys and t values, and the cache grows with every token.

The model around it is GPT-2 (Radford et al., 2019): learned positions, pre-LN blocks, tanh GELU, a head
tied to the embedding. Parameters have the names of the published checkpoint, so its weights load by name.

Shapes: q [B, T, H, K], k [B, S, H, K], v [B, S, HV, V], o [B, T, HV, V]; B batch, T queries, S keys,
H heads, HV value heads (a multiple of H), K key dim, V value dim, D model width, L layers.
"""

import dataclasses
import math
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolve import checkpoint, gpt2_layout
from evolve.cache import Cache, LayerCache, extend_key_mask
from evolve.checks import check_float, check_shape, check_token_ids, require
from evolve.loss import next_token_loss
from evolve.memory_rule import runs_on_triton

# ---------------------------------------------------------------------------------- the operation


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention, o = softmax(scale q k^T + mask) v (Vaswani et al., 2017, eq. 1).

    q [B, T, H, K], k [B, S, H, K], v [B, S, HV, V] -> o [B, T, HV, V] in v's dtype. ``scale`` defaults to
    K**-0.5. ``causal``: the last query is aligned with the last key, so query t sees keys up to
    t + S - T. ``key_mask`` [B, S] (bool, true = real) hides keys; what they hold never matters. A query
    that sees no key returns zero. ``backend``: "torch" is the written-out form below, "sdpa" PyTorch's
    fused one, "triton" our kernel; ``None`` picks the kernel on a GPU where Triton is installed, and the
    fused form otherwise.

    Raises ``ValueError`` naming the argument.
    """
    _check_operands(q, k, v, key_mask)
    check_scale(scale)
    known = backend in (None, "torch", "sdpa", "triton")
    require(known, f"backend must be None, 'torch', 'sdpa' or 'triton', got {backend!r}")
    if runs_on_triton(backend, (q, k, v)) and (backend or max(q.shape[3], v.shape[3]) <= 256):
        from evolve_kernels.full_attention import softmax_attention as kernel

        return kernel(q, k, v, scale=scale, causal=causal, key_mask=key_mask)
    B, T, H, K = q.shape
    S, HV, V = v.shape[1:]
    scale = K**-0.5 if scale is None else scale
    if key_mask is not None:  # a hidden key has weight 0, but 0 * nan would still be nan
        k = k.masked_fill(~key_mask[:, :, None, None], 0)
        v = v.masked_fill(~key_mask[:, :, None, None], 0)
    # Value heads that share a key head are just one wider value: [B, S, H, (HV / H) V].
    v = v.reshape(B, S, H, HV // H * V if H else V)
    by_hand = backend == "torch" or scale < torch.finfo(torch.float32).tiny  # a fused -inf times 0 is nan
    if by_hand:
        o = attention_by_hand(q, k, v, scale, visible_keys(T, S, causal, key_mask, q.device))
    else:
        # The CPU's fused kernel wants values as wide as keys; without it PyTorch would hold all the weights.
        missing = max(K - v.shape[-1], 0) if v.device.type == "cpu" else 0
        o = _fused_attention(q, k, F.pad(v, (0, missing)), scale, causal, key_mask)
        o = o[..., : v.shape[-1]]
    return o.reshape(B, T, HV, V)


def fast_form(backend: str | None) -> str | None:
    """What a layer that is told "torch", "triton" or ``None`` asks for: PyTorch's fastest for "torch"."""
    return "sdpa" if backend == "torch" else backend


def check_scale(scale: object) -> None:
    """``scale`` must be a finite number or ``None``."""
    fits = scale is None or (isinstance(scale, int | float) and math.isfinite(scale))
    require(fits, f"scale must be a finite number, got {scale!r}")


def attention_weights(
    q: Tensor, k: Tensor, scale: float | None = None, visible: Tensor | None = None
) -> Tensor:
    """p [B, H, T, S] = softmax over keys of scale q k^T, in float32 or better; 0 where not ``visible``."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    accumulate = torch.promote_types(q.dtype, torch.float32)
    scores = scale * torch.einsum("bthk,bshk->bhts", q.to(accumulate), k.to(accumulate))
    if visible is None:
        return scores.softmax(dim=-1)
    # The second fill is for queries that see nothing: softmax of all -inf is nan, here it becomes 0.
    return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1).masked_fill(~visible, 0)


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    """The definition: weights [B, H, T, S], then their average of the values, [B, T, H, V]."""
    p = attention_weights(q, k, scale, visible)
    return torch.einsum("bhts,bshv->bthv", p, v.to(p.dtype)).to(v.dtype)


def _fused_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, key_mask: Tensor | None
) -> Tensor:
    """The same by PyTorch's fused kernel, which never holds the [T, S] weights at once."""
    T, S = q.shape[1], k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, K]
    if causal and T == S and key_mask is None:  # the only causal mask that PyTorch aligns as we do
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    visible = visible_keys(T, S, causal, key_mask, q.device)
    if visible is None or S == 0:
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
    # A query that sees nothing is shown everything and then zeroed, so that no nan can arise.
    blind = ~visible.any(dim=-1, keepdim=True)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible | blind, scale=scale)
    return o.masked_fill(blind, 0).transpose(1, 2)


def visible_keys(
    T: int, S: int, causal: bool, key_mask: Tensor | None, device: torch.device
) -> Tensor | None:
    """Boolean [B or 1, 1, T, S], true where the query may look; ``None`` if it may look everywhere."""
    visible = None
    if causal and T > 1:
        visible = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)[None, None]
    if key_mask is not None:
        real = key_mask[:, None, None, :]
        visible = real.expand(-1, -1, T, -1) if visible is None else visible & real
    return visible


def _check_operands(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    check_shape("q", q, B=None, T=None, H=None, K=None)
    B, _, H, K = q.shape
    require(K >= 1, "q must be [B, T, H, K] with K >= 1, got K = 0")
    check_shape("k", k, B=B, S=None, H=H, K=K)
    check_shape("v", v, B=B, S=k.shape[1], HV=None, V=None)
    HV = v.shape[2]
    require(HV % H == 0 if H else HV == 0, f"v must have HV a multiple of H = {H} heads, got HV = {HV}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_float(name, x)
        require(x.dtype == q.dtype, f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        require(x.device == q.device, f"{name} must be on q's device {q.device}, got {x.device}")
    if key_mask is not None:
        check_shape("key_mask", key_mask, B=B, S=k.shape[1])
        require(key_mask.dtype == torch.bool, f"key_mask must be bool, got {key_mask.dtype}")
        require(
            key_mask.device == q.device, f"key_mask must be on q's device {q.device}, got {key_mask.device}"
        )


# -------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2; the field names are those of the published ``config.json``."""

    vocab_size: int = 50257
    n_positions: int = 1024  # longest sequence: one learned vector a position
    n_embd: int = 768  # D, width of the residual stream
    n_layer: int = 12  # L
    n_head: int = 12  # H; the head dim is D / H
    n_inner: int | None = None  # F, width of the feed-forward; 4 D if None
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02  # std of the initial weights; the release's value suits its widths

    def __post_init__(self) -> None:
        for field in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"):
            n = getattr(self, field)
            fits = isinstance(n, int) and not isinstance(n, bool) and 1 <= n < 2**31
            optional = n is None and field == "n_inner"
            require(fits or optional, f"{field} must be a positive integer below 2**31, got {n!r}"[:200])
        require(
            self.n_embd % self.n_head == 0,
            f"n_embd must be a multiple of n_head = {self.n_head}, got {self.n_embd}",
        )
        for field in ("layer_norm_epsilon", "initializer_range"):
            x = getattr(self, field)
            fits = isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < 1e6
            require(fits, f"{field} must be positive and below a million, got {x!r}"[:200])

    @classmethod
    def published(cls, name: str) -> "GPT2Config":
        """``gpt2`` (124 M parameters), ``gpt2-medium`` (355 M), ``gpt2-large`` (774 M), ``-xl`` (1.6 B)."""
        require(name in PUBLISHED_SIZES, f"name must be one of {list(PUBLISHED_SIZES)}, got {name!r}")
        n_embd, n_layer, n_head = PUBLISHED_SIZES[name]
        return cls(n_embd=n_embd, n_layer=n_layer, n_head=n_head)

    @property
    def inner_size(self) -> int:
        """F, the width of the feed-forward."""
        return self.n_inner if self.n_inner is not None else 4 * self.n_embd


PUBLISHED_SIZES = {  # name: (D, L, H), Radford et al. (2019), table 2
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
}


class CausalSelfAttention(nn.Module):
    """Project to q, k, v; attend; project back. x [B, T, D] -> [B, T, D]."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.num_heads = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.backend: str | None = None  # "torch", "triton", or None: as in every layer with kernels

    def forward(self, x: Tensor, cache: LayerCache | None = None, key_mask: Tensor | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in self.c_attn(x).chunk(3, dim=-1))
        if cache is not None:  # the update rule of full attention: append
            k, v = cache.append("k", k), cache.append("v", v)
        o = softmax_attention(q, k, v, key_mask=key_mask, backend=fast_form(self.backend))
        return self.c_proj(o.flatten(2))


class MLP(nn.Module):
    """D -> F -> D with the *tanh* form of GELU, which is GPT-2's (the exact GELU is a silent mismatch)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.inner_size)
        self.c_proj = nn.Linear(config.inner_size, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Pre-LN: x + attention(LN(x)), then x + MLP(LN(x))."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: LayerCache | None = None, key_mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, key_mask)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """GPT-2. ``logits = model(input_ids, cache=None, attention_mask=None)``, [B, T] -> [B, T, vocab].

    There is no dropout: the series trains for minutes, and inference never has any. The head is the
    embedding matrix itself, so it has no parameter of its own.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.reset_parameters()

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        """The longest sequence the model can read: it has no vector for a later position."""
        return self.config.n_positions

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The released initialisation: N(0, 0.02), positions half of that, and the projections that write
        into the residual stream divided by sqrt(2 L), so that the stream's variance does not grow with L."""
        std = self.config.initializer_range
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif ".ln_" in name or name.startswith("ln_"):
                p.fill_(1.0)
            else:
                residual = name.endswith("c_proj.weight")
                share = (
                    (2 * self.config.n_layer) ** -0.5 if residual else 0.5 if name == "wpe.weight" else 1.0
                )
                p.normal_(0.0, share * std)

    def new_cache(self, batch_size: int) -> Cache:
        """An empty cache for ``batch_size`` sequences; the forward pass fills it in place."""
        return Cache(self.config.n_layer, batch_size)

    def forward(
        self, input_ids: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Logits [B, T, vocab] for ``input_ids`` [B, T].

        ``attention_mask`` [B, T] (bool, true = real token) marks padding on either side; what padded
        places hold never matters, and their own logits mean nothing. With a ``cache`` the tokens follow
        those already seen, and the cache is extended in place. Raises ``ValueError`` (and leaves the
        cache alone) for ids out of range or more positions than the model has.
        """
        check_shape("input_ids", input_ids, B=None, T=None)
        B, T = input_ids.shape
        self._check_call(input_ids, cache, attention_mask)
        key_mask = extend_key_mask(cache, attention_mask, B, T)
        check_token_ids("input_ids", input_ids, self.vocab_size, attention_mask)
        positions = self._positions(cache.length if cache is not None else 0, key_mask, input_ids)
        if attention_mask is not None:
            input_ids = input_ids.masked_fill(~attention_mask, 0)
        x = self.wte(input_ids) + self.wpe(positions)
        for i, block in enumerate(self.h):
            x = block(x, cache.layers[i] if cache is not None else None, key_mask)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        if cache is not None:  # last of all: nothing counts if anything above has failed
            cache.advance(T, key_mask)
        return logits

    def _check_call(self, input_ids: Tensor, cache: Cache | None, attention_mask: Tensor | None) -> None:
        device = self.wte.weight.device
        for name, x in (("input_ids", input_ids), ("attention_mask", attention_mask)):
            if x is not None:
                require(x.device == device, f"{name} must be on the model's device {device}, got {x.device}")
        if cache is not None:
            require(isinstance(cache, Cache), f"cache must be a Cache, got {type(cache).__name__}")
            L = len(self.h)
            require(
                len(cache.layers) == L, f"cache must have this model's {L} layers, got {len(cache.layers)}"
            )

    def _positions(self, past: int, key_mask: Tensor | None, input_ids: Tensor) -> Tensor:
        """Positions count real tokens only, so that padding shifts nothing. [1 or B, T]"""
        T = input_ids.shape[1]
        if key_mask is None:
            longest, positions = past + T, torch.arange(past, past + T, device=input_ids.device)[None]
        else:
            count = key_mask.cumsum(dim=1)
            longest = int(count.max()) if count.numel() and not count.is_meta else 0
            positions = (count - 1).clamp(min=0)[:, past:]
        require(
            longest <= self.context_length,
            f"input_ids must end within n_positions = {self.context_length}, got {longest} tokens in all",
        )
        return positions

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token; ``targets`` [B, T], -100 where nothing is asked."""
        return next_token_loss(self, input_ids, targets)

    # ----------------------------------------------------------------------- the published layout

    @classmethod
    def from_pretrained(
        cls, path_or_name: str | os.PathLike, *, dtype: torch.dtype | None = None, device=None
    ) -> "GPT2":
        """Load a folder in GPT-2's published layout, or one of the published names from the hub.

        ``dtype`` defaults to the file's. Raises ``ValueError`` naming the file and what is wrong with it.
        """
        checkpoint.check_target(dtype, device)
        folder = checkpoint.resolve_folder(path_or_name, gpt2_layout.HUB_REPOSITORIES)
        config = checkpoint.build_config(GPT2Config, gpt2_layout.read_sizes(folder), folder)
        tensors = gpt2_layout.read_weights(folder, config.n_layer)
        with torch.device("meta"):
            expected = {name: t.shape for name, t in cls(config).state_dict().items()}
        checkpoint.check_tensors(expected, tensors, folder)
        dtype = tensors["wte.weight"].dtype if dtype is None else dtype
        return checkpoint.load_model(lambda: cls(config), tensors, dtype, device)

    def save_pretrained(self, dir: str | os.PathLike) -> None:
        """Write ``config.json`` and ``model.safetensors`` in the published layout."""
        tensors = {name: gpt2_layout.transposed(name, t) for name, t in self.state_dict().items()}
        config = gpt2_layout.CONSTANTS | dataclasses.asdict(self.config)
        checkpoint.write_folder(dir, config, tensors)
