"""Build the site from docs/ and the committed notebooks, without executing anything.

The sources are gathered anew in build/site-source/ (so a notebook that was removed leaves no page), built
beside the old site with warnings as errors, and moved to build/site/ only when that succeeded.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build" / "site-source"
FRESH = ROOT / "build" / "site-new"
SITE = ROOT / "build" / "site"


def gather() -> None:
    """docs/, with the notebooks in a folder of it and the README for the parts that it shares."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE, ignore=shutil.ignore_patterns("__pycache__"))
    (SOURCE / "notebooks").mkdir()
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copy2(notebook, SOURCE / "notebooks")
    shutil.copy2(ROOT / "README.md", SOURCE / "_readme.md")


def main() -> int:
    gather()
    shutil.rmtree(FRESH, ignore_errors=True)
    options = ["-q", "-E", "-W", "--keep-going", "-d", ROOT / "build" / "doctrees"]
    status = subprocess.run([sys.executable, "-m", "sphinx", *options, SOURCE, FRESH]).returncode
    if status:
        print("The site was not built; build/site/ is as it was.", file=sys.stderr)
        return 1
    shutil.rmtree(SITE, ignore_errors=True)
    FRESH.rename(SITE)
    print(f"The site: {SITE.relative_to(ROOT)}/index.html ({len(list(SITE.rglob('*.html')))} pages)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
