"""The stored runs of notebook 04 are those of their script, and come out again; its exam counts right."""

import dataclasses

import pytest
import torch
from benchmarks import context_switch

from evolve.lab import stored
from evolve.lab.small import void_exam
from evolve.lab.tasks import AssociativeRecall

RUNS = stored.load("context_switch")


def test_the_stored_runs_are_those_of_the_script():
    def plain(run):
        return dataclasses.replace(run, run=run.run.config, exams={})

    assert [plain(r) for r in RUNS] == [plain(r) for r in context_switch.plans()]
    assert stored.command("context_switch") == context_switch.COMMAND


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"{r.name}-{r.mixer}-{r.seed}")
def test_the_first_steps_of_a_stored_run_come_out_again(run):
    assert len(run.run.loss) == run.run.config.steps
    assert run.repeat(4)[1].loss == pytest.approx(run.run.loss[:4], rel=1e-3)


def test_each_rung_was_given_the_learning_rate_that_served_it_best():
    for mixer, peak in context_switch.BEST.items():
        tried = {r.run.config.peak: r.exams["accuracy"] for r in RUNS if r.seed == 9 and r.mixer == mixer}
        assert set(tried) == set(context_switch.PEAKS)
        assert peak == max(tried, key=tried.get)


def test_what_is_stored_can_be_measured_again():
    """The exams of an untrained model: every number is a share, and those of the state fit each other."""
    plan = next(p for p in context_switch.plans() if p.mixer == "gated_delta_rule")
    found = context_switch.exams(plan, plan.build())
    assert set(found) == set(next(r for r in RUNS if r.mixer == "gated_delta_rule").exams)
    assert all(0 <= x <= 1 for x in found.values())
    assert found["left at the first question"] < found["left after SWITCH"] < 1


def table_of_bindings(task, *, forgets):
    """Answers of a reader with a perfect memory that empties it at SWITCH, or does not."""

    def answer(ids):
        out = torch.zeros(*ids.shape, task.vocab_size)
        for row, tokens in zip(out, ids.tolist()):
            table = {}
            for t, (token, following) in enumerate(zip(tokens, [*tokens[1:], task.blank])):
                if token == task.switch and forgets:
                    table = {}
                elif token < task.num_keys <= following < task.blank:
                    table[token] = following
                row[t, table.get(token, task.void)] = 1
        return out

    return answer


@pytest.mark.parametrize(
    "task",
    [
        AssociativeRecall(num_pairs=3, contexts=2, voids=2, batch_size=16),
        AssociativeRecall(num_pairs=3, contexts=2, voids=2, batch_size=16, ask_last_only=True),
        AssociativeRecall(num_pairs=4, num_keys=8, contexts=4, voids=4, num_slots=9, batch_size=16),
    ],
)
def test_the_exam_tells_old_values_from_right_answers(task):
    validate = void_exam(task, 5)
    shares = validate(table_of_bindings(task, forgets=True))
    assert shares == {"accuracy": 1, "known": 1, "void": 1, "stale": 0}
    shares = validate(table_of_bindings(task, forgets=False))
    asked = (task(5).targets != -100).sum(), (task(5).targets == task.void).sum()
    assert shares["accuracy"] == pytest.approx(1 - (asked[1] / asked[0]).item())
    assert (shares["known"], shares["void"], shares["stale"]) == (1, 0, 1)


def test_an_exam_without_void_keys_is_refused():
    with pytest.raises(ValueError, match="task must have void keys, got voids = 0"):
        void_exam(AssociativeRecall(), 0)


def test_the_last_contexts_questions_can_be_counted_alone():
    task = AssociativeRecall(num_pairs=3, contexts=3, voids=2, batch_size=16)
    right = table_of_bindings(task, forgets=True)

    def silent_before_the_last_switch(ids):
        last = (ids[0] == task.switch).nonzero()[-1].item()
        return right(ids) * (torch.arange(ids.shape[1]) > last)[:, None]

    assert void_exam(task, 5, last_only=True)(silent_before_the_last_switch)["accuracy"] == 1
    assert void_exam(task, 5)(silent_before_the_last_switch)["accuracy"] < 0.7
