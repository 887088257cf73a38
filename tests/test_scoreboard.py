"""The stored rows are well formed, broken ones are refused by name, and the table lines up."""

import json

import pytest

from evolve.lab import scoreboard

ROW = {"rung": 2, "name": "linear attention"} | {column.key: "n/a" for column in scoreboard.columns}


def stored(tmp_path, rows):
    file = tmp_path / "scoreboard.json"
    file.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return file


def test_rows_rise_from_the_first_rung():
    rows = scoreboard.load()
    assert [row["rung"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[0]["name"] == "full attention"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("{", "scoreboard.json is not valid JSON"),
        ({}, "must hold a list of rows, got dict"),
        ([3], "row 1 must be an object, got int"),
        ([ROW | {"extra": 1}], r"row 1 must have exactly the keys .* differs in \['extra'\]"),
        ([{"rung": 1, "name": "x"}], "differs in .*'memory_cell'"),
        ([ROW | {"rung": 10}], "rung must be 1 to 9, got 10"),
        ([ROW | {"rung": True}], "rung must be 1 to 9, got True"),
        ([ROW | {"name": " "}], "name must be text"),
        ([ROW | {"memory_cell": "fine"}], "memory_cell must be a number >= 0, \"n/a\" or null, got 'fine'"),
        ([ROW | {"memory_cell": -1}], "memory_cell must be a number"),
        ([ROW | {"memory_cell": float("nan")}], "memory_cell must be a number"),
        ([ROW | {"state_bytes": True}], "state_bytes must be a number"),
        ([ROW, ROW], r"rungs must rise, one row each, got \[2, 2\]"),
    ],
)
def test_broken_file_is_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        scoreboard.load(stored(tmp_path, rows))


def test_table_shows_every_kind_of_value(tmp_path, monkeypatch):
    rows = [
        ROW | {"rung": 1, "state_bytes": 524288, "read_back_error": 0.00123456, "retention": None},
        ROW | {"state_bytes": 16384},
    ]
    load = scoreboard.load
    monkeypatch.setattr(scoreboard, "load", lambda: load(stored(tmp_path, rows)))
    header, rule, first, second, *_ = text = scoreboard.table().splitlines()
    assert len(header) == len(rule) == len(first) == len(second)
    assert header.split() == ["rung", *(column.title for column in scoreboard.columns)]
    assert "524,288" in first
    assert "0.00123" in first
    assert first.rstrip().endswith("-")
    assert "16,384" in second
    assert "n/a" in second
    assert text[-1].split(maxsplit=1) == ["-", "not measured yet"]
    assert second not in scoreboard.table(upto=1).splitlines()
    assert scoreboard.table(upto=2) == scoreboard.table()


@pytest.mark.parametrize("upto", [0, -1, 1.5, "2", True])
def test_bad_upto_is_refused(upto):
    with pytest.raises(ValueError, match="upto must be a rung >= 1"):
        scoreboard.table(upto=upto)
