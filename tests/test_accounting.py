"""Costs counted from the model against closed forms written down here."""

import pytest
import torch

from evolve import GPT2, GPT2Config
from evolve.lab.accounting import cache_bytes, forward_flops, parameters


def on_meta(**sizes) -> GPT2:
    with torch.device("meta"):
        return GPT2(GPT2Config(**sizes))


SIZES = [
    {},
    {"vocab_size": 300, "n_positions": 77, "n_embd": 48, "n_layer": 5, "n_head": 3},
    {"vocab_size": 11, "n_positions": 40, "n_embd": 8, "n_layer": 1, "n_head": 8, "n_inner": 20},
]


@pytest.mark.parametrize("sizes", SIZES)
def test_counts_equal_closed_forms(sizes):
    model = on_meta(**sizes)
    c, D, L, F = model.config, model.config.n_embd, model.config.n_layer, model.config.inner_size
    layer = 4 * D * D + 4 * D + 2 * D * F + F + D + 4 * D
    assert parameters(model) == (c.vocab_size + c.n_positions) * D + L * layer + 2 * D
    S, T = 30, 5
    for dtype, size in ((torch.bfloat16, 2), (torch.float32, 4)):
        assert cache_bytes(model, S, batch_size=3, dtype=dtype) == 3 * S * L * 2 * D * size
    weights = L * (4 * D * D + 2 * D * F) + c.vocab_size * D
    attention = L * 2 * (S + T) * D  # scores and their average of the values, per new token
    assert forward_flops(model, T, context=S) == 2 * T * (weights + attention)


def test_gpt2_small_in_numbers():
    model = on_meta()
    assert parameters(model) == 124_439_808
    assert cache_bytes(model, 1) == 36_864
    million = on_meta(n_positions=2**20)
    assert cache_bytes(million, 2**20) == 36_864 * 2**20


def test_counting_changes_nothing():
    model = GPT2(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    before = {n: p.clone() for n, p in model.named_parameters()}
    forward_flops(model, 1, context=4)
    assert all(torch.equal(p, before[n]) and p.device.type == "cpu" for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: forward_flops(m, 0), "tokens must be at least 1"),
        (lambda m: cache_bytes(m, -1), "context must not be negative"),
        (lambda m: cache_bytes(m, 2000), "n_positions = 1024"),
        (lambda m: cache_bytes(m, 1, batch_size=-1), "batch_size must be an integer >= 0"),
    ],
)
def test_bad_counts_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(on_meta())
