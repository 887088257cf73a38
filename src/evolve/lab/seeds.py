"""Randomness: one seed at the top of a notebook, and streams that are pure functions of their key."""

import random

import numpy as np
import torch

from evolve.checks import check_count, require


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's global generators (on every device); ``seed`` in [0, 2**32)."""
    check_count("seed", seed, 0)
    require(seed < 2**32, f"seed must be below 2**32, got {seed}")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (the global one is meant)
    torch.manual_seed(seed)


def generator(*key: int) -> torch.Generator:
    """A fresh CPU generator that depends on ``key`` (integers >= 0) alone: ``generator(seed, step)``.

    Neighbouring keys give unrelated streams, which ``manual_seed(seed + step)`` would not: there step 1 of
    seed 0 is step 0 of seed 1. The global generators are neither read nor moved.
    """
    for part in key:
        check_count("key", part, 0)
    # The length goes in as well, since SeedSequence pads with zeros: else (seed,) would equal (seed, 0).
    mixed = np.random.SeedSequence([len(key), *key]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed >> np.uint64(1)))  # torch takes 63 bits
