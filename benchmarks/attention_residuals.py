"""Attention Residuals read in two phases beside the plain form, on a CPU.

``python -m benchmarks.attention_residuals`` prints a table and writes
``benchmarks/results/attention_residuals.json``. 48 layers (96 sub-layers) in blocks of 24 sub-layers,
float32, one forward pass without gradients, two threads. Both run in turns in one process; what counts is the
median of the ratios. Two rows: the reading alone, where every sub-layer only passes its mix on, and a whole
decoder of MLA layers. A pair whose outputs differ is not timed.
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

from evolve.attention_residuals import AttnResDecoder, DepthMemory, site
from evolve.mla import MultiHeadLatentAttention

RESULTS = Path(__file__).parent / "results" / "attention_residuals.json"
COMMAND = "python -m benchmarks.attention_residuals"
LAYERS, BLOCK, WIDTH, TOKENS = 48, 24, 512, 256
LARGEST_DIFFERENCE = 1e-5  # of the largest |output|


class Nothing(nn.Module):
    """A mixer that returns what it is given."""

    def forward(self, x: Tensor, cache: object = None, attention_mask: Tensor | None = None) -> Tensor:
        return x


def build(mixer: str) -> AttnResDecoder:
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    make = Nothing if mixer == "none" else lambda: MultiHeadLatentAttention(WIDTH, 4, **sizes)
    net = AttnResDecoder(
        [make() for _ in range(LAYERS)],
        vocab_size=64, hidden_size=WIDTH, intermediate_size=2 * WIDTH, block_size=BLOCK,
    )  # fmt: skip
    for name, weight in net.named_parameters():
        if name.endswith("_res_proj.weight"):
            nn.init.normal_(weight, 0.0, WIDTH**-0.5)
    return net.eval()


def reading_alone(net: AttnResDecoder, x: Tensor, two_phase: bool) -> Tensor:
    """All 97 sites read; a sub-layer's output is its mix."""
    memory = DepthMemory(x, BLOCK)
    sublayers = [(site(layer, name), lambda h: h) for layer in net.layers for name in layer.SITES]
    (net.run_two_phase if two_phase else net.run_plain)(memory, sublayers)
    return memory.partial


def whole(net: AttnResDecoder, x: Tensor, two_phase: bool) -> Tensor:
    net.two_phase = two_phase
    return net.run_layers(x, None, None)


@torch.no_grad()
def compared(name: str, mixer: str, run, repeats: int) -> dict:
    net, x = build(mixer), torch.randn(1, TOKENS, WIDTH)
    plain, fast = run(net, x, False), run(net, x, True)
    difference = ((plain - fast).abs().max() / plain.abs().max()).item()
    if difference > LARGEST_DIFFERENCE:
        raise SystemExit(f"{name}: outputs differ by {difference:.1e}, not timed")
    seconds = {False: [], True: []}
    for _ in range(repeats):
        for two_phase in (False, True):
            start = time.perf_counter()
            run(net, x, two_phase)
            seconds[two_phase].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds[False], seconds[True])]
    return {
        "name": name,
        "difference": float(f"{difference:.1e}"),
        "plain_ms": round(1e3 * statistics.median(seconds[False]), 1),
        "two_phase_ms": round(1e3 * statistics.median(seconds[True]), 1),
        "ratio": round(statistics.median(ratios), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(2)
    rows = [
        compared("reading alone", "none", reading_alone, repeats),
        compared("decoder of MLA layers", "mla", whole, repeats),
    ]
    print(f"{'':24}{'difference':>11}{'plain':>10}{'two-phase':>11}{'ratio':>7}")
    for r in rows:
        times = f"{r['plain_ms']:>7} ms{r['two_phase_ms']:>8} ms"
        print(f"{r['name']:24}{r['difference']:>11.0e}{times}{r['ratio']:>6}x")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    sizes = {"layers": LAYERS, "block_size": BLOCK, "width": WIDTH, "tokens": TOKENS}
    head = {
        "command": COMMAND,
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "sizes": sizes,
    }
    RESULTS.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
