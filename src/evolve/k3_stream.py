"""A forward pass with one layer in memory at a time: K3 on a machine that is far too small for it.

The model stands on ``meta``. Attention and feed-forward network of a layer get their weights from the mapped
files when they are called, and lose them when they return; an expert's matrices are read when a token has
chosen it, a row of the embedding when its token comes up. Norms and pseudo-queries, 0.0002 % of the released
model, are there all the time. Results are those of the model that is loaded whole, to rounding: the same
modules run, and only an expert's matrices come one by one instead of in a stack.

Weights that need no cast are used where the file is mapped and take no memory of their own; the system reads
and drops their pages as it likes. Every token reads the weights anew, so decoding is as slow as the disk.
Where the C library is glibc, the process is told to give freed blocks of 128 KiB and more back at once.
"""

import ctypes
import os
from collections.abc import Callable
from functools import partial

import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolve import mxfp4
from evolve.decoder import Activation
from evolve.k3_experts import KINDS, OnDemand
from evolve.moe import LatentMoE, Routing, grouped_experts
from evolve.progress import NoBar, progress
from evolve.shards import StoredTensor

STREAMED = ("self_attn", "mlp", "block_sparse_moe")  # of a layer; what else it has is small


class Store:
    """The tensors of a folder by this package's names. One file is mapped at a time."""

    def __init__(self, listed: dict[str, StoredTensor], device: object) -> None:
        self.listed, self.device = listed, device or "cpu"
        self.file: os.PathLike | None = None
        self.opened = None

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor in ``dtype``; where the file has it so, and on the CPU, it is the mapped file itself."""
        return self.mapped(name).to(self.device, dtype)

    def mapped(self, name: str) -> Tensor:
        stored = self.listed[name]
        if stored.file != self.file:
            self.opened = safetensors.safe_open(stored.file, framework="pt")
            self.file = stored.file
        t = self.opened.get_tensor(stored.name)
        return t if t.shape == stored.shape else t.flatten()[: stored.shape[0]]  # padded decay rates

    def matrix(self, name: str, dtype: torch.dtype) -> Tensor:
        """An expert's matrix, expanded if it is packed."""
        if f"{name}.weight" in self.listed:
            return self.read(f"{name}.weight", dtype)
        codes, scale = (self.read(f"{name}.weight_{kind}", torch.uint8) for kind in KINDS)
        return mxfp4.unpack(codes, scale, dtype=dtype)


class StoredEmbedding(nn.Module):
    """ids [B, T] -> [B, T, D], from the rows of a mapped table."""

    def __init__(self, store: Store, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.store, self.name, self.dtype = store, name, dtype

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids.cpu(), self.store.mapped(self.name))
        return rows.to(ids.device, self.dtype)


class StoredExperts(nn.Module):
    """``Experts`` that stay in their file: (x [N, D], routing) -> u [N, D] in float32 at least."""

    def __init__(self, store: Store, prefix: str, num_experts: int, activation: Activation) -> None:
        super().__init__()
        self.store, self.prefix = store, prefix
        self.num_experts, self.activation = num_experts, activation

    def extra_repr(self) -> str:
        return f"{self.num_experts} in {self.store.listed[f'{self.prefix}.0.w1.{self._kind()}'].file}"

    def _kind(self) -> str:
        plain = f"{self.prefix}.0.w1.weight" in self.store.listed
        return "weight" if plain else f"weight_{KINDS[0]}"

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        def gate_up(e: int) -> Tensor:
            return torch.cat([self.store.matrix(f"{self.prefix}.{e}.{w}", x.dtype) for w in ("w1", "w3")])

        def down(e: int) -> Tensor:
            return self.store.matrix(f"{self.prefix}.{e}.w2", x.dtype)

        matrices = (OnDemand(self.num_experts, make) for make in (gate_up, down))
        return grouped_experts(x, routing, *matrices, self.activation)


def attach(model: nn.Module, listed: dict[str, StoredTensor], device: object) -> nn.Module:
    """Make a model on ``meta`` read its weights from files that were checked before, as they are needed."""
    return_freed_memory()
    store = Store(listed, device)
    dtype = model.embed_tokens.weight.dtype
    parts = {"lm_head": model.lm_head}
    for l, layer in enumerate(model.layers):
        parts |= {f"layers.{l}.{n}": m for n, m in layer.named_children() if n in STREAMED}
    model.embed_tokens = StoredEmbedding(store, "embed_tokens.weight", dtype)
    for name, part in parts.items():
        if isinstance(part, LatentMoE):
            experts, prefix = part.experts, f"{name}.experts"
            part.experts = StoredExperts(store, prefix, part.gate.out_features, experts.activation)
        part.requires_grad_(False)
    small = {n for n, _ in model.named_parameters() if not n.startswith(tuple(f"{p}." for p in parts))}
    fill(model, small, "", store)
    _watch(model, parts, store)
    return model.requires_grad_(False).eval()


def return_freed_memory() -> bool:
    """Make glibc map every block from 128 KiB on by itself, for the whole process; whether it could be told.

    It starts so, but after the first large block that is freed it keeps blocks of up to 32 MiB in a heap that
    becomes mostly holes: several times what is in use. (mallopt(3): M_TRIM_THRESHOLD, M_MMAP_THRESHOLD.)
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library, or none that can be asked
        return False
    return all(mallopt(option, 128 * 1024) == 1 for option in (-1, -3))


def fill(module: nn.Module, names: set[str], prefix: str, store: Store) -> None:
    """Put stored weights in the place of a module's own ones, under ``names``."""
    for name in names:
        owner, leaf = _owner(module, name)
        t = store.read(f"{prefix}{name}", owner._parameters[leaf].dtype)
        owner._parameters[leaf] = nn.Parameter(t, requires_grad=False)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _watch(model: nn.Module, parts: dict[str, nn.Module], store: Store) -> None:
    """Hooks that bring in a part before it runs and let go of it afterwards, whatever happens in between."""
    bar = [NoBar()]

    def start(*_: object) -> None:
        bar[0] = progress(len(parts), "K3, layer by layer")

    def stop(*_: object) -> None:
        bar[0].close()

    for name, part in parts.items():
        empty = dict(part.named_parameters())
        part.register_forward_pre_hook(partial(_load, set(empty), f"{name}.", store))
        part.register_forward_hook(partial(_release, empty, lambda: bar[0].update(1)), always_call=True)
    model.register_forward_pre_hook(start)
    model.register_forward_hook(stop, always_call=True)


def _load(names: set[str], prefix: str, store: Store, module: nn.Module, _: tuple) -> None:
    fill(module, names, prefix, store)


def _release(empty: dict[str, nn.Parameter], done: Callable, module: nn.Module, *_: object) -> None:
    for name, p in empty.items():
        owner, leaf = _owner(module, name)
        owner._parameters[leaf] = p
    done()
