"""The plain decoder of the rungs above GPT-2: any mixer of tokens, RMSNorm, a SwiGLU feed-forward network.

What changed from GPT-2 besides the mixer, so that no gain is credited to the wrong part: LayerNorm →
RMSNorm, GELU → SwiGLU, no biases, no positions, a head of its own. Layer l of L:

    x ← x + mixer_l(norm(x))        x ← x + W_down(SiLU(W_gate norm(x)) · W_up norm(x))

Shapes: input_ids [B, T]; x [B, T, D]; logits [B, T, vocab].
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from evolve.cache import Cache, LayerCache, extend_key_mask
from evolve.checks import check_count, check_shape, check_token_ids, require
from evolve.loss import next_token_loss
from evolve.norms import RMSNorm


class SwiGLU(nn.Module):
    """D -> F -> D, W_down(SiLU(W_gate x) · W_up x) (Shazeer, 2020, eq. 6)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + SwiGLU(norm(x)), by the released checkpoints' names."""

    def __init__(self, mixer: nn.Module, hidden_size: int, intermediate_size: int, norm_eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps=norm_eps)
        self.self_attn = mixer
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=norm_eps)
        self.mlp = SwiGLU(hidden_size, intermediate_size)

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache, attention_mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """``logits = model(input_ids, cache=None, attention_mask=None)`` around one mixer a layer.

    Args:
        mixers: L modules, called as ``mixer(x, cache, attention_mask) -> y`` with x, y [B, T, D]: the layers
            of rungs 2 to 6, in any order.
        vocab_size: rows of embedding and head. hidden_size: D. intermediate_size: F of the feed-forward.
    Raises: ValueError for sizes below 1, no mixer, one mixer twice, or one of another width.
    """

    layer_class = DecoderLayer

    def __init__(
        self,
        mixers: Sequence[nn.Module],
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        mixers = list(mixers)
        require(len(mixers) > 0, "mixers must hold at least one layer, got none")
        kinds = [type(mixer).__name__ for mixer in mixers]
        modules = all(isinstance(mixer, nn.Module) for mixer in mixers)
        require(modules, f"mixers must be modules, got {kinds}")
        require(len(set(map(id, mixers))) == len(mixers), "mixers must be different modules, got one twice")
        widths = {getattr(mixer, "hidden_size", hidden_size) for mixer in mixers}
        require(
            widths == {hidden_size}, f"mixers must have hidden_size = {hidden_size}, got {sorted(widths)}"
        )
        is_eps = isinstance(norm_eps, float) and norm_eps > 0
        require(is_eps, f"norm_eps must be a positive number, got {norm_eps!r}")
        sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
        for name, n in sizes.items():
            check_count(name, n)
        self.vocab_size = vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            self.layer_class(mixer, hidden_size, intermediate_size, norm_eps) for mixer in mixers
        )
        self.norm = RMSNorm(hidden_size, eps=norm_eps)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    @property
    def context_length(self) -> None:
        """No limit: there is no table of positions to run out of."""
        return None

    def new_cache(self, batch_size: int) -> Cache:
        """An empty cache for ``batch_size`` sequences; the forward pass fills it in place."""
        return Cache(len(self.layers), batch_size)

    def forward(
        self, input_ids: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Logits [B, T, vocab] for ``input_ids`` [B, T].

        ``attention_mask`` [B, T] (bool, true = real token) marks padding on either side. With a ``cache`` the
        tokens follow those already seen. Raises ``ValueError`` for arguments that do not fit; the cache is
        then as it was.
        """
        check_shape("input_ids", input_ids, B=None, T=None)
        if cache is not None:
            require(isinstance(cache, Cache), f"cache must be a Cache, got {type(cache).__name__}")
            L = len(self.layers)
            require(
                len(cache.layers) == L, f"cache must have this model's {L} layers, got {len(cache.layers)}"
            )
        key_mask = extend_key_mask(cache, attention_mask, *input_ids.shape)
        check_token_ids("input_ids", input_ids, self.vocab_size, attention_mask)
        if attention_mask is not None:
            input_ids = input_ids.masked_fill(~attention_mask, 0)
        x = self.run_layers(self.embed_tokens(input_ids), cache, attention_mask)
        logits = self.lm_head(self.norm(x))
        if cache is not None:  # last of all: nothing counts if anything above has failed
            cache.advance(input_ids.shape[1], key_mask)
        return logits

    def run_layers(self, x: Tensor, cache: Cache | None, attention_mask: Tensor | None) -> Tensor:
        """What the last norm reads, [B, T, D], from the embedding x."""
        for i, layer in enumerate(self.layers):
            x = layer(x, cache.layers[i] if cache is not None else None, attention_mask)
        return x

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token; ``targets`` [B, T], -100 where nothing is asked."""
        return next_token_loss(self, input_ids, targets)
