"""How long the channels of a small KDA model remember, before and after it is trained on text.

The decay of a channel over n tokens is exp(g_1 + … + g_n); with ḡ the mean of its log-decays on held-out
text, half of a write is gone after ln 2 / −ḡ tokens. The runs are stored (``results/half_life.json``).
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor

from evolve.decoder import Decoder
from evolve.lab.inside import channel_decays
from evolve.lab.small import small_model
from evolve.lab.text import VOCAB_SIZE, TextBatches, standard_library
from evolve.lab.training import Run, TrainingConfig, train

NEWLINE = 10
EXAM = 1_000_000  # the batch of the validation text that is looked at
BLOCK, BATCH = 128, 8
MODEL = {"num_layers": 2, "num_heads": 2, "head_dim": 16, "head_v_dim": 32}


@dataclass(frozen=True)
class TextRun:
    """A small KDA model on text. ``before`` and ``after``: mean log-decay of each channel [layers, HV · K],
    over all bytes; ``newline``: at newlines only, after training."""

    mixer: str
    seed: int
    run: Run
    before: Sequence[Sequence[float]] = ()
    after: Sequence[Sequence[float]] = ()
    newline: Sequence[Sequence[float]] = ()

    def build(self) -> Decoder:
        """The model before training."""
        return small_model(self.mixer, vocab_size=VOCAB_SIZE, seed=self.seed, **MODEL)

    def repeat(self, until: int | None = None) -> tuple[Decoder, Run]:
        """Train it again, for the first ``until`` steps of its schedule or to the end."""
        corpus, net = standard_library(), self.build()
        exam = TextBatches(corpus.validation, BLOCK, 32)(EXAM)
        return net, train(
            net,
            TextBatches(corpus.training, BLOCK, BATCH, seed=self.seed),
            self.run.config,
            validate=lambda model: {"loss": model.loss(exam.input_ids, exam.targets).item()},
            until=until,
            label=self.mixer,
        )

    def measured(self) -> "TextRun":
        """The same run with its curve and its decays, to four digits."""
        before = mean_decays(self.build())[0]
        net, run = self.repeat()
        after, newline = mean_decays(net.eval())
        run = dataclasses.replace(run, loss=[float(f"{x:.5g}") for x in run.loss])
        return dataclasses.replace(self, run=run, before=before, after=after, newline=newline)


def mean_decays(model: Decoder) -> tuple[list[list[float]], list[list[float]]]:
    """Mean log-decay of each channel of each layer on held-out text: over all bytes, and at newlines."""
    ids = TextBatches(standard_library().validation, BLOCK, 32)(EXAM).input_ids
    layers = [g.flatten(2) for g in channel_decays(model, ids)]
    everywhere = [_rounded(g.mean((0, 1))) for g in layers]
    return everywhere, [_rounded(g[ids == NEWLINE].mean(0)) for g in layers]


def _rounded(x: Tensor) -> list[float]:
    return [float(f"{v:.4g}") for v in x.tolist()]


def half_lives(g: Sequence[Sequence[float]]) -> Tensor:
    """Half-lives in tokens from mean log-decays, sorted from short to long. [channels of all layers]"""
    return (torch.tensor(0.5).log() / torch.tensor(g).flatten()).sort().values


def planned(mixer: str, seed: int, config: TrainingConfig) -> TextRun:
    """A run that has not been made yet."""
    return TextRun(mixer, seed, Run(dataclasses.replace(config, seed=seed)))


def load_runs() -> list[TextRun]:
    """The runs of ``results/half_life.json``, made by ``python -m benchmarks.half_life``."""
    rows = json.loads((files("evolve.lab") / "results" / "half_life.json").read_text("utf-8"))["runs"]
    runs = (Run(TrainingConfig(**r["run"]["config"]), r["run"]["loss"], r["run"]["validation"]) for r in rows)
    return [TextRun(**row | {"run": run}) for row, run in zip(rows, runs)]
