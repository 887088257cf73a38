"""Every page of the site in a real browser. ``SHOTS`` may name a folder for screenshots to look at."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from PIL import Image

from site_pages.series import series
from tests.site_fixtures import ADDRESSES, LAPTOP, PHONE, pages_of, violations

ROOT = Path(__file__).resolve().parent.parent
SHOTS = os.environ.get("SHOTS", "")
NOTEBOOKS = [n.stem for n in series()]
# Axe takes a second or two a page: one of each kind in both schemes and at both widths.
KINDS = ["index.html", "playground.html", "notebooks/05_kda.html", "api/kda.html", "benchmarks.html"]
KINDS += ["bibliography.html", "glossary.html", "search.html"]

# Elements that reach beyond the window, unless they sit in a box that scrolls sideways.
WIDE = """() => [...document.querySelectorAll(".bd-article-container *")].filter(e => {
  const box = e.getBoundingClientRect();
  if (!box.width || !box.height || box.right <= innerWidth + 1) return false;
  for (let p = e.parentElement; p; p = p.parentElement) {
    if (getComputedStyle(p).overflowX !== "visible") return false;
  }
  return true;
}).map(e => e.outerHTML.slice(0, 200))"""
WEIGHT = """() => [...performance.getEntriesByType("resource"), ...performance.getEntriesByType("navigation")]
  .reduce((sum, e) => sum + e.decodedBodySize, 0)"""


class Links(HTMLParser):
    """Targets of links, ids, and pictures without a text for those who cannot see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links, self.ids, self.poor_alts = [], set(), []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        values = dict(attributes)
        if "id" in values:
            self.ids.add(values["id"])
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag == "img" and (len(values.get("alt") or "") < 4 or "_images/" in values["alt"]):
            self.poor_alts.append(values)


