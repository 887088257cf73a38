"""Trained recall with several seeds: the spread beside the one run that notebooks 02 and 03 show live.

``python -m benchmarks.recall`` trains every run anew and writes ``src/evolve/lab/results/recall.json``.
Within one comparison models have the same number of parameters (within 0.3 %), data and schedule. Its peak
rate is near the best for each: with one seed, recall of 8 pairs at 3e-3, 1e-2 and 3e-2 was .94, .98, .97 for
linear attention, .54, .81, .84 for its elu + 1 form and .88, .98, .97 for the delta rule. One layer and one
head, since two layers can make up for each other's memory: the last comparison is there to show it.

- ``pairs``: N = 8 pairs with keys of K = 8 channels; examined with 2 to 32 pairs.
- ``no convolution``: the same without the short convolution.
- ``rewritten``: each of N = 8 keys is written twice, K = 16; ``old``: how often the first value is answered.
- ``rewritten, two layers``: the same with two layers, trained longer, three seeds; ``third``: the share of
  right answers when every key has been written once more than in training.

``--only NAME`` makes one comparison anew and keeps the others as they are stored.
"""

import argparse
import dataclasses
from pathlib import Path

import torch
from torch import nn

import evolve.lab
from evolve.lab import stored
from evolve.lab.seeds import generator
from evolve.lab.small import rewritten_answers
from evolve.lab.tasks import AssociativeRecall, Batch, accuracy
from evolve.lab.training import TrainingConfig

RESULTS = Path(evolve.lab.__file__).parent / "results" / "recall.json"
COMMAND = "python -m benchmarks.recall"
SEEDS = (0, 1, 2, 3, 4)
COUNTS = (2, 4, 8, 12, 16, 24, 32)  # pairs in an exam
SHAPE = {"num_layers": 1, "num_heads": 1, "head_v_dim": 32}
CONFIG = TrainingConfig(steps=400, peak=1e-2, eval_every=20)
PAIRS = AssociativeRecall(num_pairs=8)
REWRITTEN = AssociativeRecall(num_pairs=8, rewrites=8)
LONGER = dataclasses.replace(CONFIG, steps=1500, eval_every=50)


def plans() -> list[stored.StoredRun]:
    """Every run of the file, in order."""
    table = [
        ("pairs", PAIRS, mixer, SHAPE | {"head_dim": 8})
        for mixer in ("softmax_attention", "linear_attention", "linear_attention_elu1", "delta_rule")
    ]
    table += [
        ("no convolution", PAIRS, mixer, SHAPE | {"head_dim": 8, "conv_size": None})
        for mixer in ("softmax_attention", "linear_attention")
    ]
    table += [
        ("rewritten", REWRITTEN, mixer, SHAPE | {"head_dim": 16})
        for mixer in ("softmax_attention", "linear_attention", "delta_rule")
    ]
    runs = [
        stored.planned(name, mixer, task, CONFIG, seed=seed, **model)
        for name, task, mixer, model in table
        for seed in SEEDS
    ]
    deep = SHAPE | {"num_layers": 2, "head_dim": 16}
    return runs + [
        stored.planned("rewritten, two layers", mixer, REWRITTEN, LONGER, seed=seed, **deep)
        for mixer in ("linear_attention", "delta_rule")
        for seed in SEEDS[:3]
    ]


def exams(plan: stored.StoredRun, model: nn.Module) -> dict[str, float]:
    """What is measured after training."""
    if plan.task.rewrites:
        batch = dataclasses.replace(plan.task, batch_size=256)(stored.EXAM)
        third = {} if plan.model["num_layers"] == 1 else {"third": third_write(model, plan.task, batch)}
        return rewritten_answers(model, batch) | third
    sizes = {n: dataclasses.replace(plan.task, num_pairs=n, batch_size=128) for n in COUNTS}
    batches = {str(n): task(stored.EXAM) for n, task in sizes.items()}
    return {n: accuracy(model(b.input_ids), b.targets) for n, b in batches.items()}


def third_write(model: nn.Module, task: AssociativeRecall, batch: Batch) -> float:
    """Accuracy on ``batch`` of ``task`` (each key written twice) with a third value for every key."""
    N, rng = task.num_pairs, generator(stored.EXAM)
    questions = batch.input_ids[:, 4 * N :]
    first = (questions[:, :, None] == batch.input_ids[:, None, : 2 * N : 2]).float().argmax(-1)
    old = batch.input_ids[:, 1 : 2 * N : 2].gather(1, first)  # of each question, its first value
    answers = task.num_keys + torch.randint(task.num_values, questions.shape, generator=rng)
    for _ in range(2):  # a value that the key has had already gives way to the next one
        seen = (answers == old) | (answers == batch.targets[:, 4 * N :])
        answers = torch.where(seen, task.num_keys + (answers - task.num_keys + 1) % task.num_values, answers)
    order = torch.rand(questions.shape, generator=rng).argsort(1)
    third = torch.stack([questions.gather(1, order), answers.gather(1, order)], dim=-1).flatten(1)
    logits = model(torch.cat([batch.input_ids[:, : 4 * N], third, questions], dim=1))
    return accuracy(logits[:, 6 * N :], answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted({plan.name for plan in plans()}), help="one comparison")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    kept = {(r.name, r.mixer, r.seed): r for r in stored.load("recall")} if only else {}
    runs = []
    for plan in plans():
        if only and plan.name != only:
            runs.append(kept[plan.name, plan.mixer, plan.seed])
            continue
        run = plan.measured(lambda model, plan=plan: exams(plan, model))
        print(run.name, run.mixer, run.seed, {k: round(v, 2) for k, v in run.exams.items()}, flush=True)
        runs.append(run)
    stored.save(RESULTS, runs, command=COMMAND)


if __name__ == "__main__":
    main()
