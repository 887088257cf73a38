"""Charts: figures with a finding for a title, lines named where they end, and log axes written for people."""

import re
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from evolve.checks import require
from evolve.lab.palette import mechanism, text_colour
from evolve.lab.style import Panel, styled


def line(key: str, *, markers: bool = True, label: str | None = None) -> dict:
    """Keywords for ``ax.plot`` that draw the mechanism ``key`` in its colour, with its name as label.

    Told apart in grey by markers, or by a dash pattern when ``markers=False`` (dense or noisy curves).
    """
    look = mechanism(key)
    style: dict = {"color": look.colour, "label": look.name if label is None else label}
    if markers:
        return style | {"marker": look.marker, "markevery": 0.11}
    return style | {"linestyle": (0, look.dash) if look.dash else "-"}


@styled
def figure(
    title: str,
    *,
    xlabel: str | Sequence[str],
    ylabel: str | Sequence[str],
    subtitle: str = "",
    height: float = 4.0,
    rows: int = 1,
    cols: int = 1,
    alt: str = "",
    **subplots: object,
) -> tuple[Panel, Axes | np.ndarray]:
    """A panel whose title states the finding, with one axes or an array of them [rows·cols].

    ``xlabel`` and ``ylabel`` (one for all, or one for each axes) must end in their unit in brackets:
    ``"context (tokens)"``, ``"error (ratio)"``, ``"stored pairs (count)"``; ``ValueError`` otherwise.
    ``height`` is in inches. Further keywords go to ``Figure.subplots`` (``sharey=True``, ``width_ratios=…``).
    """
    xlabels, ylabels = (_labels(n, v, rows * cols) for n, v in (("xlabel", xlabel), ("ylabel", ylabel)))
    panel = Panel(title, height, subtitle=subtitle, alt=alt)
    axes = np.atleast_1d(panel.subplots(rows, cols, **subplots)).ravel()
    for ax, x, y in zip(axes, xlabels, ylabels):
        ax.set_xlabel(x)
        # Read like a caption above the axis: nobody has to turn their head.
        ax.set_ylabel(y, rotation=0, ha="left", va="bottom")
        ax.yaxis.set_label_coords(0, 1.03)
    return panel, (axes[0] if axes.size == 1 else axes)


def _labels(name: str, value: str | Sequence[str], count: int) -> list[str]:
    labels = [value] * count if isinstance(value, str) else list(value)
    require(len(labels) == count, f"{name} must be one label or {count}, got {len(labels)}")
    for label in labels:
        fits = re.search(r"\S \(.+\)$", label) is not None
        require(fits, f"{name} must end in its unit, as in 'context (tokens)', got {label!r}")
    return labels


# ---------------------------------------------------------------------------------------- direct labels


@styled
def direct_label(ax: Axes) -> list[str]:
    """Write each labelled line's name at its right-hand end, in its colour, instead of a legend.

    Names that would overlap are moved apart vertically, as little as possible, and tied to their line by a
    hairline. Call it last: it measures the finished axes. Returns the names from top to bottom.
    ``ValueError`` when no line has a label.
    """
    lines = [ln for ln in ax.get_lines() if not str(ln.get_label()).startswith("_")]
    require(bool(lines), "ax must hold at least one line with a label, got none")
    ax.figure.draw_without_rendering()  # settles limits and layout
    ends = [_last_point(ax, ln) for ln in lines]
    box = ax.get_window_extent()
    at = np.array([ax.transData.transform(end)[1] for end in ends])
    placed = spread(at, 1.4 * 10.5 * ax.figure.dpi / 72)
    for ln, end, y, moved in zip(lines, ends, placed, placed - at):
        colour = text_colour(to_hex(ln.get_color()))
        gap = box.x1 - ax.transData.transform(end)[0]
        tie = {"arrowstyle": "-", "color": colour, "lw": 0.8, "shrinkA": 0, "shrinkB": 5, "alpha": 0.6}
        ax.annotate(
            str(ln.get_label()), end, (1 + 11 / box.width, (y + 2 - box.y0) / box.height),
            textcoords="axes fraction", color=colour, weight="bold", va="center_baseline",
            annotation_clip=False, arrowprops=tie if abs(moved) > 3 or gap > 25 else None,
        )  # fmt: skip
    return [str(lines[i].get_label()) for i in np.argsort(-placed)]


