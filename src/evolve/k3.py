"""Rung 9, Kimi K3: everything below it, assembled (arXiv 2607.24653).

Nothing is new here but the wiring. KDA in three of four layers and gated MLA in every fourth and the last
(rungs 5, 6); Attention Residuals at two sites of every layer and before the head, in blocks of 12 layers
(rung 7); a dense first network and Stable LatentMoE in all others (rung 8). At its released size the model
has 93 layers and 2,779,484,476,000 parameters, of which a token passes through 104,189,612,640; with its
routed experts in MXFP4 it is 1.56 TB.

    p = embedding                                        blocks = []
    before layer 0, 12, 24, …, once attention has read:  blocks += [p], p = nothing
    h = mix(blocks, p)   p += attention(norm(h))         h = mix(blocks, p)   p += network(norm(h))
    logits = W_head norm(mix(blocks, p))

``python -m evolve.k3 --audit`` counts the released model, tensor by tensor, without its weights.
Shapes: input_ids [B, T]; logits [B, T, vocab].
"""

import os
from typing import Self

import torch
from torch import nn

from evolve import checkpoint, k3_folder, k3_layout, k3_stream, shards
from evolve.attention_residuals import AttnResDecoder, PseudoQuery
from evolve.backends import set_backend
from evolve.decoder import GatedFeedForward
from evolve.hybrid import mixer
from evolve.k3_config import K3Config, VisionConfig
from evolve.k3_experts import expand_experts, pack_experts
from evolve.kimi_linear import draw_weights
from evolve.moe import LatentMoE
from evolve.situ import SituGLU

__all__ = ["K3", "K3Config", "VisionConfig", "released_tensors"]


class K3(AttnResDecoder):
    """``logits = model(input_ids, cache=None, attention_mask=None)``, [B, T] -> [B, T, vocab].

    Args:
        config: the sizes. two_phase: read finished blocks once for all sites of a block (the same function).
        backend: of every part that has one, see ``evolve.backends``: "triton" runs all kernels there are.
    """

    config_class = K3Config

    def __init__(self, config: K3Config, *, two_phase: bool = False, backend: str | None = None) -> None:
        layers = range(1, config.num_hidden_layers + 1)
        super().__init__(
            [mixer(config, l) for l in layers],
            feed_forwards=[feed_forward(config, l) for l in layers],
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            block_size=2 * config.attn_res_block_size,  # there in layers, here in sub-layers
            two_phase=two_phase,
            norm_eps=config.rms_norm_eps,
        )
        self.config = config
        pad = config.pad_token_id
        self.embed_tokens.padding_idx = pad if pad is not None and pad < config.vocab_size else None
        self.reset_parameters()
        set_backend(self, backend)

    @property
    def context_length(self) -> int:
        """The longest sequence that the model was trained for; nothing in it ends there."""
        return self.config.max_position_embeddings

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Matrices from N(0, initializer_range), experts too; pseudo-queries zero; the rest as modules do."""
        draw_weights(self, self.config.initializer_range)
        for module in self.modules():
            if isinstance(module, PseudoQuery):
                module.reset_parameters()

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | os.PathLike,
        *,
        dtype: torch.dtype | None = None,
        device: object = None,
        packed: bool = True,
    ) -> Self:
        """Load a folder in the released layout, in one file or in shards; they are mapped, and copied from
        one tensor at a time.

        ``dtype`` defaults to that of the folder; what the release keeps in float32 stays there. ``packed``:
        quantized experts stay as they are, and are expanded when they are used; otherwise they are expanded
        here, to parameters that can learn. The vision tower's tensors may be there, and are not loaded.
        Raises ``ValueError`` naming the file and what is wrong with it, all tensors at once.
        """
        model, listed = cls._checked(path_or_name, dtype, device)
        shards.fill(model, listed, device)
        return model if packed else expand_experts(model, model.embed_tokens.weight.dtype)

    @classmethod
    def streamed(
        cls, path_or_name: str | os.PathLike, *, dtype: torch.dtype | None = None, device: object = None
    ) -> Self:
        """The same model with its weights left in the folder: every part is read when it runs, and let go.

        For forward passes and ``generate`` where the model does not fit (``evolve.k3_stream``); it cannot
        learn or be saved. Arguments and errors as ``from_pretrained``.
        """
        model, listed = cls._checked(path_or_name, dtype, device)
        return k3_stream.attach(model, listed, device)

    @classmethod
    def _checked(
        cls, path_or_name: str | os.PathLike, dtype: torch.dtype | None, device: object
    ) -> tuple[Self, dict[str, shards.StoredTensor]]:
        """The model on ``meta`` and where each of its tensors lies, once everything is known to fit."""
        checkpoint.check_target(dtype, device)
        folder = checkpoint.resolve_folder(path_or_name, {})
        config = cls.config_class.from_json(folder)
        listed = k3_folder.list_text(folder, config)
        model = on_meta(config, dtype or k3_folder.stored_dtype(listed, config, folder))
        shards.check_listing(model.state_dict(), listed, folder)
        k3_folder.check_padding(listed, config)
        return model, listed

    def save_pretrained(self, dir: str | os.PathLike, *, max_shard_bytes: int | None = None) -> None:
        """Write ``config.json`` and the weights in the released layout: one file, or shards and an index.

        Experts are packed if the configuration says ``quantized``: those that are not yet are rounded.
        """
        k3_folder.write(self, dir, max_shard_bytes)


def on_meta(config: K3Config, dtype: torch.dtype) -> K3:
    """The model without memory, its experts as they lie in a folder."""
    with torch.device("meta"), shards.default_dtype(dtype):
        model = K3(config)
        return pack_experts(model) if config.quantized else model


def released_tensors(config: K3Config) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor of the released layout by its name, those of the vision tower too.

    Names come from the modules: the model is built on ``meta`` and asked.
    """
    dtype = getattr(torch, config.dtype)
    text = k3_folder.released(on_meta(config, dtype))
    tensors = {name: (t.shape, t.dtype) for name, t in text.items()}
    if config.vision is not None:
        shapes = k3_layout.vision_tensors(config.vision, config.hidden_size)
        tensors |= {name: (torch.Size(shape), dtype) for name, shape in shapes.items()}
    return tensors


def feed_forward(config: K3Config, layer: int) -> nn.Module:
    """The network of a layer, counted from 1: dense in the first ones, experts in the others."""
    activation = SituGLU(config.activation_situ_beta, config.activation_situ_linear_beta)
    if layer <= config.first_k_dense_replace:
        return GatedFeedForward(config.hidden_size, config.intermediate_size, activation)
    return LatentMoE(
        config.hidden_size,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_token,
        expert_size=config.moe_intermediate_size,
        latent_size=config.routed_expert_hidden_size,
        num_shared_experts=config.num_shared_experts,
        activation=activation,
        renormalize=config.moe_renormalize and config.num_experts_per_token > 1,  # as the official code does:
        # a lone choice keeps its score, over itself it would be 1
        scaling=config.routed_scaling_factor,
        norm_eps=config.rms_norm_eps,
    )


if __name__ == "__main__":
    from evolve.k3_audit import main  # it imports this module

    main()
