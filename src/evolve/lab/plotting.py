"""The house style: figures whose title states what they show, on a panel that fits light and dark pages.

This is the one module to import from; the parts live beside it (``palette``, ``style``, ``charts``,
``matrices``, ``ladder``, ``rung_table``, ``player``). ``use_style()`` once at the top of a notebook; then::

    fig, ax = figure(
        "Errors grow with every pair stored",
        xlabel="stored pairs (count)",
        ylabel="read-back error (ratio)",
    )
    ax.plot(n, error, **line("linear_attention"))
    direct_label(ax)
    fig

A figure here is a :class:`Panel`: a matplotlib ``Figure`` that lives outside pyplot (nothing to close,
nothing shown twice), shows itself when it is the last expression of a cell, and writes the same bytes each
time. Its ``text/plain`` output is its alt text, so that a strict notebook test compares words.
"""

from evolve.lab.charts import (
    direct_label,
    figure,
    format_bytes,
    format_count,
    format_seconds,
    format_tokens,
    line,
    log_axis,
)
from evolve.lab.ladder import RUNGS, ladder, ladder_alt
from evolve.lab.matrices import attention_pattern, heatmap, panel, state_matrix, state_series
from evolve.lab.palette import HAIR, INK, MECHANISMS, MUTED, PANEL, PAPER, mechanism, text_colour
from evolve.lab.player import Player, animate
from evolve.lab.rung_table import COLUMNS, Column, scoreboard_figure
from evolve.lab.style import DIVERGING, SEQUENTIAL, WIDTH, Panel, use_style

__all__ = [
    "COLUMNS",
    "DIVERGING",
    "HAIR",
    "INK",
    "MECHANISMS",
    "MUTED",
    "PANEL",
    "PAPER",
    "RUNGS",
    "SEQUENTIAL",
    "WIDTH",
    "Column",
    "Panel",
    "Player",
    "animate",
    "attention_pattern",
    "direct_label",
    "figure",
    "format_bytes",
    "format_count",
    "format_seconds",
    "format_tokens",
    "heatmap",
    "ladder",
    "ladder_alt",
    "line",
    "log_axis",
    "mechanism",
    "panel",
    "scoreboard_figure",
    "state_matrix",
    "state_series",
    "text_colour",
    "use_style",
]
