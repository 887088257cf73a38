"""Stored training runs: what was run with several seeds, or takes too long to run in a notebook.

A file holds the command that made it, the versions, and for each run its task, model, schedule and seed
beside what was measured, so that a run can be started again from the file alone (``StoredRun.repeat``).
The files are package data: a notebook opened alone finds them.
"""

import dataclasses
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import torch
from torch import nn

from evolve.checkpoint import replacing
from evolve.checks import require
from evolve.lab.hybrids import ShortAndLong, small_hybrid
from evolve.lab.small import MIXERS, recall_exam, small_model
from evolve.lab.tasks import AssociativeRecall
from evolve.lab.training import Run, TrainingConfig, train

EXAM = 1_000_000  # the batch that models are examined on: far outside the training stream
Exams = Callable[[nn.Module], dict[str, float]]


@dataclass(frozen=True)
class StoredRun:
    """One small model, trained on one recall task.

    ``name`` says what is compared; ``mixer`` and ``model`` are arguments of ``small_model``, or of
    ``small_hybrid`` if ``mixer`` is a layout; ``seed`` draws its weights; ``exams`` are named numbers
    measured on the trained model.
    """

    name: str
    mixer: str
    seed: int
    task: AssociativeRecall
    model: Mapping[str, int | None]
    run: Run
    exams: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def build(self) -> nn.Module:
        """The model before training."""
        make = small_model if self.mixer in MIXERS else small_hybrid
        return make(self.mixer, vocab_size=self.task.vocab_size, seed=self.seed, **self.model)

    def repeat(self, until: int | None = None) -> tuple[nn.Module, Run]:
        """Train it again, for the first ``until`` steps of its schedule or to the end."""
        mixed = isinstance(self.task, ShortAndLong)  # examined with its longest lists
        exam = self.task.plain(self.task.num_pairs) if mixed else self.task
        net, validate = self.build(), recall_exam(exam(EXAM))
        return net, train(net, self.task, self.run.config, validate=validate, until=until, label=self.name)

    def measured(self, exams: Exams) -> "StoredRun":
        """The same run with its curve and what ``exams(model)`` gives after it."""
        net, run = self.repeat()
        with torch.no_grad():
            return dataclasses.replace(self, run=run, exams=exams(net.eval()))


def planned(
    name: str, mixer: str, task: AssociativeRecall, config: TrainingConfig, *, seed: int, **model: int | None
) -> StoredRun:
    """A run that has not been made yet. Task and schedule get the seed, too, so that runs share nothing."""
    task, config = dataclasses.replace(task, seed=seed), dataclasses.replace(config, seed=seed)
    return StoredRun(name, mixer, seed, task, model, Run(config))


def save(path: str | os.PathLike, runs: Sequence[StoredRun], *, command: str) -> None:
    """Write the runs as JSON, one a line, with the command that makes them again."""
    write(path, [_rounded(run) for run in runs], command=command)


def write(path: str | os.PathLike, runs: Sequence[object], *, command: str) -> None:
    """``save`` for runs of any dataclass."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    rows = ",\n".join(json.dumps(dataclasses.asdict(run)) for run in runs)
    head = json.dumps({"command": command, "versions": versions})[:-1]
    with replacing(Path(path)) as file:
        file.write_text(f'{head}, "runs": [\n{rows}\n]}}\n', encoding="utf-8")


def load(name: str, file: Traversable | None = None) -> list[StoredRun]:
    """The runs of ``evolve.lab``'s ``results/<name>.json``, or of a ``file``.

    Raises ``ValueError`` that names the file if it is missing or not a file of runs.
    """
    file = files("evolve.lab") / "results" / f"{name}.json" if file is None else file
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["runs"]
        require(isinstance(rows, list) and len(rows) > 0, "runs must be a list of runs")
        return [_parsed(row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{file.name} is not a file of stored runs: {error}") from error


def command(name: str) -> str:
    """The command that makes ``results/<name>.json`` again."""
    return json.loads((files("evolve.lab") / "results" / f"{name}.json").read_text("utf-8"))["command"]


def select(runs: Sequence[StoredRun], name: str, mixer: str) -> list[StoredRun]:
    """Those of one comparison and one mixer, in order of their seeds. ``ValueError`` if there are none."""
    found = sorted((r for r in runs if (r.name, r.mixer) == (name, mixer)), key=lambda r: r.seed)
    known = sorted({(r.name, r.mixer) for r in runs})
    require(bool(found), f"name and mixer must be one of {known}, got {(name, mixer)}")
    return found


def _parsed(row: dict) -> StoredRun:
    run = row["run"]
    task = ShortAndLong if "shortest" in row["task"] else AssociativeRecall
    parts = {
        "task": task(**row["task"]),
        "run": Run(TrainingConfig(**run["config"]), run["loss"], run["validation"]),
    }
    steps, numbers = len(parts["run"].loss), [*parts["run"].loss, *row["exams"].values()]
    require(steps in (0, parts["run"].config.steps), f"a run must have a loss for each step, got {steps}")
    require(all(isinstance(x, int | float) for x in numbers), "losses and exams must be numbers")
    kept = {row["seed"], parts["task"].seed, parts["run"].config.seed}
    require(len(kept) == 1, f"task and schedule must have the run's seed, got {sorted(kept)}")
    return StoredRun(**row | parts)


def _rounded(run: StoredRun) -> StoredRun:
    """Losses to five digits: what a curve needs, and what another machine repeats for a while."""
    loss = [float(f"{x:.5g}") for x in run.run.loss]
    return dataclasses.replace(run, run=dataclasses.replace(run.run, loss=loss))
