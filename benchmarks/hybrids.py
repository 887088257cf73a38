"""Trained hybrids with several seeds: the spread beside the one run that notebook 06 shows live.

``python -m benchmarks.hybrids`` trains every run anew and writes ``src/evolve/lab/results/hybrids.json``.
Within one comparison models have the same number of parameters, data and schedule.

- ``ratio``: lists of 1 to 8 pairs; four layers of KDA ("k": two heads, K = 8, V = 16) and MLA ("m", or "c"
  where nothing below has a short convolution: it then sees x and a convolution of x) in four orders. Examined
  with 4 to 32 pairs. ``pairs N``: the share of right answers; ``numbers N``: of numbers of four places, those
  that are right in every place; ``age a``: of 32 pairs, the share of right answers to the four that have a to
  a + 3 younger ones.
- ``no convolution``: the same with MLA as it is in all four layers.
- ``latent``: two layers of MLA with a convolution whose latent has R = 2 to 16 numbers.

``--jobs N`` trains N at a time.
"""

import argparse
import dataclasses
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn

import evolve.lab
from evolve.lab import stored
from evolve.lab.hybrids import ShortAndLong, recalled, whole_numbers
from evolve.lab.training import TrainingConfig

RESULTS = Path(evolve.lab.__file__).parent / "results" / "hybrids.json"
COMMAND = "python -m benchmarks.hybrids"
SEEDS = (0, 1, 2)
COUNTS = (4, 8, 16, 24, 32)  # pairs in an exam
LAYOUTS = ("kkkk", "kkkm", "kmkm", "cccc")
RANKS = (2, 4, 8, 16)
SHORTER = TrainingConfig(steps=300, peak=1e-2, warm_up=20, eval_every=20)
CONFIG = dataclasses.replace(SHORTER, steps=600)
TASK = ShortAndLong(num_pairs=8)


def plans() -> list[stored.StoredRun]:
    """Every run of the file, in order."""
    table = [("ratio", layout, CONFIG, {}) for layout in LAYOUTS]
    table += [("no convolution", "mmmm", CONFIG, {})]
    table += [("latent", "cc", SHORTER, {"kv_lora_rank": R}) for R in RANKS]
    return [
        stored.planned(name, layout, TASK, config, seed=seed, **model)
        for seed in SEEDS
        for name, layout, config, model in table
    ]


def exams(plan: stored.StoredRun, model: nn.Module) -> dict[str, float]:
    """What is measured after training."""
    measured = {}
    for n in COUNTS:
        right = recalled(model, plan.task.plain(n, batch_size=128), stored.EXAM)
        measured |= {f"pairs {n}": right.double().mean().item(), f"numbers {n}": whole_numbers(right)}
    by_age = right.flip(1).double().unflatten(1, (-1, 4)).mean((0, 2)).tolist()  # the youngest pair first
    return measured | {f"age {4 * i}": share for i, share in enumerate(by_age)}


def make(plan: stored.StoredRun) -> stored.StoredRun:
    torch.set_num_threads(1)
    return plan.measured(lambda model: exams(plan, model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    runs = []
    with get_context("spawn").Pool(parser.parse_args().jobs) as pool:
        for run in pool.imap(make, plans()):
            print(run.name, run.mixer, run.seed, {k: round(v, 2) for k, v in run.exams.items()}, flush=True)
            runs.append(run)
            stored.save(RESULTS, runs, command=COMMAND)


if __name__ == "__main__":
    main()
