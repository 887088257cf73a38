"""Small decoders with experts on text: how evenly experts are used, by which bytes, and what they forget.

Every model reads one kind of text first, the source of Python's standard library, and then another, Python's
documentation, or, as a control, more of the first. In each layer it has one of three feed-forward networks:

    dense    one SwiGLU network with as many parameters as a token of ``experts`` passes through, router too
    wide     one with as many as ``experts`` has in all
    experts  16 SwiGLU networks of which a token visits 2, their load kept even by one of ``RULES``
"""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from evolve.balancing import Rule, balanced, expert_load, quantile_balance, recorded_routing, sign_balance
from evolve.checks import check_shape, require
from evolve.decoder import Decoder, swiglu
from evolve.lab.accounting import activated_parameters, parameters
from evolve.lab.small import MIXERS
from evolve.lab.tasks import Batch
from evolve.lab.text import VOCAB_SIZE, Corpus, TextBatches, documentation, standard_library
from evolve.lab.training import Run, TrainingConfig, train
from evolve.moe import LatentMoE, Router, route

BLOCK, BATCH, EXAM = 96, 8, 1_000_000  # tokens a sequence, sequences a step, the batch that is looked at
LAYERS, WIDTH, EXPERTS, TOP_K, EXPERT_SIZE = 2, 64, 16, 2, 64
HEADS = {"num_heads": 2, "head_dim": 16, "head_v_dim": 32}
KINDS = ("dense", "wide", "experts")
KEPT_EVERY = 10  # steps between two loads that are stored
SIGN_RATE = 3e-3  # of the sign rule, the best of three


