"""Parts of the home page: the ladder one can click, where to start, the scoreboard."""

import json
from html import escape

from evolve.lab import rung_table, scoreboard
from evolve.lab.ladder import RUNGS
from evolve.lab.palette import (
    MECHANISMS,
    MUTED,
    PANEL,
    PANEL_DARK,
    diverging,
    diverging_dark,
    format_hex,
    mechanism,
    mix,
    text_colour,
)
from site_pages.series import Notebook

READERS = (
    (
        "You know attention",
        "and its cache of keys and values",
        (1, 2, 3),
        "Begin with the price of remembering every token, then trade the list for one matrix and watch what "
        "that breaks.",
    ),
    (
        "You know linear attention",
        "or a state-space model",
        (3, 4, 5),
        "Begin where a key is written twice. Three rungs later a decay for every channel keeps facts and "
        "drops scratch.",
    ),
    (
        "You want Kimi K3",
        "and the parts it is made of",
        (5, 6, 7, 8, 9),
        "One rung for each part: the delta memory, the latent look-back, the read along depth, the experts.",
    ),
)


def _colours(key: str) -> str:
    """The colours of one rung as CSS variables, all readable on the figures' neutral panel."""
    colour = mechanism(key).colour
    face = mix(colour, PANEL, 0.14)
    names = {
        "tread": colour,
        "face": face,
        "ink": text_colour(colour, face),
        "quiet": text_colour(MUTED, face),
        "strong": text_colour(colour),
    }
    return ";".join(f"--{name}:{value}" for name, value in names.items())


def ladder(notebooks: list[Notebook]) -> str:
    """Nine steps as a list of links; a rung without a notebook yet is a step without a link."""
    pages = {n.rung: n.stem for n in notebooks}
    steps = []
    for number, rung in enumerate(RUNGS, 1):
        words = (
            f'<span class="number">{number}</span> <strong>{escape(rung.name)}</strong> '
            f'<span class="memory">{escape(rung.memory)}</span>'
        )
        if number in pages:
            inner = f'<a href="notebooks/{pages[number]}.html">{words}</a>'
        else:
            inner = f'<span class="ahead">{words} <span class="memory">(coming)</span></span>'
        steps.append(f'<li style="--n:{number};{_colours(rung.mechanism)}">{inner}</li>')
    listed = "\n".join(steps)
    label = "The ladder, from GPT-2 to Kimi K3"
    return f'<nav class="ladder" aria-label="{label}">\n<ol role="list">\n{listed}\n</ol>\n</nav>\n'


def start_here(notebooks: list[Notebook]) -> str:
    """Three cards, one for each kind of reader, each with the rungs to read in order."""
    pages = {n.rung: n for n in notebooks}
    cards = []
    for title, more, rungs, text in READERS:
        there = [pages[r] for r in rungs if r in pages]
        links = "\n".join(
            f'<li><a href="notebooks/{n.stem}.html">{n.rung} · {escape(n.name)}</a></li>' for n in there
        )
        cards.append(
            f'<section class="start"><h3>{title}<br><small>{more}</small></h3>\n<p>{text}</p>\n'
            f'<ul role="list">\n{links}\n</ul></section>'
        )
    return "\n".join(['<div class="starts">', *cards, "</div>", ""])


def _cell(value: float | str | None) -> str:
    """A number as the scoreboard in the notebooks prints it."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def scoreboard_table(notebooks: list[Notebook]) -> str:
    """The legend, then the stored rows as a Markdown table with units, the rungs linked."""
    pages = {n.rung: f"notebooks/{n.stem}.ipynb" for n in notebooks}
    units = {column.key: column.unit for column in rung_table.COLUMNS}  # as in the notebooks' picture of it
    lines = ["| rung | " + " | ".join(f"{c.title} ({units[c.key]})" for c in scoreboard.columns) + " |"]
    lines.append("|---|" + "--:|" * len(scoreboard.columns))
    for row in scoreboard.load():
        name = f"{row['rung']} · {row['name']}"
        name = f"[{name}]({pages[row['rung']]})" if row["rung"] in pages else name
        lines.append(f"| {name} | " + " | ".join(_cell(row[c.key]) for c in scoreboard.columns) + " |")
    meanings = "\n".join(f"- **{c.title}** ({units[c.key]}): {c.meaning}" for c in scoreboard.columns)
    legend = f"{meanings}\n- n/a: the question does not apply to the rung"
    return (
        f"```{{rst-class}} legend\n{legend}\n```\n\n```{{rst-class}} measured\n```\n\n"
        + "\n".join(lines)
        + "\n"
    )


def toctree(notebooks: list[Notebook]) -> str:
    """The series in the sidebar, by short names."""
    entries = "\n".join(f"{n.rung} · {n.name} <notebooks/{n.stem}>" for n in notebooks)
    return f"```{{toctree}}\n:caption: The series\n:hidden:\n\n{entries}\n```\n"


def palette_json() -> str:
    """The colours that the playground draws with on light and on dark pages, as a data block of the page."""
    named = [
        mechanism.colour for mechanism in MECHANISMS.values()
    ]  # six for the board's keys, then for typed ones
    lines = {"light": named, "dark": [text_colour(c, PANEL_DARK, "#ffffff") for c in named]}
    maps = {"light": diverging(), "dark": diverging_dark()}
    colours = {
        scheme: {"diverging": [format_hex(c) for c in steps[:: len(steps) // 64]], "lines": lines[scheme]}
        for scheme, steps in maps.items()
    }
    return f'<script type="application/json" id="playground-palette">{json.dumps(colours)}</script>'
