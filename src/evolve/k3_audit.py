"""What Kimi K3 consists of, counted: parameters, activated parameters, bytes on disk, bytes of a sequence.

Nothing here is a formula. The model is built on ``meta`` and walked: its parameters are counted by the part
they belong to, its released tensors by name, shape and dtype, and its cache after one token.

``python -m evolve.k3 --audit`` prints the table of the released model, ``--config FILE`` that of another.
"""

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from evolve import k3_layout
from evolve.k3 import K3, K3Config, released_tensors
from evolve.lab import accounting

MILLION = 2**20  # tokens
PARTS = {  # what a tensor's own name has -> the part it belongs to; the first that fits
    r"vision_tower": "vision tower",
    r"mm_projector": "projector",
    r"block_sparse_moe\.experts": "routed experts",
    r"block_sparse_moe\.shared_experts": "shared experts",
    r"routed_expert_(down|up)_proj": "latent projections",
    r"block_sparse_moe": "routers, latent norms",
    r"layers\.\d+\.mlp\.": "dense networks",
    r"layers\..*norm|layers\..*_res_": "layer norms, AttnRes",
    r"embed_tokens": "embedding",
    r"lm_head": "head",
    r"^(model\.)?(norm|output_attn_res)": "final norm, last AttnRes",
}
NO_TEXT = ("vision tower", "projector")
ORDER = ("embedding", "KDA", "MLA", *(p for p in PARTS.values() if p not in NO_TEXT), *NO_TEXT)


@dataclass
class Row:
    """One part of the model: how many tensors, parameters and bytes, and parameters that a token passes."""

    tensors: int = 0
    parameters: int = 0
    activated: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Audit:
    """The rows by their part, and what a sequence occupies in the cache."""

    rows: dict[str, Row]
    latent_bytes: int  # of a token, in all MLA layers
    state_bytes: int  # of a sequence, in all KDA layers
    conv_bytes: int

    def total(self, *, text_only: bool = False) -> Row:
        """The sum of the parts."""
        rows = [row for part, row in self.rows.items() if not (text_only and part in NO_TEXT)]
        return Row(*(sum(getattr(row, n) for row in rows) for n in Row.__dataclass_fields__))

    def sequence_bytes(self, tokens: int) -> int:
        """What the cache holds of one sequence after so many tokens."""
        return self.latent_bytes * tokens + self.state_bytes + self.conv_bytes


def audit(config: K3Config) -> Audit:
    """Count a K3 of these sizes."""
    with torch.device("meta"):
        model = K3(config)
    rows: dict[str, Row] = {}
    for name, p in model.named_parameters():
        row = rows.setdefault(_part(name, config), Row())
        row.parameters += p.numel()
        row.activated += 0 if name.startswith("embed_tokens") else p.numel()
    rows["routed experts"].activated -= accounting.parameters(model) - _without_idle(model)
    for name, (shape, dtype) in released_tensors(config).items():
        row = rows.setdefault(_part(name.replace("language_model.", ""), config), Row())
        row.tensors += 1
        row.nbytes += math.prod(shape) * dtype.itemsize
        row.parameters += math.prod(shape) if k3_layout.is_vision(name) else 0
    return Audit(rows, **_cache(model))


def _without_idle(model: nn.Module) -> int:
    table = accounting.parameters(model.embed_tokens)
    return accounting.activated_parameters(model) + table


def _part(name: str, config: K3Config) -> str:
    mixer = re.match(r"(?:model\.)?layers\.(\d+)\.self_attn\.", name)
    if mixer:
        return "MLA" if int(mixer[1]) + 1 in config.full_attn_layers else "KDA"
    return next(part for pattern, part in PARTS.items() if re.search(pattern, name))


def _cache(model: nn.Module) -> dict[str, int]:
    """What one token leaves: rows that grow by one a token, and states that do not grow."""
    layers = accounting.meta_cache(model, 1, 1, torch.bfloat16).layers
    fixed = [(name, t) for layer in layers for name, t in layer.fixed.items()]
    return {
        "latent_bytes": sum(_nbytes(layer.get(name)) for layer in layers for name in layer.growing),
        "state_bytes": sum(_nbytes(t) for name, t in fixed if name == "state"),
        "conv_bytes": sum(_nbytes(t) for name, t in fixed if name != "state"),
    }


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def table(config: K3Config) -> str:
    """The audit as text."""
    return "\n".join(_lines(audit(config)))


def _lines(found: Audit) -> Iterator[str]:
    yield f"{'':26}{'tensors':>9}{'parameters':>20}{'activated':>18}{'bytes on disk':>20}"
    totals = {"text": found.total(text_only=True), "everything": found.total()}
    ordered = {part: found.rows[part] for part in ORDER if part in found.rows}
    for part, row in (ordered | totals).items():
        line = f"{row.tensors:>9,}{row.parameters:>20,}{row.activated:>18,}{row.nbytes:>20,}"
        yield f"{part:26}{line}"
    yield ""
    yield f"all text parameters as bfloat16: {2 * totals['text'].parameters:,} bytes"
    yield f"cache: {found.latent_bytes:,} bytes a token (MLA latents, bfloat16)"
    states = f"{found.state_bytes:,} (states, float32) + {found.conv_bytes:,} (convolutions, bfloat16)"
    yield f"       {states} bytes a sequence (KDA)"
    yield f"       {found.sequence_bytes(MILLION):,} bytes after {MILLION:,} tokens"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of ``python -m evolve.k3``."""
    parser = argparse.ArgumentParser(prog="python -m evolve.k3", description="Kimi K3, counted.")
    parser.add_argument(
        "--audit", action="store_true", required=True, help="print what the model consists of"
    )
    parser.add_argument("--config", help="a config.json in the released layout; the released one by default")
    options = parser.parse_args(arguments)
    try:
        config = K3Config.from_json(options.config) if options.config else K3Config.official()
    except ValueError as error:
        parser.error(str(error))
    print(table(config))
