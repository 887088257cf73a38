"""Multi-query associative recall: bind keys to values, then ask with the keys alone.

The task of Zoology (Arora et al., 2023, section 3 and appendix on MQAR): N pairs are written, and each key
comes back later, at a gap drawn from a power law. One thing is asked, that the value follows the key; the
value itself is never shown with the question, since that would write the pair a second time.

One context of a sequence, with its length in tokens (three pairs, one rewritten, one void)::

    k1 v1 k2 v2 k3 v3   k2 w2      k3 k9 k1 k2             inputs
    .  .  .  .  .  .    .  .       v3 VOID v1 w2           targets, -100 at the dots
    2 num_pairs         2 rewrites num_slots

Token ids: keys come first, then values, then the special tokens BLANK (an empty slot), SWITCH (opens every
context but the first; all older bindings are void) and VOID (the right answer to a void key). With
``ask_last_only`` the questions of every context but the last are left out: a memory can then not have erased
a binding when it was read. The vocabulary is the same for every variant, so that one model can be trained on
one and tried on another.

A task is called with a batch's number: ``task(n)`` depends on the task's fields and on n alone. The stream
is infinite, and whoever resumes at step n reads exactly what the interrupted run would have read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from evolve.checks import check_count, check_shape, require
from evolve.lab.seeds import generator

IGNORE = -100  # the target where nothing is asked


@dataclass(frozen=True)
class Batch:
    """input_ids [B, T] and targets [B, T], int64; a target of -100 asks for nothing."""

    input_ids: Tensor
    targets: Tensor


@dataclass(frozen=True)
class AssociativeRecall:
    """Sizes of the task; ``task(n)`` is batch n. Raises ``ValueError`` for sizes that cannot be met."""

    num_pairs: int = 8  # N, pairs in a context
    num_keys: int = 32  # size of the key vocabulary
    num_values: int = 32  # size of the value vocabulary
    rewrites: int = 0  # of the N keys, how many are written again; their latest value counts
    contexts: int = 1  # from the second on, SWITCH comes first and all older bindings are void
    voids: int = 0  # keys asked in each context but the first that only the context before it had bound
    ask_last_only: bool = False  # every context but the last is left behind without having been read
    num_slots: int | None = None  # places for questions; None: as many as questions, so no BLANK between
    power: float = 0.01  # P(slot g is asked) ~ g**(power - 1), Zoology's value; 1 is uniform
    batch_size: int = 64  # B
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_pairs", 1), ("num_keys", 1), ("num_values", 2), ("rewrites", 0)):
            check_count(name, getattr(self, name), least)
        for name, least in (("contexts", 1), ("voids", 0), ("batch_size", 1), ("seed", 0)):
            check_count(name, getattr(self, name), least)
        for name in ("rewrites", "voids"):
            n = getattr(self, name)
            require(n <= self.num_pairs, f"{name} must be at most num_pairs = {self.num_pairs}, got {n}")
        require(not self.voids or self.contexts > 1, f"voids = {self.voids} needs contexts of at least 2")
        need = self.num_pairs + self.voids
        require(
            need <= self.num_keys,
            f"num_keys must be at least num_pairs + voids = {need}, got {self.num_keys}",
        )
        if self.num_slots is not None:
            check_count("num_slots", self.num_slots, need)
        flag = isinstance(self.ask_last_only, bool)
        require(flag, f"ask_last_only must be True or False, got {self.ask_last_only!r}")
        positive = isinstance(self.power, int | float) and self.power > 0
        require(positive, f"power must be > 0, got {self.power!r}")

    @property
    def blank(self) -> int:
        return self.num_keys + self.num_values

    @property
    def switch(self) -> int:
        return self.blank + 1

    @property
    def void(self) -> int:
        return self.blank + 2

    @property
    def vocab_size(self) -> int:
        return self.num_keys + self.num_values + 3

    @property
    def length(self) -> int:
        """T, tokens in a sequence; 3 N in the plain task."""
        return sum(
            2 * (self.num_pairs + self.rewrites) + self._slots(c) + (c > 0) for c in range(self.contexts)
        )

    def __call__(self, n: int) -> Batch:
        """Batch ``n`` of the stream."""
        check_count("n", n, 0)
        rng = generator(self.seed, n)
        parts, keys, voided = [], None, None
        for c in range(self.contexts):
            if c > 0:
                parts.append(_silent(torch.full((self.batch_size, 1), self.switch)))
                voided = _choose(keys, self.voids, rng)
            keys = self._draw_keys(voided, rng)
            context = self._context(keys, voided, rng)
            parts += context if self._slots(c) else context[:-1]
        return Batch(*(torch.cat(columns, dim=1) for columns in zip(*parts)))

    def _slots(self, context: int) -> int:
        if self.ask_last_only and context < self.contexts - 1:
            return 0
        asked = self.num_pairs + (self.voids if context else 0)
        return asked if self.num_slots is None else self.num_slots

    def _draw_keys(self, voided: Tensor | None, rng: torch.Generator) -> Tensor:
        """N distinct keys a row, none of them among ``voided``. [B, N]"""
        score = torch.rand(self.batch_size, self.num_keys, generator=rng)
        if voided is not None:
            score.scatter_(1, voided, -1.0)
        return score.topk(self.num_pairs, dim=1).indices

    def _context(self, keys: Tensor, voided: Tensor | None, rng: torch.Generator) -> list:
        """One context as (inputs, targets) columns: pairs, rewritten pairs, questions."""
        B, N = keys.shape
        values = torch.randint(self.num_values, (B, N), generator=rng)
        written = [_pairs(keys, self.num_keys + values)]
        if self.rewrites:
            again = _choose(torch.arange(N).expand(B, N), self.rewrites, rng)  # [B, R]
            # A shift by 1 ... num_values - 1, so that the new value always differs from the stale one.
            shift = torch.randint(1, self.num_values, again.shape, generator=rng)
            values = values.scatter(1, again, (values.gather(1, again) + shift) % self.num_values)
            written.append(_pairs(keys.gather(1, again), self.num_keys + values.gather(1, again)))
        asked, answers = keys, self.num_keys + values
        if voided is not None:
            asked = torch.cat([asked, voided], dim=1)
            answers = torch.cat([answers, torch.full_like(voided, self.void)], dim=1)
        return [*map(_silent, written), self._questions(asked, answers, rng)]

    def _questions(self, asked: Tensor, answers: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Put every question [B, Q] into a slot of its own. -> inputs and targets, [B, slots]

        Empty slots hold BLANK. A value there would make (key, value) out of a question and its successor,
        which is a pair being written.
        """
        B, Q = asked.shape
        slots = Q if self.num_slots is None else self.num_slots
        log_weight = (self.power - 1) * torch.arange(1, slots + 1).log()
        # Gumbel noise and the Q largest: Q slots drawn one after the other without putting back.
        gumbel = -torch.empty(B, slots).exponential_(generator=rng).log()
        places = _choose((log_weight + gumbel).topk(Q, dim=1).indices, Q, rng)
        inputs = torch.full((B, slots), self.blank).scatter(1, places, asked)
        return inputs, torch.full((B, slots), IGNORE).scatter(1, places, answers)


def accuracy(logits: Tensor, targets: Tensor) -> float:
    """Share of the asked positions (target not -100) where the largest logit is the target.

    logits [B, T, vocab], targets [B, T]. Raises ``ValueError`` where nothing is asked.
    """
    check_shape("logits", logits, B=None, T=None, vocab=None)
    check_shape("targets", targets, B=logits.shape[0], T=logits.shape[1])
    asked = targets != IGNORE
    require(bool(asked.any()), "targets must ask for at least one token, got none")
    return (logits.argmax(dim=-1) == targets)[asked].double().mean().item()


def _choose(x: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """``count`` entries of every row of x [B, N] in random order, without putting back. [B, count]"""
    order = torch.rand(x.shape, generator=rng).argsort(dim=1)
    return x.gather(1, order[:, :count])


def _pairs(keys: Tensor, values: Tensor) -> Tensor:
    """k1 v1 k2 v2 ... from keys and values [B, N]. -> [B, 2 N]"""
    return torch.stack([keys, values], dim=-1).flatten(1)


def _silent(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs where nothing is asked, with their targets."""
    return inputs, torch.full_like(inputs, IGNORE)
