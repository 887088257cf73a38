"""Balancing rules against their definitions, what they do to a skewed router, and their place in a model."""

import numpy as np
import pytest
import torch
from torch import nn

from evolve.balancing import (
    balanced,
    bias_from_histogram,
    expert_load,
    histogram_balance,
    lacking_histogram,
    quantile_balance,
    recorded_routing,
    sign_balance,
)
from evolve.moe import LatentMoE, route

SIZES = pytest.mark.parametrize(
    ("m", "E", "k"), [(4096, 64, 4), (100, 8, 2), (37, 5, 4), (3, 16, 1), (1, 4, 2)]
)


def skewed(m: int, E: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of a router that prefers some experts, and a bias from an earlier step."""
    scores = torch.sigmoid(torch.randn(m, E, dtype=dtype) + torch.randn(E, dtype=dtype))
    return scores, 0.1 * torch.randn(E, dtype=dtype)


def by_definition(scores, bias, k):
    """Per expert −quantile_{1−k/E}(s_j − α), before it is centred; α from a full sort."""
    s, b = scores.numpy(), bias.numpy()
    alpha = np.sort(s + b, axis=1)[:, -(k + 1)]
    E = len(b)
    return np.array([-np.quantile(s[:, j] - alpha, 1 - k / E) for j in range(E)]), alpha


@SIZES
def test_quantile_is_its_definition(m, E, k):
    scores, bias = skewed(m, E)
    want, _ = by_definition(scores, bias, k)
    got = quantile_balance(scores, bias, k)
    np.testing.assert_allclose(got, want - want.mean(), atol=1e-12)
    assert got.mean().abs() < 1e-12


def test_each_expert_would_get_its_share_were_the_cutoffs_to_stay():
    scores, bias = skewed(4096, 64)
    want, alpha = by_definition(scores, bias, 4)
    ahead = scores.numpy() + want - alpha[:, None]
    above, level, share = (ahead > 1e-12).sum(0), (abs(ahead) <= 1e-12).sum(0), 4096 * 4 // 64
    # A token whose cutoff is this expert itself lacks exactly the old bias: there many are level.
    assert ((above <= share) & (share <= above + level)).all()
    assert (above == share).mean() > 0.8


@SIZES
@pytest.mark.parametrize("bins", [20, 1000])
def test_histogram_is_right_to_a_bins_width(m, E, k, bins):
    """Within a bin of the ⌈mk/E⌉-th smallest α − s, which the exact quantile lies beside."""
    scores, bias = skewed(m, E)
    _, alpha = by_definition(scores, bias, k)
    sorted_lacking = np.sort(alpha[:, None] - scores.numpy(), axis=0)
    exact = sorted_lacking[int(np.ceil(m * k / E)) - 1]
    width = (2 + (bias.max() - bias.min()).item()) / bins
    got = histogram_balance(scores, bias, k, bins=bins).numpy()
    errors = got - exact
    assert errors.max() - errors.min() <= 2 * width + 1e-12  # each is off by less than one, up to the mean
    assert abs(got.mean()) < 1e-12
    counts = lacking_histogram(scores, bias, k, bins=bins)
    low = bias.min().item() - 1
    upper = low + width * (1 + (counts.cumsum(1) >= m * k / E).int().argmax(1).numpy())
    assert ((upper >= exact - 1e-12) & (upper - width <= exact + 1e-12)).all()


def test_histograms_of_parts_add_up():
    scores, bias = skewed(1000, 16)
    whole = lacking_histogram(scores, bias, 3)
    parts = sum(lacking_histogram(part, bias, 3) for part in scores.split([1, 700, 299]))
    assert torch.equal(whole, parts)
    assert (whole.sum(1) == 1000).all()
    assert torch.equal(bias_from_histogram(parts, bias, 3), histogram_balance(scores, bias, 3))


def test_quantile_evens_a_skewed_router_in_a_few_steps_and_the_sign_rule_does_not():
    torch.manual_seed(1)
    scores = skewed(4096, 64, torch.float32)[0]
    first = expert_load(route(scores, torch.zeros(64), 4).indices, 64).max_over_mean
    assert first > 4
    after = {}
    for rule in (quantile_balance, histogram_balance, sign_balance):
        bias, loads = torch.zeros(64), []
        for _ in range(6):
            bias = rule(scores, bias, 4)
            loads.append(expert_load(route(scores, bias, 4).indices, 64).max_over_mean)
        after[rule] = loads
    for rule in (quantile_balance, histogram_balance):
        assert after[rule][0] < 1.5
        assert after[rule][2] < 1.15
        assert after[rule][5] < 1.10
    assert after[quantile_balance][5] < 1.06
    assert 0.9 * first < after[sign_balance][5] < first


def test_the_sign_rule_moves_by_its_rate_towards_the_mean():
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.9, 0.1, 0.8], [0.9, 0.8, 0.1]])  # loads 3, 2, 1 of a mean of 2
    got = sign_balance(scores, torch.tensor([0.5, 0.4, 0.3]), 2, rate=0.01)
    torch.testing.assert_close(got, torch.tensor([0.49, 0.40, 0.31]))


@pytest.mark.parametrize("rule", [quantile_balance, histogram_balance, sign_balance])
def test_rules_change_nothing_that_they_are_given(rule):
    scores, bias = skewed(50, 8, torch.float32)
    kept = scores.clone(), bias.clone()
    new = rule(scores.requires_grad_(), bias, 2)
    assert torch.equal(scores, kept[0])
    assert torch.equal(bias, kept[1])
    assert new.dtype == bias.dtype
    assert not new.requires_grad
    assert torch.equal(rule(torch.zeros(0, 8), bias, 2), bias)


def test_with_every_expert_chosen_there_is_nothing_to_balance():
    scores, bias = skewed(50, 8)
    assert torch.equal(quantile_balance(scores, bias, 8), bias)
    assert torch.equal(sign_balance(scores, bias, 8), bias)


def test_load_counts_experts_dead_ones_and_the_fullest():
    load = expert_load(torch.tensor([[0, 1], [0, 3], [0, 1]]), 5)
    assert load.counts.tolist() == [3, 2, 0, 1, 0]
    assert (load.dead, load.max_over_mean) == (2, pytest.approx(3 / (6 / 5)))
    empty = expert_load(torch.zeros(0, 2, dtype=torch.int64), 5)
    assert (empty.counts.tolist(), empty.dead, empty.max_over_mean) == ([0] * 5, 5, 0.0)


# ------------------------------------------------------------------------------------ in a model


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(LatentMoE(8, num_experts=4, top_k=2, expert_size=4) for _ in range(2)))


def test_balanced_moves_the_bias_for_the_next_pass_in_training_only():
    net, x = model(), torch.randn(30, 8)
    bias = net[0].gate.e_score_correction_bias
    with balanced(net, quantile_balance):
        net.eval()(x)
        assert not bias.any()
        with recorded_routing(net) as record:
            y = net.train()(x)
    (routing,) = record["0.gate"]
    assert torch.equal(bias, quantile_balance(routing.scores, torch.zeros(4), 2))
    assert bias.any()
    other = model()
    torch.testing.assert_close(y, other(x))  # what was routed, was routed without the new bias
    y.sum().backward()
    other(x).sum().backward()
    for p, q in zip(net.parameters(), other.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
    kept = bias.clone()
    net(x)
    assert torch.equal(bias, kept)  # outside, nothing moves


def test_routings_are_recorded_by_name_and_hooks_leave_on_errors():
    net, x = model(), torch.randn(3, 5, 8)
    with recorded_routing(net) as record:
        net(x)
        net(x[:1])
    assert {name: [len(r.indices) for r in calls] for name, calls in record.items()} == {
        "0.gate": [15, 5],
        "1.gate": [15, 5],
    }
    assert not record["1.gate"][0].scores.requires_grad
    with pytest.raises(ZeroDivisionError), balanced(net, lambda *_: 1 / 0):
        net.train()(x)
    net(x)


def test_trained_with_balancing_no_expert_is_left_behind():
    """A router that starts out with one favourite: without a rule it keeps it."""
    loads = {}
    for rule in (None, quantile_balance):
        torch.manual_seed(0)
        net = LatentMoE(8, num_experts=8, top_k=1, expert_size=4)
        with torch.no_grad():
            net.gate.weight[0] = 2.0
        x = torch.randn(256, 8) + 1
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 1e-2)
        for _ in range(10):
            optimizer.zero_grad()
            if rule is None:
                y = net(x)
            else:
                with balanced(net, rule):
                    y = net(x)
            (y - x).square().mean().backward()
            optimizer.step()
        loads[rule] = expert_load(net.gate(x).indices, 8)
    assert loads[None].max_over_mean > 6
    assert loads[quantile_balance].max_over_mean < 2
    assert loads[quantile_balance].dead == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, b: quantile_balance(s[0], b, 2), r"scores must be \[m, E\]"),
        (lambda s, b: quantile_balance(s, b[:3], 2), r"bias must be \[E\] = \[8\], got \[3\]"),
        (lambda s, b: quantile_balance(s, b, 9), "top_k must be at most the 8 experts, got 9"),
        (lambda s, b: quantile_balance(s.long(), b, 2), "scores must be floating point"),
        (lambda s, b: sign_balance(s, b, 2, rate=0.0), "rate must be positive and finite, got 0.0"),
        (lambda s, b: histogram_balance(s, b, 2, bins=0), "bins must be an integer >= 1, got 0"),
        (lambda s, b: histogram_balance(s, b, 8), "top_k must be below the 8 experts"),
        (
            lambda s, b: bias_from_histogram(torch.ones(7, 10), b, 2),
            r"counts must be \[E, bins\] = \[8, any\]",
        ),
        (lambda s, b: expert_load(torch.tensor([8]), 8), r"indices must lie in \[0, 8\)"),
        (lambda s, b: expert_load(torch.tensor([-1]), 8), r"indices must lie in \[0, 8\)"),
        *(
            (lambda s, b, counts=counts: bias_from_histogram(torch.tensor(counts), b[:2], 1), message)
            for counts, message in (
                ([[5, 5], [0, 1]], "counts must have as many tokens for every expert, got from 1 to 10"),
                ([[5, -5], [0, 0]], "counts must not be negative, got -5"),
                ([[5.0], [5.0]], "counts must be int64 or int32, got torch.float32"),
            )
        ),
        (
            lambda s, b: bias_from_histogram(torch.zeros(8, 0).long(), b, 2),
            "counts must have at least one bin",
        ),
        (lambda s, b: expert_load(s, 8), "indices must be integers"),
        (lambda s, b: expert_load(s > 0.5, 8), "indices must be integers .* got torch.bool"),
        (lambda s, b: expert_load([0, 1], 8), "indices must be a torch.Tensor, got list"),
        (lambda s, b: expert_load(torch.tensor([0]), 0), "num_experts must be an integer >= 1"),
        (lambda s, b: balanced(nn.Linear(2, 2), quantile_balance).__enter__(), "model must have a router"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(*skewed(20, 8))
