"""Every probe against loops in NumPy that share no code with it, and the hand-over numbers pinned."""

import math

import numpy as np
import pytest
import torch

from evolve.lab import handover, probes, scoreboard
from evolve.lab.memories import (
    RULES,
    MemoryRule,
    delta,
    gated,
    kda,
    latent,
    linear,
    linear_elu1,
    plain_writes,
    softmax,
)
from evolve.lab.probes import (
    LOCAL_DECAY,
    context_switch,
    interference,
    memory_cell,
    overwriting,
    retention,
)

NUMPY = np.random.default_rng(0)


def unit(*shape):
    x = NUMPY.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


class Table:
    """The four matrix memories, one pair at a time."""

    def __init__(self, kind, K=64, V=64):
        self.kind, self.S, self.z = kind, np.zeros((K, V)), np.zeros(K)

    def feature(self, x):
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) if self.kind == "elu" else x

    def write(self, k, v, alpha=1.0):
        k = self.feature(k)
        self.S = np.asarray(alpha).reshape(-1, 1) * self.S
        if self.kind == "delta":
            v = v - self.S.T @ k
        self.S, self.z = self.S + np.outer(k, v), self.z + k

    def read(self, q):
        q = self.feature(q)
        return self.S.T @ q / (q @ self.z if self.kind == "elu" else 1.0)


def numpy_error(kind, N, passes=1, correlation=0.0, repeats=40):
    """RMS read-back error of N random pairs, with random numbers of its own."""
    wrong = 0.0
    for _ in range(repeats):
        shared = unit(64)
        k = np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * unit(N, 64)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        v, memory = unit(N, 64), Table(kind)
        for _ in range(passes):
            for i in range(N):
                memory.write(k[i], v[i])
        wrong += np.mean([np.sum((memory.read(k[i]) - v[i]) ** 2) for i in range(N)])
    return math.sqrt(wrong / repeats)


@pytest.mark.parametrize(
    ("rule", "kind", "options"),
    [
        (linear, "hebb", {}),
        (delta, "delta", {}),
        (linear_elu1, "elu", {}),
        (delta, "delta", {"passes": 2}),
        (linear, "hebb", {"correlation": 0.5}),
        (delta, "delta", {"correlation": 0.5}),
    ],
)
def test_interference_equals_numpy(rule, kind, options):
    for N in (16, 40):
        assert interference(rule, [N], **options)[0] == pytest.approx(
            numpy_error(kind, N, **options), rel=0.1
        )


def test_interference_of_linear_attention_follows_its_law():
    for N, repeats in [(1, 10), (2, 4000), (16, 400), (64, 100), (200, 40)]:
        error = interference(linear, [N], repeats=repeats)[0]
        assert error == pytest.approx(math.sqrt((N - 1) / 64), rel=0.04, abs=1e-12)


def test_orthogonal_keys_are_recalled_exactly_up_to_capacity():
    for rule in (linear, delta, gated, kda):
        assert max(interference(rule, [1, 17, 32], K=32, orthogonal=True)) < 1e-12
    with pytest.raises(ValueError, match="counts must be at most K = 32"):
        interference(delta, [33], K=32, orthogonal=True)


def test_replay_and_correlation_tell_the_rules_apart():
    once, often = (interference(delta, [16], passes=p)[0] for p in (1, 20))
    assert often < 0.02 < 0.3 < once
    linear_error, delta_error = (interference(r, [16], correlation=0.5)[0] for r in (linear, delta))
    assert linear_error > 2 * delta_error
    errors = interference(softmax(256.0), [16, 1024], repeats=4)
    assert max(errors) < 1e-6


def test_gates_left_open_change_nothing():
    for rule in (gated, kda):
        assert interference(rule, [40]) == pytest.approx(interference(delta, [40]), abs=1e-12)


def test_overwriting_equals_its_meaning():
    for rule, error, stale in [(linear, 1, 1), (delta, 0, 0), (gated, 0, 0), (kda, 0, 0)]:
        got = overwriting(rule)
        assert (got.error, got.stale) == pytest.approx((error, stale), abs=1e-12)
    # both values weigh one half, so the read is (v1 + v2) / 2
    for rule in (softmax(), linear_elu1):
        assert overwriting(rule) == pytest.approx((math.sqrt(0.5), 0.5), abs=1e-12)
    half = overwriting(delta, beta=0.5)  # the error is halved, not removed
    assert half == pytest.approx((math.sqrt(0.5), 0.5), abs=1e-12)


