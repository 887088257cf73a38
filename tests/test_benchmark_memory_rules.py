"""The benchmark's own promises: unlike outputs are not timed, and decoding costs the same at any context."""

import pytest
from benchmarks import memory_rules


def test_a_pair_whose_outputs_differ_is_not_timed() -> None:
    row = memory_rules.compare("evolve chunk_delta_rule", "evolve chunk_kda", 64, 16, "unbounded", rounds=1)
    assert row["difference"] > memory_rules.LARGEST_DIFFERENCE
    assert row["refused"] == "outputs differ"
    assert "ratio" not in row


def test_a_pair_with_equal_outputs_is_timed() -> None:
    pytest.importorskip("transformers")
    peer = "transformers chunk_kimi_delta_attention"
    row = memory_rules.compare("evolve chunk_kda", peer, 64, 16, "bounded", rounds=1)
    assert row["difference"] < 2e-6
    assert row["ratio"] > 0


def test_decoding_costs_the_same_after_any_context() -> None:
    """Counted, not timed: operations, bytes touched and bytes kept per token."""
    short, long = memory_rules.decode(contexts=(8, 512), steps=1)
    for cost in ("operations", "bytes_touched", "cache_bytes"):
        assert short[cost] == long[cost] > 0
