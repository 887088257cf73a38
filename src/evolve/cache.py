"""What a model remembers between two calls.

A ``Cache`` has one ``LayerCache`` a layer. A layer stores what its mixer needs: rows that grow by one a
token (``append``: keys and values, latents), or a state of fixed size (``layer["state"] = ...``); a hybrid
has layers of both kinds. Nothing counts until the model calls ``advance`` at the end of a successful forward
pass, so a call that fails or is interrupted leaves the cache as it was.
"""

import json
import os
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from evolve.checkpoint import check_target, replacing
from evolve.checks import check_count, check_float, check_shape, require

MOST_LAYERS = 2**16  # and the largest length: what a file claims beyond them is no cache of anything
LARGEST_LENGTH = 2**63 - 1


class LayerCache:
    """The memory of one layer: named tensors, of fixed size or growing along axis 1."""

    def __init__(self, owner: "Cache") -> None:
        self.owner = owner  # the cache of all layers: its length and key_mask are this one's
        self.growing: dict[str, Tensor] = {}  # name -> buffer [B, capacity, ...], filled up to the length
        self.fixed: dict[str, Tensor] = {}  # name -> state, replaced as a whole
        self._pending: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        """The stored tensor of that name, or ``None`` before the first token."""
        if name in self.growing:
            return self.growing[name][:, : self.owner.length]
        return self.fixed.get(name)

    def __setitem__(self, name: str, value: Tensor) -> None:
        """Replace a tensor of fixed size (kept from ``advance`` on)."""
        self._pending[name] = value

    def append(self, name: str, new: Tensor) -> Tensor:
        """Add ``new`` [B, T, ...] behind what is stored; return everything so far, [B, length + T, ...].

        Room is doubled when it runs out, so that decoding copies each row O(1) times. Where gradients may
        be asked for, rows are concatenated instead: autograd may have kept the buffer, and writing into it
        would spoil what it kept. Raises ``ValueError`` if another model filled the cache.
        """
        start, end = self.owner.length, self.owner.length + new.shape[1]
        buffer = self.growing.get(name) if start else None  # before the first advance nothing counts
        require(not start or buffer is not None, f"cache must have been filled by this model: no {name} here")
        if buffer is not None:
            fits = (buffer.shape[0], *buffer.shape[2:]) == (new.shape[0], *new.shape[2:])
            fits = fits and buffer.dtype == new.dtype and buffer.device == new.device
            require(
                fits,
                f"cache must have been filled by this model, but its {name} has another form",
            )
        if torch.is_grad_enabled():
            buffer = new if buffer is None else torch.cat([buffer[:, :start], new], dim=1)
        else:
            sealed = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
            if buffer is None or buffer.shape[1] < end or sealed or buffer.requires_grad:
                buffer = _with_room(buffer, new, start, max(end, 2 * start))
            buffer[:, start:end] = new
        self.growing[name] = buffer  # rows from `start` on count only after `advance`
        return buffer[:, :end]

    def commit(self) -> None:
        """Make what was set since the last commit the stored memory."""
        self.fixed.update(self._pending)
        self._pending = {}

    def stored(self) -> dict[str, Tensor]:
        """What is stored, by name, without spare room."""
        return {name: self.get(name) for name in (*self.growing, *self.fixed)}

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored; spare room in the buffers is not counted."""
        return sum(t.numel() * t.element_size() for t in self.stored().values())


class Cache:
    """The memory of a model for ``batch_size`` sequences.

    ``length`` counts the positions seen, padding included; ``key_mask`` [B, length] says which of them
    hold real tokens (``None``: all). ``nbytes`` is counted from the stored tensors.
    """

    def __init__(self, num_layers: int, batch_size: int) -> None:
        check_count("num_layers", num_layers)
        check_count("batch_size", batch_size, 0)
        self.batch_size = batch_size
        self.length = 0
        self.key_mask: Tensor | None = None
        self.layers = [LayerCache(self) for _ in range(num_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes stored by all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def advance(self, num_tokens: int, key_mask: Tensor | None) -> None:
        """Accept the ``num_tokens`` new positions that the layers have just stored."""
        for layer in self.layers:
            layer.commit()
        self.length += num_tokens
        self.key_mask = key_mask

    def crop(self, length: int) -> None:
        """Forget every position from ``length`` on; 0 empties the cache.

        What grows by a row a token can be cut off anywhere. A state of fixed size is the sum of all that was
        read and cannot be rewound: then only 0 and the present length are possible, and anything else raises
        ``ValueError`` and changes nothing. (To come back to a place, ``save`` or copy the cache there.)
        """
        check_count("length", length, 0)
        require(length <= self.length, f"length must be at most the cache's {self.length}, got {length}")
        states = [
            f"layer {i}: {', '.join(layer.fixed)}" for i, layer in enumerate(self.layers) if layer.fixed
        ]
        possible = length in (0, self.length) or not states
        require(
            possible,
            f"length must be 0 or {self.length}: a state cannot be rewound ({states[:1]}), got {length}",
        )
        kept = [
            {n: t[:, :length].clone() for n, t in layer.growing.items() if length} for layer in self.layers
        ]
        for layer, growing in zip(self.layers, kept):
            layer.growing = growing
            layer.fixed = layer.fixed if length else {}
        self.length = length
        self.key_mask = self.key_mask[:, :length] if self.key_mask is not None and length else None

    def reorder(self, rows: Tensor) -> None:
        """Keep the sequences ``rows`` [B'] (int64) of the batch, in that order; one may come several times.

        For beam search, and for leaving out sequences that are done. The cache is then for B' sequences.
        """
        check_shape("rows", rows, **{"B'": None})
        require(rows.dtype == torch.int64, f"rows must be int64, got {rows.dtype}")
        inside = not rows.numel() or (rows.min() >= 0 and rows.max() < self.batch_size)
        require(bool(inside), f"rows must lie in [0, {self.batch_size}), got {rows.tolist()}")
        picked = [{n: t[rows.to(t.device)] for n, t in layer.stored().items()} for layer in self.layers]
        for layer, stored in zip(self.layers, picked):  # only now: all of it fitted into memory
            layer.growing = {name: stored[name] for name in layer.growing}
            layer.fixed = {name: stored[name] for name in layer.fixed}
        if self.key_mask is not None:
            self.key_mask = self.key_mask[rows.to(self.key_mask.device)]
        self.batch_size = len(rows)

    def save(self, path: str | os.PathLike) -> None:
        """Write all that is stored into one safetensors file, which takes its name when it is whole."""
        tensors = {
            f"{i}.{kind}.{name}": layer.get(name).detach().contiguous().cpu()
            for i, layer in enumerate(self.layers)
            for kind in ("growing", "fixed")
            for name in getattr(layer, kind)
        }
        if self.key_mask is not None:
            tensors["key_mask"] = self.key_mask.contiguous().cpu()
        sizes = {"num_layers": len(self.layers), "batch_size": self.batch_size, "length": self.length}
        sizes["tensors"] = sorted(tensors)
        with replacing(Path(path)) as file:
            save_file(tensors, file, metadata={"evolve.cache": json.dumps(sizes)})

    @classmethod
    def load(cls, path: str | os.PathLike, *, device: torch.device | str | None = None) -> "Cache":
        """A cache that ``save`` wrote. Raises ``ValueError`` naming the file if it is anything else."""
        path = Path(path)
        check_target(None, device)
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                sizes = json.loads((file.metadata() or {})["evolve.cache"])
                tensors = {name: file.get_tensor(name).to(device, copy=True) for name in file.keys()}  # noqa: SIM118
            whole = sizes["tensors"] == sorted(tensors)
            require(whole, f"it must hold {sizes['tensors']}, but has {sorted(tensors)}")
            check_count("num_layers", sizes["num_layers"], 1, MOST_LAYERS)  # before they are made
            cache = cls(sizes["num_layers"], sizes["batch_size"])
            check_count("length", sizes["length"], 0, LARGEST_LENGTH)
            cache.length, cache.key_mask = sizes["length"], tensors.pop("key_mask", None)
            for name, t in tensors.items():
                cache._restore(name, t)
            if cache.key_mask is not None:
                check_shape("key_mask", cache.key_mask, B=cache.batch_size, length=cache.length)
                require(cache.key_mask.dtype == torch.bool, "key_mask must be bool")
        except (
            safetensors.SafetensorError,
            OSError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            raise ValueError(f"{path} is not a cache that was saved whole: {error}") from error
        return cache

    def _restore(self, name: str, t: Tensor) -> None:
        """Put a tensor of a file into its place, if it fits this cache."""
        layer, kind, entry = name.split(".", 2)
        placed = kind in ("growing", "fixed") and layer in map(str, range(len(self.layers)))
        require(placed, f"{name} has no place in a cache of {len(self.layers)} layers")
        stored = self.layers[int(layer)].stored()
        require(entry not in stored, f"{name} must not be stored a second time, as growing and as fixed")
        check_float(name, t)
        lead = [self.batch_size, self.length] if kind == "growing" else [self.batch_size]
        require(list(t.shape[: len(lead)]) == lead, f"{name} must be {lead} and more, got {list(t.shape)}")
        getattr(self.layers[int(layer)], kind)[entry] = t


def extend_key_mask(cache: Cache | None, attention_mask: Tensor | None, B: int, T: int) -> Tensor | None:
    """Which keys are real tokens once T new ones are added: [B, length + T], or ``None`` if all are.

    Changes nothing. ``attention_mask`` is boolean [B, T], true for real tokens.
    """
    require(
        cache is None or cache.batch_size == B,
        f"cache must be for the batch of input_ids ({B} rows), got one for {cache and cache.batch_size}",
    )
    if attention_mask is not None:
        check_shape("attention_mask", attention_mask, B=B, T=T)
        require(
            attention_mask.dtype == torch.bool, f"attention_mask must be bool, got {attention_mask.dtype}"
        )
        if not attention_mask.is_meta and attention_mask.all():
            attention_mask = None
    past = cache.key_mask if cache is not None else None
    if attention_mask is None and past is None:
        return None
    device = past.device if past is not None else attention_mask.device
    if past is None:
        past = torch.ones(B, cache.length if cache is not None else 0, dtype=torch.bool, device=device)
    if attention_mask is None:
        attention_mask = torch.ones(B, T, dtype=torch.bool, device=device)
    return torch.cat([past, attention_mask], dim=1)


def _with_room(buffer: Tensor | None, new: Tensor, filled: int, capacity: int) -> Tensor:
    """A buffer with ``capacity`` rows, its first ``filled`` ones copied from ``buffer``."""
    bigger = new.new_empty(new.shape[0], capacity, *new.shape[2:])
    if buffer is not None:
        bigger[:, :filled] = buffer[:, :filled]
    return bigger
