"""The house style as matplotlib settings, and the panel that every figure is drawn on."""

import base64
import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import ParamSpec, TypeVar

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from PIL import Image

from evolve.checks import require
from evolve.lab.palette import HAIR, INK, MECHANISMS, MUTED, PANEL, diverging, sequential

_LIGHT = 60_000  # bytes: a still picture up to this size keeps every colour

P = ParamSpec("P")
R = TypeVar("R")

WIDTH = (
    7.2  # inches, at 100 CSS pixels each: every figure is 720 px wide, so that type is one size everywhere
)
MARGIN = 0.24  # inches around the content
FAMILY = ["Inter Subset", "DejaVu Sans"]  # ours (OFL, beside this file), then matplotlib's own for rare signs

SEQUENTIAL = ListedColormap(sequential(), name="evolve_sequential")
DIVERGING = ListedColormap(diverging(), name="evolve_diverging")

STYLE = {
    "figure.facecolor": PANEL,
    "figure.dpi": 100,
    "savefig.facecolor": PANEL,
    "savefig.bbox": None,
    "svg.hashsalt": "evolve",
    "font.family": FAMILY,
    "font.size": 10.5,
    "mathtext.fontset": "dejavusans",
    "text.color": INK,
    "text.hinting": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10.5,
    "axes.linewidth": 0.8,
    "axes.titlesize": 10.5,
    "axes.titlecolor": INK,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.prop_cycle": cycler(color=[m.colour for m in MECHANISMS.values()]),
    "axes.xmargin": 0.02,
    "axes.unicode_minus": True,
    "grid.color": HAIR,
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.2,
    "lines.markersize": 6.5,
    "lines.markeredgewidth": 0,
    "lines.solid_capstyle": "round",
    "lines.dash_capstyle": "butt",
    "lines.scale_dashes": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "xtick.major.size": 3.5,
    "xtick.major.width": 0.8,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "image.cmap": "evolve_sequential",
    "image.interpolation": "nearest",
}


@functools.cache
def _register() -> None:
    """Tell matplotlib once about our font and maps.

    The semi-bold cut is filed under weight 700, which the fallback font has too: asking that one for 600
    would print a warning, and anything on stderr fails a notebook test.
    """
    for weight in ("Regular", "SemiBold"):
        with as_file(files("evolve.lab") / "fonts" / f"InterSubset-{weight}.ttf") as path:
            font_manager.fontManager.addfont(path)
    for cmap in (SEQUENTIAL, DIVERGING):
        mpl.colormaps.register(cmap)


def use_style() -> None:
    """Make the house style matplotlib's default for the rest of the session. Calling it twice is harmless."""
    _register()
    mpl.rcParams.update(STYLE)