def spread(positions: np.ndarray, gap: float) -> np.ndarray:
    """``positions`` [n], moved as little as possible (least squares) until they are ``gap`` apart."""
    order = np.argsort(positions, kind="stable")
    # With the room that each needs subtracted, the rule is "not decreasing": pool neighbours that break it.
    blocks: list[list[float]] = []
    for wish in np.asarray(positions, float)[order] - gap * np.arange(len(order)):
        blocks.append([wish, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, n), (b, m) = blocks[-2:]
            blocks[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    settled = np.repeat([b[0] for b in blocks], [int(b[1]) for b in blocks]) + gap * np.arange(len(order))
    placed = np.empty(len(order))
    placed[order] = settled
    return placed


def _last_point(ax: Axes, ln: Line2D) -> tuple[float, float]:
    """The data coordinates of the line's last finite point between the left and right edge of the axes."""
    points = ln.get_transform().transform(np.asarray(ln.get_xydata(), float))  # pixels: axhline has its own
    box = ax.get_window_extent()
    inside = (points[:, 0] >= box.x0 - 1) & (points[:, 0] <= box.x1 + 1)
    seen = np.flatnonzero(np.isfinite(points).all(axis=1) & inside)
    require(seen.size > 0, f"line {ln.get_label()!r} must have a finite point inside the axes")
    x, y = ax.transData.inverted().transform(points[seen[-1]])
    return float(x), float(y)


# ------------------------------------------------------------------------------------------- log scales


def _scaled(value: float, step: float, units: Sequence[str]) -> str:
    """Three significant digits of ``value`` with the largest unit that keeps it at 1 or more."""
    power = 0
    while power < len(units) - 1 and abs(value) >= step * (1 - 5e-4):
        value, power = value / step, power + 1
    digits = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return digits + units[power]


def format_count(value: float) -> str:
    """1500 → ``"1.5k"``, 2.78e12 → ``"2.78T"`` (powers of 1000)."""
    return _scaled(value, 1000, ("", "k", "M", "B", "T"))


def format_tokens(value: float) -> str:
    """8192 → ``"8k"``, 1048576 → ``"1M"``: contexts are counted in powers of 1024."""
    return _scaled(value, 1024, ("", "k", "M", "G"))


def format_bytes(value: float) -> str:
    """38654705664 → ``"38.7 GB"`` (powers of 1000)."""
    return _scaled(value, 1000, (" B", " kB", " MB", " GB", " TB", " PB"))


def format_seconds(value: float) -> str:
    """0.0003 → ``"300 µs"``, 2.5 → ``"2.5 s"``."""
    return f"{value:.3g} s" if value >= 0.9995 else _scaled(value * 1e9, 1000, (" ns", " µs", " ms"))


_LOG_KINDS = {
    "count": (10, format_count),
    "tokens": (2, format_tokens),
    "bytes": (10, format_bytes),
    "seconds": (10, format_seconds),
    "ratio": (10, lambda v: f"{v:g}"),
}


def log_axis(axis: Axis, kind: str, *, ticks: int = 6) -> None:
    """Make ``ax.xaxis`` or ``ax.yaxis`` logarithmic, with at most ``ticks`` whole powers, written for people.

    ``kind``: ``"tokens"`` (powers of 2), or ``"count"``, ``"bytes"``, ``"seconds"``, ``"ratio"`` (of 10).
    Call it after plotting. ``ValueError`` for another kind, or when the data are not positive.
    """
    require(kind in _LOG_KINDS, f"kind must be one of {', '.join(_LOG_KINDS)}, got {kind!r}")
    require(ticks >= 2, f"ticks must be at least 2, got {ticks}")
    base, write = _LOG_KINDS[kind]
    low, high = axis.get_data_interval()
    require(0 < low <= high < np.inf, f"data on a log axis must be positive and finite, got {low} to {high}")
    axis._set_axes_scale("log", base=base)
    first, last = int(np.floor(np.log(low) / np.log(base))), int(np.ceil(np.log(high) / np.log(base)))
    step = max(1, -(-(last - first) // (ticks - 1)))
    marks = [float(base) ** p for p in range(first, last + 1, step)]
    if base == 10 and high < 60 * low:  # powers alone would leave one mark, or none
        marks = [m * 10.0**p for p in range(first, last + 1) for m in (1, 2, 5)]
        marks = [x for x in marks if 0.9 * low <= x <= 1.1 * high]
    axis.set_major_locator(FixedLocator(marks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axis.set_minor_locator(NullLocator())
