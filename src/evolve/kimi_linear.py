"""Kimi Linear whole: the hybrid of rung 6 with the experts of rung 8 (arXiv 2510.26692, section 4).

An assembly: every part is another module's. The defaults are the released 48B-A3B, 49.1 billion parameters of
which a token passes through 3.1 billion: 27 layers, three KDA to one MLA and one more MLA at the end; a dense
first layer, and in the others 256 full-width SwiGLU experts of which 8 are chosen, beside one that all tokens
pass through. A folder in the released layout loads by name.

Shapes: input_ids [B, T]; logits [B, T, vocab].
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from evolve.checks import check_positive, require
from evolve.decoder import swiglu
from evolve.hybrid import Hybrid, HybridConfig, draw_matrices
from evolve.moe import Experts, LatentMoE, check_top_k


@dataclass(frozen=True)
class KimiLinearConfig(HybridConfig):
    """Sizes of a Kimi Linear; the field names are those of the released ``config.json``."""

    may_be_zero: ClassVar[tuple[str, ...]] = (
        *HybridConfig.may_be_zero,
        "num_shared_experts",
        "first_k_dense_replace",
    )
    vocab_size: int = 163_840
    hidden_size: int = 2304  # D
    intermediate_size: int = 9216  # F of the dense layers
    num_hidden_layers: int = 27  # L
    num_attention_heads: int = 32
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    linear_num_heads: int = 32
    linear_head_dim: int = 128
    num_experts: int = 256  # E
    num_experts_per_token: int = 8  # k
    num_shared_experts: int = 1
    moe_intermediate_size: int = 1024  # F of each expert
    first_k_dense_replace: int = 1  # so many first layers are dense
    moe_renormalize: bool = True
    routed_scaling_factor: float = 2.446

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top_k(self.num_experts_per_token, self.num_experts)
        check_positive("routed_scaling_factor", self.routed_scaling_factor)
        is_flag = isinstance(self.moe_renormalize, bool)
        require(is_flag, f"moe_renormalize must be true or false, got {self.moe_renormalize!r}")


class KimiLinear(Hybrid):
    """``logits = model(input_ids, cache=None, attention_mask=None)``, [B, T] -> [B, T, vocab]."""

    config_class = KimiLinearConfig

    @staticmethod
    def feed_forward(config: KimiLinearConfig, layer: int) -> nn.Module | None:
        if layer <= config.first_k_dense_replace:
            return None
        return LatentMoE(
            config.hidden_size,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_token,
            expert_size=config.moe_intermediate_size,
            num_shared_experts=config.num_shared_experts,
            activation=swiglu,
            renormalize=config.moe_renormalize,
            scaling=config.routed_scaling_factor,
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Matrices from N(0, initializer_range), experts too; what else there is as its module draws it."""
        draw_weights(self, self.config.initializer_range)


def draw_weights(model: nn.Module, std: float) -> None:
    """What ``draw_matrices`` draws, and every routed expert from N(0, std)."""
    draw_matrices(model, std)
    for module in model.modules():
        if isinstance(module, Experts):
            for stack in module.parameters():
                stack.normal_(0.0, std)
