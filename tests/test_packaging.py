"""What is shipped, and how little an import costs."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_import_needs_pytorch_and_nothing_else():
    """No Triton, no plotting, no notebook machinery and no test oracle comes in with the package."""
    heavy = "triton", "matplotlib", "nbclient", "IPython", "transformers", "huggingface_hub", "fla"
    code = f"""
import sys
import evolve, evolve_kernels, evolve.lab, evolve.lab.scoreboard
print([name for name in {heavy} if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_wheel_holds_both_packages_and_the_scoreboard(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"evolve/__init__.py", "evolve_kernels/__init__.py", "evolve/lab/scoreboard.json"} <= names
    assert {name.split("/")[0] for name in names} == {
        "evolve",
        "evolve_kernels",
        "evolve_k3-0.1.0.dist-info",
    }
