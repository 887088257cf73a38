"""The animation player: matplotlib frames, a slider, the keyboard, and nothing from outside.

::

    def draw(fig, i):
        state_matrix(states[i], ax=fig.subplots(), vmax=1)

    animate(draw, len(states), title="Each write fills one row", alt="A 16 × 16 state …", captions=notes)

Space plays and pauses, ← and → step, Home and End jump, once anything in the player has the focus (a click
on the picture gives it). Nothing moves until asked; ``autoplay=True`` is still ignored for readers who prefer
reduced motion. Where scripts do not run (an untrusted notebook, a repository preview) the poster frame stands
still and no control is shown.

In a notebook test that compares text/html strictly, pictures are the trouble: the same frame differs by a few
bytes between versions of FreeType. Everything else here is the same for the same input, so either let nbval
replace the pictures before it compares (a ``--nbval-sanitize-with`` file with ``regex:`` ``PIXELS``), or mark
the cell ``# NBVAL_IGNORE_OUTPUT`` and assert the data that it shows.
"""

import base64
import hashlib
import html
import json
from collections.abc import Callable, Sequence
from importlib.resources import files

import numpy as np
from matplotlib.transforms import Bbox

from evolve.checks import require
from evolve.lab.style import WIDTH, Panel, encode_lean, styled

PIXELS = r"data:image/png;base64,[A-Za-z0-9+/]+=*"
"""A regular expression for the part of a player's HTML that may differ between machines."""

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Player:
    """Frames (PNG bytes, all of one size) with controls; shows itself as the last expression of a cell.

    ``title`` names the group of controls; ``alt`` says in words what the animation shows; ``captions`` has
    one line for each frame; ``poster`` is the frame shown at rest (negative counts from the end); ``fps`` is
    frames per second at speed 1×; ``width`` the picture's largest width in CSS pixels. The same input gives
    the same HTML, byte for byte. No element has an id, so players never collide; ``key`` names the content
    (title, captions, settings, but not the pixels). ``ValueError`` for no frames, frames that are not PNG or
    differ in size, empty words, or numbers out of range.
    """

    def __init__(
        self,
        frames: Sequence[bytes],
        *,
        title: str,
        alt: str,
        captions: Sequence[str] | None = None,
        fps: float = 3.0,
        poster: int = -1,
        autoplay: bool = False,
        loop: bool = False,
        width: int = 720,
    ) -> None:
        count = len(frames)
        require(count > 0, "frames must hold at least one picture, got none")
        sizes = {_png_size(f) for f in frames}
        require(len(sizes) == 1, f"frames must all have one size, got {sorted(sizes)}")
        require(
            bool(title.strip()) and bool(alt.strip()), "title and alt must say what is seen, got an empty one"
        )
        captions = [""] * count if captions is None else [str(c) for c in captions]
        require(len(captions) == count, f"captions must be {count}, one for each frame, got {len(captions)}")
        require(0 < fps <= 60, f"fps must be above 0 and at most 60, got {fps}")
        require(
            -count <= poster < count, f"poster must be a frame from {-count} to {count - 1}, got {poster}"
        )
        require(width > 0, f"width must be positive, got {width}")
        self.frames, self.captions, self.title, self.alt = list(frames), captions, title, alt
        self.poster, self.width, (self._size,) = poster % count, width, sizes
        self._settings = {
            "captions": captions,
            "poster": self.poster,
            "interval": round(1000 / fps),
            "loop": loop,
            "autoplay": autoplay,
        }

    def __len__(self) -> int:
        return len(self.frames)

    def __repr__(self) -> str:
        return f"Animation, {len(self)} frames. {self.title}. {self.alt}"

    @property
    def key(self) -> str:
        """A short name for this player's content, the same on every machine."""
        content = json.dumps([self.title, self.alt, len(self), self._settings])
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def _repr_html_(self) -> str:
        """The player, complete in itself: style, poster, frames, script."""
        uris = ["data:image/png;base64," + base64.b64encode(f).decode("ascii") for f in self.frames]
        data = json.dumps({"frames": uris} | self._settings, ensure_ascii=False).replace("<", "\\u003c")
        width, height = self._size
        place = f"{self.poster + 1} of {len(self)}"
        caption = " · ".join(p for p in (place, self.captions[self.poster]) if p)
        folder = files("evolve.lab")
        style, script = ((folder / f"player.{kind}").read_text("utf-8") for kind in ("css", "js"))
        # "dark-light" keeps the site's theme from dimming the picture; lm-suppress keeps JupyterLab's own
        # shortcuts away from the player's keys.
        return (
            f'<div class="evolve-player" role="group" aria-label="Animation: {html.escape(self.title)}" '
            f'data-key="{self.key}" data-lm-suppress-shortcuts="true" style="max-width: {self.width}px">\n'
            f"<style>\n{style}</style>\n"
            f'<img class="dark-light" src="{uris[self.poster]}" width="{width}" height="{height}" '
            f'alt="{html.escape(self.alt)}">\n'
            f"<p>{html.escape(caption)}</p>\n"
            f'<script type="application/json">{data}</script>\n'
            f"<script>\n{script}</script>\n</div>"
        )

    def _repr_png_(self) -> tuple[bytes, dict]:
        """The poster, for readers that show no HTML."""
        width, height = self._size
        return self.frames[self.poster], {"width": self.width, "height": round(height * self.width / width)}


@styled
def animate(
    draw: Callable[[Panel, int], object],
    frames: int,
    *,
    title: str,
    alt: str,
    subtitle: str = "",
    height: float = 4.0,
    scale: float = 1.5,
    **settings: object,
) -> Player:
    """Call ``draw(fig, i)`` on a fresh titled panel for i = 0 … ``frames`` − 1 and make a ``Player`` of them.

    ``height`` is in inches, ``scale`` in dots for each CSS pixel. ``draw`` fixes its own limits and colour
    scale; margins are settled over all frames, so that axes hold still. ``settings`` go to ``Player``
    (``captions``, ``fps``, ``poster``, ``autoplay``, ``loop``). ``ValueError`` as there.
    """
    require(frames > 0, f"frames must be at least 1, got {frames}")
    panels = [Panel(title, height, subtitle=subtitle, alt=alt) for _ in range(frames)]
    for i, fig in enumerate(panels):
        draw(fig, i)
    _hold_still(panels)
    pictures = [encode_lean(fig.image(scale)) for fig in panels]
    return Player(pictures, title=title, alt=alt, width=round(100 * WIDTH), **settings)


def _hold_still(panels: list[Panel]) -> None:
    """Give each axes the one box that fits into its boxes of all frames (when all have the same axes)."""
    for fig in panels:
        fig.get_layout_engine().execute(fig)
        fig.set_layout_engine("none")
    boxes = [[ax.get_position(original=True).extents for ax in fig.axes] for fig in panels]
    if len({len(b) for b in boxes}) != 1 or not boxes[0]:
        return
    low, high = np.max(boxes, axis=0)[:, :2], np.min(boxes, axis=0)[:, 2:]
    for fig in panels:
        for ax, corner, far in zip(fig.axes, low, high):
            ax.set_position(Bbox([corner, far]))


def _png_size(frame: bytes) -> tuple[int, int]:
    """Width and height in dots, from the header."""
    fits = isinstance(frame, bytes) and frame[:8] == _SIGNATURE and len(frame) > 24
    require(fits, f"frames must be PNG bytes, got {type(frame).__name__}")
    return int.from_bytes(frame[16:20], "big"), int.from_bytes(frame[20:24], "big")
