"""Stored runs: written and read whole, refused when broken, and repeatable from the file alone."""

import dataclasses
import json

import pytest
import torch
from benchmarks import recall

from evolve.lab import stored
from evolve.lab.small import rewritten_answers
from evolve.lab.tasks import AssociativeRecall
from evolve.lab.training import TrainingConfig

TASK = AssociativeRecall(num_pairs=2, num_keys=4, num_values=4, batch_size=2)


def tiny(seed=0):
    return stored.planned(
        "pairs", "kda", TASK, TrainingConfig(steps=3), seed=seed, hidden_size=16, num_layers=1
    )


def test_a_run_is_read_as_it_was_written_and_repeats_itself(tmp_path):
    run = tiny(1).measured(lambda model: {"outputs": model(TASK(0).input_ids).numel()})
    file = tmp_path / "runs.json"
    stored.save(file, [run, tiny()], command="python -m tests")
    first, second = stored.load("runs", file)
    assert first.exams == {"outputs": 2 * 6 * 11}
    assert dataclasses.replace(first, run=run.run) == run
    assert first.run.loss == pytest.approx(run.run.loss, rel=1e-4)
    assert len(first.run.loss) == 3
    assert second == tiny()
    assert first.repeat(2)[1].loss == run.run.loss[:2]
    assert json.loads(file.read_text())["command"] == "python -m tests"
    assert stored.select([second, first], "pairs", "kda") == [second, first]
    with pytest.raises(ValueError, match=r"name and mixer must be one of .*'kda'.* got .*'rnn'"):
        stored.select([first], "pairs", "rnn")


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"runs": [{}]}', '{"runs": [{"run": {"config": {"steps": 0}}}]}']
)
def test_a_broken_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "runs.json").write_text(text)
    with pytest.raises(ValueError, match=r"runs.json is not a file of stored runs"):
        stored.load("runs", tmp_path / "runs.json")


def test_until_walks_the_same_schedule():
    run = tiny()
    assert run.repeat(2)[1].loss == run.repeat()[1].loss[:2]
    with pytest.raises(ValueError, match="until must be at most steps = 3, got 4"):
        run.repeat(4)


RECALL = stored.load("recall")


def test_the_stored_runs_are_those_of_the_script():
    planned = [dataclasses.replace(r, run=r.run.config, exams={}) for r in recall.plans()]
    assert [dataclasses.replace(r, run=r.run.config, exams={}) for r in RECALL] == planned
    assert stored.command("recall") == recall.COMMAND


@pytest.mark.parametrize("run", RECALL, ids=lambda r: f"{r.name}-{r.mixer}-{r.seed}")
def test_the_first_steps_of_a_stored_run_come_out_again(run):
    assert len(run.run.loss) == run.run.config.steps
    assert run.repeat(4)[1].loss == pytest.approx(run.run.loss[:4], rel=1e-3)


def test_answers_to_rewritten_keys_are_sorted_into_latest_and_old():
    task = AssociativeRecall(num_pairs=3, num_keys=5, num_values=7, rewrites=2, batch_size=4)
    batch = task(3)
    latest = torch.where(batch.targets >= 0, batch.targets, 0)
    bound = [dict(zip(row[:6:2].tolist(), row[1:6:2].tolist())) for row in batch.input_ids]
    old = torch.tensor([[b.get(t, 0) for t in row.tolist()] for b, row in zip(bound, batch.input_ids)])
    mixed = torch.where(torch.arange(4)[:, None] < 1, old, latest)  # one row of four gives the old values

    def answers(ids):
        return lambda _: torch.nn.functional.one_hot(ids, task.vocab_size).float()

    assert rewritten_answers(answers(latest), batch) == {"latest": 1.0, "old": 0.0}
    assert rewritten_answers(answers(old), batch) == {"latest": 0.0, "old": 1.0}
    assert rewritten_answers(answers(mixed), batch) == {"latest": 0.75, "old": 0.25}
    once = dataclasses.replace(task, rewrites=0)(0)
    with pytest.raises(ValueError, match="batch must ask for a key that was written twice"):
        rewritten_answers(answers(latest), once)


def test_the_first_validation_of_a_stored_run_comes_out_again():
    run = stored.select(RECALL, "pairs", "delta_rule")[0]
    again = run.repeat(run.run.config.eval_every)[1]
    assert again.validation[0]["step"] == run.run.config.eval_every
    assert again.validation[0]["accuracy"] == pytest.approx(run.run.validation[0]["accuracy"], abs=5e-3)


class LatestPair(torch.nn.Module):
    """Answers a key with the value that followed it last, by looking: what the exams call right."""

    def forward(self, ids):
        T = ids.shape[1]
        same = ids[:, :, None] == ids[:, None]
        is_pair = torch.zeros(T, dtype=torch.bool)
        is_pair[: T - 8 : 2] = True  # of the pairs only, not of the eight questions
        at = torch.where(same & is_pair, torch.arange(T), -1).amax(-1).clamp(min=0)
        vocab = recall.REWRITTEN.vocab_size
        return torch.nn.functional.one_hot(ids.gather(1, (at + 1).clamp(max=T - 1)), vocab).float()


def test_the_exams_give_full_marks_to_a_table_of_the_latest_pairs():
    deep = next(plan for plan in recall.plans() if plan.name == "rewritten, two layers")
    assert recall.exams(deep, LatestPair()) == {"latest": 1.0, "old": 0.0, "third": 1.0}
    batch = dataclasses.replace(deep.task, batch_size=64)(5)
    seen = []
    spy = LatestPair()
    spy.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    recall.third_write(spy, deep.task, batch)
    assert torch.equal(seen[0][:, :32], batch.input_ids[:, :32])
    for row in seen[0].tolist():
        pairs = dict(zip(row[0:16:2], row[1:16:2])), dict(zip(row[16:32:2], row[17:32:2]))
        for key, third in zip(row[32:48:2], row[33:48:2]):
            assert third not in (pairs[0][key], pairs[1][key])


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: run["run"].update(loss=[1.0]),
        lambda run: run["run"].update(loss="abc"),
        lambda run: run.update(seed=5),
        lambda run: run.update(exams={"latest": "high"}),
    ],
)
def test_a_run_that_cannot_be_is_refused(tmp_path, damage):
    file = tmp_path / "runs.json"
    stored.save(file, [tiny().measured(lambda _: {"x": 1.0})], command="python -m tests")
    content = json.loads(file.read_text())
    damage(content["runs"][0])
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"runs.json is not a file of stored runs"):
        stored.load("runs", file)
