"""One task for all memories of a K3 at once, and a small K3 that learns it: whole, and with a part missing.

A sequence is a visit to a shop floor: an order code is read out at the beginning, facts that hold to its end
are told, and then come scopes, each with locals of its own, questions, and an END at which its locals are
void. Last, the code is to be said again, symbol by symbol::

    OPEN s1 … s8  f1 v1 … f4 v4  [l1 w1 l2 w2  ? l2 ? l4   ? f3 ? f1 ? kind x  END] × 3  AGAIN s1 … s7
    .             .                          w2   VOID   v3   v1      T[kind,x]          s1    s2 … s8

Five things are asked, and each is scored on its own:

    code      all eight symbols right: exact, and from far back
    facts     the value of a fact: written once, asked scopes later
    locals    the value of a local of this scope, not of an earlier one
    void      VOID for a local that only an earlier scope has written
    table     what x is called among things of that kind: never in the text, so it must be in the weights

Token ids: values (symbols of the code, too), facts, locals, kinds, and the special tokens.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.resources import as_file, files

import torch
from torch import Tensor, nn

from evolve.balancing import balanced, expert_load, quantile_balance, recorded_routing
from evolve.checks import check_count, require
from evolve.decoder import Decoder
from evolve.hybrid import mixer
from evolve.k3 import K3, K3Config, feed_forward
from evolve.kda import KimiDeltaAttention
from evolve.kimi_linear import draw_weights
from evolve.lab.accounting import parameters
from evolve.lab.experts import no_balance
from evolve.lab.glance import MEMORIES, without
from evolve.lab.seeds import generator
from evolve.lab.tasks import IGNORE, Batch
from evolve.lab.text import TextBatches, standard_library
from evolve.lab.training import Run, TrainingConfig, train

SKILLS = ("code", "facts", "locals", "void", "table")
EXAM, EXAMS = 1_000_000, 4  # the first batch that models are examined on, far outside training; how many


@dataclass(frozen=True)
class Together:
    """Sizes of the task; ``task(n)`` is batch n, a function of the fields and of n alone.

    Sizes of a training batch are drawn by n alone, since short sequences teach how to look up at all: half of
    the batches have 1 to ``scopes`` scopes and codes of 2, 4, … or ``code_length`` symbols; a quarter are
    drills of a code alone, and a quarter of facts, each asked once. ``exam(n)`` has the full sizes.
    """

    code_length: int = 8
    num_values: int = 16
    num_facts: int = 4  # told, of ``num_fact_keys``
    num_fact_keys: int = 8
    num_locals: int = 2  # written in a scope, of ``num_local_keys``
    num_local_keys: int = 4
    num_kinds: int = 8
    scopes: int = 3
    batch_size: int = 32  # B
    seed: int = 0

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            check_count(f.name, getattr(self, f.name), 0 if f.name == "seed" else 1)
        pairs = (("code_length", "num_values"), ("num_facts", "num_fact_keys"))
        for few, many in pairs:
            a, b = getattr(self, few), getattr(self, many)
            require(a <= b, f"{few} must be at most {many} = {b}, got {a}")
        a, b = self.num_locals, self.num_local_keys
        require(a < b, f"num_locals must be below num_local_keys = {b}, got {a}")

    @cached_property
    def starts(self) -> dict[str, int]:
        """First id of each kind of token, and the ids of the special ones."""
        sizes = {"value": self.num_values, "fact": self.num_fact_keys, "local": self.num_local_keys}
        sizes |= {"kind": self.num_kinds} | dict.fromkeys(("OPEN", "AGAIN", "ASK", "END", "VOID"), 1)
        ids = torch.tensor([0, *sizes.values()]).cumsum(0).tolist()
        return dict(zip(sizes, ids)) | {"all": ids[-1]}

    @property
    def vocab_size(self) -> int:
        return self.starts["all"]

    @cached_property
    def table(self) -> Tensor:
        """What each value is called among things of each kind, [kinds, values]: the same for every seed."""
        rng = generator(2024)
        return torch.stack([torch.randperm(self.num_values, generator=rng) for _ in range(self.num_kinds)])

    def __call__(self, n: int) -> Batch:
        """Training batch ``n``."""
        check_count("n", n, 0)
        rng = generator(self.seed, n)

        def one_of(choices: Sequence[int]) -> int:
            return choices[int(torch.randint(len(choices), (), generator=rng))]

        length, facts = (one_of(_halvings(full)) for full in (self.code_length, self.num_facts))
        scopes, drill = one_of(range(1, self.scopes + 1)), one_of(("", "", "code", "facts"))
        if drill == "code":
            return _batch(self._columns(rng, length, 0, 0))
        if drill == "facts":
            return _batch(self._columns(rng, 0, facts, 0))
        return _batch(self._columns(rng, length, self.num_facts, scopes))

    def exam(self, n: int = EXAM) -> tuple[Batch, Tensor]:
        """Batch ``n`` in full size, and which of ``SKILLS`` each position asks for, [T]; -1 for none."""
        columns = self._columns(generator(self.seed, n), self.code_length, self.num_facts, self.scopes)
        skills = [SKILLS.index(skill) if skill else -1 for _, _, skill in columns]
        return _batch(columns), torch.tensor(skills)

    def _columns(self, rng: torch.Generator, length: int, num_facts: int, scopes: int) -> list[tuple]:
        """(token [B], target [B], skill) of every position. Facts without scopes are asked all."""
        page = _Page(self)
        code = _draw(self.batch_size, self.num_values, length, rng)
        if length:
            page.say("OPEN")
            page.say_all(code)
        facts = self.starts["fact"] + _draw(self.batch_size, self.num_fact_keys, num_facts, rng)
        values = torch.randint(self.num_values, facts.shape, generator=rng)
        page.say_all(torch.stack([facts, values], 2).flatten(1))
        if not scopes:
            self._ask_facts(page, facts, values, num_facts, rng)
        written = torch.zeros(self.batch_size, self.num_local_keys, dtype=torch.bool)
        for _ in range(scopes):
            written = self._scope(page, facts, values, written, rng)
        if length:
            page.say("AGAIN", code[:, 0], "code")
            for here, following in zip(code.T, code.T[1:]):
                page.say(here, following, "code")
        return page.columns

    def _ask_facts(
        self, page: "_Page", facts: Tensor, values: Tensor, count: int, rng: torch.Generator
    ) -> None:
        for j in _draw(self.batch_size, facts.shape[1], count, rng).T[..., None]:
            page.ask(facts.gather(1, j)[:, 0], values.gather(1, j)[:, 0], "facts")

    def _scope(
        self, page: "_Page", facts: Tensor, values: Tensor, before: Tensor, rng: torch.Generator
    ) -> Tensor:
        """One scope; which locals an earlier one has written, [B, local keys] -> the same after it."""
        s, B = self.starts, self.batch_size
        order = torch.rand(B, self.num_local_keys, generator=rng).argsort(1)
        mine, other = order[:, : self.num_locals], order[:, self.num_locals :]
        new = torch.randint(self.num_values, mine.shape, generator=rng)
        page.say_all(torch.stack([s["local"] + mine, new], 2).flatten(1))
        i = torch.randint(self.num_locals, (B, 1), generator=rng)
        page.ask(s["local"] + mine.gather(1, i)[:, 0], new.gather(1, i)[:, 0], "locals")
        stale = _stale(other, before, rng)
        page.ask(s["local"] + stale, s["VOID"], "void" if bool(before.any()) else "")
        self._ask_facts(page, facts, values, min(2, self.num_facts), rng)
        kind = torch.randint(self.num_kinds, (B,), generator=rng)
        x = torch.randint(self.num_values, (B,), generator=rng)
        page.say("ASK")
        page.say(s["kind"] + kind)
        page.say(x, self.table[kind, x], "table")
        page.say("END")
        return before.scatter(1, mine, True)


class _Page:
    """A batch of sequences as it is written: (token [B], target [B], skill) for each position."""

    def __init__(self, task: Together) -> None:
        self.task, self.columns = task, []

    def say(self, token: Tensor | str, target: Tensor | int = IGNORE, skill: str = "") -> None:
        B = self.task.batch_size
        token = torch.full((B,), self.task.starts[token]) if isinstance(token, str) else token
        target = torch.full((B,), target) if isinstance(target, int) else target
        self.columns.append((token, target, skill))

    def say_all(self, tokens: Tensor) -> None:
        for token in tokens.T:
            self.say(token)

    def ask(self, key: Tensor, answer: Tensor | int, skill: str) -> None:
        self.say("ASK")
        self.say(key, answer, skill)


def _halvings(n: int) -> list[int]:
    """n, n/2, n/4, … down to 1."""
    return [n >> i for i in range(n.bit_length())]


def _stale(other: Tensor, before: Tensor, rng: torch.Generator) -> Tensor:
    """Of the locals that this scope does not write, one that an earlier scope has, where there is one. [B]"""
    wish = before.gather(1, other).float() + torch.rand(other.shape, generator=rng) / 2
    return other.gather(1, wish.argmax(1, keepdim=True))[:, 0]


def _draw(rows: int, of: int, count: int, rng: torch.Generator) -> Tensor:
    """``count`` different numbers below ``of`` for each row. [rows, count]"""
    return torch.rand(rows, of, generator=rng).argsort(1)[:, :count]


def _batch(columns: list[tuple]) -> Batch:
    tokens, targets, _ = zip(*columns)
    return Batch(torch.stack(tokens, 1), torch.stack(targets, 1))


@torch.no_grad()
def scores(model: nn.Module, task: Together, n: int = EXAM) -> dict[str, float]:
    """Share of right answers by skill on ``EXAMS`` batches of ``task.exam`` from ``n`` on.

    Of ``code``, the share of whole codes.
    """
    batches, skills = zip(*(task.exam(n + i) for i in range(EXAMS)))
    right = torch.cat([model(b.input_ids).argmax(-1) == b.targets for b in batches])  # [EXAMS B, T]
    found = {}
    for i, skill in enumerate(SKILLS):
        asked = right[:, skills[0] == i]
        require(asked.shape[1] > 0, f"the exam must ask for {skill}: it needs at least two scopes")
        found[skill] = (asked.all(1) if skill == "code" else asked).double().mean().item()
    return found


# ------------------------------------------------------------------------------- with a part missing

#: A K3 for this task, but for its vocabulary: one head with a state of 16 × 16 in each KDA layer, too little
#: for a code and all facts, and networks too narrow to keep the table without routed experts.
MODEL = {
    "num_hidden_layers": 4, "linear_num_heads": 1, "kv_lora_rank": 32, "attn_res_block_size": 1,
    "intermediate_size": 64, "moe_intermediate_size": 24, "initializer_range": 0.1,
}  # fmt: skip


class OneDecayKDA(KimiDeltaAttention):
    """KDA whose channels all decay alike: each head's by the mean of what its channels would."""

    def log_decays(self, x: Tensor) -> Tensor:
        g = super().log_decays(x)
        return g.mean(-1, keepdim=True).expand_as(g)


