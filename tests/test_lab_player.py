"""The animation player: complete, small, the same each time, and honest about bad input."""

import base64
import html
import io
import json
import re
from html.parser import HTMLParser

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from evolve.lab.player import PIXELS, Player, animate
from evolve.lab.plotting import line, state_matrix

STATES = np.cumsum(np.random.default_rng(0).normal(size=(24, 16, 16)), axis=0) / 8


def png(shade, size=(8, 6)):
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade, shade, shade)).save(buffer, "PNG")
    return buffer.getvalue()


def player(count=3, **settings):
    words = {"title": "A state fills", "alt": "A matrix fills row by row."}
    return Player([png(20 * i) for i in range(count)], **(words | settings))


def draw(fig, i):
    state_matrix(STATES[i], ax=fig.subplots(), vmax=3)


class Tags(HTMLParser):
    """Start tags with their attributes, and the text inside scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self._inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"

    def handle_data(self, data):
        if self._inside:
            self.scripts.append(data)
            self._inside = False


def embedded(shown):
    """The data that the script reads."""
    return json.loads(Tags(shown._repr_html_()).scripts[0])


def test_same_input_same_html():
    one, other = (animate(draw, 3, title="t", alt="a", height=3, poster=1)._repr_html_() for _ in range(2))
    assert one == other


def test_frames_arrive_whole_and_in_order():
    shown = player(captions=["one", "two", "three"], poster=0, fps=4)
    data = embedded(shown)
    assert [base64.b64decode(f.split(",")[1]) for f in data["frames"]] == shown.frames
    assert data["captions"] == ["one", "two", "three"]
    assert (data["interval"], data["poster"], data["autoplay"], data["loop"]) == (250, 0, False, False)


def test_poster_stands_in_the_page_without_any_script():
    shown = player(captions=["one", "two", "three"])
    text = shown._repr_html_()
    picture = next(a for tag, a in Tags(text).tags if tag == "img")
    assert picture["src"] == embedded(shown)["frames"][2]
    assert picture["alt"] == "A matrix fills row by row."
    assert (picture["width"], picture["height"]) == ("8", "6")
    assert "<p>3 of 3 · three</p>" in text
    assert not any(tag in ("button", "input", "select") for tag, _ in Tags(text).tags)  # no dead controls
    data, metadata = shown._repr_png_()
    assert data == shown.frames[2]
    assert metadata == {"width": 720, "height": 540}
    assert repr(shown) == "Animation, 3 frames. A state fills. A matrix fills row by row."
    assert len(shown) == 3


def test_no_ids_to_collide_and_nothing_from_outside():
    text = player()._repr_html_()
    tags = Tags(text).tags
    assert not any({"id", "for", "name", "aria-labelledby"} & attrs.keys() for _, attrs in tags)
    assert [a["src"][:10] for tag, a in tags if "src" in a] == ["data:image"]
    outside = re.sub(PIXELS, "", text)
    assert not re.search(r"https?:|//\w|@import|url\(|fetch|XMLHttpRequest|Math\.random|Date", outside)


def test_group_is_named_and_shortcuts_of_the_host_are_kept_out():
    tag, attrs = Tags(player(title='Facts & "scratch" <fade>')._repr_html_()).tags[0]
    assert (tag, attrs["role"]) == ("div", "group")
    assert attrs["aria-label"] == 'Animation: Facts & "scratch" <fade>'
    assert attrs["data-lm-suppress-shortcuts"] == "true"


def test_words_cannot_break_out():
    bad = "</script><script>alert(1)</script>"
    shown = player(title=bad, alt=bad, captions=[bad] * 3)
    tags = [tag for tag, _ in Tags(shown._repr_html_()).tags]
    assert tags == ["div", "style", "img", "p", "script", "script"]
    assert embedded(shown)["captions"] == [bad] * 3
    assert html.escape(bad) in shown._repr_html_()


def test_key_names_the_content_and_not_the_pixels():
    same = Player([png(1), png(2), png(3)], title="A state fills", alt="A matrix fills row by row.")
    assert same.key == player().key
    assert same._repr_html_() != player()._repr_html_()
    # What a strict notebook test compares once the pictures are replaced:
    assert re.sub(PIXELS, "", same._repr_html_()) == re.sub(PIXELS, "", player()._repr_html_())
    others = [
        player(4),
        player(fps=5),
        player(poster=0),
        player(title="Another"),
        player(captions=list("abc")),
    ]
    assert len({p.key for p in [player(), *others]}) == 6


def test_24_frames_are_light_and_leave_pyplot_alone():
    before = plt.get_fignums()
    shown = animate(draw, 24, title="Each write fills one row", alt="A matrix fills.", height=4.2)
    assert len(shown._repr_html_()) < 600_000
    assert plt.get_fignums() == before
    assert Image.open(io.BytesIO(shown.frames[0])).size == (1080, 630)
    assert len(set(shown.frames)) == 24


def test_axes_hold_still_while_numbers_grow():
    seen = []

    def grow(fig, i):
        ax = fig.subplots()
        ax.plot([0, 10**i], [0, 1000.0**i], **line("kda"))
        seen.append(ax)

    animate(grow, 3, title="t", alt="a", height=3)
    boxes = np.array([ax.get_position().extents for ax in seen])
    assert np.ptp(boxes, axis=0).max() < 1e-9
    for ax in seen:
        assert all(label.get_window_extent().x0 > 0 for label in ax.get_yticklabels())


@pytest.mark.parametrize(
    ("frames", "settings", "message"),
    [
        ([], {}, "at least one picture"),
        (["text"], {}, "must be PNG bytes"),
        ([b"GIF89a" + bytes(40)], {}, "must be PNG bytes"),
        ([png(0), png(0, (9, 6))], {}, "must all have one size"),
        ([png(0)], {"title": " "}, "title and alt"),
        ([png(0)], {"alt": ""}, "title and alt"),
        ([png(0)], {"captions": ["a", "b"]}, "captions must be 1"),
        ([png(0)], {"fps": 0}, "fps must be"),
        ([png(0)], {"fps": float("nan")}, "fps must be"),
        ([png(0)], {"fps": 61}, "fps must be"),
        ([png(0)], {"poster": 1}, "poster must be a frame"),
        ([png(0)], {"poster": -2}, "poster must be a frame"),
        ([png(0)], {"width": 0}, "width must be positive"),
    ],
)
def test_player_refuses(frames, settings, message):
    with pytest.raises(ValueError, match=message):
        Player(frames, **({"title": "t", "alt": "a"} | settings))


def test_animate_refuses_no_frames_before_drawing():
    with pytest.raises(ValueError, match="frames must be at least 1"):
        animate(lambda fig, i: pytest.fail("drawn"), 0, title="t", alt="a")
