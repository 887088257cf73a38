"""The scoreboard as a picture: a row for each rung, a column for each measure, in each cell a dot."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from evolve.checks import require
from evolve.lab.charts import format_bytes, format_count
from evolve.lab.ladder import RUNGS
from evolve.lab.palette import HAIR, INK, MUTED, PANEL, mechanism, mix, text_colour
from evolve.lab.style import MARGIN, WIDTH, Panel, styled


def _plain(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.3g}"


class Column(NamedTuple):
    """One measure: the row's key, a heading (two short lines at most), its unit, how its dots are placed.

    ``scale`` is ``"log"`` (zeros sit at the left end) or ``"linear"`` (from 0). ``better`` is ``"lower"``,
    ``"higher"`` or ``""``; the best values of a column are set in bold.
    """

    key: str
    heading: str
    unit: str
    scale: str = "linear"
    better: str = "lower"
    write: Callable[[float], str] = _plain


COLUMNS = (
    Column("state_bytes", "state\nkept", "bytes", "log", "lower", format_bytes),
    Column("decode_bytes", "decode\nreads", "bytes", "log", "lower", format_bytes),
    Column("read_back_error", "read-back\nerror", "ratio"),
    Column("overwrite_error", "overwrite\nerror", "ratio"),
    Column("writes_to_clear", "writes to\nclear", "count", "log", "lower", format_count),
    Column("memory_cell", "memory\ncell", "sq. error"),
    Column("retention", "still\nread", "share", "linear", "higher"),
)

TRACK = mix(MUTED, PANEL, 0.3)
_NAME = 1.5  # inches for the rung's name
_ROW = 0.44  # inches for each row
_HEAD = 0.68  # inches for the column headings


@styled
def scoreboard_figure(
    rows: Sequence[Mapping[str, object]],
    columns: Sequence[Column] = COLUMNS,
    *,
    title: str = "What each rung repairs, and what it still pays",
    subtitle: str = "Bold: the best value so far",
    lit: int | None = None,
    alt: str = "",
) -> Panel:
    """A dot table of 1 to 9 rungs.

    Each row is a mapping with ``"rung"`` (1–9) and, under each column's key, a number, ``"n/a"`` where the
    question does not apply, or ``None`` where it has not been measured (shown as –).
    Rungs must be distinct and are shown in order; ``lit`` (default: the highest) has its row marked.
    ``ValueError`` for no rows, an unknown rung, a missing key, or a value that is negative or not finite.
    """
    rows = _checked(rows, columns)
    lit = rows[-1]["rung"] if lit is None else lit
    require(any(r["rung"] == lit for r in rows), f"lit must be one of the rungs in rows, got {lit!r}")
    above = 0.62 + (0.25 if subtitle else 0)
    height = above + _HEAD + _ROW * len(rows) + MARGIN
    fig = Panel(title, height, subtitle=subtitle, alt=alt or _alt(rows, columns))
    fig.set_layout_engine("none")
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(height, 0))  # inches from the top left
    ax.set_axis_off()
    step = (WIDTH - 2 * MARGIN - _NAME) / len(columns)
    for i, row in enumerate(rows):
        _row_name(ax, row["rung"], above + _HEAD + _ROW * i, row["rung"] == lit)
    for j, column in enumerate(columns):
        x = MARGIN + _NAME + step * j
        for k, words in enumerate(reversed(column.heading.split("\n"))):
            ax.text(x, above + 0.34 - 0.16 * k, words, weight="bold", size=9, va="baseline")
        ax.text(x, above + 0.4, column.unit, color=MUTED, size=8.5, va="top")
        _column(ax, column, rows, x, above + _HEAD, 0.78 * step)
    return fig


def _checked(rows: Sequence[Mapping[str, object]], columns: Sequence[Column]) -> list[Mapping]:
    require(1 <= len(rows) <= len(RUNGS), f"rows must be 1 to {len(RUNGS)} mappings, got {len(rows)}")
    require(len(columns) >= 1, "columns must hold at least one Column, got none")
    for column in columns:
        require(column.scale in ("log", "linear"), f"scale must be 'log' or 'linear', got {column.scale!r}")
    for row in rows:
        for key in ("rung", *(c.key for c in columns)):
            require(key in row, f"rows must each have the key {key!r}, got {sorted(row)}")
        require(
            row["rung"] in range(1, len(RUNGS) + 1), f"rung must be 1 to {len(RUNGS)}, got {row['rung']!r}"
        )
        for column in columns:
            value = row[column.key]
            number = isinstance(value, int | float) and math.isfinite(value) and value >= 0
            require(
                number or value in (None, "n/a"),
                f'{column.key} must be a finite number ≥ 0, "n/a" or None, got {value!r}',
            )
    rungs = [row["rung"] for row in rows]
    require(len(set(rungs)) == len(rungs), f"rows must have distinct rungs, got {rungs}")
    return sorted(rows, key=lambda row: row["rung"])


def _row_name(ax: Axes, rung: int, y: float, lit: bool) -> None:
    """Number and name, on a band in the mechanism's tint when this is the row to look at."""
    colour = mechanism(RUNGS[rung - 1].mechanism).colour
    face = mix(colour, PANEL, 0.13) if lit else PANEL
    if lit:
        ax.add_patch(Rectangle((MARGIN / 2, y), WIDTH - MARGIN, _ROW, facecolor=face, edgecolor="none"))
    else:
        ax.plot([MARGIN, WIDTH - MARGIN], [y, y], color=HAIR, lw=0.8)
    ink = text_colour(colour, face)
    ax.text(MARGIN, y + _ROW / 2, str(rung), color=ink, weight="bold", size=10, va="center")
    ax.text(MARGIN + 0.2, y + _ROW / 2, RUNGS[rung - 1].name, color=ink, weight="bold", size=9.5, va="center")


