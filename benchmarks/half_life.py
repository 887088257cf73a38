"""Half-lives of KDA's channels before and after training on text, with three seeds: for notebook 05.

``python -m benchmarks.half_life`` trains two layers of KDA, once with each of the two decay gates, on the
standard library's source, byte by byte, and writes ``src/evolve/lab/results/half_life.json``.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import evolve.lab
from evolve.lab import stored
from evolve.lab.half_life import TextRun, planned
from evolve.lab.training import TrainingConfig

RESULTS = Path(evolve.lab.__file__).parent / "results" / "half_life.json"
COMMAND = "python -m benchmarks.half_life"
SEEDS = (0, 1, 2)
CONFIG = TrainingConfig(steps=300, peak=5e-3, eval_every=50)


def plans() -> list[TextRun]:
    """Every run of the file, in order."""
    return [planned(mixer, seed, CONFIG) for mixer in ("kda", "kda_bounded") for seed in SEEDS]


def measured(plan: TextRun) -> TextRun:
    torch.set_num_threads(1)
    return plan.measured()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    runs = []
    with ProcessPoolExecutor(parser.parse_args().jobs) as pool:
        for run in pool.map(measured, plans()):
            print(run.mixer, run.seed, run.run.validation[-1], flush=True)
            runs.append(run)
    stored.write(RESULTS, runs, command=COMMAND)


if __name__ == "__main__":
    main()
