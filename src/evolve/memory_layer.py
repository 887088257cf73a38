"""What the four memory layers share: projections, short convolutions, padding, the cache.

A rung's own layer adds its gates and its rule in ``remember`` and, where its paper has one, an output norm
or gate in ``read_out``. Shapes: x, y [B, T, D]; q, k [B, T, H, K]; v, o [B, T, HV, V].
"""

import math
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolve.checks import check_float, check_shape, require
from evolve.short_conv import ShortConvolution

LayerCache = MutableMapping[str, Tensor]


ENTRIES = ("state", "z", "q_conv", "k_conv", "v_conv")


@dataclass
class Call:
    """One call of a layer: what it found in the cache and will leave there, and how its rows are packed."""

    entries: dict[str, Tensor]
    cu_seqlens: Tensor | None
    one_token: bool
    keep_state: bool
    backend: str | None

    def run(self, recurrent: Callable, chunk: Callable, *tokens: Tensor, **options: Any) -> Tensor:
        """Run a rule from the cached state and keep its last one: one token by definition, more in chunks."""
        state, z = self.entries.get("state"), self.entries.get("z")
        o, state = (recurrent if self.one_token else partial(chunk, backend=self.backend))(
            *tokens,
            initial_state=state if z is None else (state, z),
            output_final_state=self.keep_state,
            cu_seqlens=self.cu_seqlens,
            **options,
        )
        if self.keep_state:
            states = state if isinstance(state, tuple) else (state,)
            self.entries.update(zip(("state", "z"), states))
        return o


class MemoryLayer(nn.Module):
    """q, k, v = SiLU(conv(W x)); the rung's rule; y = W_o · read-out.

    Args:
        hidden_size: D. num_heads: H. head_dim: K. num_v_heads: HV, a multiple of H (default H).
        head_v_dim: V (default K). conv_size: the convolution's width; 0 or ``None`` leaves it out.
    The attribute ``backend`` is the chunked rules'; ``evolve.backends`` sets it, the convolutions' too.
    """

    silu_without_conv = True  # the delta rules' feature map is SiLU, with or without a convolution

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = 4,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.head_v_dim = head_dim if head_v_dim is None else head_v_dim
        fits = num_heads > 0 and self.num_v_heads > 0 and self.num_v_heads % num_heads == 0
        require(fits, f"num_v_heads must be a multiple of num_heads = {num_heads}, got {self.num_v_heads}")
        key_dim, value_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        for name, dim in {"q": key_dim, "k": key_dim, "v": value_dim}.items():
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, dim, bias=False))
            self.add_module(f"{name}_conv1d", ShortConvolution(dim, conv_size) if conv_size else None)
        self.backend: str | None = None
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False)

    def extra_repr(self) -> str:
        """What no weight's shape tells: two layers with one ``repr`` compute the same."""
        sizes = ("num_heads", "num_v_heads", "head_dim", "head_v_dim")
        options = ("feature_map", "normalize", "gate_lower_bound")
        return ", ".join(f"{name}={getattr(self, name)}" for name in sizes + options if hasattr(self, name))

    def reset_parameters(self) -> None:
        """Draw every parameter anew; call it after ``to_empty`` on a layer built on ``meta``."""
        for child in self.children():
            if hasattr(child, "reset_parameters"):
                child.reset_parameters()

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Run the layer over x, going on from ``cache`` and leaving the new state in it.

        Args:
            x: [B, T, D].
            cache: this layer's slot, a mapping from names to tensors (a dict will do), filled in place:
                "state" [B, HV, K, V], "q_conv", "k_conv", "v_conv" [B, conv_size − 1, channels].
            attention_mask: [B, T] bool, true for real tokens. Padding is taken out before anything is
                computed, so what it holds and where it stands cannot matter; its outputs are zeros.
        Returns: y [B, T, D].
        Raises: ValueError on arguments that do not fit; the cache is then unchanged.
        """
        check_shape("x", x, B=None, T=None, D=self.hidden_size)
        check_float("x", x)
        mask = attention_mask
        if mask is not None:
            check_shape("attention_mask", mask, B=x.shape[0], T=x.shape[1])
            require(mask.dtype == torch.bool, f"attention_mask must be bool, got {mask.dtype}")
            mask = None if mask.all() else mask  # nothing to take out
        real, cu_seqlens = (x, None) if mask is None else pack_rows(x, mask)
        found = {} if cache is None else {name: cache.get(name) for name in ENTRIES}
        self._check_filled(found, cache)
        entries = {name: entry for name, entry in found.items() if entry is not None}
        call = Call(entries, cu_seqlens, x.shape[1] == 1, cache is not None, self.backend)
        o = self.remember(real, *(self._project(name, real, call) for name in "qkv"), call)
        y = self.o_proj(self.read_out(o, real).flatten(-2))
        if cache is not None:
            for name, entry in call.entries.items():
                cache[name] = entry
        return y if mask is None else unpack_rows(y, mask)

    def _check_filled(self, found: dict[str, Tensor | None], cache: LayerCache | None) -> None:
        """A cache that has seen tokens must hold this layer's entries, or another model has filled it."""
        if getattr(getattr(cache, "owner", None), "length", 0):
            convs = [f"{name}_conv" for name in "qkv" if getattr(self, f"{name}_conv1d") is not None]
            lacking = [name for name in ("state", *convs) if found[name] is None]
            require(not lacking, f"cache must have been filled by this model: no {', '.join(lacking)} here")

    def _project(self, name: str, x: Tensor, call: Call) -> Tensor:
        """Project x, convolve, and split into heads: [B, T, heads, head dim]."""
        u = getattr(self, f"{name}_proj")(x)
        conv, slot = getattr(self, f"{name}_conv1d"), f"{name}_conv"
        if conv is not None:
            u, call.entries[slot] = conv(u, call.entries.get(slot), call.cu_seqlens)
        elif self.silu_without_conv:
            u = F.silu(u)
        return u.unflatten(-1, (-1, self.head_v_dim if name == "v" else self.head_dim))

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """The rung's rule: o [B, T, HV, V]. x: [B, T, D]; q, k: [B, T, H, K]; v: [B, T, HV, V]."""
        raise NotImplementedError

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        """What happens to o [B, T, HV, V] before the output projection: nothing, by default."""
        return o


def pack_rows(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The real tokens of all rows in one row, and where each row ends. x: [B, T, D] -> [1, n, D], [B+1]."""
    return x[mask][None], F.pad(mask.sum(1).cumsum(0), (1, 0))


def unpack_rows(y: Tensor, mask: Tensor) -> Tensor:
    """Undo ``pack_rows``, with zeros where there was padding. y: [1, n, D] -> [B, T, D]."""
    rows = y.new_zeros(*mask.shape, y.shape[-1])
    rows[mask] = y[0]
    return rows


def initial_dt_bias(n: int) -> Tensor:
    """A bias b [n] with softplus(b) = dt log-uniform in [1e-3, 1e-1]: memories start out long and varied."""
    low, high = math.log(1e-3), math.log(1e-1)
    dt = torch.empty(n, dtype=torch.float32).uniform_(low, high).exp().clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus


def float32_parameter(*shape: int) -> nn.Parameter:
    """A parameter that stays in float32 when a layer is built in half precision: a gate needs its digits."""
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return nn.Parameter(torch.empty(*shape, dtype=dtype))
