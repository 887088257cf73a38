"""The API reference: signatures and docstrings of the package, read from its source without importing it."""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from site_pages.series import ROOT, Notebook

PACKAGE = ROOT / "src" / "evolve"
SECTION = re.compile(r"(Args|Returns|Raises|Yields|Shapes|Attributes): *(.*)", re.DOTALL)


def escaped(text: str) -> str:
    """Text in which Markdown means nothing, but for ``code``."""
    pieces = re.split(r"(``.+?``)", text)
    return "".join(p if p.startswith("``") else re.sub(r"([\\*_$<>\[\]#`|~{}^])", r"\\\1", p) for p in pieces)


def _section(name: str, text: str) -> str:
    """``Args:`` and its like: a paragraph, or a list where each entry has a line of its own."""
    first, _, rest = text.partition("\n")
    entries: list[str] = []
    for line in textwrap.dedent(rest).splitlines():
        if line.startswith(" ") and entries:
            entries[-1] += " " + line.strip()
        elif line.strip():
            entries.append(line.strip())
    if first.strip() or len(entries) <= 1:
        return f"**{name}:** " + escaped(" ".join([first.strip(), *entries]).strip())
    return f"**{name}:**\n\n" + "\n".join(f"- {escaped(entry)}" for entry in entries)


def markdown(docstring: str) -> str:
    """A docstring as Markdown: paragraphs, indented blocks as they stand, sections as lists."""
    blocks = []
    for block in re.split(r"\n\s*\n", docstring.strip("\n")):
        pieces = re.split(r"\n(?=(?:Args|Returns|Raises|Yields|Shapes|Attributes):)", block)
        for piece in pieces:
            found = SECTION.fullmatch(piece.strip())
            if piece.startswith("    "):
                blocks.append(f"```text\n{textwrap.dedent(piece)}\n```")
            elif found:
                blocks.append(_section(found[1], found[2]))
            elif piece.strip() != "::":
                blocks.append(re.sub(r"^(\d+)([.)])", r"\1\\\2", escaped(" ".join(piece.split()))))
    return "\n\n".join(blocks)


def _directive(kind: str, signature: str, module: str, body: str, fence: str) -> str:
    return f"{fence}{{py:{kind}}} {signature}\n:module: {module}\n\n{body}\n{fence}\n"


def _function(node: ast.FunctionDef, module: str, kind: str = "function", prefix: str = "") -> str:
    arguments = ast.unparse(node.args)
    if kind == "method":
        arguments = re.sub(r"^(self|cls)(, )?", "", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    body = markdown(ast.get_docstring(node) or "")
    return _directive(kind, f"{prefix}{node.name}({arguments}){returns}", module, body, ":::::")


def _class(node: ast.ClassDef, module: str) -> str:
    functions = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    start = functions.get("__init__")
    arguments = re.sub(r"^self(, )?", "", ast.unparse(start.args)) if start else ""
    methods = [n for name, n in functions.items() if not name.startswith("_") and ast.get_docstring(n)]
    inner = "\n".join(_function(n, module, "method", f"{node.name}.") for n in methods)
    signature = f"{node.name}({arguments})" if arguments else node.name
    return _directive(
        "class", signature, module, markdown(ast.get_docstring(node) or "") + "\n\n" + inner, "::::::"
    )


def public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Functions and classes of a module that have a docstring and no leading underscore."""
    for node in tree.body:
        known = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if known and ast.get_docstring(node):
            yield node


def module_section(path: Path, level: int) -> str:
    """One module: its docstring, then everything public in it."""
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = [f"{'#' * level} {name}\n", markdown(ast.get_docstring(tree) or ""), ""]
    parts += [_class(n, name) if isinstance(n, ast.ClassDef) else _function(n, name) for n in public(tree)]
    return "\n".join(parts)


def pages(notebooks: list[Notebook]) -> dict[str, str]:
    """Page name → Markdown: the modules of the rungs, the parts they share, the instruments."""
    modules = sorted(PACKAGE.glob("*.py"))
    rungs = [PACKAGE / f"{n.stem[3:]}.py" for n in notebooks if (PACKAGE / f"{n.stem[3:]}.py").exists()]
    whole = [PACKAGE / "kimi_linear.py", *sorted(PACKAGE.glob("k3*.py"))]
    whole = [path for path in whole if path not in rungs]
    rest = [p for p in modules if p not in rungs + whole and p.name != "__init__.py"]
    lab = [p for p in sorted((PACKAGE / "lab").glob("*.py")) if p.name != "__init__.py"]
    made = {f"api/{path.stem}": module_section(path, 1) for path in rungs}
    for page, title, paths in (
        ("api/models", "Whole models: Kimi Linear and Kimi K3", whole),
        ("api/parts", "Shared parts", rest),
        ("api/lab", "The lab: instruments of the notebooks", lab),
    ):
        made[page] = f"# {title}\n\n" + "\n\n".join(module_section(path, 2) for path in paths)
    listed = "\n".join(page.removeprefix("api/") for page in made)
    made["api/index"] = (
        "# API reference\n\nFrom the docstrings of the package. Shape letters: B batch, T time, H heads, "
        "HV value heads, K key dim, V value dim, C chunk length, N stored pairs or packed sequences, "
        "D model, F hidden, E experts, L layers, M depth sources.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n"
    )
    return made
