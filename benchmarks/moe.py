"""A mixture of experts beside transformers' two, on a CPU: its loop over experts, and its grouped product.

``python -m benchmarks.moe`` prints a table and writes ``benchmarks/results/moe.json``. 64 experts of which 4
are chosen, 4096 tokens, width 256, SwiGLU, float32, forward + backward, two threads; the experts alone, under
a given routing, and a whole layer of Kimi Linear's with its router and its shared expert. Each pair runs in
turns in one process, and what counts is the median of the ratios. A pair whose outputs or gradients differ is
not timed.
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.memory_rules import transformers_function, version
from evolve.decoder import swiglu
from evolve.moe import LatentMoE, Routing

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


def experts_alone(layer: nn.Module, routing: Routing) -> Callable[[Tensor], Tensor]:
    """The experts under one and the same routing, x [1, N, D] -> u [N, D]."""
    if isinstance(layer, LatentMoE):
        return lambda x: layer.experts(x[0], routing)
    return lambda x: layer.experts(x[0], routing.indices, routing.weights)


def forward_backward(f: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> float:
    """Seconds of one forward and backward pass."""
    layer.zero_grad()
    x.grad = None
    start = time.perf_counter()
    f(x).square().mean().backward()
    return time.perf_counter() - start


def values(f: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and of the experts."""
    forward_backward(f, layer, x)
    return [f(x).detach(), x.grad, layer.experts.gate_up_proj.grad, layer.experts.down_proj.grad]


def compare(what: str, peer: str, expert_size: int, rounds: int) -> dict:
    net, x = ours(expert_size), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    layers = net, theirs(net, expert_size, PEERS[peer])
    routing = Routing(*(t.detach() for t in net.gate(x[0])))
    runs = [(experts_alone(l, routing) if what == "experts" else l, l) for l in layers]
    name = {"experts": "KimiLinearExperts", "layer": "KimiLinearMoE"}[what]
    row = {"what": what, "peer": f"transformers {name}, {PEERS[peer]}", "expert_size": expert_size}
    pairs = zip(*(values(f, layer, x) for f, layer in runs))
    apart = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    row["difference"] = float(f"{apart:.1e}")
    if apart > LARGEST_DIFFERENCE:
        return row | {"refused": "outputs differ"}
    times = [[forward_backward(f, layer, x) for f, layer in runs] for _ in range(rounds)]
    mine, their = (round(1e3 * statistics.median(t), 1) for t in zip(*times))
    ratio = round(statistics.median(b / a for a, b in times), 2)
    return row | {"ms": mine, "peer_ms": their, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(2)
    kinds = [(what, peer, size) for what in ("experts", "layer") for size in (256, 128) for peer in PEERS]
    rows = [compare(*kind, rounds) for kind in kinds]
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
