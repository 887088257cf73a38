"""Sphinx configuration. `make docs` gathers the sources and calls it; see tools/docs.py."""

from evolve import __version__

project = "evolve"
author = "The evolve authors"
copyright = "2026, The evolve authors"
release = __version__

extensions = ["myst_nb"]
exclude_patterns = ["_readme.md"]  # included by index.md
html_theme = "sphinx_book_theme"
html_title = "evolve"
html_static_path = ["_static"]
html_css_files = ["evolve.css"]
html_theme_options = {
    "home_page_in_toc": True,
    "use_download_button": True,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # the sidebar has the search field
    "show_navbar_depth": 1,
    "show_toc_level": 2,
}

# The committed outputs are the outputs: nothing runs here.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