def test_every_page_loads_whole_at_both_widths(open_site, site):
    """``open_site`` checks that nothing is asked for elsewhere and that the console stays quiet."""
    pages = pages_of(site)
    assert len(pages) > len(NOTEBOOKS) + 10
    for path in pages:
        page = open_site(path)
        assert page.locator("main h1:visible").count() == 1, path
        assert page.evaluate(WIDE) == [], path
        page.set_viewport_size({"width": PHONE, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE, path
        assert page.evaluate(WIDE) == [], path
        page.context.close()


def test_opened_as_a_file_it_works_too(site_browser, site):
    page, trouble = site_browser.new_page(), []
    page.on("console", lambda m: m.type == "error" and trouble.append(m.text))
    page.on("pageerror", lambda e: trouble.append(str(e)))
    page.on("request", lambda r: r.url.startswith(("file:", "data:")) or trouble.append(r.url))
    for path in ("index.html", "playground.html", "notebooks/05_kda.html"):
        page.goto(f"file://{site}/{path}")
    assert trouble == []
    page.goto(f"file://{site}/search.html?q=KDA")  # lists what it finds, without the excerpts it would fetch
    page.wait_for_selector("#search-results li")
    page.close()


def formulas_in(stem: str) -> int:
    """Formulas in the Markdown cells of a notebook, by the parser that reads them."""
    parser = MarkdownIt().enable("table").use(dollarmath_plugin, double_inline=True)
    cells = json.loads((ROOT / "notebooks" / f"{stem}.ipynb").read_text())["cells"]
    tokens = [t for c in cells if c["cell_type"] == "markdown" for t in parser.parse("".join(c["source"]))]
    flat = [child for t in tokens for child in (t.children or [t])]
    return sum(t.type.startswith("math_") for t in flat)


@pytest.mark.parametrize("stem", NOTEBOOKS)
def test_formulas_of_a_notebook_are_all_there(site, stem):
    page = (site / "notebooks" / f"{stem}.html").read_text()
    article = page[page.index('<article class="bd-article"') : page.index("</article>")]
    expected = formulas_in(stem)
    assert expected > 10
    assert len(re.findall(r'<(?:span|div) class="math[^"]*"[^>]*>\s*<span class="katex', article)) == expected
    assert article.count("<math ") == expected
    assert "katex-error" not in page


def test_links_and_anchors_resolve_and_pictures_have_words(site):
    parsed = {path: Links((site / path).read_text()) for path in pages_of(site)}
    broken = []
    for path, found in parsed.items():
        assert found.poor_alts == [], path
        for link in found.links:
            target = urlsplit(urljoin(f"http://here/{path}", link))
            if target.netloc != "here" or target.scheme not in ("http",):
                continue
            place = unquote(target.path).lstrip("/") or "index.html"
            anchors = parsed[place].ids if place in parsed else {""}
            lost = target.fragment and place in parsed and unquote(target.fragment) not in anchors
            if lost or not (site / place).is_file():
                broken.append((path, link))
    assert broken == []


def test_buttons_and_addresses(open_site, site):
    notebook = (site / "notebooks/05_kda.html").read_text()
    address, repository = ADDRESSES.values()
    blob = repository.replace("https://github.com", "https://colab.research.google.com/github")
    assert f"{blob}/blob/main/notebooks/05_kda.ipynb" in notebook
    assert (
        "https://mybinder.org/v2/gh/example/evolve/main?urlpath=lab/tree/notebooks/05_kda.ipynb" in notebook
    )
    assert f'<link rel="canonical" href="{address}/notebooks/05_kda.html"' in notebook
    assert f'content="{address}/_static/cards/05_kda.png"' in notebook
    assert Image.open(site / "_static/cards/05_kda.png").size == (1200, 630)
    places = re.findall("<loc>(.+?)</loc>", (site / "sitemap.xml").read_text())
    assert {f"{address}/notebooks/{stem}.html" for stem in NOTEBOOKS} <= set(places)
    assert all((site / place.removeprefix(f"{address}/")).is_file() for place in places)
    page = open_site("notebooks/05_kda.html")
    assert page.locator(".prev-next-area a.left-prev").get_attribute("href") == "04_gated_deltanet.html"
    assert page.locator(".prev-next-area a.right-next").get_attribute("href") == "06_mla_hybrid.html"
    assert page.locator("button.copybtn").count() > 10
    assert page.locator('a.btn-download-source-button[href$="05_kda.ipynb"]').count() == 1
    assert "PyTorch 2" in page.locator(".tested").inner_text()


def test_ladder_is_clicked_by_mouse_and_keyboard(open_site):
    page = open_site()
    page.locator(".ladder a").nth(4).click()
    assert page.url.endswith("/notebooks/05_kda.html")
    page.go_back()
    page.locator(".ladder a").nth(1).focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/notebooks/02_linear_attention.html")


def test_search_finds_kda(open_site):
    page = open_site(width=LAPTOP)
    page.locator(".search-button-field").click()
    page.keyboard.type("KDA")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a")
    page.wait_for_function("!document.querySelector('#search-progress')?.textContent.includes('Searching')")
    found = page.locator("#search-results li a").evaluate_all(
        "links => links.map(a => a.getAttribute('href'))"
    )
    assert any("notebooks/05_kda.html" in link for link in found[:3]), found[:8]
    page.locator('#search-results a[href*="notebooks/05_kda.html"]').first.click()
    assert "Kimi Delta Attention" in page.locator("main h1:visible").inner_text()


@pytest.mark.parametrize("path", KINDS)
def test_axe_finds_nothing_in_either_scheme(open_site, path):
    page = open_site(path, color_scheme="light")
    assert violations(page) == []
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    page.set_viewport_size({"width": PHONE, "height": 800})
    page.wait_for_timeout(300)  # boxes that now scroll are marked
    assert violations(page) == []


def test_a_player_works_on_its_page(open_site):
    page = open_site("notebooks/05_kda.html")
    slider = page.locator(".evolve-player [data-part=slider]").first
    slider.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert slider.input_value() == "1"


@pytest.mark.parametrize(
    ("path", "most"), [("index.html", 1), *((f"notebooks/{s}.html", 4) for s in NOTEBOOKS)]
)
def test_pages_are_light(open_site, path, most):
    """Megabytes before any compression, all pictures of the page included."""
    page = open_site(path)
    page.evaluate("document.querySelectorAll('main img').forEach(i => { i.loading = 'eager'; })")
    page.wait_for_function("[...document.querySelectorAll('main img')].every(i => i.complete)")
    assert page.evaluate(WEIGHT) < most * 1e6


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, LAPTOP])
def test_screenshots_to_look_at(open_site, tmp_path, scheme, width):
    for path in ("index.html", "notebooks/05_kda.html", "playground.html"):
        page = open_site(path, width=width, color_scheme=scheme)
        page.wait_for_load_state("networkidle")
        file = Path(SHOTS or tmp_path) / f"{Path(path).stem}-{scheme}-{width}.png"
        page.screenshot(path=file)
        shot = Image.open(file).convert("RGB")
        assert shot.width == width
        corner = shot.getpixel((width // 2, 795))
        assert len(shot.getcolors(shot.width * shot.height)) > 50, corner
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(int, re.findall(r"\d+", background)[:3])) > 380
        assert light == (scheme == "light")
