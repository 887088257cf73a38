"""The site, built once and served from a sub-path of localhost, and a browser that notes what goes wrong.

Needs Playwright and a Chromium (``CHROMIUM`` names another one than Debian's); the tests that use these
fixtures are skipped where one of them is missing.
"""

import functools
import http.server
import os
import shutil
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

import docs

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
ADDRESSES = {"SITE_URL": "https://example.org/evolve", "REPOSITORY_URL": "https://github.com/example/evolve"}
PHONE, LAPTOP = 360, 1280
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


def axe_script() -> str:
    """axe-core's source (``AXE`` names another file than that of the Python package); skips without."""
    spec = find_spec("axe_playwright_python")
    file = os.environ.get("AXE") or (spec and Path(spec.origin).with_name("axe.min.js"))
    if not file:
        pytest.skip("axe-playwright-python is not installed")
    return Path(file).read_text("utf-8")


def violations(page) -> list[tuple[str, str]]:
    """What axe finds on the open page: rule and element. It must have looked: some rules must have passed."""
    page.evaluate(axe_script())
    found = page.evaluate(
        "rules => axe.run({ exclude: [['.katex-html']] }, { runOnly: rules, preload: false })", RULES
    )
    assert len(found["passes"]) > 10
    return [(v["id"], n["html"][:200]) for v in found["violations"] for n in v["nodes"]]


def pages_of(site: Path) -> list[str]:
    """The site's pages, relative to it."""
    return sorted(str(p.relative_to(site)) for p in site.rglob("*.html") if "_static" not in p.parts)


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The built site, with the addresses of a site and a repository in the environment.

    ``SITE`` may name one that was built so already.
    """
    if os.environ.get("SITE"):
        return Path(os.environ["SITE"]).resolve()
    target = tmp_path_factory.mktemp("served") / "evolve"
    assert docs.build(target, os.environ | ADDRESSES) == 0
    return target


@pytest.fixture(scope="session")
def site_address(site):
    """Where the site is served, with a closing slash: a sub-path, as project sites have."""
    handler = functools.partial(Handler, directory=str(site.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/{site.name}/"
        server.shutdown()


@pytest.fixture(scope="module")
def site_browser():
    """One browser for a module: Playwright's event loop is open as long, and no other can be started then."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield launched
        launched.close()


@pytest.fixture
def open_site(site_browser, site_address):
    """Open a page of the site by its path. Afterwards: no console message, no error, no request elsewhere."""
    contexts, trouble = [], []

    def note(request) -> None:
        if not request.url.startswith((site_address, "data:", "blob:")):
            trouble.append(request.url)

    def opened(path: str = "", width: int = LAPTOP, height: int = 800, **context):
        contexts.append(site_browser.new_context(viewport={"width": width, "height": height}, **context))
        page = contexts[-1].new_page()
        page.on("console", lambda m: m.type in ("error", "warning") and trouble.append(f"{path}: {m.text}"))
        page.on("pageerror", lambda e: trouble.append(f"{path}: {e}"))
        page.on("request", note)
        page.on("response", lambda r: r.status >= 400 and trouble.append(f"{r.status} {r.url}"))
        page.goto(site_address + path)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert trouble == []
