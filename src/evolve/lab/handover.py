"""The hand-over numbers: where each rung breaks, and what the next one makes of it.

One function a number, deterministic and untrained. A notebook's closing cell calls the function of its rung
with its own memory; the next notebook's opening cell calls the same function with the repaired one.
"""

import torch
from torch import nn

from evolve.attention_residuals import AttentionResidual, attention_residual, source_weights
from evolve.checks import check_count, check_positive, require
from evolve.decoder import GatedFeedForward
from evolve.full_attention import GPT2, GPT2Config
from evolve.kda import KimiDeltaAttention
from evolve.lab import accounting, probes
from evolve.lab.memories import MemoryRule, delta, kda, latent, plain_writes
from evolve.lab.probes import MemoryCell
from evolve.lab.seeds import generator
from evolve.mla import MultiHeadLatentAttention
from evolve.norms import RMSNorm

MILLION = 2**20  # tokens; the context that Kimi K3 is released with


def cache_bytes_at(context: int = MILLION, *, dtype: torch.dtype = torch.bfloat16) -> int:
    """01 → 02: bytes that one decoded token must read from a GPT-2's cache after ``context`` tokens."""
    with torch.device("meta"):
        model = GPT2(GPT2Config(n_positions=max(context, 1)))
    return accounting.cache_bytes(model, context, dtype=dtype)


def rewritten_key_error(rule: MemoryRule) -> float:
    """02 → 03: a key is written with v₁, then with v₂; relative error of a read against v₂."""
    return probes.overwriting(rule).error


