"""The stored differences from the golden fixtures: none is missing, all are small, all can be had again."""

import json

import pytest
from benchmarks import parity

STORED = {row["file"]: row for row in json.loads(parity.RESULTS.read_text())["goldens"]}
FILES = {str(path.relative_to(parity.GOLDENS)): path for path in parity.fixtures()}
# Through 13 layers float32's rounding grows; the test of the whole model says how far.
LIMITS = {"float64": lambda file: 1e-12, "float32": lambda file: 2e-4 if file.startswith("k3/") else 5e-6}


def test_every_fixture_has_a_stored_difference() -> None:
    assert STORED.keys() == FILES.keys()
    for file, row in STORED.items():
        assert all(row[name] < limit(file) for name, limit in LIMITS.items()), row


@pytest.mark.parametrize("file", FILES)
def test_the_stored_difference_is_measured_again(file) -> None:
    """To the order of magnitude: the last bits are another machine's."""
    row = parity.row(FILES[file])
    assert row["what"] == STORED[file]["what"]
    for name, limit in LIMITS.items():
        assert row[name] < limit(file)
        rounding = 5e-16 if name == "float64" else 3e-7
        assert row[name] < 10 * STORED[file][name] + rounding
        assert STORED[file][name] < 10 * row[name] + rounding


def test_a_wrong_output_is_seen(monkeypatch) -> None:
    right = parity.full_attention.softmax_attention
    monkeypatch.setattr(parity.full_attention, "softmax_attention", lambda q, k, v: right(q, k, v) * 1.001)
    assert parity.row(FILES["ops/softmax_T7_nostate.safetensors"])["float64"] == pytest.approx(1e-3, rel=0.01)
