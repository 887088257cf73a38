"""Benchmark and parity pages from the committed JSON and fixtures: nothing is typed in by hand."""

import json
import struct
from pathlib import Path

from site_pages.series import ROOT

RESULTS = ROOT / "benchmarks" / "results"
GOLDENS = ROOT / "tests" / "goldens"
WORDS = {"ms": "ms", "peer_ms": "peer, ms", "us": "µs", "MiB": "MiB", "difference": "largest difference"}


def shown(value: object) -> str:
    """A value of a result as a cell of a table."""
    if isinstance(value, float):
        if value and abs(value) < 1e-3:
            return f"{value:.1e}"
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def rows_table(rows: list[dict]) -> str:
    """Rows of one measurement as a Markdown table; a key that a row lacks is an empty cell."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(WORDS.get(k, k.replace("_", " ")) for k in keys) + " |"]
    numeric = [all(isinstance(r.get(k, 0), int | float) for r in rows) for k in keys]
    lines.append("|" + "|".join("--:" if n else "---" for n in numeric) + "|")
    lines += ["| " + " | ".join(shown(r[k]) if k in r else "" for k in keys) + " |" for r in rows]
    return "\n".join(lines)


def _results() -> dict[str, dict]:
    return {p.stem: json.loads(p.read_text()) for p in sorted(RESULTS.glob("*.json"))}


def _listed(content: dict) -> str:
    return ", ".join(f"{k} {shown(v)}" for k, v in content.items())


def benchmarks() -> str:
    """One section for each file of results: how it was made, then its tables."""
    parts = [
        "# Benchmarks\n\nEach was measured in one process with its peer, after the outputs of both were "
        "compared; a pair that differs is not timed. What counts is the ratio (above 1: ours is faster). "
        "Absolute times depend on the machine and on what else it did.\n"
    ]
    for name, result in _results().items():
        parts.append(f"## {name.replace('_', ' ').capitalize()}\n")
        made = result.get("date", "compiled and counted, not measured")
        facts = [f"`{result['command']}`", made, _listed(result["versions"])]
        facts += [f"{k}: {_listed(v)}" for k, v in result.items() if isinstance(v, dict) and k != "versions"]
        facts += [f"{k} {v}" for k, v in result.items() if isinstance(v, int) or k == "target"]
        parts.append("; ".join(facts) + ".\n")
        for key, rows in result.items():
            if isinstance(rows, list):
                title = f"### {key.replace('_', ' ').capitalize()}\n\n" if key != "rows" else ""
                parts.append(f"{title}{rows_table(rows)}\n")
    return "\n".join(parts)


def _compared() -> list[dict]:
    """Every stored comparison of two outputs: what, with which peer, the largest difference."""
    found = []
    for name, result in _results().items():
        for rows in (v for v in result.values() if isinstance(v, list)):
            for row in (r for r in rows if "difference" in r):
                version = result["versions"].get("transformers")
                peer = row.get("peer") or (f"transformers {version}" if version else "its plain form")
                sizes = {k: v for k, v in row.items() if k in ("T", "K", "gate", "prompt", "expert_size")}
                what = row.get("ours") or row.get("name") or f"{name} {row.get('what', '')}".strip()
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


def parity() -> str:
    """Differences that were measured, then the stored outputs of others that every test run compares with."""
    fixtures = []
    for path in sorted(GOLDENS.rglob("*.safetensors")):
        tensors = header(path)
        types = ", ".join(sorted({t["dtype"] for t in tensors.values()}))
        fixtures.append({"file": str(path.relative_to(GOLDENS)), "tensors": len(tensors), "types": types})
    return (
        "# Parity\n\nTwo kinds of evidence that the code computes what it says.\n\n"
        "## Differences measured beside a peer\n\nThe largest difference of two outputs on the same input, "
        "in float32, as stored with the [benchmarks](benchmarks.md).\n\n"
        f"{rows_table(_compared())}\n\n"
        "## Stored outputs of independent implementations\n\nComputed in float64 by others' code "
        "and committed under `tests/goldens/`; `make test` compares the package with each of them, and the "
        "memory rules with flash-linear-attention and transformers directly.\n\n"
        f"{rows_table(fixtures)}\n"
    )
