"""Benchmark and parity pages from the committed JSON and fixtures: no number is typed in by hand."""

import json
import struct
from pathlib import Path

from site_pages.series import ROOT
from site_pages.tables import SECTIONS, TABLES, About, explained, shown

RESULTS = ROOT / "benchmarks" / "results"
GOLDENS = ROOT / "tests" / "goldens"
PARITY = "parity"  # the results that have a page of their own


def results() -> dict[str, dict]:
    """The stored results by name, but for those of parity."""
    found = {p.stem: json.loads(p.read_text()) for p in sorted(RESULTS.glob("*.json"))}
    return {name: result for name, result in found.items() if name != PARITY}


def tables_of(result: dict) -> dict[str, list[dict]]:
    """The tables of one file of results."""
    return {key: rows for key, rows in result.items() if isinstance(rows, list)}


def _listed(content: dict) -> str:
    return ", ".join(f"{k} {shown(v)}" for k, v in content.items())


def made(result: dict) -> str:
    """How a result was made: command, day, versions, sizes."""
    facts = [f"`{result['command']}`", result.get("date", "compiled and counted, not measured")]
    facts.append(_listed(result["versions"]))
    facts += [f"{k}: {_listed(v)}" for k, v in result.items() if isinstance(v, dict) and k != "versions"]
    facts += [f"{k} {v}" for k, v in result.items() if isinstance(v, int) or k == "target"]
    return "; ".join(facts) + ".\n"


def benchmarks() -> str:
    """One section for each file of results: its tables, each explained, and how they were made."""
    parts = [
        "# Benchmarks\n\nEach was measured in one process with its peer, after the outputs of both were "
        "compared; a pair that differs is not timed. What counts is the **ratio** (above 1: ours is faster). "
        "Absolute times depend on the machine and on what else it did.\n"
    ]
    for name, result in results().items():
        title = SECTIONS.get(name, name.replace("_", " ").capitalize())
        parts.append(f"## {title}\n")
        for key, rows in tables_of(result).items():
            about = TABLES.get((name, key), About(f"{title}: {key.replace('_', ' ')}", ""))
            parts.append(explained(*about, rows))
        parts.append(f"Made by {made(result)}")
    return "\n".join(parts)


def _compared() -> list[dict]:
    """Every stored comparison of two outputs: what, the largest difference, with which peer."""
    found = []
    for name, result in results().items():
        for row in (r for rows in tables_of(result).values() for r in rows if "difference" in r):
            version = result["versions"].get("transformers")
            peer = row.get("peer") or (f"transformers {version}" if version else "its plain form")
            sizes = {k: v for k, v in row.items() if k in ("T", "K", "gate", "prompt", "expert_size")}
            what = row.get("ours") or f"{name.replace('_', ' ')} {row.get('name') or row.get('what', '')}"
            what = what.removeprefix("evolve ").strip()
            measured = {"at": _listed(sizes), "difference": row["difference"]}
            found.append({"what": what, "against": peer} | measured)
    return found


def header(path: Path) -> dict[str, dict]:
    """Names, types and shapes in a safetensors file, without its numbers."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        content = json.loads(file.read(length))
    content.pop("__metadata__", None)
    return content


def _fixtures(parity: dict) -> list[dict]:
    """The stored differences from the fixtures, each with the number of tensors in its file."""
    return [row | {"tensors": len(header(GOLDENS / row["file"]))} for row in parity["goldens"]]


def parity() -> str:
    """Differences that were measured beside a peer, and those from the stored outputs of others."""
    result = json.loads((RESULTS / f"{PARITY}.json").read_text())
    beside = explained(
        "Largest difference of two outputs on the same input",
        "In float32, as stored with the [benchmarks](benchmarks.md).",
        _compared(),
    )
    stored = explained(
        "Difference from the stored outputs of others",
        "Others' code computed these in float64; they are committed, and `make test` holds the package to "
        "each, gradients included, and the memory rules to flash-linear-attention and transformers as well. "
        "In float64 nothing but rounding is left.",
        _fixtures(result),
    )
    return (
        "# Parity\n\nTwo kinds of evidence that the code computes what it says.\n\n"
        f"## Measured beside a peer\n\n{beside}\n"
        f"## Stored outputs of independent implementations\n\n{stored}\nMade by {made(result)}"
    )
