"""The player in a real browser: keys, slider, speed, reduced motion, two of a kind, no script, axe.

Browser and axe are those of ``tests.site_fixtures``. ``SHOTS`` may name a folder for screenshots to look at.
"""

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from evolve.lab.player import Player
from tests.site_fixtures import axe_script

SHOTS = os.environ.get("SHOTS", "")

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Players</title>
<meta name="viewport" content="width=device-width"><style>
:root {{ color-scheme: light dark }}
body {{ margin: 16px; font-family: sans-serif; background: #fff; color: #111 }}
@media (prefers-color-scheme: dark) {{ body {{ background: #121418; color: #eee }} }}
</style></head><body><main><h1>Players</h1>{}</main></body></html>"""


def make(**settings):
    frames = []
    for i in range(5):
        buffer = io.BytesIO()
        Image.new("RGB", (1080, 300), (236 - 20 * i, 235, 230)).save(buffer, "PNG")
        frames.append(buffer.getvalue())
    captions = [f"write {i + 1}" for i in range(5)]
    words = {"title": "A state fills", "alt": "A matrix fills.", "captions": captions, "poster": 0, "fps": 20}
    return Player(frames, **(words | settings))


@pytest.fixture
def open_page(site_browser):
    """Open players on one page; afterwards: no console message, no error, no request beyond data."""
    contexts, trouble = [], []

    def opened(*players, width=900, **context):
        contexts.append(site_browser.new_context(viewport={"width": width, "height": 800}, **context))
        page = contexts[-1].new_page()
        page.on("console", lambda m: trouble.append(m.text))
        page.on("pageerror", lambda e: trouble.append(str(e)))
        page.on("request", lambda r: r.url.startswith(("data:", "about:")) or trouble.append(r.url))
        page.set_content(PAGE.format("\n<p>and</p>\n".join(p._repr_html_() for p in players)))
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not trouble


def at(page, nth=0):
    """Which frame is shown, checked in four places."""
    return (
        page.locator(".evolve-player")
        .nth(nth)
        .evaluate(
            """root => {
          const frames = JSON.parse(root.querySelector('script[type="application/json"]').textContent).frames;
          const slider = root.querySelector('[data-part=slider]');
          const shown = frames.indexOf(root.querySelector('img').src);
          const [text, value] = [root.querySelector('p').textContent, slider.getAttribute('aria-valuetext')];
          if (Number(slider.value) !== shown) return `slider ${slider.value}, picture ${shown}`;
          if (text !== `${shown + 1} of ${frames.length} · write ${shown + 1}`) return text;
          if (value !== `${shown + 1} of ${frames.length}: write ${shown + 1}`) return value;
          return shown;
        }"""
        )
    )


def button(page, part, nth=0):
    return page.locator(f"[data-part={part}]").nth(nth)


def test_nothing_moves_until_asked(open_page):
    page = open_page(make(loop=True))
    page.wait_for_timeout(300)
    assert at(page) == 0
    assert button(page, "toggle").get_attribute("aria-label") == "Play"


@pytest.mark.parametrize("focus", ["slider", "toggle", "forward"])
def test_keyboard(open_page, focus):
    page = open_page(make())
    button(page, focus).focus()
    for key, expected in [
        ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 4), ("ArrowRight", 4), ("Home", 0),
        ("ArrowLeft", 0), ("Control+ArrowRight", 1 if focus == "slider" else 0),
    ]:  # fmt: skip
        page.keyboard.press(key)
        assert at(page) == expected, key


def test_space_plays_to_the_end_and_starts_again(open_page):
    page = open_page(make())
    toggle, caption = button(page, "toggle"), page.locator(".evolve-player p")
    button(page, "slider").focus()
    page.keyboard.press(" ")
    assert toggle.get_attribute("aria-label") == "Pause"
    assert caption.get_attribute("aria-live") == "off"
    page.wait_for_selector("[data-part=toggle][aria-label=Play]")
    assert at(page) == 4
    assert caption.get_attribute("aria-live") == "polite"
    button(page, "toggle").focus()
    page.keyboard.press(" ")  # the button's own key: once, not twice
    assert toggle.get_attribute("aria-label") == "Pause"
    page.wait_for_selector("[data-part=toggle][aria-label=Play]")
    assert at(page) == 4


def test_pause_holds_and_loop_goes_on(open_page):
    page = open_page(make(loop=True))
    button(page, "toggle").click()
    page.wait_for_timeout(600)  # more than one round of 5 × 50 ms
    assert button(page, "toggle").get_attribute("aria-label") == "Pause"
    button(page, "toggle").click()
    held = at(page)
    page.wait_for_timeout(200)
    assert at(page) == held


def test_buttons_slider_and_picture(open_page):
    page = open_page(make())
    button(page, "forward").click()
    assert at(page) == 1
    button(page, "back").click()
    button(page, "back").click()
    assert at(page) == 0
    box = button(page, "slider").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert at(page) == 2
    page.locator("img").click()
    assert button(page, "toggle").get_attribute("aria-label") == "Pause"
    assert page.evaluate("document.activeElement.dataset.part") == "slider"


def test_speed_keeps_its_own_keys(open_page):
    page = open_page(make(fps=1))
    button(page, "speed").focus()
    page.keyboard.press("ArrowDown")
    assert button(page, "speed").input_value() == "2"
    assert at(page) == 0
    button(page, "speed").select_option("4")
    button(page, "toggle").click()
    page.wait_for_timeout(600)  # at 4 frames a second: two frames on
    assert at(page) in (1, 2, 3)


def test_autoplay_only_when_asked_and_never_against_reduced_motion(open_page):
    page = open_page(make(autoplay=True, loop=True))
    assert button(page, "toggle").get_attribute("aria-label") == "Pause"
    page = open_page(make(autoplay=True, loop=True), reduced_motion="reduce")
    page.wait_for_timeout(200)
    assert at(page) == 0
    assert button(page, "toggle").get_attribute("aria-label") == "Play"
    button(page, "toggle").click()  # asked for: it moves
    page.wait_for_function("document.querySelector('[data-part=slider]').value !== '0'")


def test_the_same_player_twice_and_another_live_side_by_side(open_page):
    page = open_page(make(), make(), make(title="Another", poster=3))
    assert page.locator("[data-part=slider]").count() == 3
    button(page, "forward", 1).click()
    assert [at(page, i) for i in range(3)] == [0, 1, 3]


def test_a_player_taken_off_the_page_stops(open_page):
    page = open_page(make(loop=True))
    button(page, "toggle").click()
    page.evaluate("() => { window.gone = document.querySelector('.evolve-player'); gone.remove(); }")
    page.wait_for_timeout(150)
    assert page.evaluate("gone.classList.contains('playing')") is False


def test_without_scripts_the_poster_stands(open_page):
    page = open_page(make(poster=2), java_script_enabled=False)
    assert page.locator("button, input, select").count() == 0
    assert page.locator("img").is_visible()
    assert page.locator(".evolve-player p").inner_text() == "3 of 5 · write 3"


@pytest.mark.parametrize("width", [320, 360, 900])
def test_fits_the_page(open_page, width):
    page = open_page(make(), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    targets = page.locator(".evolve-player button, .evolve-player select").all()
    boxes = [t.bounding_box() for t in targets]
    assert len({b["y"] for b in boxes}) == 1  # one row
    assert all(b["width"] >= 36 and b["height"] >= 36 for b in boxes)
    assert all(b["x"] + b["width"] <= width - 16 for b in boxes)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(open_page, scheme):
    page = open_page(make(), make(), color_scheme=scheme)
    page.evaluate(axe_script())
    button(page, "toggle").focus()
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    found = page.evaluate("tags => axe.run({ runOnly: tags })", tags)
    assert [(v["id"], v["nodes"][0]["html"]) for v in found["violations"]] == []
    assert len(found["passes"]) > 10


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 900])
def test_screenshots_to_look_at(open_page, tmp_path, scheme, width):
    page = open_page(make(), width=width, color_scheme=scheme, device_scale_factor=2)
    button(page, "toggle").focus()
    page.keyboard.press("Tab")  # shows the ring
    path = Path(SHOTS or tmp_path) / f"player-{scheme}-{width}.png"
    page.screenshot(path=path)
    shot = Image.open(path).convert("RGB")
    colours = {c: n for n, c in shot.getcolors(shot.width * shot.height)}
    assert colours[(236, 235, 230)] > 10_000  # the panel
    assert colours[(183, 48, 59)] > 100  # the focus ring
