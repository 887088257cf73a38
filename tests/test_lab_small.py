"""The smallest instruments: exercises and timing."""

import pytest
import torch

from evolve import GPT2, GPT2Config
from evolve.lab.exercises import check, verify
from evolve.lab.timing import decode_seconds, filled_cache, reread_seconds


def is_double(f):
    assert f(3) == 6, "f(3) should be 6"


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (None, "not yet: the answer is still None"),
        (lambda x: None, "not yet: f(3) should be 6"),
        (lambda x: 1 / 0, "not yet: division by zero"),
        (lambda x: 2 * x, "right"),
    ],
)
def test_check_never_raises_and_says_why(attempt, said, capsys):
    check(attempt, is_double)
    assert capsys.readouterr().out == said + "\n"


def test_verify_raises_for_a_wrong_solution(capsys):
    with pytest.raises(AssertionError, match="should be 6"):
        verify(lambda x: x, is_double)
    verify(lambda x: x + x, is_double)
    assert "passes" in capsys.readouterr().out


def test_timing_takes_time_and_names_bad_input():
    model = GPT2(GPT2Config(vocab_size=11, n_positions=64, n_embd=8, n_layer=1, n_head=2))
    assert 0 < decode_seconds(model, 16, repeats=2) < 10
    assert 0 < reread_seconds(model, 16, repeats=1) < 10
    for call in (decode_seconds, reread_seconds):
        with pytest.raises(ValueError, match="context must be at least 1"):
            call(model, 0)
        with pytest.raises(ValueError, match="repeats must be at least 1"):
            call(model, 4, repeats=0)
    with pytest.raises(ValueError, match="n_positions = 64"):
        decode_seconds(model, 65)


def test_a_filled_cache_is_what_a_prefill_would_leave():
    model = GPT2(GPT2Config(vocab_size=11, n_positions=64, n_embd=8, n_layer=2, n_head=2)).double()
    cache, prefilled = filled_cache(model, 20), model.new_cache(1)
    model(torch.zeros(1, 20, dtype=torch.long), cache=prefilled)
    assert (cache.length, cache.nbytes) == (prefilled.length, prefilled.nbytes)
    for a, b in zip(cache.layers, prefilled.layers):
        for name in ("k", "v"):
            assert a.get(name).shape == b.get(name).shape
            assert a.get(name).dtype == torch.float64
            assert a.get(name).std() > 0.5
