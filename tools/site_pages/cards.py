"""Social cards: the ladder with the page's rung lit, 1200 × 630, as sites show them beside a link."""

from importlib.resources import as_file, files
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from evolve.lab.ladder import RUNGS, ladder
from evolve.lab.palette import INK, MUTED, PANEL
from evolve.lab.style import encode_lean
from site_pages.series import Notebook

SIZE = (1200, 630)
SCALE = 1.6


def _write(draw: ImageDraw.ImageDraw, at: tuple[int, int], text: str, cut: str, size: int, fill: str) -> None:
    with as_file(files("evolve.lab") / "fonts" / f"InterSubset-{cut}.ttf") as path:
        draw.text(at, text, font=ImageFont.truetype(str(path), size), fill=fill)


def card(lit: int) -> Image.Image:
    """The card of rung ``lit``."""
    image = Image.new("RGB", SIZE, PANEL)
    picture = ladder(lit).image(SCALE)
    image.paste(picture, ((SIZE[0] - picture.width) // 2, SIZE[1] - picture.height - 10))
    draw = ImageDraw.Draw(image)
    _write(draw, (62, 46), "From GPT-2 to Kimi K3", "SemiBold", 54, INK)
    _write(draw, (64, 116), "What does a model store, and what does it forget?", "Regular", 30, MUTED)
    return image


def write_cards(folder: Path, notebooks: list[Notebook]) -> None:
    """One PNG for each notebook and one for all other pages, with the last rung lit."""
    folder.mkdir(parents=True)
    for name, lit in [*((n.stem, n.rung) for n in notebooks), ("home", len(RUNGS))]:
        (folder / f"{name}.png").write_bytes(encode_lean(card(lit)))
