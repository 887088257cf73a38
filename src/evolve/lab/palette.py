"""The colours of the series: one panel, one colour for each mechanism, two maps for matrices.

The panel is a warm light grey, so that a figure neither glares on a dark page nor dissolves in a white one.
Mechanism colours were chosen by maximising the smallest colour difference (CIEDE2000) over all pairs, seen
normally and with simulated protanopia, deuteranopia and tritanopia, inside the hue that each should have;
a marker and a dash pattern of its own keep each line apart in grey print too.

This module needs NumPy only.
"""

from typing import NamedTuple

import numpy as np

from evolve.checks import require

PANEL = "#ecebe6"  # the background of every figure
PAPER = "#f8f7f4"  # one step lighter: "nothing here" inside a matrix
INK = "#23232b"  # titles and values
MUTED = "#5c5b62"  # labels, ticks, captions
HAIR = "#cfcdc6"  # grid and hairlines
PANEL_DARK = "#20252e"  # what the panel is where a drawing of the site follows a dark page


class Mechanism(NamedTuple):
    """How one mechanism looks: its name in full, colour, marker and dash pattern (points on, off, ...)."""

    name: str
    colour: str
    marker: str
    dash: tuple[float, ...]


MECHANISMS = {
    "softmax_attention": Mechanism("softmax attention", "#16307a", "o", (7, 2)),
    "linear_attention": Mechanism("linear attention", "#b47b00", "s", (2, 1.6)),
    "delta_rule": Mechanism("delta rule", "#2d8268", "^", (7, 2, 1.5, 2)),
    "gated_delta_rule": Mechanism("gated delta rule", "#805b96", "D", (4, 1.6)),
    "kda": Mechanism("KDA", "#b7303b", "P", ()),
    "mla": Mechanism("MLA", "#068fcb", "v", (9, 2, 3, 2)),
    "attention_residuals": Mechanism("attention residuals", "#336001", "X", (1, 1.4)),
    "moe": Mechanism("mixture of experts", "#5d2421", "h", (4, 1.6, 1.2, 1.6, 1.2, 1.6)),
    "k3": Mechanism("Kimi K3", "#292730", "*", (12, 3)),
    "reference": Mechanism("reference", "#83858a", "d", (1, 3)),
}


def mechanism(key: str) -> Mechanism:
    """The look of the mechanism called ``key``; ``ValueError`` for a name that is not in ``MECHANISMS``."""
    require(key in MECHANISMS, f"mechanism must be one of {', '.join(MECHANISMS)}, got {key!r}")
    return MECHANISMS[key]


# ------------------------------------------------------------------------------------------ colour arithmetic


def to_linear(rgb: np.ndarray) -> np.ndarray:
    """sRGB in [0, 1] → linear light (IEC 61966-2-1)."""
    rgb = np.asarray(rgb, float)
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def from_linear(light: np.ndarray) -> np.ndarray:
    """Linear light → sRGB; what lies outside the gamut is clipped."""
    light = np.clip(light, 0, 1)
    return np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def parse_hex(colour: str) -> np.ndarray:
    """``"#rrggbb"`` → sRGB [3] in [0, 1]."""
    require(len(colour) == 7 and colour[0] == "#", f"colour must be '#rrggbb', got {colour!r}")
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def format_hex(rgb: np.ndarray) -> str:
    """sRGB [3] in [0, 1] → ``"#rrggbb"``."""
    return "#" + "".join(f"{round(255 * float(c)):02x}" for c in rgb)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, from 1 to 21 (WCAG 2.2: text needs 4.5, lines need 3)."""
    weights = (0.2126, 0.7152, 0.0722)
    dark, light = sorted(float(to_linear(parse_hex(c)) @ weights) for c in (one, other))
    return (light + 0.05) / (dark + 0.05)


def mix(one: str, other: str, share: float) -> str:
    """``share`` of ``one`` over ``other`` (mixed in sRGB, as an opaque stand-in for transparency)."""
    return format_hex(share * parse_hex(one) + (1 - share) * parse_hex(other))


def text_colour(colour: str, background: str = PANEL, ink: str = INK) -> str:
    """``colour``, with more and more ``ink`` in it until text reaches 4.5 : 1 on ``background``."""
    for share in np.linspace(1, 0, 41):
        candidate = mix(colour, ink, float(share))
        if contrast(candidate, background) >= 4.5:
            return candidate
    return ink


# ------------------------------------------------------------------------------------------ maps for matrices

# OKLab (Ottosson 2020): distances in it follow perceived difference, so equal steps along a curve look equal.
_TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def to_oklab(rgb: np.ndarray) -> np.ndarray:
    """sRGB [..., 3] → OKLab [..., 3]."""
    return np.cbrt(to_linear(rgb) @ _TO_LMS.T) @ _TO_LAB.T


def from_oklab(lab: np.ndarray) -> np.ndarray:
    """OKLab [..., 3] → sRGB [..., 3], clipped to the gamut."""
    return from_linear((lab @ np.linalg.inv(_TO_LAB).T) ** 3 @ np.linalg.inv(_TO_LMS).T)


def _even_curve(anchors: list[str], steps: int) -> np.ndarray:
    """A Bézier curve in OKLab with these control colours, in steps of equal perceived size [steps, 3]."""
    points = to_oklab(np.stack([parse_hex(a) for a in anchors]))
    t = np.linspace(0, 1, 2001)[:, None, None]
    curve = np.broadcast_to(points, (2001, *points.shape))
    while curve.shape[1] > 1:  # de Casteljau
        curve = (1 - t) * curve[:, :-1] + t * curve[:, 1:]
    curve = curve[:, 0]
    length = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(curve, axis=0), axis=1))])
    even = np.linspace(0, length[-1], steps)
    return from_oklab(np.stack([np.interp(even, length, c) for c in curve.T], -1))


def sequential() -> np.ndarray:
    """The map for unsigned data, sRGB [256, 3]: paper → teal → deep indigo, lightness falling evenly."""
    return _even_curve([PAPER, "#9fd3c7", "#2f8fb0", "#2a2f7a", "#1c1747"], 256)


def diverging() -> np.ndarray:
    """The map for signed data, sRGB [255, 3]: blue (−) ← paper (0) → red-brown (+), equally light at ±x."""
    minus = _even_curve([PAPER, "#a9c9ea", "#3f7fd0", "#123a80"], 128)
    plus = _even_curve([PAPER, "#f3bf9c", "#d9603a", "#711d08"], 128)
    return np.concatenate([minus[:0:-1], plus])


def diverging_dark() -> np.ndarray:
    """The same for a dark page, sRGB [255, 3]: 0 is the page's panel, and what is large shines."""
    minus = _even_curve([PANEL_DARK, "#28558f", "#4f93e0", "#b5d7ff"], 128)
    plus = _even_curve([PANEL_DARK, "#8d4021", "#e37d50", "#ffd3bb"], 128)
    return np.concatenate([minus[:0:-1], plus])