def numpy_switch(writes, K, repeats, reset):
    """Energy and old-key share by propagating the old state alone: S <- (I - k kᵀ) S, after S <- α S."""
    history = []
    for _ in range(repeats):
        memory = Table("delta", K, 16)
        keys, values = unit(16, K), unit(16, 16)
        for k, v in zip(keys, values):
            memory.write(k, v)
        states = [memory.S]
        if reset:
            states.append(math.exp(reset) * states[-1])
        for _ in range(writes):
            k = unit(K)
            states.append(states[-1] - np.outer(k, k @ states[-1]))
        history.append([(np.sum(S**2), np.mean([v @ S.T @ k for k, v in zip(keys, values)])) for S in states])
    energy, old_key = np.mean(history, axis=0).T
    return energy / energy[0], old_key / old_key[0]


@pytest.mark.parametrize("reset", [0.0, -1.0])
def test_context_switch_equals_numpy(reset):
    got = context_switch(gated if reset else delta, 40, K=32, reset=reset, repeats=60)
    energy, old_key = numpy_switch(40, 32, 60, reset)
    np.testing.assert_allclose(got.energy, energy, rtol=0.08)
    np.testing.assert_allclose(got.old_key, old_key, rtol=0.08)
    if not reset:
        np.testing.assert_allclose(got.energy, (1 - 1 / 32) ** np.arange(41), rtol=0.06)


@pytest.mark.parametrize("rule", [linear, linear_elu1, delta, softmax(4.0)], ids=lambda r: r.name)
def test_what_is_left_is_the_part_of_a_read_that_is_due_to_the_old_values(rule):
    """With new values that are not zero: the read minus the same read with the old values set to zero."""
    rng = torch.Generator().manual_seed(3)
    (old, new), (value, other) = (torch.randn(2, 1, 5, 8, generator=rng).double() for _ in "kv")
    queries = torch.cat([torch.eye(8, dtype=torch.float64)[None], old], dim=1)

    def read(first, second):
        state = rule.write(None, plain_writes(old, first))
        return rule.read(rule.write(state, plain_writes(new, second)), queries)

    due = read(value, other) - read(torch.zeros_like(value), other)
    torch.testing.assert_close(read(value, torch.zeros_like(other)), due, atol=1e-12, rtol=0)


def test_dilution_is_not_forgetting():
    """Other queries find less and less of what softmax holds, the old keys find all of it."""
    left = context_switch(softmax(), 320, repeats=1)
    assert left.energy[-1] < 0.2
    assert left.old_key[-1] == pytest.approx(1, abs=1e-3)
    assert left.writes_to_clear(0.2) is None


def test_a_sum_never_clears_and_a_kv_cache_never_forgets():
    assert context_switch(linear, 30).energy == pytest.approx([1] * 31)
    assert context_switch(softmax(256.0), 30).old_key == pytest.approx([1] * 31, abs=1e-6)
    assert context_switch(linear, 30).writes_to_clear() is None


def test_retention_is_the_decay_to_the_power_of_the_lag():
    g = torch.tensor([0.0, -0.01, -1.0, -5.0], dtype=torch.float64)
    lags = [0, 1, 3, 20]
    kept = retention(kda, g, lags)
    np.testing.assert_allclose(kept, np.exp(np.outer(lags, g)), atol=1e-14)
    np.testing.assert_allclose(retention(gated, g[1:2].expand(4), lags)[:, 0], np.exp(-0.01 * np.array(lags)))
    for rule in (softmax(), linear, linear_elu1, delta):
        assert retention(rule, g, lags) == pytest.approx(torch.ones(4, 4).double(), abs=1e-12)


def numpy_cell(alpha, repeats=400, erase=None):
    """The memory cell from its description, one repetition at a time. ``alpha`` [16] at each END."""
    fact, stale = [], []
    for _ in range(repeats):
        memory, facts = Table("delta", 16, 16), unit(4, 16)
        for key, value in enumerate(facts):
            memory.write(np.eye(16)[key], value)
        for scope in range(6):
            written = NUMPY.choice(4, 2, replace=False)
            for local in written:
                memory.write(np.eye(16)[4 + local], unit(16))
            if scope:
                fact += [np.sum((memory.read(np.eye(16)[i]) - facts[i]) ** 2) for i in range(4)]
                left = set(range(4)) - set(written)
                stale += [np.sum(memory.read(np.eye(16)[4 + i]) ** 2) for i in left]
            memory.S = alpha[:, None] * memory.S
            if erase is not None:
                memory.S -= np.outer(erase, erase @ memory.S)
    return np.mean(fact), np.mean(stale)


