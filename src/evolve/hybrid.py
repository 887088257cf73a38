"""Rung 6, the hybrid: KDA in most layers, and MLA in every fourth to look back at what no state can hold.

An assembly: every part is another module's. The pattern and the names of layers and parameters are those of
Kimi Linear (arXiv 2510.26692, section 4), whose experts come at rung 8 (``evolve.kimi_linear``); here every
layer has one SwiGLU feed-forward network. A folder in the released layout loads by name.

Shapes: input_ids [B, T]; logits [B, T, vocab].
"""

import dataclasses
import os
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import nn

from evolve import checkpoint, hybrid_layout, shards
from evolve.checks import check_count, check_flag, check_positive, require
from evolve.decoder import Decoder
from evolve.kda import KimiDeltaAttention, check_lower_bound
from evolve.mla import MultiHeadLatentAttention

LARGEST = 2**20  # of any size: the product of three is then still a number of bytes that exists


@dataclass(frozen=True)
class HybridConfig:
    """Sizes of a hybrid; the field names are those of the released ``config.json``, without its nesting."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("qk_rope_head_dim",)
    vocab_size: int
    hidden_size: int  # D
    intermediate_size: int  # F of the feed-forward networks
    num_hidden_layers: int  # L
    num_attention_heads: int  # of MLA
    kv_lora_rank: int  # R
    qk_nope_head_dim: int  # Kn
    qk_rope_head_dim: int  # Kr, of the key part that all heads share; never rotated
    v_head_dim: int  # V
    linear_num_heads: int  # of KDA
    linear_head_dim: int  # K = V of KDA
    full_attn_layers: tuple[int, ...] | None = None  # MLA, counted from 1; None: every fourth and the last
    q_lora_rank: int | None = None
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None  # of KDA's decay gate; K3: -5.0
    use_full_rank_gate: bool = False  # KDA's output gate; K3: True
    mla_use_output_gate: bool = False  # K3: True
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            x = getattr(self, field.name)
            if field.type is int or (field.type == int | None and x is not None):
                check_count(field.name, x, int(field.name not in self.may_be_zero), LARGEST)
                object.__setattr__(self, field.name, int(x))  # a NumPy integer is none to JSON
            elif field.type is bool:
                check_flag(field.name, x)
        object.__setattr__(self, "full_attn_layers", self._layers())
        for name in ("rms_norm_eps", "initializer_range"):
            check_positive(name, getattr(self, name))
        check_lower_bound("gate_lower_bound", self.gate_lower_bound)

    def _layers(self) -> tuple[int, ...]:
        """The layers of MLA in order; by default every fourth and the last."""
        L, layers = self.num_hidden_layers, self.full_attn_layers
        if layers is None:
            return tuple(l for l in range(1, L + 1) if l % 4 == 0 or l == L)
        fits = isinstance(layers, list | tuple | range | set) and all(
            isinstance(l, int) and not isinstance(l, bool) and 1 <= l <= L for l in layers
        )
        fits = fits and len(set(layers)) == len(layers)
        require(fits, f"full_attn_layers must be different layers from 1 to {L}, got {layers!r}"[:300])
        return tuple(sorted(layers))


class Hybrid(Decoder):
    """``logits = model(input_ids, cache=None, attention_mask=None)``, [B, T] -> [B, T, vocab]."""

    config_class = HybridConfig

    def __init__(self, config: HybridConfig) -> None:
        layers = range(1, config.num_hidden_layers + 1)
        super().__init__(
            [mixer(config, l) for l in layers],
            feed_forwards=[self.feed_forward(config, l) for l in layers],
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
        )
        self.config = config
        self.reset_parameters()

    @staticmethod
    def feed_forward(config: HybridConfig, layer: int) -> nn.Module | None:
        """The network of a layer, counted from 1, unless it is the dense one."""
        return None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Matrices from N(0, initializer_range); convolutions, gates and norms as their modules draw them."""
        draw_matrices(self, self.config.initializer_range)

    @classmethod
    def from_pretrained(
        cls, path_or_name: str | os.PathLike, *, dtype: torch.dtype | None = None, device: object = None
    ) -> Self:
        """Load a folder in Kimi Linear's released layout, in one file or in shards.

        ``dtype`` defaults to that of the embedding in the file; what the release keeps in float32 (decay
        rates, convolutions, KDA's output norm) stays there. Raises ``ValueError`` naming the file and what is
        wrong with it, all tensors at once.
        """
        checkpoint.check_target(dtype, device)
        folder = checkpoint.resolve_folder(path_or_name, {})
        sizes = hybrid_layout.read_sizes(folder, cls.config_class)
        config = checkpoint.build_config(cls.config_class, sizes, folder)
        listed = hybrid_layout.own_names(shards.list_tensors(folder))
        hybrid_layout.check_layers(listed, config.num_hidden_layers, folder)
        with torch.device("meta"):
            expected = cls(config).state_dict()
        shards.check_listing(expected, listed, folder)
        with torch.device("meta"), shards.default_dtype(dtype or listed["embed_tokens.weight"].dtype):
            model = cls(config)
        return shards.fill(model, listed, device)

    def save_pretrained(self, dir: str | os.PathLike, *, max_shard_bytes: int | None = None) -> None:
        """Write ``config.json`` and the weights in the released layout: one file, or shards and an index."""
        tensors = hybrid_layout.released_tensors(self.state_dict())
        shards.write_shards(dir, hybrid_layout.released_config(self.config), tensors, max_shard_bytes)


def draw_matrices(model: nn.Module, std: float) -> None:
    """Every Linear and Embedding from N(0, std), after the KDA layers have drawn all that they have."""
    for module in model.modules():
        if isinstance(module, KimiDeltaAttention):
            module.reset_parameters()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0.0, std)


def mixer(config: HybridConfig, layer: int) -> nn.Module:
    """MLA in the layers that the configuration lists, counted from 1, and KDA in the others."""
    if layer in config.full_attn_layers:
        return MultiHeadLatentAttention(
            config.hidden_size,
            config.num_attention_heads,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            q_lora_rank=config.q_lora_rank,
            output_gate=config.mla_use_output_gate,
        )
    return KimiDeltaAttention(
        config.hidden_size,
        config.linear_num_heads,
        config.linear_head_dim,
        conv_size=config.short_conv_kernel_size,
        norm_eps=config.rms_norm_eps,
        gate_lower_bound=config.gate_lower_bound,
        full_rank_gate=config.use_full_rank_gate,
    )
