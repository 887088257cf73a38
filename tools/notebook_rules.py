"""What a committed notebook looks like: ``normalise`` makes it so, ``findings`` says where it is not.

Needs nbformat only, so that the pre-commit hook stays small.
"""

import ast
import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES, LONG = 40, 10

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}
NOTEBOOK_METADATA = {"mystnb"}  # what an author writes and a run does not; everything else goes
CELL_METADATA = {"jupyter", "mystnb", "slideshow", "tags"}
FOLDED = "hide-input"  # the site shows the figure and folds the code
WIDGET = "application/vnd.jupyter.widget-view+json"  # needs a live kernel: empty on a static page

MACHINE_TEXT = re.compile(
    r"/home/\w+|/Users/\w+|/root\b|/tmp/|/private/var/|/var/folders/|[A-Za-z]:\\+Users\\|"
    r"[\\/](?:site|dist)-packages|ipykernel_\d+|\b0x[0-9a-f]{9,}\b"
)
DATA_URI = re.compile(r"data:[\w/+.-]+;base64,[A-Za-z0-9+/=\s]+")  # base64 spells any path by chance
LOOKS_LIKE_A_FILE = re.compile(r"[\\/]|\.(png|svg|jpe?g|gif)\b|[0-9a-f]{16,}", re.IGNORECASE)


def code_cells(nb: NotebookNode) -> list[NotebookNode]:
    """The cells that run: code that is not blank, in order."""
    return [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]


def first_line(cell: NotebookNode) -> str:
    """The first line of a cell that is not blank."""
    return cell.source.strip().partition("\n")[0]


def _plots(statement: ast.stmt) -> bool:
    """Whether a statement is a call of ``plotting``, its result kept or not."""
    value = getattr(statement, "value", None)
    function = value.func if isinstance(value, ast.Call) else None
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) == "plotting"


def only_draws(cell: NotebookNode) -> bool:
    """Whether a cell begins with a call of ``plotting``, after helpers of its own, and shows a figure alone.

    What it draws was computed before, so a reader of the site who looks at the figure only misses nothing.
    """
    shown = [output.get("data", {}) for output in cell.outputs]
    if not shown or not all(any(mime.startswith("image/") for mime in data) for data in shown):
        return False
    try:
        body = ast.parse(cell.source).body
    except SyntaxError:  # a magic: not a drawing
        return False
    first = next((s for s in body if not isinstance(s, ast.FunctionDef)), None)
    return first is not None and _plots(first)


# --- normalise ----------------------------------------------------------------------------------------


def hide_paths(text: str) -> str:
    """Folders of this machine, by what they are: the repository and the home."""
    for folder, name in ((ROOT, "."), (Path.home(), "~")):
        if folder.parent != folder:
            text = re.sub(rf"{re.escape(str(folder))}(?![\w-])", name, text)
    return text


def merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join neighbouring stdout pieces: where the kernel flushed is chance."""
    merged: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and merged and merged[-1].output_type == "stream":
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def normalise_outputs(cell: NotebookNode, number: int) -> None:
    """Keep what a reader sees and the next run repeats."""
    kept = []
    for output in cell.outputs:
        if output.get("name") == "stderr" or WIDGET in output.get("data", {}):
            continue
        if output.output_type == "execute_result":
            output.execution_count = number
        if "text" in output:
            output.text = hide_paths(output.text)
        for mime, value in output.get("data", {}).items():
            if isinstance(value, str) and not is_binary(mime):
                output.data[mime] = hide_paths(value)
        kept.append(output)
    cell.outputs = merge_streams(kept)


def normalise(nb: NotebookNode) -> NotebookNode:
    """Bring an executed notebook, in place, to the form that is committed. Returns it."""
    authored = {key: nb.metadata[key] for key in NOTEBOOK_METADATA & set(nb.metadata)}
    nb.metadata = nbformat.from_dict(authored | {"kernelspec": KERNELSPEC, "language_info": LANGUAGE})
    nb.nbformat, nb.nbformat_minor = 4, 5
    taken = {cell.get("id") for cell in nb.cells}
    number = 0
    for position, cell in enumerate(nb.cells):
        cell.metadata = {key: cell.metadata[key] for key in CELL_METADATA & set(cell.metadata)}
        if not cell.get("id"):
            cell.id = next(i for i in (f"cell-{position}{s}" for s in ("", "a", "b")) if i not in taken)
        if cell.cell_type == "code":
            number += bool(cell.source.strip())
            cell.execution_count = number if cell.source.strip() else None
            normalise_outputs(cell, number)
            if only_draws(cell) and FOLDED not in cell.metadata.get("tags", []):
                cell.metadata["tags"] = [*cell.metadata.get("tags", []), FOLDED]
    return nb


# --- findings -----------------------------------------------------------------------------------------


def is_binary(mime: str) -> bool:
    return mime.startswith("image/") and mime != "image/svg+xml"


def output_texts(output: NotebookNode) -> list[str]:
    """Everything in an output that is text: streams, results, HTML, SVG."""
    data = output.get("data", {})
    texts = [value for mime, value in data.items() if isinstance(value, str) and not is_binary(mime)]
    return [*texts, output.get("text", "")]


def output_findings(cell: NotebookNode) -> list[str]:
    """stderr, errors and words that name a machine."""
    found = []
    for output in cell.outputs:
        if output.output_type == "error":
            found.append(f"saved an error: {output.ename}: {output.evalue}")
        elif output.get("name") == "stderr":
            found.append(f"saved stderr: {output.text.strip().partition(chr(10))[0]}")
        elif WIDGET in output.get("data", {}):
            found.append("saved a widget, which is empty on a static page")
        for text in output_texts(output):
            match = MACHINE_TEXT.search(DATA_URI.sub("", text))
            if match:
                found.append(f"output names this machine: {match.group()!r}")
    return found


def figure_findings(cell: NotebookNode) -> list[str]:
    """Each figure says in words what is seen: ``metadata.mystnb.image.alt``."""
    images = sum(any(m.startswith("image/") for m in o.get("data", {})) for o in cell.outputs)
    if not images:
        return []
    alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt")
    if not isinstance(alt, str) or not alt.strip():
        return ["figure without alt text (cell metadata mystnb.image.alt)"]
    if images > 1:
        return [f"{images} figures share one alt text: one figure a cell"]
    if LOOKS_LIKE_A_FILE.search(alt) or len(alt.split()) < 4:
        return [f"alt text does not say what is seen: {alt!r}"]
    if only_draws(cell) and FOLDED not in cell.metadata.get("tags", []):
        return [f"a cell that only draws needs the tag {FOLDED}"]
    return []


def layout_findings(nb: NotebookNode) -> list[str]:
    """A title first, no cell too long, prose between long cells."""
    found, previous_long = [], False
    if not nb.cells or nb.cells[0].cell_type != "markdown" or not first_line(nb.cells[0]).startswith("# "):
        found.append("the first cell must be Markdown and start with a title, '# ...'")
    for position, cell in enumerate(nb.cells, 1):
        lines = len(cell.source.strip().splitlines())
        if not lines:
            found.append(f"cell {position} is empty")
        if cell.cell_type == "code" and lines > MAX_LINES:
            found.append(f"cell {position} has {lines} lines of code, more than {MAX_LINES}")
        is_long = cell.cell_type == "code" and lines > LONG
        if is_long and previous_long:
            found.append(f"cells {position - 1} and {position} are both over {LONG} lines, no prose between")
        previous_long = is_long
    return found


def metadata_findings(nb: NotebookNode) -> list[str]:
    """The kernel any reader has, and only what an author writes."""
    found = []
    if nb.metadata.get("kernelspec") != KERNELSPEC:
        found.append(f"kernelspec must be {KERNELSPEC}, got {nb.metadata.get('kernelspec')}")
    extra = set(nb.metadata) - NOTEBOOK_METADATA - {"kernelspec", "language_info"}
    for cell in nb.cells:
        extra |= set(cell.metadata) - CELL_METADATA
    if extra:
        found.append(f"metadata left by a run or an editor: {', '.join(sorted(extra))}")
    return found


def order_findings(nb: NotebookNode) -> list[str]:
    """Executed 1..n from top to bottom, in one go."""
    counts = [cell.execution_count for cell in code_cells(nb)]
    wrong = next((i for i, count in enumerate(counts, 1) if count != i), None)
    if not counts:
        return ["no code cell"]
    return [f"code cell {wrong} was executed as [{counts[wrong - 1]}], not [{wrong}]"] if wrong else []


def findings(path: Path) -> list[str]:
    """Everything in one committed notebook that is out of order, each as one line; empty when none is."""
    try:
        nb = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        nbformat.validate(nb)
    except Exception as error:  # not JSON, not a notebook, another version: all the same to a reader
        return [f"not a valid notebook: {str(error).partition(chr(10))[0]}"]
    if (nb.nbformat, nb.nbformat_minor) < (4, 5):
        return [f"notebook format {nb.nbformat}.{nb.nbformat_minor}, needs 4.5 (stable cell ids)"]
    found = order_findings(nb) + metadata_findings(nb) + layout_findings(nb)
    for number, cell in enumerate(code_cells(nb), 1):
        found += [f"code cell {number} ({first_line(cell)[:50]}): {f}" for f in output_findings(cell)]
        found += [f"code cell {number} ({first_line(cell)[:50]}): {f}" for f in figure_findings(cell)]
    return found
