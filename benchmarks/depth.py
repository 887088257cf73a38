"""Twelve layers with a residual stream and with Attention Residuals, trained on text: for notebook 07.

``python -m benchmarks.depth`` trains every run anew on the standard library's source, byte by byte, and
writes ``src/evolve/lab/results/depth.json``: same layers, data, steps and seeds.

- ``tried``: learning rates, tried with a seed that nothing else uses; the best serve the rest. A tenth of
  the rate for the pseudo-queries is tried as well.
- ``compared``: residual stream, blocks of four sub-layers, and the full form, three seeds each.
- ``block size``: other sizes of block, one seed, at the rate of blocks of four.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import evolve.lab
from evolve.lab import stored
from evolve.lab.depth import DepthRun
from evolve.lab.training import Run, TrainingConfig

RESULTS = Path(evolve.lab.__file__).parent / "results" / "depth.json"
COMMAND = "python -m benchmarks.depth"
SEEDS, TUNING_SEED = (0, 1, 2), 9
STEPS = 250
TRIED = {  # peaks and query rates, by block size
    None: [(6e-3, 1.0), (1.2e-2, 1.0), (2.4e-2, 1.0)],
    4: [(6e-3, 1.0), (1.2e-2, 1.0), (2.4e-2, 1.0), (6e-3, 0.1), (1.2e-2, 0.1), (2.4e-2, 0.1)],
    1: [(1.2e-2, 1.0), (6e-3, 0.1), (1.2e-2, 0.1), (2.4e-2, 0.1)],
}
BEST = {None: (1.2e-2, 1.0), 4: (1.2e-2, 0.1), 1: (1.2e-2, 0.1)}  # of those
OTHER_SIZES = (2, 8, 24)


def plans() -> list[DepthRun]:
    """Every run of the file, in order."""
    table = [("tried", size, rates, TUNING_SEED) for size, tried in TRIED.items() for rates in tried]
    table += [("compared", size, rates, seed) for size, rates in BEST.items() for seed in SEEDS]
    table += [("block size", size, BEST[4], SEEDS[0]) for size in OTHER_SIZES]
    return [DepthRun(name, size, seed, Run(schedule(rates, seed))) for name, size, rates, seed in table]


def schedule(rates: tuple[float, float], seed: int) -> TrainingConfig:
    peak, query_rate = rates
    return TrainingConfig(STEPS, peak=peak, query_rate=query_rate, eval_every=25, seed=seed)


def measured(plan: DepthRun) -> DepthRun:
    torch.set_num_threads(1)
    return plan.measured()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--only", help="try only the runs whose name starts so, and store nothing")
    args = parser.parse_args()
    runs = []
    with ProcessPoolExecutor(args.jobs) as pool:
        wanted = [plan for plan in plans() if plan.name.startswith(args.only or "")]
        for run in pool.map(measured, wanted):
            c = run.run.config
            found = run.run.validation[-1]["loss"]
            print(run.name, run.block_size, c.peak, c.query_rate, run.seed, found, flush=True)
            runs.append(run)
    if args.only is None:
        stored.write(RESULTS, runs, command=COMMAND)


if __name__ == "__main__":
    main()
