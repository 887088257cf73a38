"""Twelve layers with a residual stream and with Attention Residuals, trained on text: for notebook 07.

``python -m benchmarks.depth`` trains every run anew on the standard library's source, byte by byte, and
writes ``src/evolve/lab/results/depth.json``: same layers, data, steps and seeds.

- ``peak ...``: learning rates, tried with a seed that nothing else uses; the best one serves the rest.
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
PEAKS = (6e-3, 1.2e-2, 2.4e-2)
BEST = {None: 1.2e-2, 4: 1.2e-2, 1: 1.2e-2}  # of the PEAKS, by block size
OTHER_SIZES = (2, 8, 24)


def plans() -> list[DepthRun]:
    """Every run of the file, in order."""
    table = [(f"peak {peak:g}", size, peak, TUNING_SEED) for size in BEST for peak in PEAKS]
    table += [("compared", size, peak, seed) for size, peak in BEST.items() for seed in SEEDS]
    table += [("block size", size, BEST[4], SEEDS[0]) for size in OTHER_SIZES]
    return [
        DepthRun(name, size, seed, Run(TrainingConfig(STEPS, peak=peak, eval_every=25, seed=seed)))
        for name, size, peak, seed in table
    ]


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
            rate = run.run.config.peak
            print(run.name, run.block_size, rate, run.seed, run.run.validation[-1]["loss"], flush=True)
            runs.append(run)
    if args.only is None:
        stored.write(RESULTS, runs, command=COMMAND)


if __name__ == "__main__":
    main()