def no_balance(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The rule of a router that is left alone."""
    return bias


RULES: dict[str, Rule] = {"none": no_balance, "sign": sign_balance, "quantile": quantile_balance}


def expert_model(kind: str, *, seed: int = 0) -> Decoder:
    """Softmax attention with a short convolution in each layer, and the feed-forward networks of ``kind``."""
    require(kind in KINDS, f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    router = EXPERTS / 3  # its EXPERTS · WIDTH parameters, as hidden units of a SwiGLU network
    inner = {"dense": TOP_K * EXPERT_SIZE + router, "wide": EXPERTS * EXPERT_SIZE + router, "experts": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mixers = [MIXERS["softmax_attention"](WIDTH, **HEADS) for _ in range(LAYERS)]
        networks = [expert_layer() for _ in range(LAYERS)] if kind == "experts" else None
        sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "intermediate_size": round(inner[kind])}
        return Decoder(mixers, **sizes, feed_forwards=networks)


def expert_layer() -> LatentMoE:
    """16 SwiGLU experts at full width, 2 of them for a token; no shared one."""
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "expert_size": EXPERT_SIZE}
    return LatentMoE(WIDTH, **sizes, activation=swiglu)


# ------------------------------------------------------------------------------------------- costs


def layer_cost(layer: nn.Module, width: int, tokens: int = 64) -> dict[str, float]:
    """Parameters of a layer [..., width] -> [..., width], those that a token is multiplied by, and the FLOPs
    of its matrix products for a token. ``layer`` must be on ``meta``: nothing is computed."""
    x = torch.empty(1, tokens, width, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x)
    used = {"parameters": parameters(layer), "activated": activated_parameters(layer)}
    return used | {"flops": counter.get_total_flops() / tokens}


# ------------------------------------------------------------------------------------------- loads


@contextmanager
def balanced_and_watched(model: nn.Module, rule: Rule) -> Iterator[list[Tensor]]:
    """``balanced(model, rule)`` that also keeps the load of every training step: counts [E], layer by layer.

    A model without routers is left as it is, with an empty list.
    """
    counts: list[Tensor] = []

    def watched(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
        counts.append(expert_load(route(scores, bias, top_k).indices, len(bias)).counts)
        return rule(scores, bias, top_k)

    if any(isinstance(m, Router) for m in model.modules()):
        with balanced(model, watched):
            yield counts
    else:
        yield counts


def by_layer(counts: list[Tensor], layers: int = LAYERS) -> Tensor:
    """Loads as they were kept, [steps · layers] of [E], as one tensor [layers, steps, E]."""
    require(len(counts) > 0, "counts must hold at least one load, got none")
    return torch.stack(counts).unflatten(0, (-1, layers)).transpose(0, 1)


# ------------------------------------------------------------------------------------ who takes what

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MEMBERS = {
    **{"lower case": LETTERS, "upper case": LETTERS.upper(), "digit": "0123456789", "underscore": "_"},
    **{"space": " ", "line end": "\n", "bracket": "()[]{}", "quote": "'\"`"},
}
CLASSES = (*_MEMBERS, "other")


def byte_classes(ids: Tensor) -> Tensor:
    """Which of ``CLASSES`` each byte belongs to: int64, shape of ``ids``."""
    table = torch.full((VOCAB_SIZE,), len(CLASSES) - 1)
    for i, members in enumerate(_MEMBERS.values()):
        table[list(members.encode())] = i
    return table[ids]


@torch.no_grad()
def routings(model: nn.Module, ids: Tensor) -> Tensor:
    """The experts that each token of ``ids`` [B, T] chooses in each layer: [layers, B·T, k]."""
    was_training = model.training
    with recorded_routing(model.eval()) as record:
        model(ids)
    model.train(was_training)
    return torch.stack([calls[0].indices for calls in record.values()])


def shares(indices: Tensor, groups: Tensor, num_groups: int, num_experts: int = EXPERTS) -> Tensor:
    """Of the choices of each group of tokens, the share of each expert: [num_groups, num_experts].

    indices: [N, k]. groups: [N] int64. A group without a token has shares of 0.
    """
    check_shape("indices", indices, N=None, k=None)
    check_shape("groups", groups, N=len(indices))
    chosen = groups[:, None] * num_experts + indices
    counts = torch.bincount(chosen.flatten(), minlength=num_groups * num_experts)
    counts = counts.view(num_groups, num_experts).double()
    return counts / counts.sum(1, keepdim=True).clamp(min=1)


def kept_choices(before: Tensor, after: Tensor) -> float:
    """Of the choices [N, k] before, the share that the same tokens still make after."""
    require(before.shape == after.shape, "before and after must be of the same tokens")
    return (before[:, :, None] == after[:, None]).any(2).double().mean().item()


def guessed_choices(
    indices: Tensor, groups: Tensor, num_groups: int = VOCAB_SIZE, num_experts: int = EXPERTS
) -> float:
    """The share of choices [N, k] that is right if each group of ``groups`` [N] is always given to the k
    experts that take it most often: counted on one half of the tokens, examined on the other, and the other
    way round. A group that the counted half lacks is given the k experts that are asked most.

    1 if a token's experts depend on its group alone. A single group gives what the busiest experts give.
    """
    k, halves = indices.shape[1], torch.arange(len(indices)).tensor_split(2)
    found = 0.0
    for counted, examined in (halves, halves[::-1]):
        use = shares(indices[counted], groups[counted], num_groups, num_experts)
        usual = shares(indices[counted], torch.zeros_like(counted), 1, num_experts)
        favourites = torch.where(use.any(1, keepdim=True), use, usual).topk(k).indices
        found += kept_choices(indices[examined], favourites[groups[examined]]) * len(examined)
    return found / len(indices)


# --------------------------------------------------------------------------------------- forgetting


def exam_of(corpus: Corpus) -> Batch:
    """The held-out text that models are examined on."""
    return TextBatches(corpus.validation, BLOCK, 64)(EXAM)


@dataclass(frozen=True)
class ExpertRun:
    """A small model that reads code, and then documentation.

    ``rule``: a key of ``RULES`` (dense models have none to use). ``held``: the rule rests in the second part.
    ``control``: the second part is more code, at the same rates, so that what the schedule does can be told
    from what the other text does. ``first``, ``second``: the two trainings; each validation holds the loss
    on ``code`` and on ``prose``.
    ``loads``: of the first training, every tenth step's counts [layers, steps, E]. ``looks``: see ``look``.
    """

    name: str
    kind: str
    rule: str
    seed: int
    first: Run
    second: Run | None = None
    held: bool = False
    control: bool = False
    sign_rate: float = SIGN_RATE
    loads: list = field(default_factory=list)
    looks: dict = field(default_factory=dict)

    def build(self) -> Decoder:
        """The model before training."""
        return expert_model(self.kind, seed=self.seed)

    def learn(self, net: Decoder, part: int, until: int | None = None) -> tuple[Run, list[Tensor]]:
        """Train ``net`` in place in its first (0: code) or second part (1: prose, or code in a control): the
        curve, the loads. A control's second part goes on in the stream of batches where the first ended."""
        rule = RULES["none" if part == 1 and self.held else self.rule]
        rule = partial(rule, rate=self.sign_rate) if rule is sign_balance else rule
        plan = self.second if part else self.first
        corpus = documentation if part and not self.control else standard_library
        batches = TextBatches(corpus().training, BLOCK, BATCH, seed=self.seed)
        passed = self.first.config.steps if part and self.control else 0
        exams = {"code": exam_of(standard_library()), "prose": exam_of(documentation())}
        with balanced_and_watched(net, rule) as counts:
            run = train(
                net,
                lambda n: batches(passed + n),
                plan.config,
                validate=partial(losses, exams=exams),
                until=until,
                label=f"{self.name} {self.kind}",
            )
        return run, counts

    def measured(self) -> "ExpertRun":
        """The same run with its curves, loads and looks."""
        net = self.build()
        first, counts = self.learn(net, 0)
        loads = by_layer(counts)[:, ::KEPT_EVERY].tolist() if counts else []
        found = dataclasses.replace(self, first=_rounded(first), loads=loads)
        if self.second is None:
            return found
        before = copy.deepcopy(net)
        second, _ = self.learn(net, 1)
        return dataclasses.replace(found, second=_rounded(second), looks=look(before, net))


@torch.no_grad()
def losses(model: Decoder, exams: dict[str, Batch]) -> dict[str, float]:
    """The loss of each exam, nats a byte."""
    return {name: model.loss(e.input_ids, e.targets).item() for name, e in exams.items()}


#: What can be put back as it was before the second training, and by which names its parameters are known.
PARTS: dict[str, Callable[[str], bool]] = {
    "nothing": lambda name: False,
    "routers": lambda name: ".gate." in name,
    "feed-forward networks": lambda name: ".mlp." in name or ".block_sparse_moe." in name,
    "attention": lambda name: ".self_attn." in name,
    "embedding and head": lambda name: "embed_tokens" in name or "lm_head" in name,
}


def with_part_back(before: Decoder, after: Decoder, part: str) -> Decoder:
    """A copy of ``after`` with that part (a key of ``PARTS``) as it is in ``before``."""
    require(part in PARTS, f"part must be one of {', '.join(PARTS)}, got {part!r}")
    mixed = copy.deepcopy(after)
    old = {name: t for name, t in before.state_dict().items() if PARTS[part](name)}
    mixed.load_state_dict(mixed.state_dict() | old)
    return mixed


def look(before: Decoder, after: Decoder) -> dict:
    """What the second training has changed, on held-out text, to four digits.

    ``back``: the loss on code with each part put back. With experts also, for each layer: ``kept``, the share
    of choices that code's tokens still make; ``guessed``, of those before, what the ``byte``, its ``class``
    and ``nothing`` guess; ``classes``, before, the shares [classes, E]; ``apart``, the share of choices by
    which code and prose differ in their use of experts (total variation), before and after.
    """
    code, prose = exam_of(standard_library()), exam_of(documentation())
    mixed = {part: with_part_back(before, after, part) for part in PARTS}
    back = {part: losses(m, {"code": code, "prose": prose}) for part, m in mixed.items()}
    found = {"back": {part: {k: _digits(x) for k, x in two.items()} for part, two in back.items()}}
    if not any(isinstance(m, Router) for m in before.modules()):
        return found
    ids = code.input_ids.flatten()
    old, new = (routings(m, code.input_ids) for m in (before, after))
    found["kept"] = [_digits(kept_choices(a, b)) for a, b in zip(old, new)]
    groups = byte_classes(ids)
    known = {"byte": ids, "class": groups, "nothing": torch.zeros_like(ids)}
    found["guessed"] = {name: [_digits(guessed_choices(a, g)) for a in old] for name, g in known.items()}
    classes = [shares(a, groups, len(CLASSES)) for a in old]
    found["classes"] = [[[_digits(x) for x in row] for row in layer.tolist()] for layer in classes]
    other = [routings(m, prose.input_ids) for m in (before, after)]
    found["apart"] = [[_digits(_distance(a, b)) for a, b in zip(*pair)] for pair in zip((old, new), other)]
    return found


def _distance(a: Tensor, b: Tensor) -> float:
    """Half the sum of differences of two uses of the experts."""
    one, two = (shares(x, torch.zeros(len(x), dtype=torch.int64), 1)[0] for x in (a, b))
    return ((one - two).abs().sum() / 2).item()


def _digits(x: float) -> float:
    return float(f"{x:.4g}")


def _rounded(run: Run) -> Run:
    rows = [{k: float(f"{x:.5g}") for k, x in row.items()} for row in run.validation]
    return dataclasses.replace(run, loss=[float(f"{x:.5g}") for x in run.loss], validation=rows)


def load_runs() -> list[ExpertRun]:
    """The runs of ``results/experts.json``, made by ``python -m benchmarks.experts``."""
    rows = json.loads((files("evolve.lab") / "results" / "experts.json").read_text("utf-8"))["runs"]

    def parsed(run: dict | None) -> Run | None:
        return run and Run(**run | {"config": TrainingConfig(**run["config"])})

    return [ExpertRun(**row | {part: parsed(row[part]) for part in ("first", "second")}) for row in rows]
