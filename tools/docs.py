"""Build the site from docs/ and the committed files, without executing anything and without a network.

The sources are gathered anew (so a notebook that was removed leaves no page), with the pages that
`site_pages` makes from the committed notebooks, docstrings and measurements; the site is built beside the old
one with warnings as errors, and moved to build/site/ only when that succeeded.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from site_pages import write_pages

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"


def gather(source: Path) -> None:
    """docs/, with the notebooks in a folder of it, the README for the parts it shares, and made pages."""
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "notebooks").mkdir()
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copy2(notebook, source / "notebooks")
    shutil.copy2(ROOT / "README.md", source / "_readme.md")
    write_pages(source)


def build(target: Path, environ: Mapping[str, str]) -> int:
    """Build into ``target``, which must not exist, in a process of its own; the exit status of Sphinx."""
    path = os.pathsep.join(filter(None, [str(ROOT / "tools"), environ.get("PYTHONPATH")]))
    command = [sys.executable, __file__, target]
    return subprocess.run(command, env={**environ, "PYTHONPATH": path}).returncode


def _build_here(target: Path) -> int:
    """Gather and build in this process, so that PyTorch and the pages' makers are imported once."""
    sys.modules["rfc3987_syntax"] = None  # jsonschema imports it to check addresses: 4 s of grammars, no use
    from sphinx.cmd.build import main as sphinx

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        gather(source)
        options = ["-q", "-E", "-W", "--keep-going", "-d", str(Path(folder) / "doctrees")]
        return sphinx([*options, str(source), str(target)])


def main() -> int:
    fresh = SITE.with_name("site-new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.parent.mkdir(exist_ok=True)
    if build(fresh, os.environ):
        print("The site was not built; build/site/ is as it was.", file=sys.stderr)
        return 1
    shutil.rmtree(SITE, ignore_errors=True)
    fresh.rename(SITE)
    print(f"The site: {SITE.relative_to(ROOT)}/index.html ({len(list(SITE.rglob('*.html')))} pages)")
    if "SITE_URL" not in os.environ:
        print("SITE_URL is not set: no canonical links, no sitemap, no social cards.")
    return 0


if __name__ == "__main__":
    sys.exit(_build_here(Path(sys.argv[1])) if sys.argv[1:] else main())
