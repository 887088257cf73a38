"""The sizes of Kimi K3: those of the release, and smaller models of the same make.

Field names are those of the released ``config.json``, without its nesting (``evolve.k3_layout`` reads and
writes that).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from evolve import k3_layout
from evolve.checks import check_count, check_flag, check_positive, require
from evolve.hybrid import LARGEST
from evolve.kimi_linear import KimiLinearConfig
from evolve.mxfp4 import BLOCK

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision tower and its projector, whose tensors are listed here but never run."""

    vt_hidden_size: int = 1024
    qkv_hidden_size: int = 1536
    vt_intermediate_size: int = 4096
    vt_num_hidden_layers: int = 27
    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    merge_kernel_size: tuple[int, int] = (2, 2)  # patches that become one token

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is int:
                check_count(field.name, getattr(self, field.name), 1, LARGEST)
        kernel = self.merge_kernel_size
        pair = isinstance(kernel, list | tuple) and len(kernel) == 2
        require(pair, f"merge_kernel_size must be two sizes, got {kernel!r}"[:300])
        for n in kernel:
            check_count("merge_kernel_size", n, 1, LARGEST)
        object.__setattr__(self, "merge_kernel_size", tuple(kernel))


@dataclass(frozen=True)
class K3Config(KimiLinearConfig):
    """Sizes of a K3. The defaults are the release: 93 layers, 2.78 trillion parameters.

    The ids of bos, eos and media placeholder only describe the tokenizer: they are read, compared and written
    back, and change nothing in the model. ``generate`` stops at eos if it is given as ``stop``.
    """

    vision_class: ClassVar[type[VisionConfig]] = VisionConfig
    may_be_zero: ClassVar[tuple[str, ...]] = (
        *KimiLinearConfig.may_be_zero,
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "media_placeholder_token_id",
    )
    hidden_size: int = 7168  # D
    intermediate_size: int = 33_792  # F of the dense layers
    num_hidden_layers: int = 93  # L
    num_attention_heads: int = 96  # of MLA
    linear_num_heads: int = 96  # of KDA
    q_lora_rank: int | None = 1536
    gate_lower_bound: float | None = -5.0
    use_full_rank_gate: bool = True
    mla_use_output_gate: bool = True
    num_experts: int = 896  # E
    num_experts_per_token: int = 16  # k
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072  # F of each expert
    routed_scaling_factor: float = 1.0
    routed_expert_hidden_size: int | None = 3584  # the latent width; None: experts as wide as the model
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    attn_res_block_size: int = 12  # in decoder layers, of two sub-layers each
    max_position_embeddings: int = 2**20  # no table ends there: so long were the texts it was trained on
    bos_token_id: int | None = 163_584
    eos_token_id: int | None = 163_586
    pad_token_id: int | None = 163_839  # its row of the embedding gets no gradient
    media_placeholder_token_id: int | None = 163_605
    dtype: str = "bfloat16"  # of the weights in a folder, but for those that are always float32
    quantized: bool = True  # routed experts are MXFP4 in a folder
    vision: VisionConfig | None = VisionConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("activation_situ_beta", "activation_situ_linear_beta"):
            check_positive(name, getattr(self, name))
        require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}"[:300])
        is_vision = self.vision is None or isinstance(self.vision, VisionConfig)
        require(is_vision, f"vision must be a VisionConfig or None, got {self.vision!r}"[:300])
        check_flag("quantized", self.quantized)
        widths = {"routed_expert_hidden_size": self.expert_width}
        widths["moe_intermediate_size"] = self.moe_intermediate_size
        for name, n in widths.items():
            fits = not self.quantized or n % BLOCK == 0
            require(fits, f"{name} must be a multiple of {BLOCK} for quantized experts, got {n}")

    @property
    def expert_width(self) -> int:
        """What the routed experts read: the latent, or all of D without one."""
        return self.routed_expert_hidden_size or self.hidden_size

    @classmethod
    def official(cls) -> Self:
        """The released model."""
        return cls()

    @classmethod
    def sized(cls, name: str, **changes: object) -> Self:
        """A smaller K3 by its name in ``SIZES``: every mechanism, in float32, ids that are bytes.

        ``changes`` replace single fields. Raises ``ValueError`` for another name or bad sizes.
        """
        require(name in SIZES, f"name must be one of {', '.join(SIZES)}, got {name!r}")
        known = {field.name for field in fields(cls)}
        strange = sorted(changes.keys() - known)
        require(not strange, f"changes must be fields of K3Config, got {', '.join(strange)}")
        return cls(**SIZES[name] | changes)

    @classmethod
    def nano(cls, **changes: object) -> Self:
        """The smallest of ``SIZES``: for a notebook, on a CPU."""
        return cls.sized("nano", **changes)

    @classmethod
    def from_json(cls, source: str | os.PathLike | Mapping) -> Self:
        """Read the released, nested ``config.json``: its text, parsed, or the file, or the folder it lies in.

        Raises ``ValueError`` that names every unknown, missing, contradictory or impossible field at once.
        """
        return k3_layout.read_config(cls, source)


def _small(D: int, L: int, heads: int, experts: int, top_k: int, block: int) -> dict:
    """The release's proportions around a width D: heads of 16 or 32 channels, a latent of half the width,
    experts not quite as wide as that, one shared expert."""
    head_dim = 2 * D // heads // 2
    return {
        "vocab_size": 256, "hidden_size": D, "intermediate_size": 4 * D, "num_hidden_layers": L,
        "num_attention_heads": heads, "kv_lora_rank": D // 4, "q_lora_rank": D // 2,
        "qk_nope_head_dim": head_dim, "qk_rope_head_dim": head_dim // 2, "v_head_dim": head_dim,
        "linear_num_heads": heads, "linear_head_dim": head_dim,
        "num_experts": experts, "num_experts_per_token": top_k, "num_shared_experts": 1,
        "moe_intermediate_size": D // 2, "routed_expert_hidden_size": D // 2, "attn_res_block_size": block,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        "media_placeholder_token_id": None, "dtype": "float32", "quantized": False, "vision": None,
    }  # fmt: skip


SIZES = {
    "nano": _small(64, 5, 4, 8, 2, 2),
    "micro": _small(128, 9, 4, 16, 2, 3),
    "mini": _small(256, 13, 8, 32, 4, 4),
    "small": _small(512, 17, 16, 64, 4, 4),
}
