"""Seconds per decoded token. They belong to one machine and one moment: compare them, do not quote them."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from evolve.checks import require


@torch.no_grad()
def decode_seconds(model: nn.Module, context: int, *, repeats: int = 7) -> float:
    """Median time of one decoding step after ``context`` tokens (plus the few that are decoded here)."""
    require(context >= 1, f"context must be at least 1, got {context}")
    ids, cache = _random_ids(model, context), model.new_cache(1)
    model(ids, cache=cache)
    return _median(lambda: model(ids[:, -1:], cache=cache), repeats)


@torch.no_grad()
def reread_seconds(model: nn.Module, context: int, *, repeats: int = 3) -> float:
    """Median time of producing one token without a cache, by reading all ``context`` tokens again."""
    require(context >= 1, f"context must be at least 1, got {context}")
    ids = _random_ids(model, context)
    return _median(lambda: model(ids), repeats)


def _random_ids(model: nn.Module, context: int) -> Tensor:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.vocab_size, (1, context), generator=generator).to(device)


def _median(step: Callable[[], object], repeats: int) -> float:
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
