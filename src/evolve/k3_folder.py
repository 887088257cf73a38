"""Folders in Kimi K3's released layout: what must hold before they are loaded, and how they are written."""

import dataclasses
import os
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from evolve import checkpoint, hybrid_layout, k3_layout, mxfp4, shards
from evolve.checks import require
from evolve.k3_config import K3Config
from evolve.k3_experts import KINDS
from evolve.shards import StoredTensor


def list_text(folder: Path, config: K3Config) -> dict[str, StoredTensor]:
    """The text model's tensors in a folder, by this package's names.

    Depth and number of experts are compared with what is there before anybody builds a model of them. Of the
    vision tower either nothing is there or all of it.
    """
    listed = shards.list_tensors(folder)
    vision = {name: t for name, t in listed.items() if k3_layout.is_vision(name)}
    if vision:
        has_vision = config.vision is not None
        require(has_vision, f"{folder} has tensors of a vision tower, but no vision_config: {min(vision)}")
        with torch.device("meta"):
            shapes = k3_layout.vision_tensors(config.vision, config.hidden_size)
            expected = {name: torch.empty(shape) for name, shape in shapes.items()}
        shards.check_listing(expected, vision, folder)
    own = k3_layout.own_names({n: t for n, t in listed.items() if n not in vision}, config)
    hybrid_layout.check_layers(own, config.num_hidden_layers, folder)
    _check_experts(own, config, folder)
    return own


def _check_experts(own: dict[str, StoredTensor], config: K3Config, folder: Path) -> None:
    """A folder of few tensors must not make anybody list millions of them."""
    numbers = {name.split(".")[4] for name in own if ".block_sparse_moe.experts." in name}
    if config.first_k_dense_replace < config.num_hidden_layers:
        E, stored = config.num_experts, len(numbers)
        message = f"{folder}: num_experts is {E}, but the weights have {stored} experts"
        require(2 * stored + 64 >= E, message)  # a few too many are reported by their names


def stored_dtype(own: dict[str, StoredTensor], config: K3Config, folder: Path) -> torch.dtype:
    """The dtype that configuration and weights agree on."""
    said, table = getattr(torch, config.dtype), own.get("embed_tokens.weight")
    agree = table is None or table.dtype in (said, None)
    message = f"{folder}: {checkpoint.CONFIG} says dtype {config.dtype}, but embed_tokens.weight is"
    require(agree, f"{message} {table and table.dtype}: give dtype to choose")
    return said


def check_padding(own: dict[str, StoredTensor], config: K3Config) -> None:
    """What lies behind the heads' decay rates must be zeros: else they are not one a head."""
    H = config.linear_num_heads
    for name, t in own.items():
        if name.endswith(".A_log"):
            with safetensors.safe_open(t.file, framework="pt") as opened:
                rest = opened.get_tensor(t.name).flatten()[H:]
            message = f"{t.file}: {t.name} must be zero from {H} on (one rate a head), got {rest.tolist()}"
            require(not rest.any(), message[:300])


def write(model: nn.Module, folder: str | os.PathLike, max_shard_bytes: int | None) -> None:
    """See ``K3.save_pretrained``."""
    held = not any(p.is_meta for p in model.parameters())
    require(held, "the model has no weights to save: it is on the meta device, or streamed from a folder")
    tower = _stored_tower(Path(folder))
    require(not tower, f"{folder} holds a vision tower, which the model has not: saving there would lose it")
    shards.write_shards(folder, saved_config(model), released(model), max_shard_bytes)


def _stored_tower(folder: Path) -> list[str]:
    """Names of the vision tower's tensors in a folder; none where no weights can be read."""
    try:
        return [name for name in shards.list_tensors(folder) if k3_layout.is_vision(name)]
    except ValueError:
        return []


def saved_config(model: nn.Module) -> dict:
    """The nested configuration; its dtype is that of the embedding."""
    dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    return k3_layout.released_config(dataclasses.replace(model.config, dtype=dtype))


def released(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors by their released names, its experts packed if its configuration says so."""
    tensors = k3_layout.released_names(model.state_dict(), model.config)
    if not model.config.quantized:
        return tensors
    packed = {}
    for name, t in tensors.items():
        if ".block_sparse_moe.experts." in name and name.endswith(".weight"):
            packed |= {f"{name}_{kind}": codes for kind, codes in zip(KINDS, mxfp4.pack(t))}
        else:
            packed[name] = t
    return packed
