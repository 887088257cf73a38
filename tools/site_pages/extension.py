"""A small Sphinx extension for what the theme leaves to us: social cards, sitemap, lean pages."""

import re
from html import escape
from pathlib import Path

from sphinx.application import Sphinx

from site_pages.cards import write_cards
from site_pages.series import series

# 1.6 MB of script that draws the icons which the theme's font draws as well.
ICON_SCRIPT = re.compile(r'\s*<script defer src="[^"]*scripts/fontawesome\.js[^"]*"></script>')
PICTURE = re.compile(r'<img (?=[^>]*src="[^"]*_images/)')
UNUSED = ("scripts/fontawesome*", "**/*.map", "katex/README.md", "katex/katex.min.js")
UNNAMED = '<summary><span class="toctree-toggle"'  # opens a branch of the sidebar, says nothing
NO_PAGES = ("genindex", "search", "py-modindex")


def describe(app: Sphinx, pagename: str, templatename: str, context: dict, doctree: object) -> None:
    """What a link to the page shows elsewhere: title, description and, where the address is known, a card."""
    notebooks = {f"notebooks/{n.stem}": n for n in series()}
    notebook = notebooks.get(pagename)
    title = re.sub(r"<[^>]+>", "", context.get("title") or "evolve")
    description = notebook.claim if notebook else "From GPT-2 to Kimi K3 in nine executable notebooks."
    meta = [("og:type", "article" if notebook else "website"), ("og:site_name", "evolve")]
    meta += [("og:title", title), ("og:description", description)]
    if app.config.html_baseurl and pagename not in NO_PAGES:
        card = f"{app.config.html_baseurl}_static/cards/{notebook.stem if notebook else 'home'}.png"
        meta += [("og:url", f"{app.config.html_baseurl}{pagename}.html"), ("og:image", card)]
        meta += [("og:image:alt", f"{title}: a step of the ladder from GPT-2 to Kimi K3")]
    context["social_meta"] = meta
    if notebook:
        context["metatags"] += f'<meta name="description" content="{escape(description)}">\n'


def lean(page: str) -> str:
    """The page without the icon script, its pictures loaded when they come near."""
    page, found = ICON_SCRIPT.subn("", page)
    if found != 1:
        raise ValueError(f"the theme's icon script was expected once in a page, found {found} times")
    page = page.replace(UNNAMED, UNNAMED.replace("<summary", '<summary aria-label="Pages below"'))
    return PICTURE.sub('<img loading="lazy" decoding="async" ', page)


def finish(app: Sphinx, exception: Exception | None) -> None:
    """After the build: lean pages, no unused files, a sitemap where the address is known."""
    if exception or app.builder.name != "html":
        return
    folder = Path(app.outdir)
    for page in folder.rglob("*.html"):
        if "_static" not in page.parts:
            page.write_text(lean(page.read_text(encoding="utf-8")), encoding="utf-8")
    for pattern in UNUSED:
        for file in (folder / "_static").glob(pattern):
            file.unlink()
    if app.config.html_baseurl:
        write_cards(folder / "_static" / "cards", series())
        (folder / "sitemap.xml").write_text(sitemap(app.config.html_baseurl, sorted(app.env.found_docs)))


def sitemap(address: str, pages: list[str]) -> str:
    """The sitemap of ``pages`` below ``address`` (sitemaps.org, 0.9)."""
    places = "\n".join(f"  <url><loc>{escape(f'{address}{page}.html')}</loc></url>" for page in pages)
    space = "http://www.sitemaps.org/schemas/sitemap/0.9"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="{space}">\n{places}\n</urlset>\n'


def setup(app: Sphinx) -> dict:
    app.connect("html-page-context", describe)
    app.connect("build-finished", finish, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
