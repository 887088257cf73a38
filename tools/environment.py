"""Make ``.venv`` from requirements.lock, once, and say what is happening meanwhile.

Standard library only: this runs before anything is installed. ``python tools/environment.py notebooks``
makes the environment that ``make run`` needs, ``dev`` the one of ``make test``; when it is there already
nothing happens. A stamp inside ``.venv`` says which: it reads "installing" until the last package is in,
so an interrupted set-up is recognised and done again from the start.

``python tools/environment.py --current dev`` makes nothing: it checks that the interpreter running it
(a conda environment, say) has what the extra needs.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "evolve-setup.json"
LOCK = ROOT / "requirements.lock"
LOG = ROOT / "build" / "setup.log"


def pin(name: str) -> str:
    """``name==version`` as the lock has it."""
    return re.search(rf"^{name}==[^\s;]+", LOCK.read_text(), re.MULTILINE).group()


def declared() -> dict:
    """``pyproject.toml`` as a dictionary."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def fingerprint() -> str:
    """Changes when the lock, the declared dependencies or the place of the repository do."""
    project, oracles = declared()["project"], declared()["tool"]["evolve"]["oracles"]
    declared_there = [project["dependencies"], project["optional-dependencies"], oracles, str(ROOT)]
    return hashlib.sha256(LOCK.read_bytes() + json.dumps(declared_there).encode()).hexdigest()


def read_stamp() -> dict:
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def write_stamp(**state: object) -> None:
    STAMP.write_text(json.dumps(state, indent=1) + "\n")


def version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def say(done: str = "", live: str = "") -> None:
    """A finished line, or one that the next call writes over; the latter on a terminal only."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print("\r\x1b[2K" + (done + "\n" if done else live[:width]), end="", flush=True)
    elif done:
        print(done, flush=True)


def summary(line: str, current: str) -> str:
    """What a reader wants of one line of pip's output; ``current`` where that is nothing."""
    found = re.match(r"\s*(Downloading|Using cached|Collecting|Processing) (\S+)(.*)", line)
    if found:
        what = found[2].rsplit("/", 1)[-1].split(";")[0]
        size = re.search(r"\([\d.]+ [kMG]B\)", found[3])
        return f"{found[1].lower()} {what} {size[0] if size else ''}"
    return "unpacking" if line.startswith("Installing collected") else current


def step(title: str, command: list[str]) -> None:
    """Run one command; its output goes to the log, its progress to the screen. Exits when it fails."""
    start, now = time.monotonic(), "starting"
    say(live=f"  {title}", done="" if sys.stdout.isatty() else f"  {title} ...")
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )

    def follow() -> None:
        nonlocal now
        with LOG.open("a") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                now = summary(line, now)

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    try:
        last = start
        while process.poll() is None:
            time.sleep(0.2)
            seconds = time.monotonic() - start
            say(live=f"  {title} · {seconds:.0f} s · {now}")
            if not sys.stdout.isatty() and time.monotonic() - last > 15:
                last = time.monotonic()
                print(f"    {seconds:.0f} s, {now}", flush=True)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    reader.join(5)
    if process.returncode:
        tail = "".join(LOG.read_text(errors="replace").splitlines(keepends=True)[-15:])
        sys.exit(f"\n{tail}\nSet-up failed at: {title}\nThe whole log: {LOG.relative_to(ROOT)}")
    say(done=f"  {title} · {time.monotonic() - start:.0f} s")


def install(extras: list[str]) -> None:
    """Everything in a few steps; PyTorch first and by its exact pin, since it is most of the bytes."""
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--constraint", str(LOCK)]
    index = os.environ.get("TORCH_INDEX")
    torch = [*pip, *(["--extra-index-url", index] if index else []), pin("torch")]
    step(f"PyTorch {pin('torch').split('==')[1]}, the largest part", torch)
    step("build tools", [*pip, pin("hatchling"), pin("editables")])
    project = [*pip, "--no-build-isolation", "--editable", f".[{','.join(extras)}]"]
    step(f"evolve itself and its extras: {', '.join(extras)}", project)
    if "dev" in extras:  # without their dependencies, which would bring other versions of PyTorch
        step(
            "independent implementations to test against",
            [*pip, "--no-deps", *declared()["tool"]["evolve"]["oracles"]],
        )


