"""The runner on small notebooks: whole files or none, failures named, and a check that misses nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import notebook_rules as rules

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "notebooks.py"


def write(path: Path, *sources: str) -> Path:
    """A notebook: Markdown where the source starts with #, a code cell otherwise."""
    cells = [(new_markdown_cell if s.startswith("# ") else new_code_cell)(s) for s in ("# Title", *sources)]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def tool(command: str, *paths: Path, build: Path | None = None) -> subprocess.CompletedProcess:
    arguments = [command, *map(str, paths), *(["--build", str(build)] if build else [])]
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True)


# --- run ----------------------------------------------------------------------------------------------


def test_run_writes_a_copy_and_leaves_the_notebook_alone(tmp_path):
    code = "import os, sys\nprint(sys.executable, os.getcwd(), os.environ['EVOLVE_PROGRESS'])"
    path = write(tmp_path / "a.ipynb", "# Where\n\n## It runs", code, "1 + 1")
    before = path.read_bytes()
    result = tool("run", path, build=tmp_path / "build")
    assert result.returncode == 0, result.stderr
    assert "a  cell  1/2  It runs" in result.stdout
    assert "Scoreboard" in result.stdout
    assert "full attention" in result.stdout
    assert path.read_bytes() == before
    copy = nbformat.read(tmp_path / "build" / "a.ipynb", as_version=4)
    assert copy.cells[2].outputs[0].text == f"{sys.executable} {tmp_path} 0\n"
    assert copy.cells[3].outputs[0].data["text/plain"] == "2"
    assert list((tmp_path / "build").iterdir()) == [tmp_path / "build" / "a.ipynb"]


def test_failing_cell_is_named_and_nothing_is_written(tmp_path):
    path = write(tmp_path / "b.ipynb", "x = 1", "y = x / 0  # here\nprint(y)", "print('never')")
    result = tool("run", path, build=tmp_path / "build")
    assert result.returncode == 1
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert "b.ipynb, code cell 2 of 3: y = x / 0  # here" in result.stderr
    assert "\x1b" not in result.stderr + result.stdout
    assert not (tmp_path / "build").exists()


def test_kernel_that_dies_is_told(tmp_path):
    result = tool("run", write(tmp_path / "c.ipynb", "import os; os._exit(7)"), build=tmp_path / "build")
    assert result.returncode == 1
    assert "The kernel died" in result.stderr
    assert "c.ipynb, code cell 1 of 1" in result.stderr


@pytest.mark.parametrize("content", ["", "{}", '{"cells": 3, "metadata": {}, "nbformat": 4}'])
def test_file_that_is_no_notebook(tmp_path, content):
    path = tmp_path / "d.ipynb"
    path.write_text(content)
    result = tool("run", path, build=tmp_path / "build")
    assert result.returncode == 1
    assert "d.ipynb is not a valid notebook" in result.stderr
    assert "Traceback" not in result.stderr