@pytest.mark.parametrize("alpha", [1.0, 0.86, 0.5, 0.0])
def test_memory_cell_equals_numpy(alpha):
    g = math.log(alpha) if alpha else -math.inf
    expected = numpy_cell(np.full(16, alpha))
    for rule in (gated, kda):
        got = memory_cell(rule, g)
        assert (got.fact, got.stale) == pytest.approx(expected, abs=0.03)


def test_memory_cell_with_a_decay_a_channel_and_with_an_erasing_token():
    expected = numpy_cell(np.exp(LOCAL_DECAY.numpy()))
    got = memory_cell(kda, LOCAL_DECAY)
    assert (got.fact, got.stale) == pytest.approx(expected, abs=1e-4)
    direction = np.array([0.0] * 4 + [0.5] * 4 + [0.0] * 8)
    expected = numpy_cell(np.full(16, 0.9), erase=direction)
    got = memory_cell(gated, math.log(0.9), erase=torch.tensor(direction))
    assert (got.fact, got.stale) == pytest.approx(expected, abs=0.03)


# --------------------------------------------------------------------------------- hand-over numbers


def test_hand_over_1_cache_bytes_at_a_million_tokens():
    assert handover.cache_bytes_at(1) == 36_864
    assert handover.cache_bytes_at() == 36_864 * 2**20
    assert handover.cache_bytes_at(1000, dtype=torch.float32) == 2 * 36_864 * 1000


def test_hand_over_2_a_rewritten_key_and_what_one_pass_buys():
    assert handover.rewritten_key_error(linear) == pytest.approx(1, abs=1e-12)
    assert handover.rewritten_key_error(delta) == pytest.approx(0, abs=1e-12)
    assert handover.random_pairs_error(linear, 16) == pytest.approx(0.48, abs=0.01)
    assert handover.random_pairs_error(delta, 16) == pytest.approx(0.37, abs=0.01)


def test_hand_over_3_writes_to_clear():
    closed_form = math.ceil(math.log(0.01) / math.log(1 - 1 / 64))
    assert closed_form == 293
    assert handover.writes_to_clear(delta) == pytest.approx(closed_form, abs=1)
    assert handover.writes_to_clear(gated, reset=-5.0) == 1
    assert 100 < handover.writes_to_clear(gated, reset=-1.0) < 293  # a weak reset is a head start
    assert handover.writes_to_clear(linear) is None


def test_hand_over_4_memory_cells():
    cells = handover.memory_cells()
    assert cells["delta rule"] == pytest.approx((0, 0.81), abs=0.01)
    assert cells["delta rule"].score == pytest.approx(0.80625 / 2, abs=0.005)  # its expectation
    assert cells["gated delta rule"].score == pytest.approx(0.33, abs=0.01)
    assert max(cells["KDA"]) < 5e-4
    erased = probes.best_scalar_decay(erase=torch.eye(16)[4:8].sum(0))[1]
    assert erased.score == pytest.approx(0.25, abs=0.01)


def test_hand_over_5_exact_retrieval_among_1024():
    assert handover.random_pairs_error(delta) == pytest.approx(1.4, abs=0.05)
    assert handover.random_pairs_error(softmax()) < 1e-6
    assert handover.random_pairs_error(latent()) < 1e-6


def test_hand_over_6_share_of_the_first_layer():
    assert handover.first_layer_share() == pytest.approx(92**-0.5, rel=0.05)
    assert handover.first_layer_share(block_size=1) == pytest.approx(1, abs=1e-12)
    assert handover.first_layer_share(block_size=12) == pytest.approx(12**-0.5, rel=0.02)
    assert handover.first_layer_share(block_size=92) == handover.first_layer_share()


def test_hand_over_7_weights_of_one_token():
    """The totals of the released model: 2,779,484,476,000, of them 1,174,405,120 in the embedding; active
    without it 104,189,612,640."""
    assert handover.weights_for_a_token(16) == 104_189_612_640
    assert handover.weights_for_a_token() == 2_779_484_476_000 - 1_174_405_120
    for wrong in (-1, 897, 1.0):
        with pytest.raises(ValueError, match="chosen_experts must be"):
            handover.weights_for_a_token(wrong)


def test_hand_over_8_bytes_of_the_model():
    """92 layers of 896 experts with 3 · 3584 · 3072 weights, the rest in bfloat16."""
    routed = 92 * 896 * 3 * 3584 * 3072
    assert handover.released_bytes() == 2 * 2_779_484_476_000
    assert handover.released_bytes(4.25) == 2 * (2_779_484_476_000 - routed) + routed * 17 // 32
    with pytest.raises(ValueError, match="expert_bits must be"):
        handover.released_bytes(0)


