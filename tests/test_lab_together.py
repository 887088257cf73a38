"""The task for all memories says what it claims; its variants differ in one part."""

import itertools

import pytest
import torch
from benchmarks import together as benchmark

from evolve.kda import KimiDeltaAttention
from evolve.lab import accounting, stored
from evolve.lab.tasks import IGNORE
from evolve.lab.together import (
    EXAM,
    SKILLS,
    VARIANTS,
    Together,
    load_runs,
    loads,
    planned,
    scores,
    text_run,
    trained,
    variant_model,
)
from evolve.lab.training import Run, TrainingConfig
from evolve.mla import MultiHeadLatentAttention

TASK = Together(batch_size=16)


def answer_by_reading(task: Together, row: list[int]) -> list[int]:
    """What a reader with perfect memory answers at each position, -100 where nothing is asked."""
    s, said = task.starts, [IGNORE] * len(row)
    code, facts, mine, t = [], {}, {}, 0
    if row[0] == s["OPEN"]:
        code = list(itertools.takewhile(lambda token: token < s["fact"], row[1:]))
        t = 1 + len(code)
    while t < len(row) and row[t] != s["AGAIN"]:
        if row[t] == s["END"]:
            mine, t = {}, t + 1
        elif row[t] == s["ASK"] and row[t + 1] >= s["kind"]:
            said[t + 2] = task.table[row[t + 1] - s["kind"], row[t + 2]].item()
            t += 3
        elif row[t] == s["ASK"]:
            said[t + 1] = (facts | mine).get(row[t + 1], s["VOID"])
            t += 2
        else:
            (mine if row[t] >= s["local"] else facts)[row[t]] = row[t + 1]
            t += 2
    return said[:t] + code


@pytest.mark.parametrize("n", [0, 1, 2, 3, 17])
def test_targets_are_what_a_perfect_reader_answers(n):
    for batch in (TASK(n), TASK.exam(n)[0]):
        for row, targets in zip(batch.input_ids.tolist(), batch.targets.tolist()):
            assert answer_by_reading(TASK, row) == targets


def test_batches_depend_on_seed_and_number_alone():
    assert torch.equal(TASK(3).input_ids, Together(batch_size=16)(3).input_ids)
    other = Together(batch_size=16, seed=1)
    assert not torch.equal(TASK.exam()[0].input_ids, other.exam()[0].input_ids)
    assert torch.equal(TASK.table, other.table)
    assert all(row.sort().values.tolist() == list(range(16)) for row in TASK.table)
    lengths = {TASK(n).input_ids.shape[1] for n in range(200)}
    drills = {2 * n + 1 for n in (1, 2, 4, 8)} | {4 * n for n in (1, 2, 4)}
    whole = {2 * n + 9 + 16 * scopes for n in (1, 2, 4, 8) for scopes in (1, 2, 3)}
    assert lengths <= drills | whole
    assert drills <= lengths


def test_the_exam_asks_for_every_skill_and_void_only_for_what_was_written():
    batch, skills = TASK.exam(5)
    asked = (batch.targets != IGNORE).all(0)
    counts = [int((skills == i).sum()) for i in range(len(SKILLS))]
    assert counts == [8, 6, 3, 2, 3]
    assert int(asked.sum()) == sum(counts) + 1  # the first scope's question for a local that nobody wrote
    void = skills == SKILLS.index("void")
    assert (batch.targets[:, void] == TASK.starts["VOID"]).all()


def test_scores_are_shares_of_right_answers():
    class Reader(torch.nn.Module):
        def forward(self, ids):
            right = torch.tensor([answer_by_reading(TASK, row) for row in ids.tolist()]).clamp(min=0)
            right[0, -1] = (right[0, -1] + 1) % 16  # one symbol of one code in every batch wrong
            return torch.nn.functional.one_hot(right, TASK.vocab_size).float()

    found = scores(Reader(), TASK)
    assert found == {"code": 15 / 16, "facts": 1, "locals": 1, "void": 1, "table": 1}
    with pytest.raises(ValueError, match="the exam must ask for void"):
        scores(Reader(), Together(batch_size=16, scopes=1))


