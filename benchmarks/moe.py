"""A mixture of experts beside transformers' two, on a CPU: its loop over experts, and its grouped product.

``python -m benchmarks.moe`` prints a table and writes ``benchmarks/results/moe.json``. One layer of Kimi
Linear's kind, 64 experts of which 4 are chosen and one that all tokens pass through, 4096 tokens, width 256,
float32, forward + backward, two threads. All run in turns in one process; what counts is the median of the
ratios. A pair whose outputs or gradients differ is not timed.
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.memory_rules import transformers_function, version
from evolve.decoder import swiglu
from evolve.moe import LatentMoE

RESULTS = Path(__file__).parent / "results" / "moe.json"
COMMAND = "python -m benchmarks.moe"
EXPERTS, TOP_K, TOKENS, WIDTH = 64, 4, 4096, 256
LARGEST_DIFFERENCE = 1e-5  # of the largest |value|
PEERS = {"loop": "eager", "grouped": "grouped_mm"}  # what is timed: transformers' experts_implementation


def ours(expert_size: int) -> LatentMoE:
    torch.manual_seed(0)
    return LatentMoE(
        WIDTH,
        num_experts=EXPERTS,
        top_k=TOP_K,
        expert_size=expert_size,
        num_shared_experts=1,
        activation=swiglu,
        scaling=2.446,
    )


def theirs(net: LatentMoE, expert_size: int, implementation: str) -> nn.Module:
    """transformers' layer with the weights of ours."""
    config = transformers_function("kimi_linear", "KimiLinearConfig")(
        hidden_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_token=TOP_K,
        num_shared_experts=1,
        moe_intermediate_size=expert_size,
        experts_implementation=implementation,
    )
    layer = transformers_function("kimi_linear", "KimiLinearMoE")(config)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.copy_(net.get_parameter(name))
    return layer


def forward_backward(layer: nn.Module, x: Tensor) -> float:
    """Seconds of one forward and backward pass."""
    layer.zero_grad()
    x.grad = None
    start = time.perf_counter()
    layer(x).square().mean().backward()
    return time.perf_counter() - start


def difference(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    """The largest difference in output, gradient of x and gradient of the experts, of the largest value."""
    results = []
    for layer in (a, b):
        forward_backward(layer, x)
        grads = [x.grad, *(layer.experts.get_parameter(n).grad for n in ("gate_up_proj", "down_proj"))]
        results.append([layer(x).detach(), *grads])
    return max(((p - q).abs().max() / q.abs().max()).item() for p, q in zip(*results))


def compare(peer: str, expert_size: int, rounds: int) -> dict:
    net, x = ours(expert_size), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    other = theirs(net, expert_size, PEERS[peer])
    row = {"peer": f"transformers KimiLinearMoE, {PEERS[peer]}", "expert_size": expert_size}
    row["difference"] = float(f"{difference(net, other, x):.1e}")
    if row["difference"] > LARGEST_DIFFERENCE:
        return row | {"refused": "outputs differ"}
    pairs = [(forward_backward(net, x), forward_backward(other, x)) for _ in range(rounds)]
    mine, their = (round(1e3 * statistics.median(times), 1) for times in zip(*pairs))
    ratio = round(statistics.median(b / a for a, b in pairs), 2)
    return row | {"ms": mine, "peer_ms": their, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(2)
    rows = [compare(peer, size, rounds) for size in (256, 128) for peer in PEERS]
    print(f"{'peer':42}{'expert size':>12}{'difference':>12}{'ours':>12}{'theirs':>12}{'ratio':>8}")
    for r in rows:
        times = r.get("refused") or f"{r['ms']:>9} ms{r['peer_ms']:>9} ms{r['ratio']:>7}x"
        print(f"{r['peer']:42}{r['expert_size']:>12}{r['difference']:>12.0e}{times}")
    head = {
        "command": COMMAND,
        "date": datetime.date.today().isoformat(),
        "versions": {p: version(p) for p in ("torch", "transformers")}
        | {"python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "sizes": {"experts": EXPERTS, "top_k": TOP_K, "tokens": TOKENS, "width": WIDTH},
    }
    RESULTS.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
