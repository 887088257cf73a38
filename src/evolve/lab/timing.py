"""Seconds per decoded token. They belong to one machine and one moment: compare them, do not quote them."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from evolve.cache import Cache
from evolve.checks import require
from evolve.lab.accounting import meta_cache


@torch.no_grad()
def decode_seconds(model: nn.Module, context: int, *, repeats: int = 7) -> float:
    """Median time of one decoding step with ``context`` tokens in the cache (plus the few decoded here)."""
    require(context >= 1, f"context must be at least 1, got {context}")
    cache, token = filled_cache(model, context), _random_ids(model, 1)
    return median_seconds(lambda: model(token, cache=cache), repeats)


def filled_cache(model: nn.Module, context: int) -> Cache:
    """A cache of ``context`` random keys, values and states: time does not depend on what they say, and
    writing them directly spares reading a million tokens first."""
    weight = next(model.parameters())
    like, cache = meta_cache(model, context, 1, weight.dtype), model.new_cache(1)
    for layer, shapes in zip(cache.layers, like.layers):
        for name in shapes.growing:
            layer.append(name, torch.randn(shapes.get(name).shape, dtype=weight.dtype, device=weight.device))
        for name, t in shapes.fixed.items():
            layer[name] = torch.randn(t.shape, dtype=t.dtype, device=weight.device)
    cache.advance(context, None)
    return cache


@torch.no_grad()
def reread_seconds(model: nn.Module, context: int, *, repeats: int = 3) -> float:
    """Median time of producing one token without a cache, by reading all ``context`` tokens again."""
    require(context >= 1, f"context must be at least 1, got {context}")
    ids = _random_ids(model, context)
    return median_seconds(lambda: model(ids), repeats)


def _random_ids(model: nn.Module, context: int) -> Tensor:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.vocab_size, (1, context), generator=generator).to(device)


def median_seconds(step: Callable[[], object], repeats: int = 7) -> float:
    """Median wall-clock time of ``step()`` over ``repeats`` calls, after one that is not counted."""
    require(repeats >= 1, f"repeats must be at least 1, got {repeats}")
    step()  # the first run pays for allocations
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