class ResidualK3(Decoder):
    """K3's layers around a plain residual stream."""

    def __init__(self, config: K3Config) -> None:
        layers = range(1, config.num_hidden_layers + 1)
        super().__init__(
            [mixer(config, l) for l in layers],
            feed_forwards=[feed_forward(config, l) for l in layers],
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
        )
        self.config = config
        with torch.no_grad():
            draw_weights(self, config.initializer_range)


#: What is compared, and which of K3's parts is missing in it.
VARIANTS = {
    "whole": "nothing",
    "no MLA": "MLA: KDA in every layer",
    "one decay": "the decay per channel: one for all channels of a head",
    "residual stream": "Attention Residuals: a plain residual stream",
    "no balancing": "Quantile Balancing: routers are left alone",
}


def variant_model(name: str, vocab_size: int, *, seed: int = 0) -> Decoder:
    """A small K3 without one of its parts (a key of ``VARIANTS``), and else the same.

    Without MLA the experts get the size that brings the number of parameters nearest to the whole model's.
    """
    require(name in VARIANTS, f"name must be one of {', '.join(VARIANTS)}, got {name!r}")
    config = K3Config.nano(vocab_size=vocab_size, **MODEL)
    if name == "no MLA":
        config = _as_large(config, dataclasses.replace(config, full_attn_layers=()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ResidualK3(config) if name == "residual stream" else K3(config)
    if name == "one decay":
        for layer in model.layers:
            if isinstance(layer.self_attn, KimiDeltaAttention):
                layer.self_attn.__class__ = OneDecayKDA  # the same parameters, read differently
    return model


def _as_large(goal: K3Config, config: K3Config) -> K3Config:
    """``config`` with experts of the size that makes it as large as ``goal``."""
    with torch.device("meta"):
        sizes = [parameters(K3(c)) for c in (goal, config, _wider(config))]
    return _wider(config, round((sizes[0] - sizes[1]) / (sizes[2] - sizes[1])))


def _wider(config: K3Config, by: int = 1) -> K3Config:
    return dataclasses.replace(config, moe_intermediate_size=config.moe_intermediate_size + by)


@dataclass(frozen=True)
class TogetherRun:
    """A variant of K3 that learns the task. ``run``: its loss, and ``scores`` at each validation.

    ``loads``: on the exam after training, the tokens of each expert, layer by layer. ``left``: the scores
    that are left without a memory (``evolve.lab.glance.MEMORIES``), for those that the variant has.
    """

    purpose: str
    variant: str
    seed: int
    task: Together
    run: Run
    loads: list = field(default_factory=list)
    left: dict = field(default_factory=dict)

    def build(self) -> Decoder:
        """The model before training."""
        return variant_model(self.variant, self.task.vocab_size, seed=self.seed)

    def repeat(self, until: int | None = None) -> tuple[Decoder, Run]:
        """Train it again, for the first ``until`` steps of its schedule or to the end."""
        net, rule = self.build(), no_balance if self.variant == "no balancing" else quantile_balance
        with balanced(net, rule):
            run = train(
                net, self.task, self.run.config, validate=partial(scores, task=self.task), until=until,
                label=self.variant,
            )  # fmt: skip
        return net.eval(), run

    def measured(self) -> tuple["TogetherRun", Decoder]:
        """The same run with its curve, its loads, and what is left of it; and the trained model."""
        net, run = self.repeat()
        lacks = {"no MLA": "MLA", "residual stream": "depth"}.get(self.variant)
        left = {memory: remaining(net, self.task, memory) for memory in MEMORIES if memory != lacks}
        rows = [{k: float(f"{x:.5g}") for k, x in row.items()} for row in run.validation]
        run = dataclasses.replace(run, loss=[float(f"{x:.5g}") for x in run.loss], validation=rows)
        counts = [x.tolist() for x in loads(net, self.task)]
        return dataclasses.replace(self, run=run, loads=counts, left=left), net


def remaining(model: Decoder, task: Together, memory: str) -> dict[str, float]:
    """The scores of a trained ``model`` without that memory."""
    with without(model, memory):
        return {skill: float(f"{x:.4g}") for skill, x in scores(model, task).items()}


@torch.no_grad()
def loads(model: Decoder, task: Together, n: int = EXAM) -> list[Tensor]:
    """Tokens of each expert on ``task.exam(n)``, [E] for each layer that has experts."""
    batch, _ = task.exam(n)
    with recorded_routing(model.eval()) as record:
        model(batch.input_ids)
    return [expert_load(calls[0].indices, calls[0].scores.shape[1]).counts for calls in record.values()]


# ------------------------------------------------------------------------------------------ on text

TEXT_STEPS, TEXT_BLOCK, TEXT_BATCH = 300, 96, 8


def text_run(until: int | None = None) -> tuple[K3, Run]:
    """A K3 of the size "nano", seed 0, trained on the standard library's source with Quantile Balancing.

    Its loss, and at each validation the one on held-out ``code``, in nats a byte.
    """
    corpus = standard_library()
    exam = TextBatches(corpus.validation, TEXT_BLOCK, 64)(EXAM)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = K3(K3Config.nano(initializer_range=MODEL["initializer_range"]))
    config = TrainingConfig(TEXT_STEPS, peak=1e-2, warm_up=20, eval_every=50)
    with balanced(net, quantile_balance):
        run = train(
            net,
            TextBatches(corpus.training, TEXT_BLOCK, TEXT_BATCH),
            config,
            validate=lambda model: {"code": model.loss(exam.input_ids, exam.targets).item()},
            until=until,
            label="K3-nano on text",
        )
    return net.eval(), run


# ------------------------------------------------------------------------------------------- stored


def planned(purpose: str, variant: str, seed: int, config: TrainingConfig, **task: int) -> TogetherRun:
    """A run that has not been made yet; weights, task and schedule have the same seed."""
    config = dataclasses.replace(config, seed=seed)
    return TogetherRun(purpose, variant, seed, Together(seed=seed, **task), Run(config))


def trained() -> K3:
    """The whole model of the first stored seed, trained, from the folder ``results/k3_together``."""
    with as_file(files("evolve.lab") / "results" / "k3_together") as folder:
        return K3.from_pretrained(folder).eval()


def load_runs() -> list[TogetherRun]:
    """The runs of ``results/together.json``, made by ``python -m benchmarks.together``."""
    rows = json.loads((files("evolve.lab") / "results" / "together.json").read_text("utf-8"))["runs"]
    for row in rows:
        row["task"] = Together(**row["task"])
        row["run"] = Run(**row["run"] | {"config": TrainingConfig(**row["run"]["config"])})
    return [TogetherRun(**row) for row in rows]
