"""The released layout of Kimi K3: what ``config.json`` says, and which tensors lie in the shards.

A configuration is read as a flat list of dotted names (``text_config.linear_attn_config.num_heads``): each is
one that sizes the model, a repetition of one, a constant (with another value it would be another model), one
that says nothing about the model, or unknown.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from evolve import checkpoint, hybrid_layout
from evolve.checks import require
from evolve.shards import StoredTensor

if TYPE_CHECKING:
    from evolve.k3_config import K3Config, VisionConfig

TEXT, LINEAR, VISION = "text_config", "text_config.linear_attn_config", "vision_config"
QUANTIZATION = f"{TEXT}.quantization_config"
GROUP = f"{QUANTIZATION}.config_groups.group_0"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SIZES = {  # dotted name -> field
    **{f"{TEXT}.{n}": n for n in (*hybrid_layout.TOP, *hybrid_layout.OPTIONAL, *hybrid_layout.EXPERTS)},
    **{f"{TEXT}.{n}": n for n in (
        "first_k_dense_replace", "routed_expert_hidden_size", "activation_situ_beta",
        "activation_situ_linear_beta", "attn_res_block_size", "max_position_embeddings", *IDS,
    )},
    **{f"{LINEAR}.{nested}": own for own, (nested, _) in hybrid_layout.LINEAR.items()},
    **{f"{LINEAR}.{n}": n for n in (*hybrid_layout.LINEAR_OPTIONAL, "full_attn_layers")},
    "media_placeholder_token_id": "media_placeholder_token_id",
    "dtype": "dtype",
}  # fmt: skip
OPTIONAL = {f"{TEXT}.{n}" for n in IDS} | {"media_placeholder_token_id"}
VISION_SIZES = (
    "vt_hidden_size", "qkv_hidden_size", "vt_intermediate_size", "vt_num_hidden_layers", "patch_size",
    "init_pos_emb_height", "init_pos_emb_width", "merge_kernel_size",
)  # fmt: skip
REPEATED = {  # dotted name -> the one that it must repeat
    f"{TEXT}.num_key_value_heads": f"{TEXT}.num_attention_heads",  # MLA has no groups
    f"{TEXT}.dtype": "dtype",
    **{n: f"{TEXT}.{n}" for n in IDS},
    f"{VISION}.text_hidden_size": f"{TEXT}.hidden_size",
    f"{VISION}.mm_hidden_size": f"{VISION}.vt_hidden_size",
}
CONSTANTS = {
    "model_type": "kimi_k3",
    "tie_word_embeddings": False,
    **{f"{TEXT}.{n}": x for n, x in {
        **hybrid_layout.EXPERT_CONSTANTS,
        "model_type": "kimi_linear", "hidden_act": "situ", "mla_use_nope": True, "latent_moe_use_norm": True,
        "topk_method": "noaux_tc", "use_grouped_topk": True, "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False, "is_encoder_decoder": False, "add_cross_attention": False,
        "cross_attention_hidden_size": None, "tie_encoder_decoder": False, "pruned_heads": {},
    }.items()},
}  # fmt: skip
QUANTIZATION_CONSTANTS = {
    **{f"{QUANTIZATION}.{n}": x for n, x in {
        "format": "mxfp4-pack-quantized", "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "kv_cache_scheme": None,
    }.items()},
    **{f"{GROUP}.{n}": x for n, x in {
        "format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None,
        "targets": ["Linear"],
    }.items()},
    **{f"{GROUP}.weights.{n}": x for n, x in {
        "group_size": 32, "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group",
        "scale_dtype": "torch.uint8", "zp_dtype": None, "dynamic": False, "actorder": None,
        "block_structure": None,
    }.items()},
}  # fmt: skip
VISION_CONSTANTS = {f"{VISION}.{n}": x for n, x in {
    "activation_func": "gelu_pytorch_tanh", "attn_bias": False, "init_pos_emb_time": 4, "linear_bias": False,
    "merge_type": "sd2_tpool", "mlp_type": "mlp2", "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm", "patch_embed_proj_bias": False, "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
    "vt_num_attention_heads": 12,
}.items()}  # fmt: skip
# What transformers writes into every configuration, and where its own code finds its classes. The list of
# names that a quantizer was to leave alone misses some that it did leave alone: tensors' names decide.
SILENT_TOP = ("architectures", "auto_map", "ignore_index", "image_placeholder", "transformers_version")
SILENT_TEXT = """
    _name_or_path architectures auto_map bad_words_ids begin_suppress_tokens chunk_size_feed_forward
    decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    is_decoder label2id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores prefix problem_type
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torchscript
    transformers_version typical_p use_bfloat16 use_cache
