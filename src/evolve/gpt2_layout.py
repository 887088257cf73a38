"""GPT-2's published layout: what its ``config.json`` may say and how its tensors are named and oriented."""

import json
from pathlib import Path

import torch
from torch import Tensor

from evolve import checkpoint
from evolve.checks import require

HUB_REPOSITORIES = {
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}

SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
OPTIONAL_SIZES = ("n_inner", "layer_norm_epsilon", "initializer_range")

# What a published config.json may say besides the sizes; any other value would be another model.
CONSTANTS = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def read_sizes(folder: Path) -> dict:
    """The sizes in the folder's ``config.json``; a model that is not a plain GPT-2 is refused."""
    raw, file = checkpoint.read_config(folder), folder / checkpoint.CONFIG
    for key, value in CONSTANTS.items():
        got = raw.get(key, value)
        if key != "architectures":  # a name for loaders, not a choice of the model
            require(got == value, f"{file}: {key} must be {json.dumps(value)}, got {json.dumps(got)}")
    missing = [key for key in SIZES if key not in raw]
    require(not missing, f"{file} must say {', '.join(missing)}")
    return {key: raw[key] for key in (*SIZES, *OPTIONAL_SIZES) if key in raw}


def read_weights(folder: Path, num_layers: int) -> dict[str, Tensor]:
    """The tensors under this package's names and orientation: no ``transformer.`` prefix, no stored causal
    masks, no copy of the tied head."""
    raw = checkpoint.read_tensors(folder)
    tensors = {name.removeprefix("transformer."): t for name, t in raw.items()}
    require(len(tensors) == len(raw), f"the weights in {folder} hold a tensor with and without its prefix")
    head = tensors.pop("lm_head.weight", None)
    embedding = tensors.get("wte.weight", head)
    tied = head is None or torch.equal(head, embedding)
    require(tied, f"lm_head.weight in {folder} must equal wte.weight: GPT-2's head is tied to its embedding")
    masks = (".attn.bias", ".attn.masked_bias")
    tensors = {name: transposed(name, t) for name, t in tensors.items() if not name.endswith(masks)}
    # Checked here, before anyone builds a model of the size that the config claims.
    stored = len({name.split(".")[1] for name in tensors if name.startswith("h.")})
    require(stored == num_layers, f"{folder}: n_layer is {num_layers}, but the weights have {stored} layers")
    return tensors


def transposed(name: str, t: Tensor) -> Tensor:
    """GPT-2 stores its projections input-first ("Conv1D"); ``nn.Linear`` has them output-first."""
    is_projection = t.ndim == 2 and name.split(".")[-2:-1] in (["c_attn"], ["c_proj"], ["c_fc"])
    return t.t() if is_projection else t
