"""The plain decoder of the rungs above GPT-2: any mixer of tokens, RMSNorm, a gated feed-forward network.

What changed from GPT-2 besides the mixer, so that no gain is credited to the wrong part: LayerNorm →
RMSNorm, GELU → SwiGLU, no biases, no positions, a head of its own. Layer l of L:

    x ← x + mixer_l(norm(x))        x ← x + W_down(SiLU(W_gate norm(x)) · W_up norm(x))

Shapes: input_ids [B, T]; x [B, T, D]; logits [B, T, vocab].
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from evolve.cache import Cache, LayerCache, extend_key_mask
from evolve.checks import check_count, check_shape, check_token_ids, require
from evolve.loss import next_token_loss
from evolve.norms import RMSNorm

Activation = Callable[[Tensor, Tensor], Tensor]  # (gate, up) [..., F] -> [..., F]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) · up (Shazeer, 2020, eq. 6)."""
    return F.silu(gate) * up


def activation_name(activation: Activation) -> str:
    """The activation in words that are the same in every process, for ``repr``."""
    if isinstance(activation, nn.Module):
        return repr(activation)
    if isinstance(activation, partial):
        return f"{activation_name(activation.func)}({activation.keywords})"
    return getattr(activation, "__name__", type(activation).__name__)


class GatedFeedForward(nn.Module):
    """D -> F -> D, W_down activation(W_gate x, W_up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Activation = swiglu) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def extra_repr(self) -> str:
        return f"activation={activation_name(self.activation)}"

    def reset_parameters(self) -> None:
        for child in (self.gate_proj, self.up_proj, self.down_proj):
            child.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)), by the released checkpoints' names."""

    def __init__(self, mixer: nn.Module, feed_forward: nn.Module, hidden_size: int, norm_eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps=norm_eps)
        self.self_attn = mixer
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=norm_eps)
        # Checkpoints call a layer's network by its kind: mlp, or block_sparse_moe for experts.
        self.feed_forward_name = getattr(feed_forward, "name_in_layer", "mlp")
        self.add_module(self.feed_forward_name, feed_forward)

    @property
    def feed_forward(self) -> nn.Module:
        return getattr(self, self.feed_forward_name)

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache, attention_mask)
        return x + self.feed_forward(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """``logits = model(input_ids, cache=None, attention_mask=None)`` around one mixer a layer.

    Args:
        mixers: L modules, called as ``mixer(x, cache, attention_mask) -> y`` with x, y [B, T, D]: the layers
            of rungs 2 to 6, in any order.
        vocab_size: rows of embedding and head. hidden_size: D. intermediate_size: F of the feed-forward.
        feed_forwards: L modules [B, T, D] -> [B, T, D] in the place of SwiGLU networks of that F; ``None``
            among them keeps the SwiGLU network of its layer.
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
        feed_forwards: Sequence[nn.Module | None] | None = None,
    ) -> None:
        super().__init__()
        mixers = list(mixers)
        require(len(mixers) > 0, "mixers must hold at least one layer, got none")
        _check_parts("mixers", mixers, hidden_size)
        networks = [None] * len(mixers) if feed_forwards is None else list(feed_forwards)
        _check_parts("feed_forwards", [n for n in networks if n is not None], hidden_size)
        L = len(mixers)
        require(len(networks) == L, f"feed_forwards must be {L}, one a layer, got {len(networks)}")
        is_eps = isinstance(norm_eps, float) and norm_eps > 0
        require(is_eps, f"norm_eps must be a positive number, got {norm_eps!r}")
        sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
        for name, n in sizes.items():
            check_count(name, n)
        self.vocab_size = vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList()
        for mixer, network in zip(mixers, networks):
            if network is None:
                network = GatedFeedForward(hidden_size, intermediate_size)
            self.layers.append(self.layer_class(mixer, network, hidden_size, norm_eps))
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


def _check_parts(name: str, parts: list[nn.Module], hidden_size: int) -> None:
    """Different modules of the model's width, as far as they tell it."""
    kinds = [type(part).__name__ for part in parts]
    require(all(isinstance(part, nn.Module) for part in parts), f"{name} must be modules, got {kinds}")
    require(len(set(map(id, parts))) == len(parts), f"{name} must be different modules, got one twice")
    widths = {getattr(part, "hidden_size", hidden_size) for part in parts} | {hidden_size}
    require(widths == {hidden_size}, f"{name} must have hidden_size = {hidden_size}, got {sorted(widths)}")
