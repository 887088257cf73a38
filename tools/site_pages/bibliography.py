"""The bibliography: what the notebooks' sections "Sources" name, each work once, with its rungs."""

import re
from typing import NamedTuple

from site_pages.series import Notebook

ENTRY = re.compile(
    r"(?P<authors>[^*]*?),? ?\*(?P<title>[^*]+)\*(?: data sheet)?(?:, (?P<year>\d{4}))?"
    r"(?: \((?:technical report, )?(?P<links>(?:\[[^\]]+\]\([^)]+\)|arXiv:[\d.]+))\))?"
)
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


class Work(NamedTuple):
    """One work as one notebook names it."""

    authors: str
    title: str
    year: str
    link: str  # Markdown, or empty
    rung: int


def _authors(text: str) -> str:
    """The authors at the end of what stands before a title: after the last note or work."""
    text = re.split(r"\): |\)[.;,] |[.;] (?=[A-Z])|: (?=[A-Z])|^- ", text)[-1]
    return re.sub(r"^(?:\)?[,;.]? ?and |[),;.: ]+)", "", text).strip(" ,-")


def works(notebook: Notebook) -> list[Work]:
    """The works in the notebook's sources; a bullet without a title in italics is a link, not a work."""
    sources = [cell.split("## Sources", 1)[1] for cell in notebook.prose if "## Sources" in cell]
    found = []
    for line in "\n".join(sources).splitlines():
        before = ""
        for match in ENTRY.finditer(line):
            authors = _authors(match["authors"])
            if not authors[:1].isupper() or authors.startswith("The "):  # a note: the authors stay the same
                authors = before
            link = match["links"] or ""
            if link.startswith("arXiv"):
                link = f"[{link}](https://arxiv.org/abs/{link[6:]})"
            found.append(Work(authors, match["title"], match["year"] or "", link, notebook.rung))
            before = authors
    return found


def merged(notebooks: list[Notebook]) -> list[tuple[Work, list[int]]]:
    """Each work once, in its longest form, with its rungs; by authors and year."""
    groups: dict[str, list[Work]] = {}
    for work in (w for n in notebooks for w in works(n)):
        number = ARXIV.search(work.link)
        groups.setdefault(number[1] if number else work.title, []).append(work)
    result = []
    for same in groups.values():
        longest = max(same, key=lambda w: (len(w.title), len(w.authors)))
        authors = max((w.authors for w in same), key=len)
        year = max(w.year for w in same)
        result.append((longest._replace(authors=authors, year=year), sorted({w.rung for w in same})))
    return sorted(result, key=lambda pair: (pair[0].authors.lower(), pair[0].year, pair[0].title))


def page(notebooks: list[Notebook]) -> str:
    """The page: one line a work."""
    stems = {n.rung: n.stem for n in notebooks}
    lines = []
    for work, rungs in merged(notebooks):
        used = ", ".join(f"[{r}](notebooks/{stems[r]}.ipynb)" for r in rungs)
        details = ", ".join(filter(None, [work.authors, f"*{work.title}*", work.year, work.link]))
        lines.append(f"- {details}. Rung {used}.")
    intro = "Everything that the notebooks build on, with the rungs that say what each work is for."
    return f"# Bibliography\n\n{intro}\n\n" + "\n".join(lines) + "\n"
