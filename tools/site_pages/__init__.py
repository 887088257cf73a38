"""What the site has beyond the notebooks: pages and pictures generated from the committed files."""

from pathlib import Path


def write_pages(source: Path) -> None:
    """Write every made page, and every made part of a page (``_*.md``), into the gathered ``source``."""
    from site_pages import api, bibliography, home, measurements
    from site_pages.series import series

    notebooks = series()
    raw = "```{{raw}} html\n{}\n```\n"
    made = {
        "_ladder": raw.format(home.ladder(notebooks)),
        "_start": raw.format(home.start_here(notebooks)),
        "_palette": raw.format(home.palette_json()),
        "_scoreboard": home.scoreboard_table(notebooks),
        "_series": home.toctree(notebooks),
        "benchmarks": measurements.benchmarks(),
        "parity": measurements.parity(),
        "bibliography": bibliography.page(notebooks),
    } | api.pages(notebooks)
    (source / "api").mkdir()
    for name, text in made.items():
        (source / f"{name}.md").write_text(text, encoding="utf-8")
