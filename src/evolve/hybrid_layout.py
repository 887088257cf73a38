"""Kimi Linear's released layout: what ``config.json`` says and how tensors are named."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from evolve import checkpoint
from evolve.checks import check_count, require
from evolve.shards import StoredTensor

if TYPE_CHECKING:
    from evolve.hybrid import HybridConfig

TOP = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
OPTIONAL = ("q_lora_rank", "mla_use_output_gate", "rms_norm_eps", "initializer_range")
LINEAR = {  # own name -> its name in the released linear_attn_config, and at transformers' top level
    "linear_num_heads": ("num_heads", "linear_num_heads"),
    "linear_head_dim": ("head_dim", "linear_head_dim"),
    "short_conv_kernel_size": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
}
LINEAR_OPTIONAL = ("gate_lower_bound", "use_full_rank_gate")
EXPERTS = (
    "num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "moe_renormalize",
    "routed_scaling_factor",
)  # fmt: skip
CONSTANTS = {  # any other value would be another model
    "model_type": "kimi_linear",
    "hidden_act": "silu",
    "mla_use_nope": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
EXPERT_CONSTANTS = {
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
}

ALIASES = {  # other families' names, which transformers reads as these too
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}

OTHER_MODELS = ("attn_res_block_size", "routed_expert_hidden_size", "activation_situ_beta")


def read_sizes(folder: Path, config_class: type["HybridConfig"]) -> dict:
    """The sizes for such a configuration in ``config.json``, as released or as transformers writes it."""
    raw, file = checkpoint.read_config(folder), folder / checkpoint.CONFIG
    raw = _one_name_each(raw, file)
    experts = EXPERTS if _has_experts(config_class) else ()
    for key, value in (CONSTANTS | (EXPERT_CONSTANTS if experts else {})).items():
        got = raw.get(key, value)
        require(got == value, f"{file}: {key} must be {json.dumps(value)}, got {json.dumps(got)}")
    missing = [key for key in (*TOP, *experts) if key not in raw]
    require(not missing, f"{file} must say {', '.join(missing)}")
    L, H = raw["num_hidden_layers"], raw["num_attention_heads"]
    require(
        raw.get("num_key_value_heads", H) == H, f"{file}: num_key_value_heads must be {H}, MLA has no groups"
    )
    foreign = [key for key in OTHER_MODELS if raw.get(key) is not None]
    require(not foreign, f"{file}: {', '.join(foreign)} must not be set: it makes another model of this one")
    linear = raw.get("linear_attn_config") or {}
    require(isinstance(linear, dict), f"{file}: linear_attn_config must be an object, got {linear!r}")
    sizes = {key: raw[key] for key in (*TOP, *OPTIONAL, *experts) if key in raw}
    sizes |= {key: linear[key] for key in LINEAR_OPTIONAL if key in linear}
    for own, (nested, top) in LINEAR.items():
        require(nested in linear or top in raw, f"{file} must say linear_attn_config.{nested}")
        sizes[own] = linear.get(nested, raw.get(top))
        agree = nested not in linear or raw.get(top, sizes[own]) == sizes[own]
        require(
            agree, f"{file}: {top} must be linear_attn_config.{nested} = {sizes[own]}, got {raw.get(top)}"
        )
    with checkpoint.naming(file):
        check_count("num_hidden_layers", L)
        dense = _dense_layers(raw, L)
        if experts:
            sizes["first_k_dense_replace"] = dense
        else:
            message = f"every layer must be dense (first_k_dense_replace = {L}): the hybrid has no experts"
            require(dense >= L, message)
        return sizes | {"full_attn_layers": _full_attn_layers(raw, linear, L)}


def _one_name_each(raw: dict, file: Path) -> dict:
    """The fields with ``ALIASES`` under the names used here; a field given twice must say the same."""
    for alias, key in ALIASES.items():
        if alias in raw:
            same = key not in raw or raw[key] == raw[alias]
            require(same, f"{file}: {alias} must be {key} = {raw.get(key)!r}, got {raw[alias]!r}")
    return {ALIASES.get(key, key): value for key, value in raw.items()}


def _has_experts(config: "HybridConfig | type[HybridConfig]") -> bool:
    return hasattr(config, "num_experts")


def _dense_layers(raw: dict, L: int) -> int:
    """How many first layers have no experts."""
    kinds, first_dense = raw.get("mlp_layer_types"), raw.get("first_k_dense_replace")
    if first_dense is not None:
        check_count("first_k_dense_replace", first_dense, 0)
    if kinds is None:
        return 1 if first_dense is None else first_dense
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    fits = kinds == ["dense"] * dense + ["sparse"] * (L - dense)
    require(fits, f"mlp_layer_types must be dense layers, then sparse ones, {L} in all, got {kinds}"[:300])
    return dense


def _full_attn_layers(raw: dict, linear: dict, L: int) -> list[int]:
    """The layers of MLA, counted from 1. Up to three fields say which: they must agree."""
    said = {f"linear_attn_config.{name}": linear.get(name) for name in ("full_attn_layers", "kda_layers")}
    for name, layers in said.items():
        if layers is not None:
            whole = isinstance(layers, list) and all(type(l) is int and 1 <= l <= L for l in layers)
            require(whole, f"{name} must be layers from 1 to {L}, got {layers!r}"[:300])
    full, kda = said.values()
    kinds = raw.get("layer_types")
    if kinds is not None:
        known = isinstance(kinds, list) and set(map(str, kinds)) <= {"full_attention", "linear_attention"}
        require(
            known and len(kinds) == L, f"layer_types must be full_ or linear_attention {L} times, got {kinds}"
        )
        named = [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"]
        full = named if full is None else full
        require(sorted(full) == named, f"layer_types and linear_attn_config disagree: {named} and {full}")
    require(full is not None, "linear_attn_config.full_attn_layers or layer_types must be given")
    others = [l for l in range(1, L + 1) if l not in full]
    agree = kda is None or sorted(kda) == others
    require(agree, f"linear_attn_config.kda_layers must be the layers without full attention, got {kda}")
    return full


def released_config(config: "HybridConfig") -> dict:
    """``config.json`` as released: layers counted from 1, the linear attention's sizes in an object."""
    sizes = dataclasses.asdict(config)
    L = config.num_hidden_layers
    linear = {released: sizes[own] for own, (released, _) in LINEAR.items()}
    linear |= {key: sizes[key] for key in LINEAR_OPTIONAL}
    linear["full_attn_layers"] = list(config.full_attn_layers)
    linear["kda_layers"] = [l for l in range(1, L + 1) if l not in config.full_attn_layers]
    top = {key: sizes[key] for key in (*TOP, *OPTIONAL)}
    top |= {"num_key_value_heads": config.num_attention_heads, "first_k_dense_replace": L}
    if _has_experts(config):
        top |= EXPERT_CONSTANTS | {key: sizes[key] for key in (*EXPERTS, "first_k_dense_replace")}
    architectures = {"architectures": ["KimiLinearForCausalLM"]}
    no_special_ids = {f"{name}_token_id": None for name in ("bos", "eos", "pad")}
    return CONSTANTS | architectures | top | no_special_ids | {"linear_attn_config": linear}


