"""The chunked memory rules beside transformers' and FLA's pure-PyTorch ones, on a CPU.

``python -m benchmarks.memory_rules`` prints a table and writes ``benchmarks/results/memory_rules.json``.
Forward + backward, float32, B = 1, H = 4, two threads. Each pair runs in turns in one process, and what
counts is the median of the ratios. A pair whose outputs differ is not timed. Memory is a child process's
high-water mark minus that of a child which only makes the inputs. KDA takes one path for every gate, bounded
or not: blocks are doubled, and no decay is ever divided by.
"""

import argparse
import datetime
import importlib
import importlib.metadata
import inspect
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evolve.deltanet import chunk_delta_rule
from evolve.gated_deltanet import chunk_gated_delta_rule
from evolve.kda import KimiDeltaAttention, chunk_kda, kda_gate
from evolve.linear_attention import chunk_linear_attention

RESULTS = Path(__file__).parent / "results" / "memory_rules.json"
COMMAND = "python -m benchmarks.memory_rules"
SIZES = ((512, 64), (2048, 64), (2048, 128))  # (T, K = V)
LARGEST_DIFFERENCE = 1e-5  # of the largest |output|; a pair further apart is not timed


def transformers_function(model: str, name: str) -> Callable:
    """transformers' own PyTorch function: it would take FLA's GPU kernels, were FLA in sight on import."""
    sys.modules["fla"] = None
    try:
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    finally:
        del sys.modules["fla"]
    return inspect.unwrap(getattr(module, name))


def fla_function(module: str, name: str) -> Callable:
    return getattr(importlib.import_module(f"fla.ops.{module}.naive"), name)


OURS = {
    "evolve chunk_kda": lambda q, k, v, g, beta: chunk_kda(q, k, v, g, beta),
    "evolve chunk_gated_delta_rule": lambda q, k, v, g, beta: chunk_gated_delta_rule(
        q, k, v, g[..., 0], beta
    ),
    "evolve chunk_delta_rule": lambda q, k, v, g, beta: chunk_delta_rule(q, k, v, beta),
    "evolve chunk_linear_attention": lambda q, k, v, g, beta: chunk_linear_attention(q, k, v),
}


def function(name: str) -> Callable:
    """A function of the table by its name there; all take (q, k, v, g, beta), g [B, T, H, K]."""
    if name in OURS:
        return OURS[name]
    package, stem = name.split()
    if stem == "torch_chunk_gated_delta_rule":
        gated = transformers_function("qwen3_next", stem)
        return lambda q, k, v, g, beta: gated(q, k, v, g[..., 0], beta)
    return (
        transformers_function("kimi_linear", stem) if package == "transformers" else fla_function("kda", stem)
    )


def inputs(T: int, K: int, gate: str = "bounded", B: int = 1, H: int = 4) -> list[Tensor]:
    """q, k, v, g, beta as a fresh layer makes them; gate "bounded" (K3) or "unbounded" (Kimi Linear)."""
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1) for _ in range(2))
    v, z, beta = torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.rand(B, T, H)
    layer = KimiDeltaAttention(8, H, K, gate_lower_bound=-5.0 if gate == "bounded" else None)
    with torch.no_grad():
        g = kda_gate(z, layer.A_log, layer.dt_bias, lower_bound=layer.gate_lower_bound)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def forward_backward(f: Callable, x: list[Tensor]) -> float:
    """Seconds of one forward and backward pass."""
    for t in x:
        t.grad = None
    start = time.perf_counter()
    f(*x)[0].square().sum().backward()
    return time.perf_counter() - start


def difference(f: Callable, peer: Callable, x: list[Tensor]) -> float:
    """The largest difference of the two outputs, of the largest |output|."""
    with torch.no_grad():
        a, b = f(*x)[0], peer(*x)[0]
    return ((a - b).abs().max() / b.abs().max()).item()


def compare(ours: str, peer: str, T: int, K: int, gate: str, rounds: int, same: bool = True) -> dict:
    """Time the two in turns; ``same`` says that they compute the same thing."""
    f, f_peer, x = function(ours), function(peer), inputs(T, K, gate)
    row = {"ours": ours, "peer": peer, "T": T, "K": K, "gate": gate}
    if same:
        row["difference"] = difference(f, f_peer, x)
        if row["difference"] > LARGEST_DIFFERENCE:
            return row | {"refused": "outputs differ"}
    forward_backward(f, x)
    pairs = [(forward_backward(f, x), forward_backward(f_peer, x)) for _ in range(rounds)]
    row["ms"], row["peer_ms"] = (1e3 * statistics.median(times) for times in zip(*pairs))
    return row | {"ratio": statistics.median(theirs / mine for mine, theirs in pairs)}


