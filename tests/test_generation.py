"""The shared ``generate``: greedy, sampling, stopping, padding, refusals."""

import pytest
import torch

from evolve import generate
from evolve.generation import sample
from tests.test_full_attention import TINY, ids, lively, padded


def by_full_passes(model, x, n):
    """Greedy without a cache: the whole sequence is read again for every token."""
    for _ in range(n):
        x = torch.cat([x, model(x)[:, -1:].argmax(-1)], dim=1)
    return x


@pytest.fixture(scope="module")
def model():
    return lively()


def test_greedy_equals_reading_everything_again(model):
    x = ids(3, 5)
    out = generate(model, x, 20)
    assert torch.equal(out, by_full_passes(model, x, 20))
    assert out.dtype == x.dtype
    assert torch.equal(generate(model, x.int(), 20).long(), out)


def test_greedy_agrees_with_transformers():
    import tempfile

    from evolve import GPT2
    from tests.test_full_attention import peer

    theirs = peer(TINY)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, 0.0, 0.2)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = GPT2.from_pretrained(folder)
    x, mask = padded([ids(1, 7)[0], ids(1, 3, seed=1)[0]], "left", 0)
    expected = theirs.generate(
        x, attention_mask=mask.long(), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert torch.equal(generate(ours, x, 12, attention_mask=mask), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_continue_like_unpadded_ones(model, side):
    rows = [ids(1, n, seed=n)[0] for n in (8, 2, 5)]
    x, mask = padded(rows, side, 96)
    out = generate(model, x, 9, attention_mask=mask)
    assert torch.equal(out[:, : x.shape[1]], x)
    for i, row in enumerate(rows):
        assert torch.equal(out[i, x.shape[1] :], generate(model, row[None], 9)[0, len(row) :])


def test_rows_that_stop_are_filled_with_the_id_they_met(model):
    x = ids(4, 4)
    free = generate(model, x, 12)
    stops = [int(free[0, 6]), int(free[2, 9])]
    out = generate(model, x, 12, stop=stops)
    assert out.shape == free.shape
    for row, unstopped in zip(out, free):
        met = [t for t in range(4, 16) if int(unstopped[t]) in stops]
        end = met[0] if met else 15
        assert torch.equal(row[: end + 1], unstopped[: end + 1])
        assert (row[end:] == unstopped[end]).all()
    assert torch.equal(generate(model, x[:1], 12, stop=stops[0])[0, 6:], torch.full((10,), stops[0]))


def test_a_seed_repeats_and_leaves_the_global_state_alone(model):
    x = ids(2, 4)
    before = torch.random.get_rng_state()
    first = generate(model, x, 10, temperature=1.0, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(generate(model, x, 10, temperature=1.0, seed=3), first)
    assert not torch.equal(generate(model, x, 10, temperature=1.0, seed=4), first)


def frequencies(logits, **kwargs):
    rows = logits.expand(20_000, -1)
    g = torch.Generator().manual_seed(0)
    return torch.bincount(sample(rows, generator=g, **kwargs), minlength=logits.shape[-1]) / len(rows)


def test_sampling_follows_the_cut_distribution():
    p = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    for kwargs, expected in [
        ({"temperature": 1.0}, p),
        ({"temperature": 0.5}, p**2 / (p**2).sum()),
        ({"temperature": 1.0, "top_k": 2}, torch.tensor([0, 0.4, 0, 0.25, 0]) / 0.65),
        # 0.4 < 0.5 <= 0.4 + 0.25: the second token is still needed to reach one half
        ({"temperature": 1.0, "top_p": 0.5}, torch.tensor([0, 0.4, 0, 0.25, 0]) / 0.65),
        ({"temperature": 1.0, "top_p": 0.3}, torch.tensor([0, 1.0, 0, 0, 0])),
        # top_p counts what top_k left: 0.4 / 0.65 reaches 0.6
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.6}, torch.tensor([0, 1.0, 0, 0, 0])),
        ({"temperature": 1.0, "top_k": 99, "top_p": 1.0}, p),
    ]:
        got = frequencies(p.log(), **kwargs)
        assert (got[expected == 0] == 0).all(), kwargs
        torch.testing.assert_close(got, expected, atol=0.015, rtol=0)


def test_tiny_temperatures_become_greedy_without_overflow():
    logits = torch.tensor([[300.0, 299.0, -500.0]])
    for temperature in (1e-3, 1e-30, 5e-324):
        assert sample(logits, temperature=temperature, generator=torch.Generator().manual_seed(0)) == 0


def test_the_last_position_is_used_and_no_more(model):
    x = ids(1, 20)
    assert generate(model, x, 13).shape == (1, 33)  # 32 positions read, the 33rd token only returned
    with pytest.raises(ValueError, match="max_new_tokens must be at most 13"):
        generate(model, x, 14)


def test_nothing_asked_returns_the_prompt(model):
    x = ids(2, 3)
    assert torch.equal(generate(model, x, 0), x)
    assert generate(model, x[:0], 5).shape == (0, 8)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "input_ids must hold at least one token"),
        ({"input_ids": torch.zeros(3, dtype=torch.long)}, r"input_ids must be \[B, T\]"),
        ({"input_ids": torch.tensor([[97]])}, "input_ids must lie in"),
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer >= 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer"),
        ({"temperature": -1.0}, "temperature must be finite and >= 0"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"top_k": 0}, "top_k must be an integer >= 1"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p must lie in"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"stop": "x"}, "stop must be an integer"),
        ({"attention_mask": torch.ones(1, 4)}, "attention_mask must be bool"),
        ({"attention_mask": torch.zeros(1, 4, dtype=torch.bool)}, "attention_mask must leave at least one"),
    ],
)
def test_bad_requests_are_named(model, kwargs, message):
    good = {"input_ids": ids(1, 4), "max_new_tokens": 2, "temperature": 1.0}
    with pytest.raises(ValueError, match=message):
        generate(model, **(good | kwargs))


def test_top_k_lets_exactly_k_through():
    tied = torch.tensor([[1.0, 1.0, 1.0, 0.5]]).expand(200, -1)
    assert len(sample(tied, temperature=1.0, top_k=2).unique()) <= 2
    rising = torch.arange(11.0)[None].expand(200, -1)
    assert (sample(rising, temperature=1e39, top_k=1) == 10).all()


def test_numpy_numbers_are_numbers(model):
    import numpy as np

    x = ids(1, 4)
    expected = generate(model, x, 3, temperature=0.5, seed=1, top_k=3, stop=5)
    settings = {
        "temperature": np.float32(0.5),
        "seed": np.int64(1),
        "top_k": np.int64(3),
        "stop": np.int64(5),
    }
    assert torch.equal(generate(model, x, np.int64(3), **settings), expected)
