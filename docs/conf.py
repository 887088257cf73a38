"""Sphinx configuration. `make docs` gathers the sources and calls it; see tools/docs.py.

Two variables of the environment say where the site and its repository are; without them nothing is invented:
SITE_URL (canonical links, sitemap, social cards) and REPOSITORY_URL (launch buttons, a link to the sources;
REPOSITORY_BRANCH is main unless given).
"""

import os
from pathlib import Path

from evolve import __version__
from site_pages import settings

project = "evolve"
author = "The evolve authors"
copyright = "2026, The evolve authors"
release = __version__
language = "en"

extensions = ["myst_nb", "sphinx_copybutton", "site_pages.formulas", "site_pages.extension"]
exclude_patterns = ["_*.md", "_static/**"]  # parts that other pages include; notes beside the static files
templates_path = ["_templates"]
html_theme = "sphinx_book_theme"
html_title = "evolve"
html_search_scorer = str(Path(__file__).with_name("_static") / "scorer.js")
html_static_path = ["_static"]
html_css_files = ["evolve.css"]
html_js_files = [("evolve.js", {"defer": "defer"})]
html_show_search_summary = False  # each excerpt would fetch a whole page, formulas three times over
html_favicon = "_static/favicon.svg"
html_theme_options = settings.theme_options(os.environ)
html_baseurl = settings.site_url(os.environ)
html_show_sourcelink = True  # the download button needs the sources
html_context = {"default_mode": "auto"}

# The committed outputs are the outputs: nothing runs here.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["amsmath", "attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_dmath_double_inline = True
html_math_renderer = "katex_in_node"

suppress_warnings = ["ref.python"]  # two modules of the lab have a Column; neither is meant as a link

copybutton_exclude = ".linenos, .gp, .go"