def styled(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` under the house style and leave the caller's settings as they were."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        _register()
        with mpl.rc_context(STYLE):
            return function(*args, **kwargs)

    return wrapper


class Panel(Figure):
    """A figure outside pyplot: nothing to close; shown as the last expression of a cell, or by ``display``.

    ``height`` is in inches; the width is the same for all figures (``WIDTH``) unless given. ``alt`` says in
    words what is seen; it is the figure's ``text/plain`` output and should be its alt text on the site.
    ``ValueError`` when a size is not positive or the title is empty.
    """

    def __init__(
        self, title: str, height: float, *, subtitle: str = "", alt: str = "", width: float = WIDTH
    ) -> None:
        require(bool(title.strip()), "title must say what the figure shows, got an empty one")
        require(height > 0 and width > 0, f"height and width must be positive, got {height} and {width}")
        _register()
        with mpl.rc_context(STYLE):
            super().__init__(figsize=(width, height))
            FigureCanvasAgg(self)
            self.alt = alt or title
            self._head(title, subtitle)

    def _head(self, title: str, subtitle: str) -> None:
        """Write title and subtitle at the top left and keep the layout below them."""
        width, height = self.get_size_inches()
        top = height - MARGIN
        for text, size, weight, colour in ((title, 14, "bold", INK), (subtitle, 10.5, "normal", MUTED)):
            if text:
                artist = self.text(
                    MARGIN / width, top / height, "", size=size, weight=weight, color=colour, va="top"
                )
                artist.set(linespacing=1.15, in_layout=False, gid="title" if weight == "bold" else "subtitle")
                _wrap(artist, text, (width - 2 * MARGIN) * self.dpi)
                top -= artist.get_window_extent().height / self.dpi + 0.07
        bottom = MARGIN * 0.75
        box = (MARGIN / width, bottom / height, 1 - 2 * MARGIN / width, (top - 0.1 - bottom) / height)
        require(box[3] > 0, f"height must leave room below the title, got {height} inches")
        self.set_layout_engine("compressed", rect=box, w_pad=0, h_pad=0, wspace=0.06, hspace=0.08)

    def _mark_few_points(self) -> None:
        """Up to a dozen points have a marker each: a gap would look like a missing measurement."""
        for ax in self.axes:
            for line in ax.lines:
                if len(line.get_xdata()) <= 12:
                    line.set_markevery(None)

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        """Lay out at screen resolution and hold it while drawing: else the first picture would differ.

        matplotlib's layout comes to rest over some five passes, and starts again at another resolution.
        """
        self._mark_few_points()
        engine, before = self.get_layout_engine(), None
        for _ in range(12 if engine else 0):
            engine.execute(self)
            boxes = np.array([ax.get_position(original=True).extents for ax in self.axes])
            if before is not None and np.allclose(boxes, before, rtol=0, atol=1e-13):
                break
            before = boxes
        self.set_layout_engine("none")
        try:
            yield
        finally:
            self.set_layout_engine(engine)

    def image(self, scale: float = 2.0) -> Image.Image:
        """The figure as an RGB picture with ``scale`` dots for each CSS pixel."""
        require(scale > 0, f"scale must be positive, got {scale}")
        buffer = io.BytesIO()
        with mpl.rc_context(STYLE), self._settled():
            self.savefig(buffer, format="rgba", dpi=100 * scale)
        size = tuple(int(round(inches * 100 * scale, 6)) for inches in self.get_size_inches())
        return Image.frombytes("RGBA", size, buffer.getvalue()).convert("RGB")

    def png(self, scale: float = 2.0) -> bytes:
        """PNG bytes, the same each time on one machine: no date, no version, no other metadata."""
        return encode(self.image(scale))

    def save(self, path: str | Path) -> None:
        """Write ``.png`` (two dots a pixel) or ``.svg`` (text as outlines), without date or random ids."""
        path = Path(path)
        require(path.suffix in (".png", ".svg"), f"path must end in .png or .svg, got {path.name!r}")
        if path.suffix == ".png":
            path.write_bytes(self.png())
            return
        with mpl.rc_context(STYLE), self._settled():
            self.savefig(path, metadata={"Date": None, "Creator": None})

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict, dict]:
        """What Jupyter stores: the picture at its size in CSS pixels, and the alt text."""
        width, height = (round(100 * inches) for inches in self.get_size_inches())
        data = {"image/png": base64.b64encode(self.png()).decode("ascii"), "text/plain": self.alt}
        return data, {"image/png": {"width": width, "height": height}}


def encode(image: Image.Image) -> bytes:
    """PNG bytes of an RGB picture, without metadata: whole if that is small, else with 256 colours."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue() if buffer.tell() <= _LIGHT else encode_lean(image)


def encode_lean(image: Image.Image) -> bytes:
    """PNG bytes of an RGB picture with at most 256 colours, the commonest exact (panel, lines, cells)."""
    lean = image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    packed = np.asarray(image, np.uint32).reshape(-1, 3) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    colours, first, counts = np.unique(packed, return_index=True, return_counts=True)
    palette = np.array(lean.getpalette(), np.uint8).reshape(-1, 3)
    rarest_first = np.argsort(counts, kind="stable")  # of the colours that share an entry the commonest wins
    entries = np.asarray(lean).ravel()[first[rarest_first]]
    for shift, channel in ((16, 0), (8, 1), (0, 2)):
        palette[entries, channel] = colours[rarest_first] >> shift & 255
    lean.putpalette(palette.ravel().tolist())
    buffer = io.BytesIO()
    lean.save(buffer, format="PNG", compress_level=9)
    return buffer.getvalue()


def _wrap(artist: mpl.text.Text, text: str, width: float) -> None:
    """Break ``text`` between words so that no line is wider than ``width`` pixels."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        artist.set_text(longer)
        if lines[-1] and artist.get_window_extent().width > width:
            lines.append(word)
        else:
            lines[-1] = longer
    artist.set_text("\n".join(lines))
