"""The memory cell, trained: decays, write strengths and keys found by gradient descent.

The memory cell of ``probes`` sets a memory's keys, decays and strengths by hand. Here they are parameters,
one decay and one strength for each kind of token, and the cell is unrolled and trained end to end. Reads stay
linear and the error squared, so that it is the memory that learns, and no network around it.

An episode with L lifetimes: four keys belong to each. The first lifetime's, the facts, are written once and
never end. Then come rounds. From the second on, each opens with the END of one other lifetime, chosen at
random, which makes that lifetime's values void. Then two of its four keys are written anew, and all keys are
read. With L = 2 this is the memory cell: facts and locals.

Shapes: B episodes, R rounds, N = 4 L keys, H heads, K key channels a head (16 over all heads), V = 16.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolve.checks import check_count, require
from evolve.lab.probes import unit_vectors
from evolve.lab.seeds import generator
from evolve.lab.training import TrainingConfig, learning_rate

CHANNELS = 16  # key channels over all heads; also value channels
KEYS = 4  # keys of a lifetime
FLOOR = -5.0  # the bounded gate's
RULES = ("delta_rule", "gated_delta_rule", "kda")
EXAM = 1_000_000  # the batch that cells are examined on


class Episodes(NamedTuple):
    """What happens, and what is right.

    facts [B, 4, V]: values of keys 0 to 3. lifetime [B, R]: whose round it is. key [B, R, 2] and value
    [B, R, 2, V]: what the round writes. target [B, R, N, V]: what each key should read, zero if void.
    fact, fresh, stale [B, R, N]: keys to be kept, written in this round, to be gone; none in the first round.
    """

    facts: Tensor
    lifetime: Tensor
    key: Tensor
    value: Tensor
    target: Tensor
    fact: Tensor
    fresh: Tensor
    stale: Tensor


@dataclass(frozen=True)
class CellTask:
    """Sizes of the task; ``task(n)`` is batch n. Raises ``ValueError`` for sizes that cannot be met."""

    lifetimes: int = 2  # L
    rounds: int = 6  # R
    batch_size: int = 32  # B
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("lifetimes", 2), ("rounds", 2), ("batch_size", 1), ("seed", 0)):
            check_count(name, getattr(self, name), least)
        require(self.lifetimes <= CHANNELS // KEYS, f"lifetimes must be at most 4, got {self.lifetimes}")

    def __call__(self, n: int) -> Episodes:
        """Batch ``n`` of the stream."""
        B, R, N, rng = self.batch_size, self.rounds, KEYS * self.lifetimes, generator(self.seed, n)
        facts = unit_vectors(B, KEYS, CHANNELS, rng=rng).float()
        lifetime = torch.randint(1, self.lifetimes, (B, R), generator=rng)
        key = KEYS * lifetime[..., None] + torch.rand(B, R, KEYS, generator=rng).argsort(-1)[..., :2]
        value = unit_vectors(B, R, 2, CHANNELS, rng=rng).float()
        holds = torch.cat([facts, facts.new_zeros(B, N - KEYS, CHANNELS)], dim=1)
        owner = (torch.arange(N) // KEYS).expand(B, N)
        alive, rounds = owner == 0, []
        for r in range(R):
            alive = alive & (owner != lifetime[:, r, None])
            fresh = F.one_hot(key[:, r], N).sum(1).bool()
            holds = holds.scatter(1, key[:, r, :, None].expand(-1, -1, CHANNELS), value[:, r])
            stale, fact = ~alive & ~fresh, alive & ~fresh
            alive = alive | fresh
            masks = (mask & (r > 0) for mask in (fact, fresh, stale))
            rounds.append((holds * alive[..., None], *masks))
        return Episodes(facts, lifetime, key, value, *(torch.stack(x, dim=1) for x in zip(*rounds)))


class Errors(NamedTuple):
    """Mean squared errors of reads: of what should be kept, was just written, or should be gone."""

    fact: Tensor
    fresh: Tensor
    stale: Tensor


class TrainableCell(nn.Module):
    """A memory of 16 × 16 numbers in ``heads`` heads, whose decays, strengths and keys are parameters.

    ``rule`` (one of ``RULES``): no decay, one a head, or one a channel, for each kind of token that writes,
    between the bounded gate's e⁻⁵ and 1. ``learn_strengths``: else every write has β = 1. ``learn_keys``: a
    table of unit keys for each head; else basis keys in one head. ``erase``: END also writes zero to a key of
    its own. With several heads, their reads are summed behind an output gate that knows the key's lifetime.
    ``reads_erase``: a read may be followed by a write of zero to the key that was read.
    """

    def __init__(
        self,
        rule: str,
        *,
        lifetimes: int = 2,
        heads: int = 1,
        learn_strengths: bool = False,
        learn_keys: bool = False,
        erase: bool = False,
        reads_erase: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require(rule in RULES, f"rule must be one of {', '.join(RULES)}, got {rule!r}")
        require(heads in (1, 2, 4), f"heads must be 1, 2 or 4, got {heads!r}")
        require(learn_keys or heads == 1, f"heads must be 1 for keys that are not learned, got {heads}")
        require(not (reads_erase and learn_keys), "reads_erase must be False for learned keys")
        L, K, rng = lifetimes, CHANNELS // heads, generator(seed)
        N, channels = KEYS * L, {"delta_rule": 0, "gated_delta_rule": 1, "kda": K}[rule]
        table = torch.randn(N + L, heads, K, generator=rng)  # a row for each key, and for the END of each
        if not learn_keys:
            basis = torch.eye(CHANNELS)[:N]
            table[:, 0] = torch.cat([basis, basis.unflatten(0, (L, KEYS)).sum(1)])
        self.lifetimes, self.learn_strengths = lifetimes, learn_strengths
        self.erase, self.reads_erase = erase, reads_erase
        self.keys = nn.Parameter(table, requires_grad=learn_keys)
        self.z = nn.Parameter(torch.randn(2 * L, heads, channels, generator=rng) - 3)  # g = -5 sigmoid(z)
        self.b = nn.Parameter(torch.randn(3 * L, heads, generator=rng))  # beta = sigmoid(b)
        gates = torch.randn(L, heads, generator=rng) + 2 if heads > 1 else torch.zeros(0)
        self.r = nn.Parameter(gates)  # an output gate sigmoid(r): which heads a read listens to

    @property
    def g(self) -> Tensor:
        """Log-decays [2 L, H, K]: of the writes of each lifetime, then of its END."""
        L, (_, H, K) = self.lifetimes, self.keys.shape
        return (
            FLOOR * self.z.sigmoid().expand(2 * L, H, K) if self.z.numel() else self.z.new_zeros(2 * L, H, K)
        )

    @property
    def beta(self) -> Tensor:
        """Strengths [3 L, H]: of the writes of each lifetime, of its END, of what follows a read."""
        write, end, read = self.b.sigmoid().chunk(3)
        write = write if self.learn_strengths else torch.ones_like(write)
        return torch.cat([write, end * self.erase, read * self.reads_erase])

    def forward(self, x: Episodes, *, read_last_only: bool = False) -> Tensor:
        """What each key reads in each round [B, R, N, V]. ``read_last_only``: no read, and so nothing that
        follows one, before the last round; zeros stand in."""
        L, (B, R), table = self.lifetimes, x.lifetime.shape, F.normalize(self.keys, dim=-1)
        N, kept = KEYS * L, 1 - self.beta[2 * L :].repeat_interleave(KEYS, 0)  # kept [N, H]: after a read
        steps = iter(self._steps(x, table))
        S, keys, reads = table.new_zeros(B, *table.shape[1:], CHANNELS), table[:N].movedim(1, 0), []
        for r in range(R):
            for _ in range(KEYS if r == 0 else 1):
                S = _write(S, *next(steps))  # the facts, or END
            for _ in range(2):
                S = _write(S, *next(steps))
            if read_last_only and r < R - 1:
                reads.append(torch.zeros_like(x.target[:, r]))
                continue
            reads.append(self._listen(keys @ S).sum(1))
            if self.reads_erase:  # basis keys: a write of zero to each of them scales its row
                S = torch.cat([kept.T[..., None] * S[:, :, :N], S[:, :, N:]], dim=2)
        return torch.stack(reads, dim=1)

    def _listen(self, o: Tensor) -> Tensor:
        """Reads of every key by every head [B, H, N, V], times the output gate of the key's lifetime."""
        return o * self.r.sigmoid().repeat_interleave(KEYS, 0).T[..., None] if self.r.numel() else o

    def _steps(self, x: Episodes, table: Tensor) -> list[tuple[Tensor, ...]]:
        """(k, v, alpha, beta) of every token that writes, looked up at once: one product each is faster."""
        L, B, lifetime = self.lifetimes, len(x.lifetime), x.lifetime[..., None]
        nothing = torch.zeros_like(x.value[:, :, :1])
        kind = torch.cat([L + lifetime, lifetime, lifetime], dim=2).flatten(1)[:, 1:]  # no END in round 1
        key = torch.cat([KEYS * L + lifetime, x.key], dim=2).flatten(1)[:, 1:]
        value = torch.cat([nothing, x.value], dim=2).flatten(1, 2)[:, 1:]
        facts = torch.arange(KEYS).expand(B, KEYS)
        kind, key = torch.cat([0 * facts, kind], dim=1), torch.cat([facts, key], dim=1)
        which = F.one_hot(kind, 3 * L).float()[..., : 2 * L]
        k = (F.one_hot(key, len(table)).float() @ table.flatten(1)).unflatten(-1, table.shape[1:])
        alpha = (which @ self.g.exp().flatten(1)).unflatten(-1, table.shape[1:])
        beta = which @ self.beta[: 2 * L]
        v = torch.cat([x.facts, value], dim=1)[:, :, None, None]
        factors = (k[..., None], v, alpha[..., None], beta[..., None, None])
        return list(zip(*(y.unbind(1) for y in factors)))

    def errors(self, x: Episodes, **options: bool) -> Errors:
        """On the rounds that were read, from the second on."""
        error = (self(x, **options) - x.target).square().sum(-1)
        if options.get("read_last_only"):
            error, x = error[:, -1:], x._replace(**{n: getattr(x, n)[:, -1:] for n in Errors._fields})
        return Errors(*(error[getattr(x, name)].mean() for name in Errors._fields))


