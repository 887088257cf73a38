"""The memory cell, trained by gradient descent, with three seeds: the spread beside notebook 05's live runs.

``python -m benchmarks.cell`` trains every run anew and writes ``src/evolve/lab/results/cell.json``.

- ``decays``: only the decays are learned; every write has strength 1, the keys are a basis.
- ``strengths``: the write strengths are learned as well.
- ``2 lifetimes``, ``3 lifetimes``, ``4 lifetimes``: keys and strengths are learned, too, for a gated rule
  with 1, 2 or 4 heads that share the 16 channels (and have an output gate), and for KDA with one.
- ``reads erase``: a delta rule whose reads may be followed by a write of zero to the key that was read.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import evolve.lab
from evolve.lab import stored
from evolve.lab.cell import RULES, CellRun, CellTask, planned
from evolve.lab.training import TrainingConfig

RESULTS = Path(evolve.lab.__file__).parent / "results" / "cell.json"
COMMAND = "python -m benchmarks.cell"
SEEDS = (0, 1, 2)
CONFIG = TrainingConfig(steps=200, peak=0.1, warm_up=20)
ALL = {"learn_strengths": True, "learn_keys": True}


def plans() -> list[CellRun]:
    """Every run of the file, in order."""
    table = [
        (name, rule, CellTask(), cell)
        for name, cell in (("decays", {}), ("strengths", {"learn_strengths": True}))
        for rule in RULES
    ]
    table.append(("reads erase", "delta_rule", CellTask(), {"reads_erase": True}))
    for L in (2, 3, 4):
        task, heads = CellTask(lifetimes=L, rounds=2 * L + 2), (1, 2) if L == 2 else (1, 2, 4)
        table += [(f"{L} lifetimes", "gated_delta_rule", task, ALL | {"heads": h}) for h in heads]
        table.append((f"{L} lifetimes", "kda", task, ALL | {"heads": 1}))
    return [
        planned(name, rule, seed, task, CONFIG, **cell) for name, rule, task, cell in table for seed in SEEDS
    ]


def measured(plan: CellRun) -> CellRun:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    return plan.measured()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    runs = []
    with ProcessPoolExecutor(parser.parse_args().jobs) as pool:
        for run in pool.map(measured, plans()):
            print(run.name, run.rule, dict(run.cell), run.seed, dict(run.exam), flush=True)
            runs.append(run)
    stored.write(RESULTS, runs, command=COMMAND)


if __name__ == "__main__":
    main()
