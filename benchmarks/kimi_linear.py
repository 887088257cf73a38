"""Kimi Linear beside transformers' at the same size and with the same weights, on a CPU.

``python -m benchmarks.kimi_linear`` prints a table and writes ``benchmarks/results/kimi_linear.json``. Eight
layers (six KDA, two MLA), width 512, 64 experts of which 8 are chosen, float32, two threads, no gradients.
Prefill reads a prompt; decoding adds tokens one by one after it, each model with its own cache. Both run in
turns in one process; what counts is the median of the ratios. A pair whose logits differ is not timed.
transformers picks its implementations of attention and experts (printed), and takes its PyTorch code for KDA:
FLA's kernels need a GPU.
"""

import argparse
import datetime
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.memory_rules import transformers_function, version
from evolve.kimi_linear import KimiLinear, KimiLinearConfig

RESULTS = Path(__file__).parent / "results" / "kimi_linear.json"
COMMAND = "python -m benchmarks.kimi_linear"
CONFIG = KimiLinearConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=8,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    linear_num_heads=8,
    linear_head_dim=64,
    num_experts=64,
    num_experts_per_token=8,
    moe_intermediate_size=128,
)
PROMPTS = {128: 5, 512: 5, 2048: 3, 8192: 1}  # length -> rounds of prefill
DECODED = 40
LARGEST_DIFFERENCE = 1e-4  # of the largest |logit|

Call = Callable[[Tensor, object], tuple[Tensor, object]]  # (input_ids, cache) -> (logits, cache)


def models() -> tuple[KimiLinear, nn.Module]:
    """Ours, and transformers' loaded from the folder that ours writes."""
    torch.manual_seed(0)
    ours = KimiLinear(CONFIG).eval()
    with tempfile.TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        load = transformers_function("kimi_linear", "KimiLinearForCausalLM").from_pretrained
        return ours, load(folder, dtype=torch.float32).eval()


def calls(ours: KimiLinear, theirs: nn.Module) -> list[Call]:
    def our_call(ids: Tensor, cache: object) -> tuple[Tensor, object]:
        cache = ours.new_cache(len(ids)) if cache is None else cache
        return ours(ids, cache), cache

    def their_call(ids: Tensor, cache: object) -> tuple[Tensor, object]:
        out = theirs(ids, cache=cache, use_cache=True)
        return out.logits, out.cache

    return [our_call, their_call]


def timed(call: Call, ids: Tensor, cache: object) -> tuple[float, Tensor, object]:
    start = time.perf_counter()
    logits, cache = call(ids, cache)
    return time.perf_counter() - start, logits, cache


def summary(what: str, times: list[tuple[float, float]]) -> dict:
    """Medians of (ours, theirs) in ms, and the median of the ratios."""
    mine, their = (round(1e3 * statistics.median(t), 2) for t in zip(*times))
    ratio = round(statistics.median(b / a for a, b in times), 2)
    return {f"{what}_ms": mine, f"peer_{what}_ms": their, f"{what}_ratio": ratio}


@torch.no_grad()
def compare(pair: list[Call], T: int, rounds: int) -> dict:
    ids = torch.randint(CONFIG.vocab_size, (1, T + DECODED))
    prompt, following = ids.split([T, DECODED], dim=1)
    prefill, decode, apart = [], [], 0.0
    for _ in range(rounds):
        runs = [timed(call, prompt, None) for call in pair]
        prefill.append(tuple(seconds for seconds, _, _ in runs))
    for token in following.split(1, dim=1):
        apart = max(apart, difference(runs))
        runs = [timed(call, token, cache) for call, (_, _, cache) in zip(pair, runs)]
        decode.append(tuple(seconds for seconds, _, _ in runs))
    row = {"prompt": T, "difference": float(f"{max(apart, difference(runs)):.1e}")}
    if row["difference"] > LARGEST_DIFFERENCE:
        return row | {"refused": "logits differ"}
    return row | summary("prefill", prefill) | summary("decode", decode[1:])


def difference(runs: list[tuple[float, Tensor, object]]) -> float:
    """The largest difference of the two models' logits, of the largest |logit|."""
    (_, a, _), (_, b, _) = runs
    return ((a - b).abs().max() / b.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=int, default=max(PROMPTS), help="leave longer prompts out")
    longest = parser.parse_args().longest
    torch.set_num_threads(2)
    ours, theirs = models()
    kinds = {
        "attention": theirs.config._attn_implementation,
        "experts": theirs.config._experts_implementation,
    }
    print("transformers KimiLinearForCausalLM,", kinds)
    rows = [compare(calls(ours, theirs), T, n) for T, n in PROMPTS.items() if longest >= T]
    print(f"{'':8}{'':12}{'prefill':^32}{'one decoded token':^32}")
    print(f"{'prompt':>8}{'difference':>12}" + 2 * f"{'ours':>11}{'theirs':>12}{'ratio':>9}")
    for r in rows:
        parts = [
            r.get("refused") or f"{r[f'{w}_ms']:>8} ms{r[f'peer_{w}_ms']:>9} ms{r[f'{w}_ratio']:>8}x"
            for w in ("prefill", "decode")
        ]
        print(f"{r['prompt']:>8}{r['difference']:>12.0e}" + "".join(parts))
    head = {
        "command": COMMAND,
        "date": datetime.date.today().isoformat(),
        "versions": {p: version(p) for p in ("torch", "transformers")}
        | {"python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "peer": kinds,
    }
    RESULTS.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
