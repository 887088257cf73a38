"""Everything that `make test` runs, in order; every step runs even where one before it failed."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKED_PYTHON = (3, 11)
INTERPRETED = "kernels in Triton's interpreter"  # chosen for a whole process, when triton is imported


def steps() -> dict[str, list[str]]:
    """Name → arguments to Python. Saved text must equal fresh text on the locked Python; elsewhere the
    asserts in the cells must hold."""
    nbval = "--nbval" if sys.version_info[:2] == LOCKED_PYTHON else "--nbval-lax"
    return {
        "unit tests": ["-m", "pytest"],
        INTERPRETED: ["-m", "pytest", "tests/kernels"],
        f"notebooks ({nbval})": ["-m", "pytest", nbval, "--nbval-current-env", "notebooks"],
        "saved outputs": ["tools/notebooks.py", "check"],
        "ruff check": ["-m", "ruff", "check", "--output-format=concise", "."],
        "ruff format": ["-m", "ruff", "format", "--check", "."],
        "site": ["tools/docs.py"],
    }


def main() -> int:
    os.environ["EVOLVE_PROGRESS"] = "0"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin slow a busy machine fourfold
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.pop("MPLBACKEND", None)  # figures inline, whatever the shell says
    results = []
    for name, arguments in steps().items():
        print(f"\n=== {name} ===", flush=True)
        start = time.monotonic()
        # pytest's status 5, no test collected, is a failure too
        interpret = {"TRITON_INTERPRET": "1"} if name == INTERPRETED else {}
        status = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=os.environ | interpret).returncode
        results.append((name, status, time.monotonic() - start))
    print("\n=== summary ===")
    for name, status, seconds in results:
        print(f"  {'passed' if status == 0 else 'FAILED'}  {seconds:6.0f} s  {name}")
    failed = sum(status != 0 for _, status, _ in results)
    print(f"total: {len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        sys.exit(130)