def peak_memory(name: str, T: int, K: int) -> float:
    """MiB that one forward + backward pass adds to a process which has imported and made its inputs."""
    peaks = []
    for what in ("inputs", name):
        command = [sys.executable, "-m", "benchmarks.memory_rules", "--child", what, name, str(T), str(K)]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return (peaks[1] - peaks[0]) / 1024


def child(what: str, name: str, T: int, K: int) -> None:
    """Make the inputs and, unless that is all, one pass; print this process's high-water mark in KiB.

    From /proc: ``getrusage`` would count what the parent held when it started this process.
    """
    f, x = function(name), inputs(T, K)
    if what != "inputs":
        forward_backward(f, x)
    status = Path("/proc/self/status").read_text()
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


class Count(TorchDispatchMode):
    """Counts operations, and the bytes of all their tensor arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        self.bytes += sum(t.nbytes for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
        return result


@torch.no_grad()
def decode(contexts: tuple[int, ...] = (512, 1024, 2048, 4096, 8192), steps: int = 200) -> list[dict]:
    """One token of a K3-style layer after each context: operations and bytes counted, time in turns."""
    layer = KimiDeltaAttention(256, 4, 64, gate_lower_bound=-5.0, full_rank_gate=True)
    token, caches = torch.randn(1, 1, 256), {}
    for T in contexts:
        layer(torch.randn(1, T, 256), caches.setdefault(T, {}))
    times = {T: [] for T in contexts}
    for _ in range(steps):
        for T, cache in caches.items():
            start = time.perf_counter()
            layer(token, cache)
            times[T].append(time.perf_counter() - start)
    rows = []
    for T, cache in caches.items():
        with Count() as count:
            layer(token, cache)
        kept = sum(t.nbytes for t in cache.values())
        row = {
            "context": T,
            "operations": count.operations,
            "bytes_touched": count.bytes,
            "cache_bytes": kept,
        }
        rows.append(row | {"us": 1e6 * statistics.median(times[T])})
    return rows


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def measure(rounds: int) -> dict:
    """Everything, as it is written to the results."""
    gated = "evolve chunk_gated_delta_rule"
    pairs, memory = [], []
    for T, K in SIZES:
        kda = ("evolve chunk_kda", "transformers chunk_kimi_delta_attention")
        pairs.append(compare(*kda, T, K, "bounded", rounds))
        pairs.append(compare(*kda, T, K, "unbounded", rounds))
        pairs.append(compare("evolve chunk_kda", "fla naive_chunk_kda", T, K, "bounded", max(1, rounds // 2)))
        their_gated = "transformers torch_chunk_gated_delta_rule"
        pairs.append(compare(gated, their_gated, T, K, "bounded", 3 * rounds))
        for simpler in ("evolve chunk_delta_rule", "evolve chunk_linear_attention"):
            pairs.append(compare(simpler, gated, T, K, "bounded", 3 * rounds, same=False))
        for name in (*kda, gated, their_gated):
            memory.append({"function": name, "T": T, "K": K, "MiB": peak_memory(name, T, K)})
    packages = ("torch", "transformers", "flash-linear-attention")
    return {
        "command": COMMAND,
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
        "threads": torch.get_num_threads(),
        "forward_backward": pairs,
        "peak_memory": memory,
        "decode": decode(),
    }


def show(results: dict) -> None:
    """Print the results as tables."""
    print(results["date"], results["versions"], f"{results['threads']} threads\n")
    head = f"{'T':>5} {'K':>4} {'gate':>9}  {'ours':32}{'peer':42}"
    print(head + f"{'difference':>10} {'ms':>8} {'peer ms':>9} {'ratio':>6}")
    for r in results["forward_backward"]:
        name = f"{r['T']:5} {r['K']:4} {r['gate']:>9}  {r['ours']:32}{r['peer']:42}"
        apart = f"{r['difference']:10.1e}" if "difference" in r else f"{'':10}"
        speed = r.get("refused") or f"{r['ms']:8.1f} {r['peer_ms']:9.1f} {r['ratio']:6.2f}"
        print(name + apart + " " + speed)
    print("\npeak memory of one forward + backward pass")
    for r in results["peak_memory"]:
        print(f"{r['T']:5} {r['K']:4}  {r['function']:42}{r['MiB']:8.1f} MiB")
    print("\none decoded token of a KDA layer (D = 256, H = 4, K = V = 64)")
    for r in results["decode"]:
        counted = f"{r['operations']:4} operations, {r['bytes_touched']:8} bytes touched"
        counted += f", {r['cache_bytes']} bytes kept"
        print(f"  after {r['context']:5}: {counted}, {r['us']:6.0f} µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns per pair (three times that for quick pairs)"
    )
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(2)
    if args.child:
        what, name, T, K = args.child
        return child(what, name, int(T), int(K))
    results = measure(args.rounds)
    show(results)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
