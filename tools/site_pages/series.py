"""The committed notebooks as the site's pages need them: number, name, title, words."""

import json
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


class Notebook(NamedTuple):
    """One notebook: its rung, file stem, heading ("Linear attention: one matrix …") and Markdown cells."""

    rung: int
    stem: str
    title: str
    prose: list[str]

    @property
    def name(self) -> str:
        """The heading up to its colon."""
        return self.title.partition(":")[0]

    @property
    def claim(self) -> str:
        """The sentence or two after **Claim.**, as plain text."""
        found = re.search(r"\*\*Claim\.\*\*\s*(.*)", self.prose[0])
        text = found[1] if found else self.title
        return re.sub(r"[*$`]|\\(?=[a-z])", "", text)


def series(folder: Path = ROOT / "notebooks") -> list[Notebook]:
    """All notebooks in order. ``ValueError`` names one whose heading is not ``# N · Title``."""
    found = []
    for path in sorted(folder.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        prose = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        heading = re.match(r"# (\d+) · (.+)", prose[0]) if prose else None
        if heading is None or int(heading[1]) != int(path.name[:2]):
            raise ValueError(f"{path.name} must begin with '# {int(path.name[:2])} · Title'")
        found.append(Notebook(int(heading[1]), path.stem, heading[2].strip(), prose))
    return found
