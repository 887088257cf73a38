"""What a model remembers between two calls.

A ``Cache`` has one ``LayerCache`` a layer. A layer stores what its mixer needs: keys and values that grow
by one row a token (``append``), or a state of fixed size (``layer["state"] = ...``). Nothing counts until
the model calls ``advance`` at the end of a successful forward pass, so a call that fails or is interrupted
leaves the cache as it was.
"""

import torch
from torch import Tensor

from evolve.checks import check_count, check_shape, require


class LayerCache:
    """The memory of one layer: named tensors, of fixed size or growing along axis 1."""

    def __init__(self, cache: "Cache") -> None:
        self._cache = cache
        self.growing: dict[str, Tensor] = {}  # name -> buffer [B, capacity, ...], filled up to the length
        self.fixed: dict[str, Tensor] = {}  # name -> state, replaced as a whole
        self._pending: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        """The stored tensor of that name, or ``None`` before the first token."""
        if name in self.growing:
            return self.growing[name][:, : self._cache.length]
        return self.fixed.get(name)

    def __setitem__(self, name: str, value: Tensor) -> None:
        """Replace a tensor of fixed size (kept from ``advance`` on)."""
        self._pending[name] = value

    def append(self, name: str, new: Tensor) -> Tensor:
        """Add ``new`` [B, T, ...] behind what is stored; return everything so far, [B, length + T, ...].

        Room is doubled when it runs out, so that decoding copies each row O(1) times. Tensors that
        need gradients are concatenated instead, since a buffer written in place cannot carry them.
        """
        start, end = self._cache.length, self._cache.length + new.shape[1]
        buffer = self.growing.get(name) if start else None  # before the first advance nothing counts
        if buffer is not None:
            fits = (buffer.shape[0], *buffer.shape[2:]) == (new.shape[0], *new.shape[2:])
            fits = fits and buffer.dtype == new.dtype and buffer.device == new.device
            require(
                fits,
                f"cache must have been filled by this model, but its {name} has another form",
            )
        if new.requires_grad or (buffer is not None and buffer.requires_grad):
            buffer = new if buffer is None else torch.cat([buffer[:, :start], new], dim=1)
        else:
            if buffer is None or buffer.shape[1] < end:
                buffer = _with_room(buffer, new, start, max(end, 2 * start))
            buffer[:, start:end] = new
        self.growing[name] = buffer  # rows from `start` on count only after `advance`
        return buffer[:, :end]

    def commit(self) -> None:
        """Make what was set since the last commit the stored memory."""
        self.fixed.update(self._pending)
        self._pending = {}

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored; spare room in the buffers is not counted."""
        tensors = [self.get(name) for name in (*self.growing, *self.fixed)]
        return sum(t.numel() * t.element_size() for t in tensors)


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
