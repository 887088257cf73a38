"""A small K3 on a task for all its memories, whole and with a part missing: for notebook 09.

``python -m benchmarks.together`` trains every run anew and writes into ``src/evolve/lab/results``:
``together.json``, the weights of the whole model's first seed (``k3_together``), and ``k3_text.json``, a K3
of the size "nano" on the standard library's source, byte by byte.

- ``tried``: learning rates for the whole model, with a seed that nothing else uses; the best serves all.
- ``compared``: the whole model and each variant of ``evolve.lab.together.VARIANTS``, three seeds each.
"""

import argparse
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import torch

import evolve.lab
from evolve.lab import stored
from evolve.lab.together import VARIANTS, TogetherRun, load_runs, planned, text_run
from evolve.lab.training import TrainingConfig

RESULTS = Path(evolve.lab.__file__).parent / "results" / "together.json"
WEIGHTS = RESULTS.with_name("k3_together")
TEXT = RESULTS.with_name("k3_text.json")
COMMAND = "python -m benchmarks.together"
SEEDS, TUNING_SEED = (3, 4, 5), 9  # 0 to 2 were looked at while the sizes were chosen
STEPS, EVAL_EVERY = 800, 50
PEAKS = (5e-3, 2.5e-3, 1e-2, 2e-2)
BEST = 5e-3


def plans() -> Iterator[TogetherRun]:
    """Every run of the file, in order."""
    for peak in PEAKS:
        yield planned("tried", "whole", TUNING_SEED, schedule(peak))
    for seed in SEEDS:
        for variant in VARIANTS:
            yield planned("compared", variant, seed, schedule(BEST))


def schedule(peak: float) -> TrainingConfig:
    return TrainingConfig(STEPS, peak=peak, warm_up=20, eval_every=EVAL_EVERY, optimizer="muon")


def measured(plan: TogetherRun) -> TogetherRun:
    torch.set_num_threads(1)
    run, net = plan.measured()
    if (plan.purpose, plan.variant, plan.seed) == ("compared", "whole", SEEDS[0]):
        net.save_pretrained(WEIGHTS)
    return run


def known() -> list[TogetherRun]:
    """What the file holds already."""
    return load_runs() if RESULTS.exists() else []


def is_of(run: TogetherRun, plan: TogetherRun) -> bool:
    """Whether ``run`` is ``plan``, measured."""
    same = ("purpose", "variant", "seed", "task")
    return all(getattr(run, n) == getattr(plan, n) for n in same) and run.run.config == plan.run.config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--only", default="", help="only the runs whose purpose starts so")
    parser.add_argument("--keep", action="store_true", help="train only what the file does not hold yet")
    args = parser.parse_args()
    wanted = [plan for plan in plans() if plan.purpose.startswith(args.only)]
    old = known() if args.keep else []
    runs = [next((run for run in old if is_of(run, plan)), None) for plan in wanted]
    lacking = [i for i, run in enumerate(runs) if run is None]
    with get_context("spawn").Pool(args.jobs) as pool:
        for i, run in zip(lacking, pool.imap(measured, [wanted[i] for i in lacking])):
            print(run.purpose, run.variant, run.run.config.peak, run.seed, run.run.validation[-1], flush=True)
            runs[i] = run
            stored.write(RESULTS, [run for run in runs if run is not None], command=COMMAND)
    if not args.only:
        text_run()[1].save(TEXT, command=COMMAND)


if __name__ == "__main__":
    main()
