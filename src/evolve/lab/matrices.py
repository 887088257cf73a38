"""Matrices as pictures: states, heat maps, attention patterns, and a state over time.

Each function draws on an axes that you made (``panel(...)`` makes one) and returns it; ``state_series`` makes
its own panel. Rows run downwards and columns to the right, as in ``S[row, column]``.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from evolve.checks import require
from evolve.lab.palette import HAIR, INK
from evolve.lab.style import DIVERGING, SEQUENTIAL, Panel, styled


@styled
def panel(
    title: str,
    *,
    subtitle: str = "",
    height: float = 4.0,
    rows: int = 1,
    cols: int = 1,
    alt: str = "",
    **subplots: object,
) -> tuple[Panel, Axes | np.ndarray]:
    """A titled panel for pictures that bring their own labels, with one axes or an array [rows·cols]."""
    fig = Panel(title, height, subtitle=subtitle, alt=alt)
    axes = np.atleast_1d(fig.subplots(rows, cols, **subplots)).ravel()
    return fig, (axes[0] if axes.size == 1 else axes)


@styled
def heatmap(
    values: object,
    *,
    ax: Axes,
    xlabel: str,
    ylabel: str,
    unit: str,
    signed: bool = False,
    vmin: float | None = None,
    vmax: float | None = None,
    title: str = "",
    colorbar: bool = True,
) -> Axes:
    """A matrix [rows, columns] in colour, with a colour bar in ``unit``.

    Unsigned data use an even light-to-dark map from ``vmin`` (default 0) to ``vmax``. Signed data
    (``signed=True``) use the diverging map, always centred at 0, from −``vmax`` to ``vmax``; ``vmin`` is then
    not allowed. NaN cells stay empty. ``ValueError`` for anything but a matrix with a finite value in it, for
    infinities, or for negative values that were not announced as signed.
    """
    matrix = _matrix("values", values)
    low, high = _limits(matrix, signed, vmin, vmax)
    picture = ax.imshow(matrix, cmap=DIVERGING if signed else SEQUENTIAL, vmin=low, vmax=high)
    _frame(ax, xlabel, ylabel, title)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
    if colorbar:
        colour_bar(picture, [ax], unit)
    return ax


def state_matrix(
    state: object, *, ax: Axes, vmax: float | None = None, title: str = "", colorbar: bool = True
) -> Axes:
    """A memory state S [K, V]: one row for each key channel, one column for each value channel; signed.

    Give all pictures of one story the same ``vmax``. Errors as in ``heatmap``.
    """
    return heatmap(
        state,
        ax=ax,
        xlabel="value channel →",
        ylabel="← key channel",  # rotated, the arrow points down
        unit="entry of S",
        signed=True,
        vmax=vmax,
        title=title,
        colorbar=colorbar,
    )


@styled
def attention_pattern(
    weights: object,
    tokens: Sequence[str],
    *,
    ax: Axes,
    causal: bool = True,
    vmax: float | None = None,
    title: str = "",
    colorbar: bool = True,
) -> Axes:
    """Who looks at whom: attention weights [T, T], the reading token down, the token looked at across.

    A space inside a token is shown as ·, a newline as ↵. With ``causal`` the future is left empty, and must
    be exactly zero. ``ValueError`` when shape and tokens disagree or a weight is negative or from the future.
    """
    matrix = _matrix("weights", weights)
    size = len(tokens)
    require(
        matrix.shape == (size, size), f"weights must be [T, T] = [{size}, {size}], got {list(matrix.shape)}"
    )
    if causal:
        future = np.triu(np.ones_like(matrix, dtype=bool), 1)
        require(not matrix[future].any(), "weights must be 0 above the diagonal when causal")
        matrix = np.where(future, np.nan, matrix)
    heatmap(
        matrix, ax=ax, xlabel="", ylabel="", unit="attention weight (share)", vmax=vmax, title=title,
        colorbar=colorbar,
    )  # fmt: skip
    shown = [t.replace(" ", "·").replace("\n", "↵") for t in tokens]
    ax.set_yticks(range(size), shown)
    ax.set_xticks(range(size), shown, rotation=90)
    ax.set_ylabel("reading ↓", rotation=0, ha="right", va="bottom")
    ax.yaxis.set_label_coords(-0.02, 1.02)
    ax.set_xlabel("looking at →", loc="left")
    return ax


def state_series(
    states: object,
    titles: Sequence[str],
    *,
    title: str,
    subtitle: str = "",
    cols: int = 4,
    vmax: float | None = None,
    alt: str = "",
) -> Panel:
    """States [N, K, V] side by side on one colour scale: an animation that holds still.

    ``titles`` has one caption for each state. ``ValueError`` when the counts differ or the rank is wrong.
    """
    stack = np.asarray(states, float)
    require(stack.ndim == 3 and len(stack) > 0, f"states must be [N, K, V], got {list(stack.shape)}")
    require(len(titles) == len(stack), f"titles must be {len(stack)} captions, got {len(titles)}")
    require(cols >= 1, f"cols must be at least 1, got {cols}")
    cols = min(cols, len(stack))
    rows = -(-len(stack) // cols)
    high = _limits(stack.reshape(len(stack), -1), True, None, vmax)[1]
    cell = 5.0 / cols * stack.shape[1] / stack.shape[2]
    fig, axes = panel(
        title, subtitle=subtitle, height=1.4 + rows * (cell + 0.36), rows=rows, cols=cols, alt=alt
    )
    axes = np.atleast_1d(axes)
    for i, ax in enumerate(axes):
        if i >= len(stack):
            ax.set_axis_off()
            continue
        state_matrix(stack[i], ax=ax, vmax=high, title=titles[i], colorbar=False)
        ax.set(xticks=[], yticks=[])
        if i % cols:
            ax.set_ylabel("")
        if i < cols * (rows - 1):
            ax.set_xlabel("")
    styled(colour_bar)(axes[0].images[0], list(axes), "entry of S", 1 if rows == 1 else 0.6)
    return fig


def colour_bar(picture: AxesImage, axes: list[Axes], unit: str, shrink: float = 1.0) -> None:
    """A slim bar to the right of ``axes`` with its unit, marked at both ends and in the middle."""
    low, high = picture.get_clim()
    bar = axes[0].figure.colorbar(
        picture, ax=axes, fraction=0.035, aspect=24 * shrink, pad=0.03, shrink=shrink
    )
    bar.outline.set_visible(False)
    marks = [low, (low + high) / 2, high]
    bar.set_ticks(marks, labels=[f"{v:.3g}".replace("-", "−") for v in marks])
    bar.ax.tick_params(length=0)
    bar.ax.grid(False)
    bar.set_label(unit, labelpad=6)


def _frame(ax: Axes, xlabel: str, ylabel: str, title: str) -> None:
    """A hairline all round, no grid, labels at the corner where reading starts."""
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set(visible=True, color=HAIR)
    ax.tick_params(length=0)
    ax.set_xlabel(xlabel, loc="left")
    ax.set_ylabel(ylabel, loc="top")
    if title:
        ax.set_title(title, color=INK, pad=8)


def _matrix(name: str, values: object) -> np.ndarray:
    matrix = np.asarray(values, float)
    require(matrix.ndim == 2 and matrix.size > 0, f"{name} must be a matrix, got shape {list(matrix.shape)}")
    require(not np.isinf(matrix).any(), f"{name} must be finite (NaN for an empty cell), got an infinity")
    require(not np.isnan(matrix).all(), f"{name} must hold at least one number, got only NaN")
    return matrix


def _limits(matrix: np.ndarray, signed: bool, vmin: float | None, vmax: float | None) -> tuple[float, float]:
    """The ends of the colour scale; a matrix of zeros gets [−1, 1] or [0, 1]."""
    low, high = float(np.nanmin(matrix)), float(np.nanmax(matrix))
    if signed:
        require(vmin is None, "vmin must not be given for signed data: the scale is centred at 0")
        top = max(-low, high) or 1.0 if vmax is None else vmax
        require(top > 0, f"vmax must be positive, got {top}")
        return -top, top
    require(low >= 0 or vmin is not None, f"values must not be negative unless signed=True, got {low:g}")
    bottom = 0.0 if vmin is None else vmin
    top = (high if high > bottom else bottom + 1) if vmax is None else vmax
    require(top > bottom, f"vmax must be above vmin = {bottom:g}, got {top:g}")
    return bottom, top
