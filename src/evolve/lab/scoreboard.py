"""The memory scoreboard: one row a rung, the same seven numbers on every row.

The rows are package data (``scoreboard.json``), so that one notebook opened alone can show those of the
rungs before it. A value is a number, ``"n/a"`` where the question does not apply to a rung, or ``null``
where it has not been measured yet. A rung adds its row to the file; a test recomputes every number.
"""

import json
import math
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from evolve.checks import require

NOT_APPLICABLE = "n/a"


class Column(NamedTuple):
    """A measured quantity: ``key`` in the file, ``title`` over the column, ``meaning`` in the legend."""

    key: str
    title: str
    meaning: str


#: What is measured, in the order shown. Bytes are those of one head, K = V = 64, in float32.
columns = (
    Column("state_bytes", "state", "bytes kept after 1,024 tokens (one head, K = V = 64, float32)"),
    Column("decode_bytes", "decode", "bytes read to decode one more token there"),
    Column("read_back_error", "read-back", "relative error (RMS) of reading one of 1,024 random pairs"),
    Column("overwrite_error", "overwrite", "relative error of reading a key that was written twice"),
    Column(
        "writes_to_clear",
        "clear",
        "writes until 1 % of an old context's energy is left (n/a: 320 are not enough)",
    ),
    Column("memory_cell", "cell", "facts kept and scratch forgotten: mean squared error"),
    Column("retention", "retention", "share of a write that is still read after 1,024 steps"),
)


def _check_row(where: str, row: object) -> None:
    """A row has a rung, a name and every column, each a number, "n/a" or null."""
    require(isinstance(row, dict), f"{where} must be an object, got {type(row).__name__}")
    expected = {"rung", "name", *(column.key for column in columns)}
    odd = sorted(expected ^ row.keys())
    require(not odd, f"{where} must have exactly the keys {sorted(expected)}, differs in {odd}")
    rung, name = row["rung"], row["name"]
    require(type(rung) is int and 1 <= rung <= 9, f"{where}: rung must be 1 to 9, got {rung!r}")
    require(isinstance(name, str) and name.strip(), f"{where}: name must be text, got {name!r}")
    for column in columns:
        value = row[column.key]
        number = type(value) in (int, float) and math.isfinite(value) and value >= 0
        require(
            number or value is None or value == NOT_APPLICABLE,
            f'{where}: {column.key} must be a number >= 0, "n/a" or null, got {value!r}',
        )


def load(file: Traversable | None = None) -> list[dict]:
    """The rows in order of their rungs: ``{"rung": 1, "name": "full attention", <column>: value, ...}``.

    ``file`` is the package's own unless given (a ``pathlib.Path`` will do). Raises ``ValueError`` that
    names the file, the row and the rule where one is broken.
    """
    file = files("evolve.lab") / "scoreboard.json" if file is None else file
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{file.name} is not valid JSON: {error}") from error
    require(isinstance(rows, list), f"{file.name} must hold a list of rows, got {type(rows).__name__}")
    for position, row in enumerate(rows, 1):
        _check_row(f"{file.name}, row {position}", row)
    rungs = [row["rung"] for row in rows]
    require(rungs == sorted(set(rungs)), f"{file.name}: rungs must rise, one row each, got {rungs}")
    return rows


def _shown(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def table(upto: int | None = None) -> str:
    """The rows up to rung ``upto`` (all unless given) as aligned plain text with a legend below."""
    require(upto is None or (type(upto) is int and upto >= 1), f"upto must be a rung >= 1, got {upto!r}")
    rows = [row for row in load() if upto is None or row["rung"] <= upto]
    lines = [["", "rung", *(column.title for column in columns)]]
    lines += [[str(r["rung"]), r["name"], *(_shown(r[column.key]) for column in columns)] for r in rows]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    text = []
    for number, name, *values in lines:
        right = [value.rjust(width) for value, width in zip(values, widths[2:])]
        text.append("  ".join([number.rjust(widths[0]), name.ljust(widths[1]), *right]))
    text.insert(1, "-" * len(text[0]))
    legend = [f"{column.title:<10} {column.meaning}" for column in columns]
    if any(row[column.key] is None for row in rows for column in columns):
        legend.append(f"{'-':<10} not measured yet")
    return "\n".join([*text, "", *legend])
