"""Trained hybrids with several seeds: the spread beside the one run that notebook 06 shows live.

``python -m benchmarks.hybrids`` trains every run anew and writes ``src/evolve/lab/results/hybrids.json``.
Within one comparison models have the same number of parameters, data and schedule.

- ``ratio``: lists of 1 to 8 pairs; four layers of KDA ("k": two heads, K = 8, V = 16) and MLA ("m", or "c"
  where nothing below has a short convolution: it then sees x and a convolution of x) in four orders. Examined
  with 4 to 32 pairs. ``pairs N``: the share of right answers; ``numbers N``: of four pairs that were written
  one after the other, how many are right in all four; ``age a``: of 32 pairs, the share of right answers to
  the four that have a to a + 3 younger ones; ``without MLA``: ``numbers 32`` with MLA silenced.
- ``rate``: all KDA with other learning rates and a seed of its own; the other three need no better one.
- ``no convolution``: the same with MLA as it is in all four layers.
- ``latent``: two layers of MLA with a convolution, whose latent has R = 2 to 64 numbers and which has no
  shared part of key, so that R numbers are all that it keeps of a token. ``cut r``: ``numbers 32`` of the one
  with R = 64 when only the r first singular directions of its keys and values, over lists of 32 pairs, are
  left, untrained.

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
from evolve.lab.hybrids import ShortAndLong, cut_to, latent_tables, recalled, silenced, whole_numbers
from evolve.lab.training import TrainingConfig
from evolve.mla import MultiHeadLatentAttention

RESULTS = Path(evolve.lab.__file__).parent / "results" / "hybrids.json"
COMMAND = "python -m benchmarks.hybrids"
SEEDS = (0, 1, 2)
MORE_SEEDS = (0, 1, 2, 3, 4)  # where they disagree
RATE_SEED = 9  # for choosing a rate, in no comparison
COUNTS = (4, 8, 16, 24, 32)  # pairs in an exam
LAYOUTS = ("kkkk", "kkkm", "kmkm", "cccc")
RANKS = (2, 4, 8, 16, 32, 64)
CUTS = (2, 4, 8, 16, 24, 32, 64)
UNSHARED = {"mla_heads": 4, "shared_dim": 0}
RATES = (5e-3, 1e-2, 2e-2)
SHORTER = TrainingConfig(steps=300, peak=1e-2, warm_up=20, eval_every=20)
CONFIG = dataclasses.replace(SHORTER, steps=600)
TASK = ShortAndLong(num_pairs=8)


def plans() -> list[stored.StoredRun]:
    """Every run of the file, in order."""
    table = [("ratio", layout, CONFIG, {}, MORE_SEEDS) for layout in LAYOUTS]
    table += [("rate", "kkkk", dataclasses.replace(CONFIG, peak=rate), {}, (RATE_SEED,)) for rate in RATES]
    table += [("no convolution", "mmmm", CONFIG, {}, SEEDS)]
    table += [("latent", "cc", SHORTER, UNSHARED | {"kv_lora_rank": R}, SEEDS) for R in RANKS]
    return [
        stored.planned(name, layout, TASK, config, seed=seed, **model)
        for name, layout, config, model, seeds in table
        for seed in seeds
    ]


def numbers(plan: stored.StoredRun, model: nn.Module, n: int = 32) -> float:
    return whole_numbers(recalled(model, plan.task.plain(n, batch_size=128), stored.EXAM))


def exams(plan: stored.StoredRun, model: nn.Module) -> dict[str, float]:
    """What is measured after training."""
    measured = {}
    for n in COUNTS:
        right = recalled(model, plan.task.plain(n, batch_size=128), stored.EXAM)
        measured |= {f"pairs {n}": right.double().mean().item(), f"numbers {n}": whole_numbers(right)}
    by_age = right.flip(1).double().unflatten(1, (-1, 4)).mean((0, 2)).tolist()  # the youngest pair first
    measured |= {f"age {4 * i}": share for i, share in enumerate(by_age)}
    if set(plan.mixer) == {"k", "m"}:
        with silenced(model, MultiHeadLatentAttention):
            measured["without MLA"] = numbers(plan, model)
    if plan.model.get("kv_lora_rank") == max(RANKS):
        measured |= cuts(plan, model)
    return measured


def cuts(plan: stored.StoredRun, model: nn.Module) -> dict[str, float]:
    """What a trained model still finds when its keys and values are cut to their first directions."""
    latents = latent_tables(model, plan.task.plain(32)(stored.EXAM + 1).input_ids)  # not the exam's own lists
    maps = [block.self_attn.kv_b_proj.weight for block in model.layers]
    spaces = [torch.linalg.svd(c @ W.T, full_matrices=False).Vh for c, W in zip(latents, maps)]
    shares = {}
    for r in CUTS:
        with cut_to(model, [Vh[:r] for Vh in spaces]):
            shares[f"cut {r}"] = numbers(plan, model)
    return shares


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