def announce(extra: str, *, update: bool) -> None:
    """What is about to happen and how much of it there is."""
    if update:
        print(f"Bringing .venv up to what {extra!r} needs.", flush=True)
        return
    print(f"Making .venv with Python {version()}, once: a few minutes on a fast line.")
    if sys.platform == "linux" and not os.environ.get("TORCH_INDEX"):
        print("PyTorch with CUDA is up to 2.9 GB to download; the README names a smaller build without.")
    sys.stdout.flush()


def start_afresh() -> None:
    """An empty ``.venv`` with the stamp in it; one that somebody else made is not ours to remove."""
    if (VENV / "pyvenv.cfg").exists() and not STAMP.exists():
        sys.exit(
            ".venv is there already and was not made by make. Remove it and call again, or keep it:\n"
            "  .venv/bin/python -m pip install -e '.[dev]', then add ENV=current PYTHON=.venv/bin/python"
        )
    VENV.mkdir(exist_ok=True)
    write_stamp(state="installing")
    for child in VENV.iterdir():
        if child != STAMP:
            shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()


def make(extra: str) -> None:
    """Bring ``.venv`` to where ``extra`` is installed as locked."""
    stamp, key = read_stamp(), fingerprint()
    python_asked_for = os.environ.get("PYTHON") and stamp.get("python") not in (None, version())
    usable = stamp.get("state") == "complete" and PYTHON.exists() and not python_asked_for
    installed = stamp.get("extras", []) if usable else []
    if usable and stamp.get("key") == key and (extra in installed or "dev" in installed):
        return

    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    announce(extra, update=usable)
    if not usable:
        start_afresh()
        step("virtual environment", [sys.executable, "-m", "venv", str(VENV)])
    extras = ["dev"] if "dev" in (extra, *installed) else sorted({extra, *installed})
    python = stamp["python"] if usable else version()
    write_stamp(state="installing", python=python)
    install(extras)
    write_stamp(state="complete", python=python, extras=extras, key=key)


def missing(extra: str) -> list[str]:
    """Distributions that ``extra`` needs and the running interpreter lacks."""
    project = declared()["project"]
    wanted = list(project["dependencies"]) + list(project["optional-dependencies"][extra])
    lacking = []
    for requirement in wanted:
        name = re.match(r"[\w.-]+", requirement).group()
        if name == project["name"]:
            for other in re.search(r"\[(.*)\]", requirement)[1].split(","):
                lacking += [m for m in missing(other) if m not in lacking]
        elif "sys_platform == 'linux'" not in requirement or sys.platform == "linux":
            try:
                importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                lacking.append(name)
    return list(dict.fromkeys(lacking))


def check_current(extra: str) -> None:
    """Exit with what is missing, unless the interpreter that runs this can do what ``extra`` is for."""
    lacking = missing(extra)
    found = importlib.util.find_spec("evolve")
    if not lacking and found and ROOT in Path(found.origin).parents:
        return
    reason = f"lacks: {', '.join(lacking)}"
    if not lacking:
        reason = f"has evolve from {found.origin}, not from here" if found else "lacks: evolve"
    sys.exit(
        f"This environment ({sys.prefix}) {reason}.\n"
        "Either: conda env create -f environment.yml && conda activate evolve\n"
        f"or:     python -m pip install -e '.[{extra}]'"
    )


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    *current, extra = sys.argv[1:]
    if current:
        return check_current(extra)
    try:
        make(extra)
    except KeyboardInterrupt:
        print("\nSet-up interrupted. The same command starts it again from the beginning.")
        sys.exit(130)


if __name__ == "__main__":
    main()
