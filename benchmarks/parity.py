"""How far the package is from the stored outputs of independent implementations, in both precisions.

``python -m benchmarks.parity`` prints a table and writes ``benchmarks/results/parity.json``. The fixtures are
described in ``tests/goldens/README.md``; the tests hold the package to limits on the same files, and compare
gradients and greedy decoding too. A difference is the largest |ours − stored| over the largest |stored|.
"""

import json
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from evolve import deltanet, full_attention, gated_deltanet, kda, linear_attention
from evolve.attention_residuals import DepthMemory, attention_residual
from evolve.k3 import K3
from evolve.mla import MultiHeadLatentAttention
from evolve.moe import GatedFeedForward, LatentMoE, situ_glu
from evolve.norms import rms_norm

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"
RESULTS = Path(__file__).parent / "results" / "parity.json"
DTYPES = {"float64": torch.float64, "float32": torch.float32}
ELU1 = {"feature_map": "elu1"}
RULES = {  # by the first words of a file's name: module, stem of its functions, inputs, options
    "linear_identity": (linear_attention, "linear_attention", "q k v", {}),
    "linear_elu_norm": (linear_attention, "linear_attention", "q k v", ELU1 | {"normalize": True}),
    "linear_elu_unnorm": (linear_attention, "linear_attention", "q k v", ELU1),
    "delta": (deltanet, "delta_rule", "q k v beta", {}),
    "gated_delta": (gated_deltanet, "gated_delta_rule", "q k v g beta", {}),
    "kda": (kda, "kda", "q k v g beta", {}),
}  # fmt: skip
MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 24}
Pair = tuple[Tensor, Tensor]  # ours, stored


def stored(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of one fixture."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) for name, t in tensors.items()}


def below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def softmax(path: Path, dtype: torch.dtype) -> Iterator[Pair]:
    x = stored(path)[0]
    yield full_attention.softmax_attention(*(x[n].to(dtype) for n in "qkv")), x["o"]


def memory_rule(path: Path, dtype: torch.dtype) -> Iterator[Pair]:
    """Outputs and last states of the loop and of the chunked form, every case of the file."""
    x = stored(path)[0]
    module, stem, inputs, options = RULES[path.stem.rpartition("_T")[0]]
    for case in sorted(name.removesuffix("o") for name in x if name == "o" or name.endswith(".o")):
        here = {n: t for n, t in x.items() if "." not in n} | (below(x, case) if case else {})
        start = tuple(here[n].to(dtype) for n in ("S0", "z0") if n in here)
        options = options | {"initial_state": start if len(start) > 1 else next(iter(start), None)}
        for form in ("recurrent", "chunk"):
            function = getattr(module, f"{form}_{stem}")
            given = (here[name].to(dtype) for name in inputs.split())
            o, state = function(*given, output_final_state=True, **options)
            state = state if isinstance(state, tuple) else (state,)
            yield from ((got, here[name]) for name, got in zip("oSz", (o, *state)) if name in here)


def depth(path: Path, dtype: torch.dtype) -> Iterator[Pair]:
    """Every mix that Attention Residuals make of the recorded outputs of 26 sub-layers."""
    recorded = stored(path)[0]
    x = cast(recorded, dtype)
    memory = DepthMemory(x["layers.0.attn_mix"], block_size=6)
    for i in range(26):
        layer, site, part = (
            f"layers.{i // 2}",
            ("self_attention_res", "mlp_res")[i % 2],
            ("attn", "ffn")[i % 2],
        )
        memory.before(i)
        if i:  # what the first sub-layer reads is the embedding
            query, gain = x[f"{layer}.{site}_proj.weight"][0], x[f"{layer}.{site}_norm.weight"]
            yield attention_residual(memory.sources, query, gain), recorded[f"{layer}.{part}_mix"]
        memory.add(x[f"{layer}.{part}_out"])
    query, gain = x["output_attn_res_proj.weight"][0], x["output_attn_res_norm.weight"]
    yield attention_residual(memory.sources, query, gain), recorded["final_mix"]


def mla(path: Path, dtype: torch.dtype) -> Iterator[Pair]:
    for l in (3, 12):
        recorded = below(stored(path)[0], f"layers.{l}.")
        x = cast(recorded, dtype)
        layer = MultiHeadLatentAttention(64, 4, output_gate=True, **MLA).to(dtype)
        layer.load_state_dict(below(x, "self_attn."))
        yield layer(rms_norm(x["attn_mix"], 1e-5) * x["input_layernorm.weight"]), recorded["attn_out"]


def experts(path: Path, dtype: torch.dtype) -> Iterator[Pair]:
    dense = GatedFeedForward(64, 128, situ_glu)
    sparse = LatentMoE(64, num_experts=8, top_k=2, expert_size=32, latent_size=32, num_shared_experts=2)
    for l, name, net in ((0, "mlp", dense), (11, sparse.name_in_layer, sparse)):
        recorded = below(stored(path)[0], f"layers.{l}.")
        x = cast(recorded, dtype)
        net.to(dtype).load_state_dict(below(x, f"{name}."))
        yield net(rms_norm(x["ffn_mix"], 1e-5) * x["post_attention_layernorm.weight"]), recorded["ffn_out"]


def k3(path: Path, dtype: torch.dtype) -> Iterator[Pair]:
    """Logits of the whole model, its weights loaded from the released layout."""
    x = stored(path)[0]
    yield K3.from_pretrained(path.parent, dtype=dtype)(x["input_ids"]), x["logits"]


WHAT = {
    "attention_residuals_k3": (depth, "official K3, Attention Residuals: every mix"),
    "mla_k3": (mla, "official K3, gated MLA: two layers"),
    "moe_k3": (experts, "official K3, feed-forward: dense, and with experts"),
}


def compared(path: Path) -> tuple:
    """How a fixture is compared, and in words what it holds."""
    if path.parent.name == "ops":
        name = path.stem.rpartition("_T")[0]
        about = "softmax attention" if name == "softmax" else f"{name.replace('_', ' ')}: loop and chunks"
        return softmax if name == "softmax" else memory_rule, about
    if path.name == "expected.safetensors":
        return k3, "official K3, whole model: logits"
    return WHAT[path.stem]


@torch.no_grad()
def row(path: Path) -> dict:
    """The differences of one fixture. ``KeyError`` for a file that nothing here compares."""
    compare, what = compared(path)
    found = {"file": str(path.relative_to(GOLDENS)), "what": what}
    for name, dtype in DTYPES.items():
        differences = [
            (got.double() - want.double()).abs().max() / want.abs().max()
            for got, want in compare(path, dtype)
        ]
        found[name] = float(f"{max(differences):.1e}")
    return found


def fixtures() -> list[Path]:
    """Every stored output; a model's weights are not one."""
    return sorted(path for path in GOLDENS.rglob("*.safetensors") if path.name != "model.safetensors")


def main() -> None:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    rows = [row(path) for path in fixtures()]
    for found in rows:
        print(f"{found['float64']:.1e}  {found['float32']:.1e}  {found['file']}: {found['what']}")
    results = {"command": "python -m benchmarks.parity", "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    RESULTS.write_text(json.dumps(results | {"versions": versions, "goldens": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
