"""The look of the series: colours that can be told apart, figures that are exact and the same each time."""

import io
import itertools
import json
import subprocess
import sys
import warnings

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from evolve.lab import palette
from evolve.lab import plotting as P
from evolve.lab.charts import spread
from evolve.lab.rung_table import position
from evolve.lab.style import FAMILY, encode_lean

RNG = np.random.default_rng(0)
GRAPHICS = (3.0, 4.5)  # WCAG 2.2: lines, text

# Machado, Oliveira & Fernandes 2009, severity 1, on linear RGB.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def cielab(rgb):
    """sRGB [..., 3] → CIELAB, D65."""
    to_xyz = np.array(
        [
            [0.4124564, 0.3575761, 0.1804375],
            [0.2126729, 0.7151522, 0.0721750],
            [0.0193339, 0.1191920, 0.9503041],
        ]
    )
    xyz = palette.to_linear(rgb) @ to_xyz.T / to_xyz.sum(1)
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1)


def ciede2000(one, two):
    """Colour difference of two CIELAB colours (Sharma, Wu & Dalal 2005)."""
    (l1, a1, b1), (l2, a2, b2) = one, two
    c7 = ((np.hypot(a1, b1) + np.hypot(a2, b2)) / 2) ** 7
    g = 1.5 - 0.5 * np.sqrt(c7 / (c7 + 25.0**7))
    c1, c2 = np.hypot(g * a1, b1), np.hypot(g * a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, g * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180
    d_hue = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    l_mean, c_mean, h_mean = (l1 + l2) / 2, (c1 + c2) / 2, (h1 + turn / 2) % 360
    t = (
        1
        - 0.17 * np.cos(np.radians(h_mean - 30))
        + 0.24 * np.cos(np.radians(2 * h_mean))
        + 0.32 * np.cos(np.radians(3 * h_mean + 6))
        - 0.20 * np.cos(np.radians(4 * h_mean - 63))
    )
    s_l = 1 + 0.015 * (l_mean - 50) ** 2 / np.sqrt(20 + (l_mean - 50) ** 2)
    s_c, s_h = 1 + 0.045 * c_mean, 1 + 0.015 * c_mean * t
    r_c = 2 * np.sqrt(c_mean**7 / (c_mean**7 + 25.0**7))
    r_t = -r_c * np.sin(np.radians(60 * np.exp(-(((h_mean - 275) / 25) ** 2))))
    lightness, chroma, hue = (l2 - l1) / s_l, (c2 - c1) / s_c, d_hue / s_h
    return np.sqrt(lightness**2 + chroma**2 + hue**2 + r_t * chroma * hue)


def seen(colour, sight):
    """How a colour looks to somebody with this kind of sight, in CIELAB."""
    light = palette.to_linear(palette.parse_hex(colour)) @ SIGHT[sight].T
    return cielab(palette.from_linear(light))


def closest(keys, sight):
    """The smallest difference between two mechanisms' colours."""
    labs = [seen(P.MECHANISMS[k].colour, sight) for k in keys]
    return min(ciede2000(a, b) for a, b in itertools.combinations(labs, 2))


# ---------------------------------------------------------------------------------------------- colours


def test_colour_difference_matches_published_pairs():
    # Sharma, Wu & Dalal 2005, table 1, pairs 1, 7, 17 and 25.
    for one, two, expected in [
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 0.0, 0.0), (50.0, -1.0, 2.0), 2.3669),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ]:
        assert ciede2000(one, two) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("key", P.MECHANISMS)
def test_mechanism_colours_stand_out_from_the_panel(key):
    colour = P.mechanism(key).colour
    assert palette.contrast(colour, P.PANEL) >= GRAPHICS[0]
    for background in (P.PANEL, P.PAPER, palette.mix(colour, P.PANEL, 0.17)):
        assert palette.contrast(P.text_colour(colour, background), background) >= GRAPHICS[1]


@pytest.mark.parametrize("colour", [P.INK, P.MUTED])
def test_text_colours_are_readable(colour):
    assert palette.contrast(colour, P.PANEL) >= GRAPHICS[1]
    assert palette.contrast(colour, P.PAPER) >= GRAPHICS[1]


def test_contrast_has_the_known_ends():
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert palette.contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)


