"""What a decay is worth to a trained model when contexts change: the spread beside notebook 04's live runs.

``python -m benchmarks.context_switch`` trains every run anew and writes
``src/evolve/lab/results/context_switch.json``. One layer, two heads with a state of 8 × 32 each, the same
number of parameters. A sequence is a context of six pairs, SWITCH, six other pairs, and ten questions: the
six keys of this context, and four of the last one's, which are void. Each model also sits exams with more
contexts than it was trained on.

- ``peak ...``: learning rates, tried with a seed that nothing else uses; the best one serves the rest.
- ``left unread``: the task. ``read first``: the old context's questions are asked, too, before SWITCH.
- ``four contexts``: trained on four.
"""

import argparse
import dataclasses
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import evolve.lab
from evolve.decoder import Decoder
from evolve.lab import stored
from evolve.lab.inside import energy_left, first_layer_writes
from evolve.lab.small import void_exam
from evolve.lab.tasks import AssociativeRecall
from evolve.lab.training import TrainingConfig

RESULTS = Path(evolve.lab.__file__).parent / "results" / "context_switch.json"
COMMAND = "python -m benchmarks.context_switch"
SEEDS, TUNING_SEED = (0, 1, 2), 9
SHAPE = {"num_layers": 1, "num_heads": 2, "head_dim": 8, "head_v_dim": 32}
UNREAD = AssociativeRecall(num_pairs=6, num_keys=16, num_values=16, contexts=2, voids=4, ask_last_only=True)
FOUR, READ = (dataclasses.replace(UNREAD, **change) for change in ({"contexts": 4}, {"ask_last_only": False}))
PEAKS = (5e-3, 1e-2, 2e-2, 4e-2)
BEST = {"delta_rule": 1e-2, "delta_rule_output_gate": 1e-2, "gated_delta_rule": 2e-2}  # of the PEAKS
STEPS = 300
CONTEXTS = (2, 4, 8, 16)  # in the exams


def plans() -> list[stored.StoredRun]:
    """Every run of the file, in order."""
    table = [(f"peak {peak:g}", mixer, UNREAD, peak, STEPS, TUNING_SEED) for mixer in BEST for peak in PEAKS]
    for name, rates, task in (
        ("left unread", BEST, UNREAD),
        ("read first", {"delta_rule": BEST["delta_rule"]}, READ),
        ("four contexts", {"delta_rule": BEST["delta_rule"]}, FOUR),
    ):
        table += [(name, mixer, task, peak, STEPS, seed) for mixer, peak in rates.items() for seed in SEEDS]
    return [
        stored.planned(
            name, mixer, task, TrainingConfig(steps=steps, peak=peak, eval_every=25), seed=seed, **SHAPE
        )
        for name, mixer, task, peak, steps, seed in table
    ]


def exams(plan: stored.StoredRun, model: Decoder) -> dict[str, float]:
    """What is measured after training: answers, with more contexts too, and a look into the state."""
    large = dataclasses.replace(plan.task, batch_size=256)
    found = void_exam(large, stored.EXAM, last_only=True)(model)
    for n in CONTEXTS:
        exam = void_exam(dataclasses.replace(large, contexts=n), stored.EXAM, last_only=True)(model)
        found |= {f"{name}, {n} contexts": share for name, share in exam.items()}
    if plan.mixer in ("delta_rule", "gated_delta_rule"):
        found |= state_of(plan.task, model)
    return {name: round(x, 5) for name, x in found.items()}


def state_of(task: AssociativeRecall, model: Decoder) -> dict[str, float]:
    """The share of the old context's energy left after SWITCH; the mean decay α of each head, by token."""
    ids = task(stored.EXAM).input_ids
    writes = first_layer_writes(model, ids)
    switch = (ids[0] == task.switch).nonzero()[-1].item()
    pairs = slice(switch + 1, switch + 1 + 2 * task.num_pairs)
    left = energy_left(writes, switch)
    found = {"left after SWITCH": left[1], "left at the first question": left[1 + 2 * task.num_pairs]}
    if writes.g.any():
        for head, alpha in enumerate(writes.g.exp().unbind(-1), 1):
            found[f"alpha of SWITCH, head {head}"] = alpha[:, switch].mean().item()
            found[f"alpha of pairs, head {head}"] = alpha[:, pairs].mean().item()
    return found


def measured(plan: stored.StoredRun) -> stored.StoredRun:
    torch.set_num_threads(1)
    return plan.measured(lambda model: exams(plan, model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--only", help="try only the runs whose name starts so, and store nothing")
    args = parser.parse_args()
    runs = []
    with ProcessPoolExecutor(args.jobs) as pool:
        wanted = [plan for plan in plans() if plan.name.startswith(args.only or "")]
        for run in pool.map(measured, wanted):
            print(run.name, run.mixer, run.seed, {k: round(v, 3) for k, v in run.exams.items()}, flush=True)
            runs.append(run)
    if args.only is None:
        stored.save(RESULTS, runs, command=COMMAND)


if __name__ == "__main__":
    main()