def _write(S: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """KDA's update (``evolve.kda.kda_step``), its factors shaped to be multiplied with S [B, H, K, V]."""
    S = alpha * S
    return S + k * (beta * (v - k.mT @ S))


def train_cell(
    cell: TrainableCell, task: CellTask, config: TrainingConfig, *, until: int | None = None
) -> list[float]:
    """Train ``cell`` in place on the mean of its three errors with Adam; returns the loss of every step.

    Of ``config`` it uses steps, peak and warm-up. ``until`` ends it after that many steps of the schedule.
    """
    optimizer, losses = torch.optim.Adam([p for p in cell.parameters() if p.numel()], lr=config.peak), []
    for step in range(config.steps if until is None else until):
        loss = sum(cell.errors(task(step))) / 3
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def examine(cell: TrainableCell, task: CellTask, **options: bool) -> dict[str, float]:
    """The three errors on 256 episodes that training never sees; ``score`` is that of fact and stale."""
    exam = CellTask(task.lifetimes, task.rounds, batch_size=256, seed=task.seed)(EXAM)
    found = {name: x.item() for name, x in cell.errors(exam, **options)._asdict().items()}
    return found | {"score": (found["fact"] + found["stale"]) / 2}


# ------------------------------------------------------------------------------------------ stored runs


@dataclass(frozen=True)
class CellRun:
    """One trained cell: ``name`` says what is compared, ``cell`` are arguments of ``TrainableCell``."""

    name: str
    rule: str
    seed: int
    cell: Mapping[str, int | bool]
    task: CellTask
    config: TrainingConfig
    loss: Sequence[float] = ()
    exam: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def repeat(self, until: int | None = None) -> tuple[TrainableCell, list[float]]:
        """Train it again, for the first ``until`` steps of its schedule or to the end."""
        cell = TrainableCell(self.rule, lifetimes=self.task.lifetimes, seed=self.seed, **self.cell)
        return cell, train_cell(cell, self.task, self.config, until=until)

    def measured(self) -> "CellRun":
        """The same run with its losses, to five digits, and its exam."""
        cell, loss = self.repeat()
        exam = {name: round(x, 5) for name, x in examine(cell, self.task).items()}
        return dataclasses.replace(self, loss=[float(f"{x:.5g}") for x in loss], exam=exam)


def planned(name: str, rule: str, seed: int, task: CellTask, config: TrainingConfig, **cell: int) -> CellRun:
    """A run that has not been made yet; its task and schedule get the seed, too."""
    task, config = dataclasses.replace(task, seed=seed), dataclasses.replace(config, seed=seed)
    return CellRun(name, rule, seed, cell, task, config)


def load_runs() -> list[CellRun]:
    """The runs of ``results/cell.json``, made by ``python -m benchmarks.cell``."""
    rows = json.loads((files("evolve.lab") / "results" / "cell.json").read_text(encoding="utf-8"))["runs"]
    parts = ({"task": CellTask(**r["task"]), "config": TrainingConfig(**r["config"])} for r in rows)
    return [CellRun(**row | part) for row, part in zip(rows, parts)]