@pytest.mark.parametrize("sight", SIGHT)
def test_mechanisms_can_be_told_apart_by_everybody(sight):
    memory_rules = ("softmax_attention", "linear_attention", "delta_rule", "gated_delta_rule", "kda")
    assert closest(P.MECHANISMS, sight) >= 9.5
    assert closest(memory_rules, sight) >= 14.5  # these five share axes most often


def test_markers_and_dashes_tell_mechanisms_apart_in_grey():
    looks = list(P.MECHANISMS.values())
    assert len({m.marker for m in looks}) == len({m.dash for m in looks}) == len(looks)


def test_panel_neither_glares_nor_vanishes():
    luminance = palette.to_linear(palette.parse_hex(P.PANEL)) @ (0.2126, 0.7152, 0.0722)
    assert 0.75 < luminance < 0.88
    assert palette.contrast(P.PANEL, "#ffffff") > 1.15
    assert palette.contrast(P.PANEL, "#121418") > 12


def test_sequential_map_is_even_and_darkens_all_the_way():
    lab = palette.to_oklab(palette.sequential())
    steps = np.linalg.norm(np.diff(lab, axis=0), axis=1)
    assert steps.max() / steps.min() < 1.05
    assert (np.diff(lab[:, 0]) < 0).all()
    assert lab[0, 0] - lab[-1, 0] > 0.65  # uses the whole range of lightness


def test_dark_diverging_map_begins_at_the_dark_panel_and_brightens_to_both_ends():
    colours = palette.diverging_dark()
    lightness = palette.to_oklab(colours)[:, 0]
    assert palette.format_hex(colours[127]) == palette.PANEL_DARK
    assert (np.diff(lightness[127:]) > 0).all()
    assert (np.diff(lightness[:128]) < 0).all()
    assert abs(lightness[0] - lightness[-1]) < 0.05
    blue, red = colours[30], colours[224]
    assert blue[2] > blue[0] + 0.2
    assert red[0] > red[2] + 0.2


def test_diverging_map_is_even_symmetric_and_neutral_at_zero():
    lab = palette.to_oklab(palette.diverging())
    steps = np.linalg.norm(np.diff(lab, axis=0), axis=1)
    assert steps.max() / steps.min() < 1.05
    assert np.abs(lab[:, 0] - lab[::-1, 0]).max() < 0.025
    assert np.linalg.norm(lab[127, 1:]) < 0.01
    minus, plus = (palette.format_hex(palette.diverging()[i]) for i in (40, 214))
    for sight in SIGHT:
        assert ciede2000(seen(minus, sight), seen(plus, sight)) > 30


@pytest.mark.parametrize("bad", ["red", "#fff", "#12345g"])
def test_bad_colours_and_names_are_refused(bad):
    with pytest.raises(ValueError):
        palette.parse_hex(bad)
    with pytest.raises(ValueError, match="mechanism must be one of"):
        P.mechanism(bad)


# ---------------------------------------------------------------------------------------------- figures


def chart(title="Errors grow", **settings):
    fig, ax = P.figure(title, xlabel="pairs (count)", ylabel="error (ratio)", **settings)
    for i, key in enumerate(("softmax_attention", "linear_attention", "kda")):
        ax.plot([1, 2, 3], [0, i, 2 + 0.01 * i], **P.line(key))
    return fig, ax


def test_figures_leave_pyplot_and_settings_alone():
    before, settings = plt.get_fignums(), dict(mpl.rcParams)
    fig, ax = chart(subtitle="with a subtitle")
    P.direct_label(ax)
    fig.png()
    P.ladder(3)
    P.scoreboard_figure(board(2))
    assert plt.get_fignums() == before
    assert dict(mpl.rcParams) == settings


def test_use_style_is_idempotent_and_gives_the_house_look():
    with mpl.rc_context():
        P.use_style()
        P.use_style()
        assert mpl.rcParams["figure.facecolor"] == P.PANEL
        assert mpl.rcParams["font.family"] == FAMILY
        assert mpl.colormaps["evolve_diverging"].N == 255


def test_png_is_the_same_each_time_crisp_and_light():
    pictures = []
    for _ in range(2):
        fig, ax = chart()
        P.direct_label(ax)
        pictures += [fig.png(), fig.png()]
    assert len(set(pictures)) == 1
    assert len(pictures[0]) < 150_000
    image = Image.open(io.BytesIO(pictures[0]))
    assert image.size == (1440, 800)
    assert not image.info.keys() - {"dpi"}  # no date, no version
    corner = image.convert("RGB").getpixel((3, 3))
    assert corner == tuple(np.round(255 * palette.parse_hex(P.PANEL)).astype(int))