def test_variants_have_one_size_and_lack_what_they_say():
    models = {name: variant_model(name, TASK.vocab_size) for name in VARIANTS}
    sizes = {name: accounting.parameters(m) for name, m in models.items()}
    assert max(sizes.values()) < 1.02 * min(sizes.values()), sizes
    kinds = {name: [type(layer.self_attn) for layer in m.layers] for name, m in models.items()}
    assert MultiHeadLatentAttention in kinds["whole"]
    assert set(kinds["no MLA"]) == {KimiDeltaAttention}
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    one, many = (models[name].layers[0].self_attn.log_decays(x) for name in ("one decay", "whole"))
    assert torch.equal(one, many.mean(-1, keepdim=True).expand_as(many))
    assert many.std(-1).min() > 0
    assert not hasattr(models["residual stream"], "block_size")
    with pytest.raises(ValueError, match="name must be one of whole, no MLA, "):
        variant_model("x", 9)


def test_only_the_balanced_runs_move_the_routers_bias():
    config = TrainingConfig(2, warm_up=1, eval_every=9)
    for variant in ("whole", "no balancing"):
        net, _ = planned("try", variant, 0, config, batch_size=2).repeat()
        moved = [m.e_score_correction_bias.any().item() for m in net.modules() if hasattr(m, "top_k")]
        assert moved == [variant == "whole"] * 3
        counted = loads(net, Together(batch_size=2))
        assert [x.sum().item() for x in counted] == [2 * Together().exam(EXAM)[0].input_ids.shape[1] * 2] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scopes": 0}, "scopes must be an integer >= 1, got 0"),
        ({"code_length": 17}, "code_length must be at most num_values = 16, got 17"),
        ({"num_facts": 9}, "num_facts must be at most num_fact_keys = 8, got 9"),
        ({"num_locals": 4}, "num_locals must be below num_local_keys = 4, got 4"),
        ({"seed": -1}, "seed must be an integer >= 0"),
    ],
)
def test_sizes_that_cannot_be_met_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Together(**changes)


# ------------------------------------------------------------------------------------- stored runs

RUNS = load_runs()


def test_the_file_holds_what_the_command_makes():
    assert stored.command("together") == benchmark.COMMAND
    plans = list(benchmark.plans())
    assert [(r.purpose, r.variant, r.seed, r.task, r.run.config) for r in RUNS] == [
        (p.purpose, p.variant, p.seed, p.task, p.run.config) for p in plans
    ]


def test_the_rate_is_the_best_that_was_tried():
    tried = [r for r in RUNS if r.purpose == "tried" and r.variant == "whole"]
    best = min(tried, key=lambda r: sum(r.run.loss[-25:]))
    assert best.run.config.peak == benchmark.BEST


@pytest.mark.parametrize("run", [r for r in RUNS if r.seed == benchmark.SEEDS[0]], ids=lambda r: r.variant)
def test_the_first_steps_of_a_stored_run_come_out_again(run):
    assert len(run.run.loss) == run.run.config.steps
    assert run.repeat(3)[1].loss == pytest.approx(run.run.loss[:3], rel=1e-3)


def test_the_stored_weights_score_as_the_stored_run_did():
    run = next(r for r in RUNS if (r.purpose, r.variant, r.seed) == ("compared", "whole", benchmark.SEEDS[0]))
    found, expected = scores(trained(), run.task), run.run.validation[-1]
    assert found == pytest.approx({skill: expected[skill] for skill in SKILLS}, abs=0.05)


def test_the_first_steps_on_text_come_out_again():
    run = Run.load(benchmark.TEXT)
    assert text_run(3)[1].loss == pytest.approx(run.loss[:3], rel=1e-3)
    assert run.curve("code")[-1] < 2.6
