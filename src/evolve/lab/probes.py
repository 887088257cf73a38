"""Four probes of a memory, and the memory cell: deterministic, untrained, the same for every rung.

A probe writes random pairs into a memory (``evolve.lab.memories``) and reads them back. Reads are linear and
use scale 1, so that a memory is measured and not a network around it.

Shapes: R repetitions (all at once), N pairs, K key channels, V value channels; keys [R, N, K] and values
[R, N, V] are unit vectors. Everything runs in float64 and draws from a generator of its own.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evolve.checks import check_count, check_shape, require
from evolve.lab.memories import MemoryRule, Writes, gated, idle, plain_writes
from evolve.lab.seeds import generator


def unit_vectors(*shape: int, rng: torch.Generator) -> Tensor:
    """Random directions: [..., K] of length one."""
    return F.normalize(torch.randn(*shape, generator=rng, dtype=torch.float64), dim=-1)


def relative_error(read: Tensor, value: Tensor) -> float:
    """Root of the mean squared error over the mean squared value."""
    return ((read - value).square().sum() / value.square().sum()).sqrt().item()


# ------------------------------------------------------------------------------------------ probes


def interference(
    rule: MemoryRule,
    counts: Sequence[int],
    *,
    K: int = 64,
    V: int = 64,
    passes: int = 1,
    correlation: float = 0.0,
    orthogonal: bool = False,
    repeats: int = 64,
    seed: int = 0,
) -> list[float]:
    """Relative read-back error (RMS) of one of N stored pairs, for each N in ``counts``.

    ``passes``: how often the whole list is written. ``correlation`` in [0, 1): expected cosine of two keys (a
    little off for K below 16).
    ``orthogonal``: keys at right angles, N <= K. Un-normalised linear attention gives √((N−1)/K) for
    random keys. Raises ``ValueError`` naming the argument.
    """
    for name, n in (("K", K), ("V", V), ("passes", passes), ("repeats", repeats)):
        check_count(name, n, 1)
    require(0 <= correlation < 1, f"correlation must lie in [0, 1), got {correlation}")
    require(not (orthogonal and correlation), "correlation must be 0 for orthogonal keys")
    errors = []
    for N in counts:
        check_count("counts", N, 1)
        require(not orthogonal or N <= K, f"counts must be at most K = {K} for orthogonal keys, got {N}")
        rng = generator(seed, N)
        k = _keys(repeats, N, K, correlation, orthogonal, rng)
        v = unit_vectors(repeats, N, V, rng=rng)
        state = None
        for _ in range(passes):
            state = rule.write(state, plain_writes(k, v))
        errors.append(relative_error(rule.read(state, k), v))
    return errors


def _keys(R: int, N: int, K: int, correlation: float, orthogonal: bool, rng: torch.Generator) -> Tensor:
    if orthogonal:
        return torch.linalg.qr(torch.randn(R, K, K, generator=rng, dtype=torch.float64)).Q.mT[:, :N]
    shared, own = unit_vectors(R, 1, K, rng=rng), unit_vectors(R, N, K, rng=rng)
    return F.normalize(correlation**0.5 * shared + (1 - correlation) ** 0.5 * own, dim=-1)


class Overwriting(NamedTuple):
    """``error``: relative RMS error against the latest value; ``stale``: how much of the old one is read."""

    error: float
    stale: float


def overwriting(
    rule: MemoryRule, *, K: int = 64, V: int = 64, beta: float = 1.0, repeats: int = 64, seed: int = 0
) -> Overwriting:
    """One key is written with v₁, then with v₂ (at right angles to it) at strength ``beta``, and read."""
    require(beta == 1 or rule.strength, f"beta must be 1 for {rule.name}, which has no write strength")
    for name, n, least in (("K", K, 1), ("V", V, 2), ("repeats", repeats, 1)):
        check_count(name, n, least)
    rng = generator(seed)
    k = unit_vectors(repeats, 1, K, rng=rng)
    old, new = torch.linalg.qr(torch.randn(repeats, V, 2, generator=rng, dtype=torch.float64)).Q.mT.split(
        1, 1
    )
    state = rule.write(None, plain_writes(k, old))
    read = rule.read(rule.write(state, plain_writes(k, new, beta)), k)
    return Overwriting(relative_error(read, new), (read * old).sum(-1).mean().item())


class ContextSwitch(NamedTuple):
    """After each token from the switch on, [tokens + 1]; the first entry, 1, is the moment of the switch.

    ``energy``: what all reads together still return of the old context (squared, over every direction of
    the query). ``old_key``: how much of its value an old key that was not rewritten still returns.
    """

    energy: list[float]
    old_key: list[float]

    def writes_to_clear(self, share: float = 0.01) -> int | None:
        """Tokens until at most ``share`` of the energy is left, everywhere and at the old keys themselves
        (softmax dilutes what other queries find of them, and forgets nothing); ``None`` if that never is."""
        left = [max(e, x * x) for e, x in zip(self.energy, self.old_key)]
        return next((n for n, e in enumerate(left) if e <= share), None)


def context_switch(
    rule: MemoryRule,
    writes: int = 400,
    *,
    K: int = 64,
    V: int = 16,
    old_pairs: int = 16,
    reset: float = 0.0,
    repeats: int = 32,
    seed: int = 0,
) -> ContextSwitch:
    """Old pairs, then new pairs with random keys one by one; with ``reset``, a token of that log-decay first.

    Every rule reads linearly in the values, so new pairs with the value zero act on the old ones as any
    others would and add nothing to the reads: what is read is what is left. ``reset`` needs a rule that
    decays. Where 1 % is left is off by a few writes if there are few repetitions.
    """
    for name, n in (("writes", writes), ("K", K), ("V", V), ("old_pairs", old_pairs), ("repeats", repeats)):
        check_count(name, n, 1)
    require(reset <= 0, f"reset must be a log-decay <= 0, got {reset}")
    require(reset == 0 or rule.decay != "none", f"reset must be 0 for {rule.name}, which has no decay")
    rng = generator(seed)
    old, value = (unit_vectors(repeats, old_pairs, n, rng=rng) for n in (K, V))
    new, nothing = unit_vectors(repeats, writes, K, rng=rng), torch.zeros_like(value[:, :1])
    tokens = [plain_writes(k, nothing) for k in new.split(1, dim=1)]
    if reset < 0:
        tokens.insert(0, idle(repeats, 1, K, V, reset))
    queries = torch.cat([torch.eye(K, dtype=torch.float64).expand(repeats, K, K), old], dim=1)
    state = rule.write(None, plain_writes(old, value))
    left = [_left(rule.read(state, queries), value)]
    for token in tokens:
        state = rule.write(state, token)
        left.append(_left(rule.read(state, queries), value))
    energy, old_key = zip(*left)
    return ContextSwitch([e / energy[0] for e in energy], [x / old_key[0] for x in old_key])


def _left(read: Tensor, value: Tensor) -> tuple[float, float]:
    """(energy over all directions, mean projection on the old values).

    ``read`` [R, K + N, V]: reads of a basis, then of the old keys. ``value`` [R, N, V]: the old values."""
    N = value.shape[1]
    everywhere, at_old = read[:, :-N], read[:, -N:]
    return everywhere.square().sum().item(), (at_old * value).sum(-1).mean().item()


def retention(rule: MemoryRule, g: Tensor, lags: Sequence[int]) -> Tensor:
    """How much of a write is still read after so many tokens that write nothing. [lags, K]

    ``g`` [K] is the log-decay of each token; channel c is probed with the basis key e_c. A rule without
    decay ignores ``g``; one with a scalar decay takes a constant ``g`` only.
    """
    check_shape("g", g, K=None)
    require(bool((g <= 0).all()), "g must be a log-decay <= 0")
    require(rule.decay != "scalar" or bool((g == g[0]).all()), f"g must be one number for {rule.name}")
    require(all(a <= b for a, b in zip([0, *lags], lags)), f"lags must rise from 0 on, got {list(lags)}")
    K = len(g)
    k = torch.eye(K, dtype=torch.float64)[:, None]  # one repetition a channel
    state, kept, now = rule.write(None, plain_writes(k, torch.ones(K, 1, 1).double())), [], 0
    for lag in lags:
        if lag > now:
            state = rule.write(state, idle(K, lag - now, K, 1, g))
        kept.append(rule.read(state, k)[:, 0, 0])
        now = lag
    return torch.stack(kept)


# ------------------------------------------------------------------------------------ memory cell


class MemoryCell(NamedTuple):
    """Mean squared errors: ``fact`` of what should be kept, ``stale`` of what should be gone."""

    fact: float
    stale: float

    @property
    def score(self) -> float:
        return (self.fact + self.stale) / 2


FACTS, LOCALS = slice(0, 4), slice(4, 8)
LOCAL_DECAY = torch.zeros(16, dtype=torch.float64).index_fill(0, torch.arange(4, 8), -5.0)


def memory_cell(
    rule: MemoryRule,
    end_decay: Tensor | float = 0.0,
    *,
    erase: Tensor | None = None,
    scopes: int = 6,
    repeats: int = 256,
    seed: int = 0,
) -> MemoryCell:
    """Four facts written once; in each scope two of four locals, then an END token that applies a decay.

    K = V = 16, basis keys, β = 1. After the writes of a scope all eight keys are read; from the second scope
    on, ``fact`` is ‖read − v‖² on facts and ``stale`` is ‖read‖² on the locals not written in it.
    ``end_decay`` is END's log-decay, a number or [16]. ``erase`` [16]: END also writes zero to that unit key.
    """
    check_count("scopes", scopes, 2)
    check_count("repeats", repeats, 1)
    if erase is not None:
        check_shape("erase", erase, K=16)
        require(rule.strength, f"erase must be None for {rule.name}, which cannot erase")
    _check_end_decay(rule, end_decay)
    rng = generator(seed)
    keys = torch.eye(16, dtype=torch.float64).expand(repeats, 16, 16)
    facts = unit_vectors(repeats, 4, 16, rng=rng)
    state = rule.write(None, plain_writes(keys[:, FACTS], facts))
    end = _end_token(repeats, end_decay, erase)
    errors = []
    for scope in range(scopes):
        chosen = torch.rand(repeats, 4, generator=rng).argsort(dim=1)[:, :2]  # two of the four locals
        local_keys, values = F.one_hot(4 + chosen, 16).double(), unit_vectors(repeats, 2, 16, rng=rng)
        state = rule.write(state, plain_writes(local_keys, values))
        read = rule.read(state, keys[:, :8])
        written = F.one_hot(chosen, 4).sum(1).bool()
        if scope:
            fact = (read[:, FACTS] - facts).square().sum(-1).mean()
            stale = read[:, LOCALS].square().sum(-1)[~written].mean()
            errors.append((fact.item(), stale.item()))
        state = rule.write(state, end)
    return MemoryCell(*(sum(column) / len(errors) for column in zip(*errors)))


def _check_end_decay(rule: MemoryRule, end_decay: Tensor | float) -> None:
    g = torch.as_tensor(end_decay, dtype=torch.float64)
    require(g.shape in ((), (16,)), f"end_decay must be a number or [16], got {list(g.shape)}")
    require(bool((g <= 0).all()), "end_decay must be a log-decay <= 0")
    require(rule.decay != "none" or bool((g == 0).all()), f"end_decay must be 0 for {rule.name}")
    require(
        rule.decay != "scalar" or bool((g == g.max()).all()), f"end_decay must be one number for {rule.name}"
    )


def _end_token(repeats: int, end_decay: Tensor | float, erase: Tensor | None) -> Writes:
    end = idle(repeats, 1, 16, 16, end_decay)
    if erase is None:
        return end
    return end._replace(k=end.k + F.normalize(erase.double(), dim=0), beta=torch.ones_like(end.beta))


def best_scalar_decay(*, erase: Tensor | None = None) -> tuple[float, MemoryCell]:
    """The α of END, on a grid of 1/50, with which the gated rule scores best in the memory cell."""
    grid = [n / 50 for n in range(51)]
    cells = [memory_cell(gated, math.log(a) if a else -math.inf, erase=erase) for a in grid]
    return min(zip(grid, cells), key=lambda pair: pair[1].score)