def _column(ax: Axes, column: Column, rows: list[Mapping], x: float, y: float, width: float) -> None:
    """The cells of one measure: the number, and under it a dot on a scale shared by the column."""
    values = [row[column.key] for row in rows]
    known = [v for v in values if v not in (None, "n/a")]
    best = {"lower": min, "higher": max}.get(column.better)
    target = best(known) if best and len(set(known)) > 1 else None
    for row, value in zip(rows, values):
        if value in (None, "n/a"):
            ax.text(x, y + 0.14, value or "–", color=MUTED, size=9, va="center")
        else:
            look = mechanism(RUNGS[row["rung"] - 1].mechanism)
            bold = "bold" if value == target else "normal"
            ax.text(x, y + 0.14, column.write(value), color=INK, size=9, weight=bold, va="center")
            ax.plot([x, x + width], [y + 0.32] * 2, color=TRACK, lw=2.2, solid_capstyle="round")
            dot = x + width * position(value, known, column.scale)
            ax.plot([dot], [y + 0.32], marker="o", ms=6.5, color=look.colour)
        y += _ROW


def position(value: float, known: Sequence[float], scale: str) -> float:
    """Where ``value`` sits among the ``known`` ones of its column, from 0 (left) to 1 (right)."""
    if scale == "linear":
        return value / max(known) if max(known) > 0 else 0.0
    positive = [v for v in known if v > 0]
    if value == 0:
        return 0.0
    low, high = math.log(min(positive)), math.log(max(positive))
    start = 0.15 if len(positive) < len(known) else 0.0  # room for the zeros, which have no logarithm
    return start + (1 - start) * ((math.log(value) - low) / (high - low) if high > low else 0.5)


def _alt(rows: list[Mapping], columns: Sequence[Column]) -> str:
    """The table in words, row by row."""

    def cell(row: Mapping, column: Column) -> str:
        value = row[column.key]
        words = "not measured" if value is None else value if value == "n/a" else column.write(value)
        return f"{column.heading.replace(chr(10), ' ')} {words}"

    lines = [
        f"{row['rung']} {RUNGS[row['rung'] - 1].name}: {', '.join(cell(row, c) for c in columns)}."
        for row in rows
    ]
    return "Scoreboard. " + " ".join(lines)