""".split()
SILENT = {
    *SILENT_TOP,
    *(f"{TEXT}.{n}" for n in SILENT_TEXT),
    *(f"{QUANTIZATION}.{n}" for n in ("ignore", "global_compression_ratio")),
    *(f"{GROUP}.weights.{n}" for n in ("observer", "observer_kwargs")),
    f"{VISION}._attn_implementation",
}
ABSENT = object()


# ----------------------------------------------------------------------------------- config.json


def read_config(kind: type["K3Config"], source: str | os.PathLike | Mapping) -> "K3Config":
    """See ``K3Config.from_json``."""
    if isinstance(source, Mapping):
        raw, label = source, "config"
    else:
        path = Path(source)
        folder = path.parent if path.name == checkpoint.CONFIG else path
        raw, label = checkpoint.read_config(folder), str(folder / checkpoint.CONFIG)
    given = dict(_flatten(raw))
    vision, quantized = _has_part(given, VISION), _has_part(given, QUANTIZATION)
    problems = [*_misfits(given, vision, quantized)]
    sizes = {own: given[name] for name, own in SIZES.items() if name in given}
    missing = [name for name in _sizes(vision) if name not in given and name not in OPTIONAL]
    problems += [f"{', '.join(missing)} must be given"] if missing else []
    problems += [*_disagreements(given)]
    if not missing:
        try:
            seen = {n: given[f"{VISION}.{n}"] for n in VISION_SIZES} if vision else None
            none = dict.fromkeys((*IDS, "media_placeholder_token_id"))
            config = kind(**none | sizes, quantized=quantized, vision=seen and kind.vision_class(**seen))
            problems += [*_layers_disagree(given, config)]
        except ValueError as error:
            problems.append(str(error))
    require(not problems, f"{label}: {'; '.join(problems)}")
    return config


def released_config(config: "K3Config") -> dict:
    """The nested ``config.json`` of a configuration."""
    parts = {name: getattr(config, own) for name, own in SIZES.items()} | CONSTANTS
    if config.vision is not None:
        parts |= {f"{VISION}.{n}": getattr(config.vision, n) for n in VISION_SIZES} | VISION_CONSTANTS
    parts |= QUANTIZATION_CONSTANTS if config.quantized else {}
    parts |= {name: parts[said] for name, said in REPEATED.items() if said in parts}
    if config.vision is None:
        parts.pop(f"{VISION}.text_hidden_size")
    parts[f"{LINEAR}.kda_layers"] = _kda_layers(config)
    parts["architectures"] = ["KimiK3ForConditionalGeneration"]
    parts[f"{TEXT}.architectures"] = ["KimiLinearForCausalLM"]
    nested: dict = {}
    for name, x in parts.items():
        *path, last = name.split(".")
        part = nested
        for step in path:
            part = part.setdefault(step, {})
        part[last] = list(x) if isinstance(x, tuple) else x
    return nested


def _flatten(raw: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every value by its dotted name, but for those that say nothing about the model."""
    for key, x in raw.items():
        name = f"{prefix}{key}"
        if name in SILENT:
            continue
        if isinstance(x, Mapping) and x:
            yield from _flatten(x, f"{name}.")
        else:
            yield name, x


def _has_part(given: Mapping, prefix: str) -> bool:
    """Whether an object of the configuration is there; ``null`` is as good as absent."""
    return any(n.startswith(f"{prefix}.") for n in given) or given.get(prefix) is not None


def _sizes(vision: bool) -> list[str]:
    return [*SIZES, *(f"{VISION}.{n}" for n in VISION_SIZES if vision)]