def test_the_stored_scoreboard_is_what_the_probes_measure():
    stored = {row["rung"]: row for row in scoreboard.load()}
    measured = [
        handover.scoreboard_row(1, "full attention", softmax()),
        handover.scoreboard_row(2, "linear attention", linear),
        handover.scoreboard_row(3, "DeltaNet", delta),
        handover.scoreboard_row(4, "Gated DeltaNet", gated, reset=-5.0, end_decay=math.log(0.86)),
        handover.scoreboard_row(5, "KDA", kda, reset=-5.0, end_decay=LOCAL_DECAY),
        handover.hybrid_row(),
        handover.hybrid_row(7, "Attention Residuals"),
        handover.hybrid_row(8, "Mixture of experts"),
        handover.hybrid_row(9, "Kimi K3"),
    ]
    assert len(stored) == len(measured)
    for row in measured:
        assert stored[row["rung"]] == pytest.approx(row, abs=2e-3)
    assert measured[0]["state_bytes"] == 1024 * (64 + 64) * 4


# ------------------------------------------------------------------------------- contract and errors


def test_probes_repeat_and_leave_the_global_state_alone():
    before = torch.random.get_rng_state()
    first = interference(delta, [7]), overwriting(delta), context_switch(delta, 3), memory_cell(delta)
    again = interference(delta, [7]), overwriting(delta), context_switch(delta, 3), memory_cell(delta)
    assert first == again
    assert interference(delta, [7], seed=1) != first[0]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_reader_can_pass_a_rule_of_their_own():
    forgetful = MemoryRule("nothing", lambda state, w: state, lambda state, q: torch.zeros_like(q))
    assert interference(forgetful, [1, 9]) == [1.0, 1.0]
    assert overwriting(forgetful) == (1.0, 0.0)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_every_rule_writes_in_pieces_as_at_once(rule):
    k, v = torch.randn(2, 6, 5, dtype=torch.float64), torch.randn(2, 6, 4, dtype=torch.float64)
    whole = rule.write(None, plain_writes(k, v, 0.7))
    first = rule.write(None, plain_writes(k[:, :2], v[:, :2], 0.7))
    pieces = rule.write(first, plain_writes(k[:, 2:], v[:, 2:], 0.7))
    torch.testing.assert_close(rule.read(pieces, k), rule.read(whole, k), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interference(delta, [0]), "counts must be an integer >= 1"),
        (lambda: interference(delta, [4], K=0), "K must be an integer >= 1"),
        (lambda: interference(delta, [4], passes=0), "passes must be"),
        (lambda: interference(delta, [4], correlation=1.0), "correlation must lie in"),
        (lambda: interference(delta, [4], correlation=0.5, orthogonal=True), "correlation must be 0"),
        (lambda: overwriting(delta, V=1), "V must be an integer >= 2"),
        (lambda: overwriting(linear, beta=0.5), "beta must be 1 for linear attention"),
        (lambda: memory_cell(linear, erase=torch.ones(16)), "erase must be None for linear attention"),
        (lambda: context_switch(delta, 0), "writes must be"),
        (lambda: context_switch(gated, 3, reset=1.0), "reset must be a log-decay"),
        (lambda: context_switch(delta, 3, reset=-1.0), "reset must be 0 for delta rule"),
        (lambda: retention(kda, torch.ones(3), [1]), "g must be a log-decay"),
        (lambda: retention(gated, torch.tensor([0.0, -1.0]), [1]), "g must be one number"),
        (lambda: retention(kda, torch.zeros(2, 2), [1]), r"g must be \[K\]"),
        (lambda: retention(kda, torch.zeros(2), [3, 1]), "lags must rise"),
        (lambda: memory_cell(delta, scopes=1), "scopes must be an integer >= 2"),
        (lambda: memory_cell(gated, 0.5), "end_decay must be"),
        (lambda: memory_cell(delta, -1.0), "end_decay must be 0 for delta rule"),
        (lambda: memory_cell(kda, torch.zeros(3)), "end_decay must be"),
        (lambda: memory_cell(gated, LOCAL_DECAY), "end_decay must be one number"),
        (lambda: memory_cell(kda, erase=torch.zeros(3)), r"erase must be \[K\]"),
        (lambda: softmax(math.nan), "scale must be finite"),
        (lambda: latent(math.inf), "scale must be finite"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
