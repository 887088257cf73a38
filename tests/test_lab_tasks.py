"""Recall and text: every target is recomputed by reading the sequence as a person would."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from evolve.lab import text
from evolve.lab.seeds import generator, seed_everything
from evolve.lab.tasks import AssociativeRecall, accuracy
from evolve.lab.text import TextBatches

TASKS = {
    "plain": AssociativeRecall(),
    "full vocabulary": AssociativeRecall(num_pairs=5, num_keys=5, num_values=2),
    "one pair": AssociativeRecall(num_pairs=1, num_keys=1, rewrites=1, num_slots=1),
    "rewritten": AssociativeRecall(num_pairs=6, rewrites=4),
    "all rewritten": AssociativeRecall(num_pairs=6, rewrites=6, num_values=2),
    "gaps": AssociativeRecall(num_pairs=4, num_slots=30),
    "contexts": AssociativeRecall(num_pairs=4, num_keys=6, contexts=3),
    "voids": AssociativeRecall(num_pairs=4, num_keys=8, contexts=3, voids=4, num_slots=12),
    "left behind": AssociativeRecall(num_pairs=4, num_keys=8, contexts=3, voids=2, ask_last_only=True),
    "everything": AssociativeRecall(num_pairs=5, num_keys=9, rewrites=2, contexts=4, voids=3, num_slots=10),
}


def answers(task: AssociativeRecall, tokens: list[int]) -> list[int]:
    """The targets from the tokens alone: a table of bindings, emptied at every SWITCH.

    Pairs and questions are told apart by the next token: only a written key is followed by a value.
    """
    table, targets = {}, [-100] * len(tokens)
    for t, token in enumerate(tokens):
        following = tokens[t + 1] if t + 1 < len(tokens) else task.blank
        if token == task.switch:
            table = {}
        elif token < task.num_keys and task.num_keys <= following < task.blank:
            table[token] = following
        elif token < task.num_keys:
            targets[t] = table.get(token, task.void)
    return targets


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_targets_are_what_a_table_of_bindings_answers(task):
    for n in (0, 1, 77):
        batch = task(n)
        assert batch.input_ids.shape == batch.targets.shape == (task.batch_size, task.length)
        assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
        assert batch.input_ids.min() >= 0
        assert batch.input_ids.max() < task.vocab_size
        for tokens, targets in zip(batch.input_ids.tolist(), batch.targets.tolist()):
            assert targets == answers(task, tokens)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_context_asks_each_of_its_keys_once_and_its_voids(task):
    batch = task(3)
    asked = batch.targets != -100
    contexts = 1 if task.ask_last_only else task.contexts
    voids = task.voids * min(contexts, task.contexts - 1)
    assert (asked.sum(dim=1) == task.num_pairs * contexts + voids).all()
    assert ((batch.targets == task.void).sum(dim=1) == voids).all()
    assert ((batch.input_ids == task.switch).sum(dim=1) == task.contexts - 1).all()


def test_the_plain_task_has_length_3n_and_never_shows_an_answer_after_a_question():
    task = AssociativeRecall(num_pairs=7)
    batch = task(0)
    pairs, questions = batch.input_ids.split([14, 7], dim=1)
    assert task.length == 21
    assert (questions < task.num_keys).all()
    assert torch.equal(pairs[:, ::2].sort(dim=1).values, questions.sort(dim=1).values)
    assert not torch.equal(pairs[:, ::2], questions)  # asked in an order of their own


def test_rewritten_keys_get_another_value_and_the_latest_counts():
    task = AssociativeRecall(num_pairs=6, rewrites=3, num_values=4)
    for tokens in task(0).input_ids.tolist():
        first, second = (dict(zip(x[::2], x[1::2])) for x in (tokens[:12], tokens[12:18]))
        assert len(second) == 3
        assert all(first[key] != value for key, value in second.items())


def test_void_keys_were_bound_in_the_context_before_and_not_in_this_one():
    task = TASKS["voids"]
    batch = task(0)
    for tokens, targets in zip(batch.input_ids.tolist(), batch.targets.tolist()):
        ends = [0, *(i for i, x in enumerate(tokens) if x == task.switch), len(tokens)]
        contexts = [
            (tokens[a + (c > 0) : b][: 2 * task.num_pairs : 2], tokens[a:b], targets[a:b])
            for c, (a, b) in enumerate(pairwise(ends))
        ]
        for (before, *_), (now, ids, wanted) in pairwise(contexts):
            void = {i for i, target in zip(ids, wanted) if target == task.void}
            assert len(void) == task.voids
            assert void <= set(before) - set(now)


def test_contexts_left_unread_are_the_same_sequences_with_their_questions_cut_out():
    task = TASKS["left behind"]
    whole, cut = dataclasses.replace(task, ask_last_only=False)(5), task(5)
    asked_early = whole.targets != -100
    asked_early[:, -(task.num_pairs + task.voids) :] = False
    assert asked_early.sum(dim=1).eq(2 * task.num_pairs + task.voids).all()
    kept = ~asked_early.any(dim=0)
    assert torch.equal(whole.input_ids[:, kept], cut.input_ids)
    assert torch.equal(whole.targets[:, kept], cut.targets)


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_gaps_follow_the_power_law(power):
    task = AssociativeRecall(num_pairs=1, num_slots=20, power=power, batch_size=20_000)
    gap = (task(0).targets[:, 2:] != -100).int().argmax(dim=1) + 1
    share = np.bincount(gap, minlength=21)[1:] / len(gap)
    expected = np.arange(1, 21) ** (power - 1.0)
    np.testing.assert_allclose(share, expected / expected.sum(), atol=0.012)


def test_keys_values_and_questions_are_uniform():
    task = AssociativeRecall(num_pairs=4, num_keys=8, num_values=8, batch_size=8000)
    batch = task(0)
    for column in (0, 1, 6, 7, 8, 11):
        share = np.bincount(batch.input_ids[:, column] % 8, minlength=8) / 8000
        np.testing.assert_allclose(share, 1 / 8, atol=0.02)
    first = (batch.input_ids[:, 8:] == batch.input_ids[:, :1]).int().argmax(dim=1)  # its place among 4
    np.testing.assert_allclose(np.bincount(first, minlength=4) / 8000, 1 / 4, atol=0.02)


def test_batch_n_is_a_function_of_seed_and_n_alone():
    task = TASKS["everything"]
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    late = task(1000)
    assert torch.equal(torch.random.get_rng_state(), before)
    [task(n) for n in range(3)]
    again = dataclasses.replace(task)(1000)
    assert torch.equal(late.input_ids, again.input_ids)
    assert torch.equal(late.targets, again.targets)
    for other in (
        task(1001),
        dataclasses.replace(task, seed=1)(1000),
        dataclasses.replace(task, seed=1)(999),
    ):
        assert not torch.equal(late.input_ids, other.input_ids)


def test_accuracy_counts_asked_positions_only():
    targets = torch.tensor([[-100, 2, -100, 1], [0, -100, -100, -100]])
    guesses = torch.tensor([[0, 2, 0, 0], [0, 1, 1, 1]])
    logits = torch.nn.functional.one_hot(guesses, 3).float()
    assert accuracy(logits, targets) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="targets must ask for at least one token"):
        accuracy(logits, torch.full_like(targets, -100))
    with pytest.raises(ValueError, match=r"targets must be \[B, T\] = \[2, 4\]"):
        accuracy(logits, targets[:, :3])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_pairs": 0}, "num_pairs must be an integer >= 1, got 0"),
        ({"num_pairs": 2.0}, "num_pairs must be an integer"),
        ({"num_pairs": True}, "num_pairs must be an integer"),
        ({"num_pairs": 33}, "num_keys must be at least num_pairs . voids = 33, got 32"),
        ({"num_keys": -1}, "num_keys must be an integer >= 1"),
        ({"num_values": 1}, "num_values must be an integer >= 2"),
        ({"rewrites": 9}, "rewrites must be at most num_pairs = 8, got 9"),
        ({"ask_last_only": 1}, "ask_last_only must be True or False, got 1"),
        ({"contexts": 0}, "contexts must be an integer >= 1"),
        ({"voids": 1}, "voids = 1 needs contexts of at least 2"),
        ({"voids": 9, "contexts": 2}, "voids must be at most num_pairs"),
        ({"voids": 5, "contexts": 2, "num_keys": 12}, "num_keys must be at least .* 13, got 12"),
        ({"num_slots": 7}, "num_slots must be an integer >= 8, got 7"),
        ({"power": 0.0}, "power must be > 0"),
        ({"power": float("nan")}, "power must be > 0"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"seed": -1}, "seed must be an integer >= 0"),
    ],
)
def test_sizes_that_cannot_be_met_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        AssociativeRecall(**sizes)


def test_a_batch_number_must_count():
    with pytest.raises(ValueError, match="n must be an integer >= 0, got -1"):
        AssociativeRecall()(-1)


# -------------------------------------------------------------------------------------------- text


@pytest.fixture(scope="module")
def corpus():
    return text.standard_library()


def test_the_standard_library_is_whole_files_and_the_split_shares_none(corpus):
    assert not set(text.TRAINING_MODULES) & set(text.VALIDATION_MODULES)
    assert len(set(text.TRAINING_MODULES)) == len(text.TRAINING_MODULES)
    source = Path(dataclasses.__file__).read_bytes().replace(b"\r\n", b"\n")
    assert source in corpus.validation.numpy().tobytes()
    assert source not in corpus.training.numpy().tobytes()
    assert 3e6 < corpus.nbytes < 6e6
    assert 0.02 < len(corpus.validation) / corpus.nbytes < 0.2
    assert f"{len(corpus.training):,} bytes to train on" in str(corpus)


def test_text_batches_are_blocks_of_the_text_and_their_successors(corpus):
    batches = TextBatches(corpus.validation, block_size=48, batch_size=5, seed=3)
    batch, whole = batches(11), corpus.validation.numpy().tobytes()
    assert batch.input_ids.shape == batch.targets.shape == (5, 48)
    for x, y in zip(batch.input_ids.tolist(), batch.targets.tolist()):
        assert bytes([*x, y[-1]]) in whole
        assert x[1:] == y[:-1]
    again = TextBatches(corpus.validation, block_size=48, batch_size=5, seed=3)(11)
    assert torch.equal(batch.input_ids, again.input_ids)
    for other in (batches(12), dataclasses.replace(batches, seed=4)(11)):
        assert not torch.equal(batch.input_ids, other.input_ids)


def test_every_block_can_be_drawn_the_first_and_the_last_too():
    batches = TextBatches(torch.arange(7, dtype=torch.uint8), block_size=4, batch_size=200)
    assert set(batches(0).input_ids[:, 0].tolist()) == {0, 1, 2}
    shortest = TextBatches(torch.arange(5, dtype=torch.uint8), block_size=4)
    assert shortest(0).targets[0].tolist() == [1, 2, 3, 4]


def test_a_reader_s_file_is_split_in_two_pieces(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_bytes(b"0123456789\r\n" * 10)  # 11 bytes a line once line ends are equal
    corpus = text.text_file(file, validation_share=0.2)
    assert (len(corpus.training), len(corpus.validation), corpus.nbytes) == (88, 22, 110)
    both = torch.cat([corpus.training, corpus.validation]).numpy().tobytes()
    assert both == b"0123456789\n" * 10


def test_bytes_go_there_and_back():
    ids = text.encode("déjà vu")
    assert ids.shape == (1, 9)
    assert text.decode(ids[0]) == "déjà vu"
    assert text.decode(ids[0, :2]) == "d�"
    with pytest.raises(ValueError, match=r"ids must be bytes in \[0, 256\)"):
        text.decode(torch.tensor([256]))
    with pytest.raises(ValueError, match=r"ids must be \[bytes\]"):
        text.decode(ids)


def test_bad_text_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"path must be a readable file, got .*none\.txt"):
        text.text_file(tmp_path / "none.txt")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"empty\.txt' has 0 bytes"):
        text.text_file(tmp_path / "empty.txt")
    for share in (0, 1, "a", float("nan")):
        with pytest.raises(ValueError, match="validation_share must lie between 0 and 1"):
            text.text_file(tmp_path / "empty.txt", validation_share=share)
    with pytest.raises(ValueError, match=r"lacks \['argparse\.py', 'ast\.py'"):
        text.standard_library(tmp_path)
    short = torch.zeros(9, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"text must have at least block_size \+ 1 = 10 bytes, got 9"):
        TextBatches(short, block_size=9)
    with pytest.raises(ValueError, match=r"text must be uint8, got torch\.float32"):
        TextBatches(short.float(), block_size=4)
    with pytest.raises(ValueError, match=r"text must be \[bytes\]"):
        TextBatches(short[None], block_size=4)
    with pytest.raises(ValueError, match="block_size must be an integer >= 1"):
        TextBatches(short, block_size=0)


# -------------------------------------------------------------------------------------------- seeds


def test_one_seed_sets_every_global_generator():
    import random

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    seed_everything(5)
    first = draw()
    seed_everything(5)
    assert draw() == first
    seed_everything(6)
    assert all(a != b for a, b in zip(draw(), first))
    for bad in (-1, 2**32, 1.5, None):
        with pytest.raises(ValueError, match="seed must be"):
            seed_everything(bad)


def test_generators_of_neighbouring_keys_are_unrelated():
    keys = [(0,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (2**40, 3)]
    draws = [torch.randn(1000, generator=generator(*key), dtype=torch.float64) for key in keys]
    assert torch.equal(draws[2], torch.randn(1000, generator=generator(0, 1), dtype=torch.float64))
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(len(keys), dtype=torch.float64)
    assert correlation.abs().max() < 0.15
    with pytest.raises(ValueError, match="key must be an integer >= 0"):
        generator(0, -1)
