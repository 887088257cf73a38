"""Small models with experts and without on two kinds of text, one after the other: for notebook 08.

``python -m benchmarks.experts`` trains every run anew and writes ``src/evolve/lab/results/experts.json``: 300
steps on the standard library's source, and then 150 on Python's documentation, byte by byte.

- ``tried``: learning rates, and rates of the sign rule, tried on code with a seed that nothing else uses; the
  best serve the rest, in both parts.
- ``compared``: a dense network with as many parameters as a token passes through, one with as many as there
  are in all, and 16 experts, 2 a token: without balancing, with the sign rule, with Quantile Balancing. Three
  seeds each.
- ``held``: Quantile Balancing that rests while the second text is read.
- ``control``: ``compared`` with more code in place of the second text, at the same rates.

``--missing`` trains only what the file does not hold yet, and keeps the rest.
"""

import argparse
from multiprocessing import get_context
from pathlib import Path

import torch

import evolve.lab
from evolve.lab import stored
from evolve.lab.experts import KINDS, RULES, ExpertRun, load_runs
from evolve.lab.training import Run, TrainingConfig

RESULTS = Path(evolve.lab.__file__).parent / "results" / "experts.json"
COMMAND = "python -m benchmarks.experts"
SEEDS, TUNING_SEED = (0, 1, 2), 9
STEPS, LATER_STEPS = 300, 150
PEAKS = (6e-3, 1.2e-2, 2.4e-2)  # tried for each kind
SIGN_RATES = (1e-3, 3e-3, 1e-2)  # tried for the sign rule, at the peak of experts
BEST = {"dense": 1.2e-2, "wide": 1.2e-2, "experts": 1.2e-2}


def plans() -> list[ExpertRun]:
    """Every run of the file, in order."""

    def plan(name: str, kind: str, rule: str, seed: int, *, peak: float | None = None, **options: object):
        peak = BEST[kind] if peak is None else peak
        later = None if name == "tried" else schedule(LATER_STEPS, peak, seed, 20)
        return ExpertRun(name, kind, rule, seed, schedule(STEPS, peak, seed, 50), later, **options)

    rules = {kind: "quantile" if kind == "experts" else "none" for kind in KINDS}
    tried = [plan("tried", k, rules[k], TUNING_SEED, peak=peak) for k in KINDS for peak in PEAKS]
    tried += [plan("tried", "experts", "sign", TUNING_SEED, sign_rate=rate) for rate in SIGN_RATES]
    compared = [("dense", "none"), ("wide", "none"), *(("experts", rule) for rule in RULES)]
    return [
        *tried,
        *(plan("compared", kind, rule, seed) for kind, rule in compared for seed in SEEDS),
        *(plan("held", "experts", "quantile", seed, held=True) for seed in SEEDS),
        *(plan("control", kind, rule, seed, control=True) for kind, rule in compared for seed in SEEDS),
    ]


def key(run: ExpertRun) -> tuple[object, ...]:
    """What tells a run from the others and says how it is made, without what was measured."""
    later = run.second and run.second.config
    options = run.held, run.control, run.sign_rate
    return run.name, run.kind, run.rule, run.seed, *options, run.first.config, later


def schedule(steps: int, peak: float, seed: int, eval_every: int) -> Run:
    return Run(TrainingConfig(steps, peak=peak, warm_up=20, eval_every=eval_every, seed=seed))


def measured(plan: ExpertRun) -> ExpertRun:
    torch.set_num_threads(1)
    return plan.measured()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--only", help="try only the runs whose name starts so, and store nothing")
    parser.add_argument("--missing", action="store_true", help="keep the runs that the file holds")
    args = parser.parse_args()
    done = {key(run): run for run in load_runs()} if args.missing else {}
    wanted = [plan for plan in plans() if plan.name.startswith(args.only or "") and key(plan) not in done]
    with get_context("spawn").Pool(args.jobs) as pool:
        for run in pool.imap(measured, wanted):
            last = (run.second or run.first).validation[-1]
            print(*key(run)[:7], run.first.config.peak, last, flush=True)
            done[key(run)] = run
            if args.only is None:
                runs = [done[key(plan)] for plan in plans() if key(plan) in done]
                stored.write(RESULTS, runs, command=COMMAND)


if __name__ == "__main__":
    main()