def _misfits(given: Mapping, vision: bool, quantized: bool) -> Iterator[str]:
    """Unknown names, and constants with another value."""
    constants = CONSTANTS | (QUANTIZATION_CONSTANTS if quantized else {})
    constants |= VISION_CONSTANTS if vision else {}
    known = {*_sizes(vision), *REPEATED, *constants, f"{LINEAR}.kda_layers"}
    nothing = {n for n in (VISION, QUANTIZATION) if given.get(n, ABSENT) is None}
    unknown = [n for n in given if n not in known | nothing]
    if unknown:
        yield f"unknown: {checkpoint.some(unknown)}"
    for name, x in constants.items():
        got = given.get(name, ABSENT if name == "model_type" else x)
        same = got == x and isinstance(got, bool) == isinstance(x, bool)
        said = "nothing" if got is ABSENT else _text(got)
        if not same:
            yield f"{name} must be {json.dumps(x)}, got {said}"


def _disagreements(given: Mapping) -> Iterator[str]:
    for name, said in REPEATED.items():
        if name in given and said in given and given[name] != given[said]:
            yield f"{name} must be {said} = {_text(given[said])}, got {_text(given[name])}"


def _layers_disagree(given: Mapping, config: "K3Config") -> Iterator[str]:
    kda = given.get(f"{LINEAR}.kda_layers", ABSENT)
    if kda is not ABSENT and kda != _kda_layers(config):
        yield f"{LINEAR}.kda_layers must be the layers that are not in full_attn_layers, got {_text(kda)}"


def _kda_layers(config: "K3Config") -> list[int]:
    return [l for l in range(1, config.num_hidden_layers + 1) if l not in config.full_attn_layers]


def _text(x: object) -> str:
    return json.dumps(x, default=repr)[:200]


# ---------------------------------------------------------------------------------------- tensors


def released_names(tensors: Mapping[str, Tensor], config: "K3Config") -> dict[str, Tensor]:
    """A model's tensors as they lie in the shards: the text model's prefix, decay rates padded with zeros."""
    missing = max(config.linear_head_dim - config.linear_num_heads, 0)
    return {
        f"language_model.{'' if n.startswith('lm_head.') else 'model.'}{n}": (
            F.pad(t, (0, missing)) if n.endswith("A_log") else t
        )
        for n, t in tensors.items()
    }


def own_names(listed: dict[str, StoredTensor], config: "K3Config") -> dict[str, StoredTensor]:
    """The text model's part of a listing under this package's names, its decay rates without padding."""
    text: dict[str, StoredTensor] = {}
    for name, t in listed.items():
        short = name.removeprefix("language_model.")
        require(short not in text, f"the weights hold {short} twice, once as {name} in {t.file}")
        text[short] = t
    H, padded = config.linear_num_heads, max(config.linear_head_dim, config.linear_num_heads)
    own = {}
    for name, t in hybrid_layout.own_names(text).items():
        if name.endswith(".A_log") and t.shape == (padded,):
            t = StoredTensor(t.file, t.name, (H,), t.dtype)
        own[name] = t
    return own


def vision_tensors(v: "VisionConfig", hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the vision tower and the projector into a text model of width ``hidden_size``."""
    D, P = v.vt_hidden_size, v.patch_size
    merged = D * v.merge_kernel_size[0] * v.merge_kernel_size[1]
    block = {
        "norm0": (D,), "norm1": (D,), "wqkv": (3 * v.qkv_hidden_size, D), "wo": (D, v.qkv_hidden_size),
        "mlp.fc0": (v.vt_intermediate_size, D), "mlp.fc1": (D, v.vt_intermediate_size),
    }  # fmt: skip
    encoder = "vision_tower.encoder"
    blocks = {
        f"{encoder}.blocks.{l}.{name}.weight": shape
        for l in range(v.vt_num_hidden_layers)
        for name, shape in block.items()
    }
    return {
        "vision_tower.patch_embed.proj.weight": (D, 3, P, P),
        "vision_tower.patch_embed.pos_emb.weight": (v.init_pos_emb_height, v.init_pos_emb_width, D),
        **blocks,
        f"{encoder}.final_layernorm.weight": (D,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (hidden_size, merged),
        "mm_projector.post_norm.weight": (hidden_size,),
    }


def is_vision(name: str) -> bool:
    return name.startswith(("vision_tower.", "mm_projector."))