def test_a_cell_shows_picture_size_and_alt_text():
    fig, _ = chart(alt="Three lines; one stays at zero.")
    data, metadata = fig._repr_mimebundle_()
    assert data["text/plain"] == "Three lines; one stays at zero."
    assert metadata["image/png"] == {"width": 720, "height": 400}
    assert data["image/png"].startswith("iVBOR")
    assert chart()[0].alt == "Errors grow"


def test_ipython_prefers_our_picture_over_its_own():
    code = """
import json, matplotlib
matplotlib.use("module://matplotlib_inline.backend_inline")
import matplotlib.pyplot
from IPython.core.interactiveshell import InteractiveShell
from matplotlib_inline.backend_inline import configure_inline_support
from evolve.lab.plotting import ladder
shell = InteractiveShell.instance()
configure_inline_support(shell, "inline")
data, metadata = shell.display_formatter.format(ladder(1))
print(json.dumps([data["text/plain"][:11], metadata["image/png"]]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == ["A staircase", {"width": 720, "height": 280}]


def test_svg_is_the_same_each_time(tmp_path):
    for name in ("a.svg", "b.svg"):
        P.ladder(4).save(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "<dc:date>" not in (tmp_path / "a.svg").read_text("utf-8")
    with pytest.raises(ValueError, match=r"end in \.png or \.svg"):
        P.ladder(4).save(tmp_path / "a.jpg")


def test_256_colours_keep_the_common_ones_exact():
    image = chart()[0].image()
    lean = np.asarray(Image.open(io.BytesIO(encode_lean(image))).convert("RGB")).astype(int)
    full = np.asarray(image).astype(int)
    assert np.abs(lean - full).max() <= 12
    for key in ("softmax_attention", "linear_attention", "kda"):
        colour = np.round(255 * palette.parse_hex(P.mechanism(key).colour))
        exact = (full == colour).all(-1)
        assert exact.sum() > 500
        assert (lean == colour).all(-1)[exact].all()


def test_long_titles_wrap_inside_the_panel():
    fig, _ = chart("A finding that needs rather more words than fit in one line of the panel, " * 3)
    title = next(t for t in fig.texts if t.get_gid() == "title")
    box = title.get_window_extent()
    assert title.get_text().count("\n") >= 2
    assert box.x0 >= 20
    assert box.x1 <= 720 - 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"title": " "}, "title must say"),
        ({"xlabel": "pairs"}, "xlabel must end in its unit"),
        ({"ylabel": "error ()"}, "ylabel must end in its unit"),
        ({"xlabel": ["a (s)", "b (s)"]}, "xlabel must be one label or 1"),
        ({"height": 0}, "height and width must be positive"),
        ({"height": 0.5}, "height must leave room"),
    ],
)
def test_figure_refuses(change, message):
    settings = {"title": "A finding", "xlabel": "x (s)", "ylabel": "y (s)"} | change
    with pytest.raises(ValueError, match=message):
        P.figure(settings.pop("title"), **settings)


def test_labels_sit_at_the_ends_and_do_not_overlap():
    fig, ax = chart()
    assert P.direct_label(ax) == ["KDA", "linear attention", "softmax attention"]
    fig.draw_without_rendering()
    boxes = sorted((Text.get_window_extent(t) for t in ax.texts), key=lambda b: b.y0)  # without the tie
    assert len(boxes) == 3
    assert all(low.y1 <= high.y0 + 1 for low, high in itertools.pairwise(boxes))
    assert all(b.x0 > ax.get_window_extent().x1 and b.x1 <= 720 for b in boxes)
    for text in ax.texts:
        assert palette.contrast(text.get_color(), P.PANEL) >= GRAPHICS[1]


def test_labels_find_the_last_point_that_is_drawn():
    _, ax = P.figure("t", xlabel="x (s)", ylabel="y (s)")
    ax.plot([0, 1, 2, 3], [0, 1, 2, np.nan], label="stops")
    ax.axhline(0.5, label="everywhere")
    P.direct_label(ax)
    stops, everywhere = ax.texts
    assert stops.xy == pytest.approx((2, 2))
    assert everywhere.xy[1] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="at least one line"):
        P.direct_label(P.figure("t", xlabel="x (s)", ylabel="y (s)")[1])


def test_spread_moves_as_little_as_possible():
    np.testing.assert_allclose(spread(np.array([0.0, 100.0]), 10), [0, 100])
    np.testing.assert_allclose(spread(np.array([50.0, 50.0]), 10), [45, 55])
    np.testing.assert_allclose(spread(np.array([9.0, 0.0, 30.0, 12.0]), 10), [7, -3, 30, 17])
    many = RNG.uniform(0, 50, 12)
    assert np.diff(np.sort(spread(many, 8))).min() >= 8 - 1e-9
    assert spread(many, 8).mean() == pytest.approx(many.mean())


def test_line_styles():
    assert P.line("kda") == {"color": "#b7303b", "label": "KDA", "marker": "P", "markevery": 0.11}
    assert P.line("kda", markers=False, label="ours") == {
        "color": "#b7303b",
        "label": "ours",
        "linestyle": "-",
    }
    assert P.line("mla", markers=False)["linestyle"] == (0, (9, 2, 3, 2))


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (P.format_bytes, 36864 * 2**20, "38.7 GB"),
        (P.format_bytes, 5.56e12, "5.56 TB"),
        (P.format_bytes, 999.9, "1 kB"),
        (P.format_tokens, 8192, "8k"),
        (P.format_tokens, 2**20, "1M"),
        (P.format_tokens, 1, "1"),
        (P.format_count, 2.78e12, "2.78T"),
        (P.format_count, 293, "293"),
        (P.format_seconds, 3e-4, "300 µs"),
        (P.format_seconds, 2.5, "2.5 s"),
        (P.format_seconds, 120, "120 s"),
        (P.format_seconds, 0.99999, "1 s"),
    ],
)
def test_numbers_written_for_people(write, value, text):
    assert write(value) == text


def test_log_axis_has_few_ticks_in_units():
    fig, ax = P.figure("t", xlabel="context (tokens)", ylabel="cache (bytes)")
    ax.plot([1024, 2**20], [4e7, 4e10])
    P.log_axis(ax.xaxis, "tokens")
    P.log_axis(ax.yaxis, "bytes")
    fig.draw_without_rendering()
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1k", "4k", "16k", "64k", "256k", "1M"]
    assert [t.get_text() for t in ax.get_yticklabels()][:2] == ["10 MB", "100 MB"]
    with pytest.raises(ValueError, match="kind must be one of"):
        P.log_axis(ax.xaxis, "meters")
    ax.plot([0], [1])
    with pytest.raises(ValueError, match="positive and finite"):
        P.log_axis(ax.xaxis, "count")


# --------------------------------------------------------------------------------------------- matrices


def test_signed_heat_maps_are_centred_at_zero():
    _, ax = P.panel("A state")
    P.state_matrix(np.array([[0.5, -2.0], [1.0, 0.0]]), ax=ax)
    picture = ax.images[0]
    assert picture.get_clim() == (-2.0, 2.0)
    assert picture.cmap(picture.norm(0.0))[:3] == pytest.approx(palette.parse_hex(P.PAPER), abs=1 / 255)
    assert picture.get_array().shape == (2, 2)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("value channel →", "← key channel")


def test_unsigned_heat_maps_start_at_zero():
    fig, ax = P.panel("A map")
    P.heatmap([[0.2, 0.4], [np.nan, 0.8]], ax=ax, xlabel="x", ylabel="y", unit="share")
    assert ax.images[0].get_clim() == (0.0, 0.8)
    assert ax.images[0].cmap.name == "evolve_sequential"
    assert fig.axes[1].get_ylabel() == "share"
    P.heatmap(np.zeros((2, 2)), ax=P.panel("t")[1], xlabel="x", ylabel="y", unit="share")


@pytest.mark.parametrize(
    ("values", "settings", "message"),
    [
        (np.zeros(3), {}, "must be a matrix"),
        (np.zeros((2, 0)), {}, "must be a matrix"),
        (np.zeros((2, 2, 2)), {}, "must be a matrix"),
        ([[1, np.inf]], {}, "must be finite"),
        ([[np.nan]], {}, "at least one number"),
        ([[-1, 1]], {}, "unless signed=True"),
        ([[-1, 1]], {"signed": True, "vmin": -1}, "centred at 0"),
        ([[-1, 1]], {"signed": True, "vmax": 0}, "vmax must be positive"),
        ([[1, 2]], {"vmin": 3, "vmax": 2}, "vmax must be above"),
    ],
)
def test_heatmap_refuses(values, settings, message):
    _, ax = P.panel("t")
    with pytest.raises(ValueError, match=message):
        P.heatmap(values, ax=ax, xlabel="x", ylabel="y", unit="u", **settings)
    assert not ax.images


def test_attention_pattern_hides_the_future_and_names_tokens():
    _, ax = P.panel("t")
    weights = np.tril(np.ones((3, 3))) / np.array([[1], [2], [3]])
    P.attention_pattern(weights, ["The", " cat", "\n"], ax=ax)
    shown = ax.images[0].get_array()
    assert np.ma.getmaskarray(np.ma.masked_invalid(shown))[np.triu_indices(3, 1)].all()
    assert [t.get_text() for t in ax.get_yticklabels()] == ["The", "·cat", "↵"]
    with pytest.raises(ValueError, match=r"weights must be \[T, T\] = \[2, 2\]"):
        P.attention_pattern(weights, ["a", "b"], ax=ax)
    with pytest.raises(ValueError, match="0 above the diagonal"):
        P.attention_pattern(np.ones((2, 2)), ["a", "b"], ax=ax)
    with pytest.raises(ValueError, match="not be negative"):
        P.attention_pattern([[-1.0]], ["a"], ax=ax)


def test_state_series_shares_one_scale():
    states = RNG.normal(size=(5, 4, 6))
    fig = P.state_series(states, list("abcde"), title="t", cols=3)
    clims = {ax.images[0].get_clim() for ax in fig.axes if ax.images}
    assert clims == {(-np.abs(states).max(), np.abs(states).max())}
    assert len(fig.png()) < 150_000
    with pytest.raises(ValueError, match=r"\[N, K, V\]"):
        P.state_series(states[0], ["a"], title="t")
    with pytest.raises(ValueError, match="titles must be 5"):
        P.state_series(states, ["a"], title="t")


# ----------------------------------------------------------------------------------- ladder, scoreboard


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("lit", range(1, 10))
def test_ladder_words_stay_inside_and_apart(lit, compact):
    fig = P.ladder(lit, compact=compact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing glyph warns
        fig.draw_without_rendering()
    ax = fig.axes[0]
    columns = [p.get_window_extent() for p in ax.patches if p.get_height() > 0.1]
    assert len(columns) == 9
    for text in ax.texts:
        if text.get_text() == "GPT-2":
            continue
        box = text.get_window_extent()
        home = [c for c in columns if c.x0 <= box.x0 <= c.x1]
        assert len(home) == 1
        assert box.x1 <= home[0].x1
        assert box.y0 >= home[0].y0
        assert box.y1 <= home[0].y1
    words = [t.get_window_extent() for t in fig.texts + ax.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(words, 2))
    assert not any(t.get_window_extent().overlaps(c) for t in fig.texts for c in columns)


def test_ladder_text_is_readable_on_every_rung():
    for lit in (1, 5, 9):
        ax = P.ladder(lit).axes[0]
        faces = [p for p in ax.patches if p.get_height() > 0.1]
        for text in ax.texts:
            x = text.get_position()[0]
            face = next(p for p in faces if p.get_x() <= x <= p.get_x() + p.get_width())
            behind = P.PANEL if text.get_text() == "GPT-2" else mpl.colors.to_hex(face.get_facecolor())
            assert palette.contrast(mpl.colors.to_hex(text.get_color()), behind) >= GRAPHICS[1]


def test_only_the_lit_rung_is_in_full_colour():
    for lit in (1, 4, 9):
        columns = [p for p in P.ladder(lit).axes[0].patches if p.get_height() > 0.1]
        strong = P.text_colour(P.mechanism(P.RUNGS[lit - 1].mechanism).colour)
        assert [mpl.colors.to_hex(c.get_facecolor()) == strong for c in columns].index(True) == lit - 1
        assert sum(mpl.colors.to_hex(c.get_facecolor()) == strong for c in columns) == 1


def test_ladder_alt_says_what_is_lit():
    alt = P.ladder_alt(5)
    assert "Rung 5, KDA, is lit: decay per channel" in alt
    assert "4 Gated delta rule" in alt.split("Still ahead")[0]
    assert "6 MLA hybrid" in alt.split("Still ahead")[1]
    assert "Behind" not in P.ladder_alt(1)
    assert "ahead" not in P.ladder_alt(9)
    assert P.ladder(5).alt == alt


@pytest.mark.parametrize("lit", [0, 10, -1, 1.0, True, "5", None])
def test_ladder_refuses(lit):
    with pytest.raises(ValueError, match="lit must be a rung from 1 to 9"):
        P.ladder(lit)
    with pytest.raises(ValueError, match="lit must be a rung from 1 to 9"):
        P.ladder_alt(lit)


def test_every_rung_has_its_own_colour():
    assert [r.mechanism for r in P.RUNGS] == [k for k in P.MECHANISMS if k != "reference"]


def board(count):
    rows = []
    for rung in range(1, count + 1):
        row = {"rung": rung} | {c.key: float(rung * 10**i) for i, c in enumerate(P.COLUMNS)}
        rows.append(row | {"memory_cell": None, "writes_to_clear": "n/a"})
    return rows


@pytest.mark.parametrize("count", range(1, 10))
def test_scoreboard_has_a_dot_for_each_number(count):
    fig = P.scoreboard_figure(board(count), subtitle="K = V = 64")
    ax = fig.axes[0]
    dots = [ln for ln in ax.get_lines() if ln.get_marker() == "o"]
    assert len(dots) == count * (len(P.COLUMNS) - 2)
    shown = [t.get_text() for t in ax.texts]
    assert shown.count("n/a") == shown.count("–") == count
    fig.draw_without_rendering()
    boxes = [t.get_window_extent() for t in fig.texts + ax.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert max(b.x1 for b in boxes) <= 720 - 12
    assert f"{count} {P.RUNGS[count - 1].name}: state kept {P.format_bytes(count)}" in fig.alt


def test_scoreboard_shows_rows_in_order_and_the_best_in_bold():
    rows = board(3)[::-1]
    ax = P.scoreboard_figure(rows, P.COLUMNS[:1]).axes[0]
    cells = [(t.get_text(), t.get_weight()) for t in ax.texts if t.get_text().endswith(" B")]
    assert cells == [("1 B", "bold"), ("2 B", "normal"), ("3 B", "normal")]


def test_positions_on_the_scales():
    assert position(5.0, [0.0, 5.0, 10.0], "linear") == 0.5
    assert position(0.0, [0.0, 0.0], "linear") == 0.0
    assert position(10.0, [1.0, 10.0, 100.0], "log") == pytest.approx(0.5)
    assert position(0.0, [0.0, 1.0, 100.0], "log") == 0.0
    assert position(1.0, [0.0, 1.0, 100.0], "log") == 0.15
    assert position(7.0, [7.0], "log") == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], "rows must be 1 to 9"),
        ([{"rung": 1}], "must each have the key"),
        ([board(1)[0] | {"rung": 10}], "rung must be 1 to 9"),
        ([board(1)[0] | {"state_bytes": -1.0}], "state_bytes must be a finite number"),
        ([board(1)[0] | {"state_bytes": np.nan}], "state_bytes must be a finite number"),
        ([board(1)[0] | {"state_bytes": "many"}], "state_bytes must be a finite number"),
        (board(1) * 2, "distinct rungs"),
    ],
)
def test_scoreboard_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        P.scoreboard_figure(change)


def test_scoreboard_refuses_an_absent_row_to_light():
    with pytest.raises(ValueError, match="lit must be one of the rungs"):
        P.scoreboard_figure(board(2), lit=3)


def test_no_sign_of_the_series_is_missing_from_the_fonts():
    fig = P.Panel(
        "Sᵀk ← α β ‖v − Sᵀk‖² ⟨Sᵀk, v⟩ √((N−1)/K) e⁻⁵ 2²⁰ ≈ × ∇ ∂ Σ → ↓ · “it” – … ₁ ₂ ∞ ≤ ≥ ± µ ½ ↵", 3
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fig.draw_without_rendering()
    assert fig.texts[0].get_window_extent().width > 500
