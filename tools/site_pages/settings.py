"""Addresses from the environment, and the theme's options that depend on them and on the lock."""

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent.parent
SHOWN = {"torch": "PyTorch", "triton": "Triton", "transformers": "transformers", "sphinx": "Sphinx"}


def _address(environ: Mapping[str, str], name: str) -> str:
    """An http(s) address from the environment without a closing slash; empty where there is none."""
    address = environ.get(name, "").strip().rstrip("/")
    parts = urlsplit(address)
    if address and (parts.scheme not in ("http", "https") or not parts.netloc):
        raise SystemExit(f"{name} must be an address that begins with http:// or https://, got {address!r}")
    return address


def site_url(environ: Mapping[str, str]) -> str:
    """Where the site will be (``SITE_URL``), with one closing slash; empty where nobody says."""
    address = _address(environ, "SITE_URL")
    return f"{address}/" if address else ""


def locked_versions(names: Mapping[str, str] = SHOWN) -> dict[str, str]:
    """Shown name → version, as requirements.lock has them."""
    lock = (ROOT / "requirements.lock").read_text()
    return {
        shown: re.search(rf"^{name}==([^\s;]+)", lock, re.MULTILINE).group(1) for name, shown in names.items()
    }


def footer() -> str:
    """One line: the versions that the committed outputs and the tests belong to."""
    versions = ", ".join(f"{name} {version}" for name, version in locked_versions().items())
    return f'<p class="tested">Tested with Python 3.11, {versions}; exact versions: requirements.lock.</p>'


def theme_options(environ: Mapping[str, str]) -> dict:
    """Options of sphinx-book-theme. Buttons to a repository only where ``REPOSITORY_URL`` names one."""
    options = {
        "home_page_in_toc": True,
        "use_download_button": True,
        "use_fullscreen_button": False,
        "navbar_persistent": [],  # the sidebar has the search field
        "primary_sidebar_end": [],
        "show_navbar_depth": 1,
        "show_toc_level": 2,
        "pygments_light_style": "a11y-high-contrast-light",
        "pygments_dark_style": "a11y-high-contrast-dark",
        "extra_footer": footer(),
    }
    repository = _address(environ, "REPOSITORY_URL")
    if repository:
        options |= {
            "repository_url": repository,
            "repository_branch": environ.get("REPOSITORY_BRANCH") or "main",
            "path_to_docs": "",
            "use_repository_button": True,
            "launch_buttons": {"notebook_interface": "jupyterlab"},
        }
        if urlsplit(repository).netloc == "github.com":  # the only place that both can open
            options["launch_buttons"] |= {
                "binderhub_url": "https://mybinder.org",
                "colab_url": "https://colab.research.google.com",
            }
    return options
