"""Run, refresh and check the notebooks of the series.

    python tools/notebooks.py run      [NOTEBOOK ...]   execute into build/notebooks/, print the scoreboard
    python tools/notebooks.py refresh  [NOTEBOOK ...]   execute and replace the saved outputs, all or none
    python tools/notebooks.py check    [NOTEBOOK ...]   are the saved outputs in order?

Every notebook runs top to bottom in a fresh kernel of the Python that runs this script, in its own folder,
with progress bars off (``EVOLVE_PROGRESS=0``). A file is written only when its notebook is complete, in one
rename. Exit status: 0, or 1 after a failing cell or a finding, 130 after Ctrl-C.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "notebooks"


def run(paths: list[Path], timeout: int | None, build: Path) -> int:
    """Execute into copies in ``build``; the committed notebooks are only read."""
    import notebook_runner as runner

    times = {}
    for path in paths:
        nb, times[path.stem] = asyncio.run(runner.execute(path, timeout))
        runner.replace_all({build / path.name: nb})
    times["total"] = sum(times.values())
    width = max(map(len, times))
    print("\nTime")
    for name, seconds in times.items():
        print(f"  {name:<{width}}  {runner.clock(seconds):>6}")

    from evolve.lab import scoreboard

    print(f"\nScoreboard\n{scoreboard.table()}\n")
    shown = build.relative_to(ROOT) if build.is_relative_to(ROOT) else build
    print(f"{count(paths)} ran. Executed copies: {shown}/")
    return 0


def refresh(paths: list[Path], timeout: int | None) -> int:
    """Execute all, then replace all: unless every one succeeds, none changes."""
    import notebook_runner as runner
    from notebook_rules import normalise

    before = {path: path.read_bytes() for path in paths}
    results = {path: normalise(asyncio.run(runner.execute(path, timeout))[0]) for path in paths}
    edited = [path.name for path in paths if path.read_bytes() != before[path]]
    if edited:
        print(f"Edited while running: {', '.join(edited)}. Nothing was replaced.", file=sys.stderr)
        return 1
    runner.replace_all(results)
    print(f"{count(paths)} refreshed.")
    return check(paths)


def check(paths: list[Path]) -> int:
    """Print every finding in every notebook."""
    from notebook_rules import findings

    found = [f"{path.name}: {finding}" for path in paths for finding in findings(path)]
    for line in found:
        print(line, file=sys.stderr)
    print(f"{count(paths)} checked: {len(found) or 'no'} finding{'s' * (len(found) != 1)}.")
    return 1 if found else 0


def count(paths: list[Path]) -> str:
    return f"{len(paths)} notebook{'s' * (len(paths) != 1)}"


def wanted(named: list[Path]) -> list[Path]:
    """The notebooks to work on; exits with a message where there are none."""
    paths = [path.resolve() for path in named] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    absent = [str(path) for path in paths if not path.is_file()]
    if absent or not paths:
        sys.exit(f"No such notebook: {', '.join(absent) or 'notebooks/ is empty'}")
    return paths


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("command", choices=("run", "refresh", "check"))
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: every one in notebooks/")
    parser.add_argument("--timeout", type=int, help="seconds that a cell may take (default: no limit)")
    parser.add_argument("--build", type=Path, default=BUILD, help="where `run` writes its copies")
    options = parser.parse_args()
    paths = wanted(options.notebooks)
    os.environ["EVOLVE_PROGRESS"] = "0"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin slow a busy machine fourfold
    os.environ.pop("MPLBACKEND", None)  # figures inline, whatever the shell says
    try:
        if options.command == "run":
            return run(paths, options.timeout, options.build.resolve())
        return refresh(paths, options.timeout) if options.command == "refresh" else check(paths)
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("Stopped. Nothing half-written was left; saved notebooks are as they were.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
