"""The ladder: nine rungs from GPT-2 to Kimi K3, with the one that a notebook stands on lit."""

import textwrap
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from evolve.checks import require
from evolve.lab.palette import HAIR, INK, MUTED, PANEL, PAPER, mechanism, mix, text_colour
from evolve.lab.style import MARGIN, WIDTH, Panel, styled


class Rung(NamedTuple):
    """One rung: its mechanism (a key of ``MECHANISMS``), its name, the memory that it adds in few words."""

    mechanism: str
    name: str
    memory: str


RUNGS = (
    Rung("softmax_attention", "Full attention", "keeps all tokens"),
    Rung("linear_attention", "Linear attention", "one fixed matrix"),
    Rung("delta_rule", "Delta rule", "rewrites a key"),
    Rung("gated_delta_rule", "Gated delta rule", "decay per head"),
    Rung("kda", "KDA", "decay per channel"),
    Rung("mla", "MLA hybrid", "latent look-back"),
    Rung("attention_residuals", "Attention residuals", "looks back in depth"),
    Rung("moe", "Mixture of experts", "knowledge in experts"),
    Rung("k3", "Kimi K3", "all of it"),
)


def ladder_alt(lit: int = 1) -> str:
    """The ladder in words: the alt text of ``ladder(lit)``."""
    rung = _rung(lit)
    below = "; ".join(f"{i} {r.name}" for i, r in enumerate(RUNGS[: lit - 1], 1))
    above = "; ".join(f"{i} {r.name}" for i, r in enumerate(RUNGS[lit:], lit + 1))
    parts = [
        f"A staircase of nine rungs from GPT-2 to Kimi K3. Rung {lit}, {rung.name}, is lit: {rung.memory}.",
        f"Behind it: {below}." if below else "",
        f"Still ahead: {above}." if above else "",
    ]
    return " ".join(p for p in parts if p)


@styled
def ladder(lit: int = 1, *, compact: bool = False) -> Panel:
    """The staircase with rung ``lit`` (1–9) in its mechanism's colour, those before calm, those after faint.

    720 CSS pixels wide, its heading readable down to 360; ``compact=True`` is a 360-pixel drawing for narrow
    columns, with numbers on the steps and the lit rung's name only. ``ValueError`` when ``lit`` is not 1 … 9.
    """
    rung = _rung(lit)
    colour = text_colour(mechanism(rung.mechanism).colour)
    if compact:
        fig, ax = _blank(f"{lit} · {rung.name}", rung.memory, 3.6, 1.75, colour, ladder_alt(lit))
        _stairs(ax, lit, 3.6, first=0.3, rise=0.076, words=False)
    else:
        fig, ax = _blank(f"{lit} · {rung.name}", rung.memory, WIDTH, 2.8, colour, ladder_alt(lit))
        _stairs(ax, lit, WIDTH, first=1.0, rise=0.155, words=True)
    return fig


def _rung(lit: int) -> Rung:
    fits = isinstance(lit, int) and not isinstance(lit, bool) and 1 <= lit <= len(RUNGS)
    require(fits, f"lit must be a rung from 1 to {len(RUNGS)}, got {lit!r}")
    return RUNGS[lit - 1]


def _blank(
    title: str, subtitle: str, width: float, height: float, colour: str, alt: str
) -> tuple[Panel, Axes]:
    """A panel with its heading and one axes over all of it, whose unit is the inch."""
    fig = Panel(title, height, subtitle=subtitle, width=width, alt=alt)
    fig.set_layout_engine("none")
    heading, note = fig.texts
    size = 20 if width == WIDTH else 15
    heading.set(color=colour, size=size)
    note.set(color=INK, size=0.68 * size, y=1 - (MARGIN + 1.4 * size / 72) / height)
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.set_axis_off()
    return fig, ax


def _stairs(ax: Axes, lit: int, width: float, *, first: float, rise: float, words: bool) -> None:
    """Nine columns, each ``rise`` inches higher than the last; words or numbers hang under the tread."""
    step = (width - 2 * MARGIN) / len(RUNGS)
    gap = 0.03 if words else 0.025
    for i, rung in enumerate(RUNGS, 1):
        x, top = MARGIN + (i - 1) * step, MARGIN + first + rise * (i - 1)
        face, tread, ink, quiet = _shades(rung, i - lit)
        ax.add_patch(Rectangle((x, MARGIN), step - gap, top - MARGIN, facecolor=face, edgecolor="none"))
        ax.add_patch(Rectangle((x, top), step - gap, 0.04, facecolor=tread, edgecolor="none"))
        if not words:
            ax.text(x + (step - gap) / 2, top - 0.06, str(i), color=ink, weight="bold", ha="center", va="top")
            continue
        name, memory = rung.name.split(" ", 1), textwrap.wrap(rung.memory, 11)
        ax.text(x + 0.05, top - 0.07, str(i), color=ink, weight="bold", size=11, va="top")
        ax.text(x + 0.05, top - 0.29, "\n".join(name), color=ink, weight="bold", size=8.2, va="top")
        y = top - 0.36 - 0.145 * len(name)
        ax.text(x + 0.05, y, "\n".join(memory), color=quiet, size=8, va="top")
    if words:
        ax.text(MARGIN, MARGIN + first + 0.09, "GPT-2", color=MUTED, size=9, va="bottom")


def _shades(rung: Rung, distance: int) -> tuple[str, str, str, str]:
    """Column, tread, name and note colours of a rung behind (−), under (0) or ahead of (+) the reader."""
    colour = mechanism(rung.mechanism).colour
    if distance == 0:
        strong = text_colour(colour)
        return strong, strong, PAPER, PAPER
    if distance < 0:
        face = mix(colour, PANEL, 0.17)
        return face, mix(colour, PANEL, 0.7), text_colour(colour, face), text_colour(MUTED, face)
    return mix(HAIR, PANEL, 0.3), HAIR, MUTED, MUTED