def released_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``layers.0…`` here is ``model.layers.0…`` there; the head has none. Decay rates: [1, 1, H, 1]."""
    named = {n if n.startswith("lm_head.") else f"model.{n}": t for n, t in tensors.items()}
    return {n: t.view(1, 1, -1, 1) if n.endswith("A_log") else t for n, t in named.items()}


def own_names(listed: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The listing under this package's names; decay rates [1, 1, H, 1], as released, count as [H].

    transformers, where a model has experts, writes dense layers under ``block_sparse_moe`` too, and where it
    has no shared experts, matrices of them without a single number: they say nothing.
    """
    named = {}
    for name, t in listed.items():
        if ".shared_experts." in name and 0 in t.shape:
            continue
        own = re.sub(r"\.block_sparse_moe\.((gate|up|down)_proj\.)", r".mlp.\1", name.removeprefix("model."))
        if own.endswith("A_log") and t.shape[:2] == (1, 1) and t.shape[3:] == (1,):
            t = dataclasses.replace(t, shape=t.shape[2:3])
        require(own not in named, f"the weights hold {own} twice, once as {name} in {t.file}")
        named[own] = t
    return named


def check_layers(listed: dict[str, StoredTensor], num_layers: int, folder: Path) -> None:
    """Checked before anyone builds a model of any depth that a configuration may claim."""
    stored = len({name.split(".")[1] for name in listed if name.startswith("layers.")})
    message = f"{folder}: num_hidden_layers is {num_layers}, but the weights have {stored} layers"
    require(num_layers <= 2 * stored + 64, message)  # a few layers too many are reported by their names