def test_absent_notebook(tmp_path):
    result = tool("run", tmp_path / "nowhere.ipynb")
    assert result.returncode == 1
    assert "No such notebook" in result.stderr


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("command", ["run", "refresh"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_no_file_and_no_kernel(tmp_path, command, number):
    pid_file = tmp_path / "pid"
    begin = f"import os, pathlib\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))"
    path = write(tmp_path / "e.ipynb", begin, "import time\ntime.sleep(60)")
    before = path.read_bytes()
    arguments = [sys.executable, str(TOOL), command, str(path), "--build", str(tmp_path / "build")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "cell  2/2" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.3)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "Stopped. Nothing half-written was left; saved notebooks are as they were.\n"
    assert not alive(int(pid_file.read_text()))
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e.ipynb", "pid"]


# --- refresh ------------------------------------------------------------------------------------------


def test_refresh_is_all_or_nothing(tmp_path):
    paths = [write(tmp_path / "a.ipynb", "print(1)"), write(tmp_path / "b.ipynb", "raise OSError('no')")]
    before = [path.read_bytes() for path in paths]
    result = tool("refresh", *paths)
    assert result.returncode == 1
    assert "OSError: no" in result.stderr
    assert [path.read_bytes() for path in paths] == before
    assert sorted(tmp_path.iterdir()) == paths


def test_refresh_normalises_and_repeats_to_the_byte(tmp_path):
    noisy = "import sys, time\nfor i in range(3):\n    print(i, flush=True)\n    print('x', file=sys.stderr)"
    figure = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
    path = write(tmp_path / "a.ipynb", noisy, figure, "2 + 2")
    saved = nbformat.read(path, as_version=4)
    saved.cells[2].metadata = {"mystnb": {"image": {"alt": "A line that rises from one to two."}}, "x": 1}
    saved.metadata = {"kernelspec": {"name": "mine", "display_name": "Mine"}, "widgets": {}}
    saved.cells[1].execution_count = 17
    nbformat.write(saved, path)
    ids = [cell.id for cell in saved.cells]

    result = tool("refresh", path)
    assert result.returncode == 0, result.stdout + result.stderr
    first = path.read_bytes()
    nb = nbformat.reads(first.decode(), as_version=4)
    assert [cell.id for cell in nb.cells] == ids
    assert [cell.execution_count for cell in nb.cells[1:]] == [1, 2, 3]
    assert [dict(output) for output in nb.cells[1].outputs] == [
        {"output_type": "stream", "name": "stdout", "text": "0\n1\n2\n"}
    ]
    assert "image/png" in nb.cells[2].outputs[0].data
    assert list(nb.cells[2].metadata) == ["mystnb"]
    assert nb.metadata.kernelspec == rules.KERNELSPEC
    assert "version" not in nb.metadata.language_info
    assert first.endswith(b"}\n")

    assert tool("refresh", path).returncode == 0
    assert path.read_bytes() == first


def test_notebook_edited_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "a.ipynb"
    write(
        path, f"import pathlib\nfile = pathlib.Path({str(path)!r})\nfile.write_text(file.read_text() + ' ')"
    )
    result = tool("refresh", path)
    assert result.returncode == 1
    assert "Edited while running: a.ipynb" in result.stderr
    assert path.read_text().endswith(" ")


def test_normalise_hides_folders_of_this_machine():
    cell = new_code_cell("f()", outputs=[new_output("stream", name="stdout", text=f"{ROOT}/notebooks/x\n")])
    nb = rules.normalise(new_notebook(cells=[new_markdown_cell("# T"), cell]))
    assert nb.cells[1].outputs[0].text == "./notebooks/x\n"
    sibling = rules.hide_paths(f"{ROOT}-other")
    assert not sibling.startswith(".-")


# --- check --------------------------------------------------------------------------------------------

ALT = {"mystnb": {"image": {"alt": "A straight line that rises from left to right."}}}
PNG = new_output("display_data", data={"image/png": "aGVsbG8="})


def good() -> nbformat.NotebookNode:
    """A notebook with nothing to find."""
    said = new_output("stream", name="stdout", text="0.787\n")
    cells = [
        new_markdown_cell("# A title"),
        new_code_cell("print(0.787)", outputs=[said]),
        new_markdown_cell("Words."),
        new_code_cell("plot()", outputs=[PNG], metadata=ALT),
    ]
    return rules.normalise(new_notebook(cells=cells))


def stream(text: str, name: str = "stdout"):
    return lambda nb: nb.cells[1].outputs.append(new_output("stream", name=name, text=text))


def data(mime: str, value: str):
    return lambda nb: nb.cells[1].outputs.append(new_output("display_data", data={mime: value}))


def source(cell: int, text: str):
    return lambda nb: nb.cells[cell].update(source=text)


def alt(text: object):
    return lambda nb: nb.cells[3].update(metadata={"mystnb": {"image": {"alt": text}}})


def two_long_cells(nb: nbformat.NotebookNode) -> None:
    nb.cells[1].source = nb.cells[3].source = "x = 1\n" * 11
    del nb.cells[2]


DEFECTS = {
    "execution count missing": (lambda nb: nb.cells[1].update(execution_count=None), "executed as [None]"),
    "executed out of order": (
        lambda nb: nb.cells[1].update(execution_count=3),
        "code cell 1 was executed as [3]",
    ),
    "stderr": (stream("warning: x\n", "stderr"), "saved stderr: warning: x"),
    "error": (
        lambda nb: nb.cells[1].outputs.append(new_output("error", ename="E", evalue="v", traceback=[])),
        "saved an error: E: v",
    ),
    "home": (stream("/home/someone/x"), "names this machine: '/home/someone'"),
    "mac home": (data("text/plain", "'/Users/someone/x'"), "names this machine: '/Users/someone'"),
    "windows home": (data("text/plain", r"'C:\\Users\\x'"), "names this machine"),
    "temporary folder": (data("text/html", "<b>/tmp/x</b>"), "names this machine: '/tmp/'"),
    "installed package": (stream("lib/site-packages/torch"), "names this machine: '/site-packages'"),
    "address": (stream("<object at 0x7f3a2b1c4d50>"), "names this machine: '0x7f3a2b1c4d50'"),
    "svg with a path": (data("image/svg+xml", "<svg>/tmp/x</svg>"), "names this machine"),
    "widget": (data(rules.WIDGET, "x"), "saved a widget"),
    "no alt text": (lambda nb: nb.cells[3].update(metadata={}), "figure without alt text"),
    "empty alt text": (alt(" "), "figure without alt text"),
    "alt text is a number": (alt(3), "figure without alt text"),
    "alt text is a path": (alt("a figure in _images/x.png is here"), "does not say what is seen"),
    "alt text is a hash": (alt("picture of a 0123456789abcdef0"), "does not say what is seen"),
    "alt text too short": (alt("a plot"), "does not say what is seen"),
    "two figures": (lambda nb: nb.cells[3].outputs.append(PNG), "2 figures share one alt text"),
    "cell too long": (source(1, "x = 1\n" * 41), "41 lines of code"),
    "two long cells": (two_long_cells, "both over 10 lines"),
    "empty cell": (source(2, " "), "cell 3 is empty"),
    "no title": (source(0, "words"), "must be Markdown and start with a title"),
    "kernel": (lambda nb: nb.metadata.kernelspec.update(name="mine"), "kernelspec must be"),
    "metadata of the notebook": (
        lambda nb: nb.metadata.update(widgets={}),
        "left by a run or an editor: widgets",
    ),
    "metadata of a cell": (lambda nb: nb.cells[1].metadata.update(scrolled=True), "editor: scrolled"),
    "old format": (lambda nb: nb.update(nbformat_minor=4), "notebook format 4.4"),
    "invalid": (lambda nb: nb.cells[1].pop("outputs"), "not a valid notebook"),
}


def test_check_finds_nothing_in_a_good_notebook(tmp_path):
    path = tmp_path / "good.ipynb"
    nbformat.write(good(), path)
    assert rules.findings(path) == []


@pytest.mark.parametrize("defect", DEFECTS)
def test_check_finds_each_planted_defect(tmp_path, defect):
    plant, expected = DEFECTS[defect]
    nb = good()
    plant(nb)
    if nb.nbformat_minor == 4:
        for cell in nb.cells:
            del cell["id"]
    path = tmp_path / "bad.ipynb"
    path.write_text(json.dumps(nb))
    assert [f for f in rules.findings(path) if expected in f], rules.findings(path)


def drawing(code: str, *outputs) -> nbformat.NotebookNode:
    shown = outputs or (new_output("display_data", {"image/png": "AAAA"}),)
    return new_code_cell(code, outputs=[*shown], metadata={"mystnb": {"image": {"alt": "a line that rises"}}})


DRAWS = {
    "fig, ax = plotting.figure('Title')\nax.plot(x)\nfig": True,
    "# why\nplotting.animate(draw, 3)": True,
    "def draw(fig, i):\n    pass\n\n\nplotting.animate(draw, 3)": True,
    "x = model(y)\nfig, ax = plotting.figure('Title')": False,
    "import torch\n\nplotting.ladder(lit=1)": False,
    "%matplotlib inline\nplotting.figure('Title')": False,
    "def draw(fig, i):\n    pass": False,
}


@pytest.mark.parametrize("code", DRAWS)
def test_a_cell_that_only_draws_is_folded(code):
    nb = good()
    nb.cells.append(drawing(code))
    assert rules.only_draws(nb.cells[-1]) == DRAWS[code]
    missing = [f for f in rules.figure_findings(nb.cells[-1]) if "needs the tag hide-input" in f]
    assert len(missing) == DRAWS[code]
    for _ in range(2):  # the second time changes nothing
        rules.normalise(nb)
        assert nb.cells[-1].metadata.get("tags", []) == ["hide-input"] * DRAWS[code]
    assert rules.figure_findings(nb.cells[-1]) == []


def test_a_cell_that_prints_is_not_folded():
    printed = new_output("stream", text="0.787\n")
    assert not rules.only_draws(drawing("plotting.figure('Title')", printed))
    assert not rules.only_draws(new_code_cell("plotting.figure('Title')"))


def test_base64_is_not_taken_for_a_path(tmp_path):
    nb = good()
    data("text/html", '<img alt="x" src="data:image/png;base64,AAAA/tmp/AAAA/home/AAAA=">')(nb)
    path = tmp_path / "embedded.ipynb"
    nbformat.write(nb, path)
    assert rules.findings(path) == []


def test_check_prints_everything_at_once(tmp_path):
    first, second = good(), good()
    stream("/home/someone")(first)
    alt("no")(second)
    paths = [tmp_path / "a.ipynb", tmp_path / "b.ipynb"]
    nbformat.write(first, paths[0])
    nbformat.write(second, paths[1])
    result = tool("check", *paths)
    assert result.returncode == 1
    assert "a.ipynb: code cell 1 (print(0.787)): output names this machine" in result.stderr
    assert "b.ipynb: code cell 2 (plot()): alt text does not say what is seen" in result.stderr
    assert "2 notebooks checked: 2 findings." in result.stdout


# --- writing ------------------------------------------------------------------------------------------


def test_a_write_that_fails_changes_nothing(tmp_path):
    import notebook_runner as runner

    target = tmp_path / "a.ipynb"
    target.write_text("as it was")
    results = {target: new_notebook(), tmp_path / "b.ipynb": object()}  # the second cannot be written
    with pytest.raises(AttributeError):
        runner.replace_all(results)
    assert target.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [target]


def test_permissions_are_kept(tmp_path):
    import notebook_runner as runner

    target = tmp_path / "a.ipynb"
    target.write_text("")
    target.chmod(0o640)
    runner.replace_all({target: new_notebook()})
    assert target.stat().st_mode & 0o777 == 0o640


def test_progress_on_a_terminal_is_one_live_line(tmp_path, monkeypatch, capsys):
    import notebook_runner as runner

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    asyncio.run(runner.execute(write(tmp_path / "a.ipynb", "import time\ntime.sleep(0.5)"), None))
    shown = capsys.readouterr().out
    assert "\r\x1b[2K" in shown
    assert "a  cell  1/1  import time" in shown
    assert shown.count("\n") == 1
    assert shown.endswith("a  done\n")
