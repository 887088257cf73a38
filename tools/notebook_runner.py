"""Execute a notebook in a fresh kernel, show where it is, and write files whole or not at all."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from notebook_rules import code_cells, first_line

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class NotebookFailed(SystemExit):
    """A cell raised, ran too long or took its kernel down, or the file is none.

    Nothing can be done but tell the reader and exit with status 1, which is what a ``SystemExit`` with a
    message does.
    """

    def __init__(self, message: str) -> None:
        super().__init__(f"\n{message}")


# --- progress -----------------------------------------------------------------------------------------


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """Notebook, cell, elapsed: one live line on a terminal, a line a cell elsewhere."""

    def __init__(self, path: Path, cells: int) -> None:
        self.name, self.cells, self.start = path.stem, cells, time.monotonic()
        self.live = sys.stdout.isatty()
        self.text = "starting the kernel"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def draw(self) -> None:
        line = f"{self.name}  {self.text}"
        width = shutil.get_terminal_size().columns - 8
        print(f"\r\x1b[2K{clock(self.seconds):>5}  {line[:width]}", end="", flush=True)

    async def tick(self) -> None:
        """Redraw for ever; runs beside the notebook on a terminal."""
        while True:
            self.draw()
            await asyncio.sleep(0.2)

    def cell(self, number: int, label: str) -> None:
        self.text = f"cell {number:>2}/{self.cells}  {label}"
        if not self.live:
            print(f"{clock(self.seconds):>5}  {self.name}  {self.text}", flush=True)

    def end(self, outcome: str) -> None:
        if self.live:
            print("\r\x1b[2K", end="")
        print(f"{clock(self.seconds):>5}  {self.name}  {outcome}", flush=True)


def labels(nb: NotebookNode) -> Iterator[str]:
    """For each code cell the heading that it stands under, or its own first line."""
    heading = ""
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            found = re.findall(r"^#{2,4} (.+)", cell.source, re.MULTILINE)
            heading = found[-1] if found else heading
        elif cell.source.strip():
            yield heading or first_line(cell)


# --- execution ----------------------------------------------------------------------------------------


def read(path: Path) -> NotebookNode:
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat raises many kinds, for JSON, for schema, for encoding
        raise NotebookFailed(f"{path} is not a valid notebook: {error}") from error


class ThisPython(KernelSpecManager):
    """Every kernel is the interpreter that runs this, whatever "python3" means on the machine."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        argv.append("--log-level=ERROR")  # a remark about unencrypted local sockets is no news
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def new_client(nb: NotebookNode, folder: Path, timeout: int | None) -> NotebookClient:
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisPython())
    resources = {"metadata": {"path": str(folder)}}  # the kernel's working directory
    return NotebookClient(nb, km=manager, timeout=timeout, coalesce_streams=True, resources=resources)


def explain(error: Exception, path: Path, number: int, total: int, cell: NotebookNode) -> str:
    """The traceback, then which notebook, which cell, and how that cell begins."""
    if isinstance(error, CellExecutionError):
        saved = next((o for o in cell.outputs if o.output_type == "error"), None)
        what = "\n".join(saved.traceback) if saved else str(error)
        what = what if sys.stderr.isatty() else ANSI.sub("", what)
    elif isinstance(error, CellTimeoutError):
        what = "The cell took longer than it may (--timeout)."
    elif isinstance(error, DeadKernelError):
        what = "The kernel died: out of memory, or a crash in native code."
    else:
        raise error
    where = f"{path.parent.name}/{path.name}, code cell {number} of {total}: {first_line(cell)}"
    return f"{what}\n\nFailed in {where}"


async def run_cells(client: NotebookClient, nb: NotebookNode, path: Path, progress: Progress) -> None:
    total = len(code_cells(nb))
    titles = labels(nb)
    number = 0
    for index, cell in enumerate(nb.cells):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        number += 1
        progress.cell(number, next(titles))
        try:
            await client.async_execute_cell(cell, index)
        except Exception as error:
            if asyncio.current_task().cancelling():  # nbclient takes any cancellation for a dead kernel
                raise asyncio.CancelledError from error
            raise NotebookFailed(explain(error, path, number, total, cell)) from error


def cancel_on_signals() -> None:
    """Ctrl-C and ``kill`` cancel this task, once, so that it ends by way of its clean-up."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        for number in numbers:
            loop.add_signal_handler(number, lambda: None)
        task.cancel()

    with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C arrives as KeyboardInterrupt
        for number in numbers:
            loop.add_signal_handler(number, stop)


@contextlib.asynccontextmanager
async def kernel(client: NotebookClient) -> AsyncIterator[None]:
    """A running kernel that is gone afterwards, however the body ends; at once where it did not end well."""
    finished = False
    try:
        await client.async_start_new_kernel()
        await client.async_start_new_kernel_client()
        yield
        finished = True
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
        if client.km.has_kernel:
            await client.km.shutdown_kernel(now=not finished)


async def execute(path: Path, timeout: int | None) -> tuple[NotebookNode, float]:
    """The notebook with fresh outputs, and the seconds that it took. The file itself is not touched."""
    cancel_on_signals()
    nb = read(path)
    progress = Progress(path, len(code_cells(nb)))
    client = new_client(nb, path.parent, timeout)
    ticker = asyncio.ensure_future(progress.tick()) if progress.live else None
    outcome = "stopped"
    try:
        async with kernel(client):
            await run_cells(client, nb, path, progress)
        outcome = "done"
    except NotebookFailed:
        outcome = "failed"
        raise
    finally:
        if ticker:
            ticker.cancel()
        progress.end(outcome)
    return nb, progress.seconds


# --- writing ------------------------------------------------------------------------------------------


def stage(nb: NotebookNode, target: Path) -> Path:
    """Write ``nb`` whole beside ``target`` under a hidden name; returns that path."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=".tmp", dir=target.parent)
    ready = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            nbformat.write(nb, file)
        ready.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o644)
    except BaseException:
        ready.unlink()
        raise
    return ready


def replace_all(results: dict[Path, NotebookNode]) -> None:
    """Write every notebook, then rename all of them into place; a failure before that changes nothing."""
    staged: dict[Path, Path] = {}
    held = signal.signal(signal.SIGINT, signal.SIG_IGN)  # renames take no time: never stop in between
    try:
        for target, nb in results.items():
            staged[target] = stage(nb, target)
        for target, ready in staged.items():
            os.replace(ready, target)
    finally:
        signal.signal(signal.SIGINT, held)
        for leftover in staged.values():
            leftover.unlink(missing_ok=True)