def random_pairs_error(rule: MemoryRule, pairs: int = 1024) -> float:
    """02 → 03 with 16 pairs, 05 → 06 with 1024: relative error (RMS) of one of many random pairs, K = 64."""
    return probes.interference(rule, [pairs], repeats=max(16, 1024 // pairs))[0]


def writes_to_clear(rule: MemoryRule, *, reset: float = 0.0) -> int | None:
    """03 → 04: tokens after a context switch until 1 % of the old context's energy is left, K = 64.

    Every token is a random write, and a delta rule keeps 1 − 1/K of the energy at each; with ``reset`` the
    first token decays the state by exp(reset) instead. ``None`` if 320 writes are not enough.
    """
    options = {"writes": 320, "V": 4, "reset": reset}
    if probes.context_switch(rule, repeats=16, **options).writes_to_clear() is None:
        return None  # a memory that keeps everything is the slow one to read: a first look is enough
    return probes.context_switch(rule, repeats=256, **options).writes_to_clear()


def memory_cells() -> dict[str, MemoryCell]:
    """04 → 05: fact and stale error of the memory cell for the delta rule, the gated rule at its best single
    decay, and KDA with one decay a channel (1 on facts, the bounded gate's e⁻⁵ on locals)."""
    return {
        "delta rule": probes.memory_cell(delta),
        "gated delta rule": probes.best_scalar_decay()[1],
        "KDA": probes.memory_cell(kda, probes.LOCAL_DECAY),
    }


def first_layer_share(num_layers: int = 93, width: int = 7168, *, block_size: int | None = None) -> float:
    """06 → 07: size of the first layer's output in what the last of ``num_layers`` layers reads, relative to
    the whole of it, all layers writing vectors of equal length in random directions.

    In a residual stream it reads their sum: about (num_layers − 1)**-0.5. With ``block_size`` it reads by
    Attention Residuals, with a pseudo-query that points at the first output: 1 if every output is a source of
    its own (``block_size=1``), about block_size**-0.5 if outputs are summed in blocks of that many layers.
    """
    outputs = probes.unit_vectors(num_layers - 1, width, rng=generator(0))
    if block_size is None:
        return (outputs[0].norm() / outputs.sum(dim=0).norm()).item()
    sources = torch.stack([block.sum(dim=0) for block in outputs.split(block_size)])
    site = outputs[0], torch.ones_like(outputs[0])
    weight = source_weights(sources, *site)[0]
    return (weight * outputs[0].norm() / attention_residual(sources, *site).norm()).item()


def weights_for_a_token(chosen_experts: int = 896) -> int:
    """07 → 08: weights of a model of Kimi K3's size that take part in one token, if each of its 92 layers of
    experts uses ``chosen_experts`` of the 896: all in a dense model, 16 in K3. Counted on ``meta``.

    Attention and everything but the routed experts always takes part; the embedding is a look-up and left
    out. Raises ``ValueError`` for a number of experts that is none.
    """
    check_count("chosen_experts", chosen_experts, 0)
    require(chosen_experts <= 896, f"chosen_experts must be at most 896, got {chosen_experts}")
    D, latent_width, F = 7168, 3584, 3072
    kda_options = {"gate_lower_bound": -5.0, "full_rank_gate": True}
    ranks = {"q_lora_rank": 1536, "kv_lora_rank": 512, "output_gate": True}
    dims = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    with torch.device("meta"):
        parts = {
            KimiDeltaAttention(D, 96, 128, **kda_options): 69,
            MultiHeadLatentAttention(D, 96, **ranks, **dims): 24,
            GatedFeedForward(D, 33_792): 1,  # the first layer's
            GatedFeedForward(latent_width, F): 92 * chosen_experts,
            GatedFeedForward(D, 2 * F): 92,  # the two shared experts
            nn.Linear(D, 2 * latent_width, bias=False): 92,  # to the latent width and back
            nn.Linear(D, 896): 92,  # the router and its bias
            RMSNorm(latent_width): 92,
            RMSNorm(D): 2 * 93 + 1,
            AttentionResidual(D): 2 * 93 + 1,
            nn.Linear(D, 163_840, bias=False): 1,  # the head
        }
    return sum(count * accounting.parameters(part) for part, count in parts.items())


def released_bytes(expert_bits: float = 16.0) -> int:
    """08 → 09: bytes of a text model of Kimi K3's size whose routed experts have ``expert_bits`` a weight and
    whose other weights are bfloat16: 16 throughout, or the released 4.25 of MXFP4. Counted on ``meta``."""
    check_positive("expert_bits", expert_bits)
    others = weights_for_a_token(0) + 163_840 * 7168  # and the embedding
    experts = weights_for_a_token(896) - weights_for_a_token(0)
    return others * 2 + round(experts * expert_bits / 8)


def scoreboard_row(
    rung: int,
    name: str,
    rule: MemoryRule,
    *,
    reset: float = 0.0,
    end_decay: torch.Tensor | float = 0.0,
    idle_decay: float = 0.0,
) -> dict:
    """The row of ``evolve.lab.scoreboard`` for a memory: the probes' numbers, K = V = 64, float32 bytes.

    Log-decays, all 0 for a memory without decay: ``reset`` of the token that clears a context, ``end_decay``
    of END in the memory cell, ``idle_decay`` of the tokens that only pass by. A context that 320 writes do
    not clear gives "n/a".
    """
    k = probes.unit_vectors(1, 1024, 64, rng=generator(0))
    state = rule.write(None, plain_writes(k, k))
    tensors = state if isinstance(state, tuple) else (state,)
    size = sum(4 * t.numel() for t in tensors)
    writes = writes_to_clear(rule, reset=reset)
    return {
        "rung": rung,
        "name": name,
        "state_bytes": size,
        "decode_bytes": size,  # a read touches everything that is kept
        "read_back_error": round(random_pairs_error(rule), 3),
        "overwrite_error": round(rewritten_key_error(rule), 3),
        "writes_to_clear": "n/a" if writes is None else writes,
        "memory_cell": round(probes.memory_cell(rule, end_decay).score, 3),
        "retention": round(probes.retention(rule, torch.full((64,), idle_decay), [1024])[0, 0].item(), 3),
    }


def hybrid_row(rung: int = 6, name: str = "MLA hybrid") -> dict:
    """The scoreboard's row of a hybrid: of KDA's state and MLA's latents, the better number each time.

    What a model of both kinds of layer *can* do, then; whether it asks the right one is for training to show.
    "n/a" for the bytes, since a latent belongs to no head: all heads of the layer read the same one.
    """
    state = scoreboard_row(rung, name, kda, reset=-5.0, end_decay=probes.LOCAL_DECAY)
    look_back = scoreboard_row(rung, name, latent())
    row = {"rung": rung, "name": name, "state_bytes": "n/a", "decode_bytes": "n/a"}
    for key in ("read_back_error", "overwrite_error", "writes_to_clear", "memory_cell", "retention"):
        values = [r[key] for r in (state, look_back) if r[key] != "n/a"]
        row[key] = (max if key == "retention" else min)(values)
    return row
