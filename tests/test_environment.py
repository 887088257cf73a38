"""pyproject.toml, requirements.lock, environment.yml and the hooks agree.

environment.yml is parsed and compared, never solved: conda is not at hand where these tests run.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK_LINES = [
    line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and line[0] != "#"
]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
CONDA_NAMES = {"pytorch": "torch"}  # conda-forge's names, where they are not PyPI's


def declared(*extras: str) -> dict[str, Requirement]:
    """The project's dependencies with those of the extras, by name; extras of extras are followed."""
    found = {}
    for text in PROJECT["dependencies"] + [t for e in extras for t in PROJECT["optional-dependencies"][e]]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            found |= declared(*requirement.extras)
        else:
            found[canonicalize_name(requirement.name)] = requirement
    return found


def locked() -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in map(Requirement, LOCK_LINES)}


def version(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    return specifier.version


def test_lock_holds_exact_versions_and_nothing_else():
    for line in LOCK_LINES:
        name = Requirement(line).name
        assert re.fullmatch(rf"{re.escape(name)}==[\w.!+]+( ; .+)?", line), line
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"--hash|://|--index|--find-links|^nvidia-", text, re.MULTILINE)
    assert len(locked()) == len(LOCK_LINES), "a package is locked twice"


def test_pins_that_are_moved_by_hand():
    lock = locked()
    assert {name: version(lock[name]) for name in ("torch", "transformers", "triton")} == {
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "triton": "3.7.1",
    }
    assert lock["triton"].marker.evaluate({"sys_platform": "linux"})
    assert not lock["triton"].marker.evaluate({"sys_platform": "darwin"})


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_lock_satisfies_every_declared_dependency(extra):
    lock = locked()
    for name, requirement in declared(extra).items():
        assert name in lock, f"{name} of extra {extra} is not in requirements.lock"
        assert requirement.specifier.contains(version(lock[name])), f"{requirement} excludes {lock[name]}"


def test_lock_covers_what_is_installed():
    """The closure of ``.[dev]`` as pip sees it here, so a dependency of a dependency is not forgotten."""
    from importlib.metadata import PackageNotFoundError, requires

    lock, seen, todo = locked(), set(), list(declared("dev").values())
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, *sorted(requirement.extras)) in seen or re.match(r"nvidia-|cuda-", name):
            continue
        seen.add((name, *sorted(requirement.extras)))
        try:
            children = requires(requirement.name) or []
        except PackageNotFoundError:  # an optional part of another platform
            continue
        assert name in lock, f"{name} is installed as a dependency and not locked"
        wanted = [{"extra": extra} for extra in ("", *requirement.extras)]
        todo += [r for r in map(Requirement, children) if not r.marker or any(map(r.marker.evaluate, wanted))]
    assert len(seen) > 100


def test_conda_environment_agrees_with_the_project():
    assert CONDA["name"] == "evolve"
    assert CONDA["channels"] == ["conda-forge", "nodefaults"]
    *packages, block = CONDA["dependencies"]
    conda = {r.name: r for r in map(Requirement, (p for p in packages if "python=" not in p))}
    conda = {CONDA_NAMES.get(name, name): r for name, r in conda.items() if name not in ("pip", "make")}
    assert "python=3.11" in packages
    assert "pip" in packages
    wanted = declared("notebooks")
    assert conda.keys() == wanted.keys()
    assert {name: r.specifier for name, r in conda.items()} == {n: r.specifier for n, r in wanted.items()}

    triton, project = block["pip"]
    assert Requirement(triton) == Requirement(*PROJECT["optional-dependencies"]["kernels"])
    assert project == "-e .[dev]"


def test_python_versions_agree():
    assert PROJECT["requires-python"] == ">=3.11"
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.13"]


def test_hooks_use_the_locked_versions():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    lock = locked()
    pins = {Requirement(text) for hook in repository["hooks"] for text in hook["additional_dependencies"]}
    in_lock = {requirement.name: version(requirement) for requirement in pins if requirement.name in lock}
    assert in_lock == {name: version(lock[name]) for name in ("ruff", "nbformat")}


# --- the set-up that the Makefile calls ---------------------------------------------------------------


def setup(folder: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [shutil.which("sh"), str(folder / "tools" / "setup.sh"), "notebooks"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The files that the set-up reads, in a folder of their own with a space in its name."""
    folder = tmp_path / "a checkout"
    shutil.copytree(ROOT / "tools", folder / "tools")
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, folder)
    return folder


def test_no_python_is_said_clearly(checkout, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("cat", "dirname"):
        (tools / name).symlink_to(shutil.which(name))
    result = setup(checkout, PATH=str(tools))
    assert result.returncode == 1
    assert "No Python 3.11 or newer was found" in result.stderr
    assert not (checkout / ".venv").exists()

    result = setup(checkout, PATH=str(tools), PYTHON="no-such-python")
    assert result.returncode == 1
    assert "PYTHON=no-such-python is not a working Python 3.11 or newer" in result.stderr


def test_half_made_environment_is_made_anew_and_a_failure_is_told(checkout):
    """An earlier call was interrupted; in this one no package index answers."""
    venv = checkout / ".venv"
    venv.mkdir()
    (venv / "evolve-setup.json").write_text('{"state": "installing"}')
    (venv / "half-written").touch()
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    result = setup(checkout, PATH="/usr/bin:/bin", PYTHON=sys.executable, **offline)
    assert result.returncode == 1
    assert "Set-up failed at: PyTorch 2.13.0" in result.stderr
    assert not (venv / "half-written").exists()
    assert (venv / "bin" / "python").exists()
    assert "complete" not in (venv / "evolve-setup.json").read_text()


def test_environment_made_by_hand_is_left_alone(checkout):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(checkout / ".venv")], check=True)
    before = sorted((checkout / ".venv").rglob("*"))
    result = setup(checkout, PATH="/usr/bin:/bin", PYTHON=sys.executable)
    assert result.returncode == 1
    assert ".venv is there already and was not made by make" in result.stderr
    assert sorted((checkout / ".venv").rglob("*")) == before


def test_current_environment_is_checked_and_not_changed(checkout):
    """``ENV=current`` in a bare environment lists what is missing and how to get it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(checkout / "bare")], check=True)
    command = [str(checkout / "bare/bin/python"), str(checkout / "tools/environment.py"), "--current", "dev"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "lacks: torch, numpy, safetensors" in result.stderr
    assert "conda env create -f environment.yml" in result.stderr

    def here(root: Path) -> subprocess.CompletedProcess:
        command = [sys.executable, str(root / "tools/environment.py"), "--current", "dev"]
        return subprocess.run(command, capture_output=True, text=True)

    assert here(ROOT).returncode == 0
    other = here(checkout)
    assert other.returncode == 1
    assert "has evolve from" in other.stderr
    assert "not from here" in other.stderr
