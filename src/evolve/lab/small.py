"""Small models that differ in their memory alone: what the recall experiments of rungs 2 to 5 compare.

Several mixers in one decoder, each with the same projections and the same short convolution and SiLU on q, k
and v, and an RMSNorm on what is read (the normalised form of linear attention needs none). They differ in the
rule that stores and reads, and softmax attention has no unit keys. What the rules with gates have in
parameters of their own, the feed-forward network gives back: within 1 % at the default sizes.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from evolve.checks import check_count, require
from evolve.decoder import Decoder
from evolve.deltanet import DeltaNet
from evolve.full_attention import softmax_attention
from evolve.gated_deltanet import GatedDeltaNet
from evolve.kda import KimiDeltaAttention
from evolve.lab.accounting import parameters
from evolve.lab.tasks import IGNORE, AssociativeRecall, Batch, accuracy
from evolve.linear_attention import LinearAttention
from evolve.memory_layer import Call, MemoryLayer
from evolve.norms import GatedRMSNorm, RMSNorm, l2_normalize


class ConvAttention(MemoryLayer):
    """Softmax attention on the terms of the other rungs: short convolution, RMSNorm on the output.

    It is there for comparisons of what can be recalled, and takes neither a cache nor padding.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, **sizes: int | None) -> None:
        super().__init__(hidden_size, num_heads, head_dim, **sizes)
        self.o_norm = RMSNorm(self.head_v_dim)

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        require(not call.keep_state, "cache must be None: ConvAttention keeps none")
        require(call.cu_seqlens is None, "attention_mask must be None or all true for ConvAttention")
        return softmax_attention(q, k, v)

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_norm(o)


class UnitKeyLinearAttention(LinearAttention):
    """Linear attention with DeltaNet's unit keys and queries: DeltaNet without the subtraction."""

    silu_without_conv = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        conv_size: int | None = 4,
        **sizes: int | None,
    ) -> None:
        sizes |= {"conv_size": conv_size, "feature_map": None, "normalize": False}
        super().__init__(hidden_size, num_heads, head_dim, **sizes)

    def remember(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return super().remember(x, l2_normalize(q), l2_normalize(k), v, call)


class OutputGatedDeltaNet(DeltaNet):
    """DeltaNet with rung 4's output gate and without its decay: what that gate alone is worth."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, **sizes: int | None) -> None:
        super().__init__(hidden_size, num_heads, head_dim, **sizes)
        self.g_proj = nn.Linear(hidden_size, self.num_v_heads * self.head_v_dim, bias=False)
        self.o_norm = GatedRMSNorm(self.head_v_dim, activation="silu")

    def read_out(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_norm(o, self.g_proj(x).view_as(o))


#: By the names that figures know the mechanisms by.
MIXERS = {
    "softmax_attention": ConvAttention,
    "linear_attention": UnitKeyLinearAttention,
    "linear_attention_elu1": LinearAttention,
    "delta_rule": DeltaNet,
    "delta_rule_output_gate": OutputGatedDeltaNet,
    "gated_delta_rule": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "kda_bounded": partial(KimiDeltaAttention, gate_lower_bound=-5.0),
}


def small_model(
    mixer: str,
    *,
    vocab_size: int,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 2,
    head_dim: int | None = None,
    head_v_dim: int | None = None,
    conv_size: int | None = 4,
    intermediate_size: int = 128,
    seed: int = 0,
) -> Decoder:
    """A decoder with ``mixer`` (a key of ``MIXERS``) in every layer, as large as one with softmax attention.

    ``head_dim`` K and ``head_v_dim`` V default to hidden_size / num_heads. ``intermediate_size`` is that of
    the softmax model; the others get what brings their number of parameters nearest to its (within 1 % at
    the default sizes). Raises ``ValueError`` for an unknown mixer, or where the gates outweigh the budget.
    """
    require(
        isinstance(mixer, str) and mixer in MIXERS, f"mixer must be one of {', '.join(MIXERS)}, got {mixer!r}"
    )
    given = {"hidden_size": hidden_size, "num_heads": num_heads, "num_layers": num_layers}
    given |= {"head_dim": head_dim, "head_v_dim": head_v_dim, "intermediate_size": intermediate_size}
    for name, n in given.items():
        if n is not None:
            check_count(name, n)
    fits = hidden_size >= num_heads
    require(fits, f"num_heads must be at most hidden_size = {hidden_size}, got {num_heads}")
    if conv_size is not None:
        check_count("conv_size", conv_size, 0)
    check_count("seed", seed, 0)
    require(seed < 2**63, f"seed must be below 2**63, got {seed}")
    width = hidden_size // num_heads
    sizes = {
        "head_dim": width if head_dim is None else head_dim,
        "head_v_dim": width if head_v_dim is None else head_v_dim,
        "conv_size": conv_size,
    }

    def build(name: str, inner: int) -> Decoder:
        mixers = [MIXERS[name](hidden_size, num_heads, **sizes) for _ in range(num_layers)]
        return Decoder(mixers, vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=inner)

    with torch.device("meta"):
        budget, spent = (parameters(build(name, intermediate_size)) for name in ("softmax_attention", mixer))
    inner = intermediate_size + round((budget - spent) / (3 * hidden_size * num_layers))
    require(
        inner >= 1, f"intermediate_size must leave room for the gates of {mixer}, got {intermediate_size}"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(mixer, inner)


def recall_exam(exam: Batch) -> Callable[[nn.Module], dict[str, float]]:
    """A ``validate`` for ``train``: the share of the questions of ``exam`` that the model answers right."""
    return lambda model: {"accuracy": accuracy(model(exam.input_ids), exam.targets)}


def rewritten_answers(model: nn.Module, batch: Batch) -> dict[str, float]:
    """How the keys of a batch that were written twice are answered: shares of the latest and the old value.

    ``batch`` is one of ``AssociativeRecall`` with ``rewrites`` and one context. Raises ``ValueError`` where
    no key was written twice.
    """
    ids, answers = batch.input_ids, model(batch.input_ids).argmax(-1)
    first = (ids[:, :, None] == ids[:, None]).float().argmax(-1)  # where the same token came first, [B, T]
    old = ids.gather(1, (first + 1).clamp(max=ids.shape[1] - 1))  # what followed it then
    twice = (batch.targets >= 0) & (old != batch.targets)
    require(bool(twice.any()), "batch must ask for a key that was written twice, got none")
    return {
        name: (answers == value)[twice].double().mean().item()
        for name, value in (("latest", batch.targets), ("old", old))
    }


def void_exam(
    task: AssociativeRecall, n: int, *, last_only: bool = False
) -> Callable[[nn.Module], dict[str, float]]:
    """A ``validate`` for ``train`` where some keys are void: how batch ``n`` of ``task`` is answered.

    "accuracy": the share of all questions that is answered right; "known" and "void": of those for bound and
    for void keys; "stale": the share of void keys that is answered with the value they had last.
    ``last_only`` counts the questions of the last context alone. Raises ``ValueError`` for a task without
    void keys.
    """
    require(task.voids > 0, f"task must have void keys, got voids = {task.voids}")
    batch, T = task(n), task.length
    ids, targets = batch.input_ids, batch.targets
    if last_only:
        last_switch = (ids[0] == task.switch).nonzero()[-1].item()  # at the same place in every sequence
        targets = targets.masked_fill(torch.arange(T) < last_switch, IGNORE)
    is_void, is_asked = targets == task.void, targets != IGNORE
    following = ids.roll(-1, dims=1)
    is_pair = (following >= task.num_keys) & (following < task.blank)  # a key with its value behind it
    same = (ids[:, :, None] == ids[:, None, :]) & is_pair[:, None] & torch.ones(T, T).bool().tril(-1)
    last = (same * torch.arange(T)).argmax(dim=-1)  # where each token was last written, [B, T]
    old = following.gather(1, last)

    def validate(model: nn.Module) -> dict[str, float]:
        answer = model(ids).argmax(dim=-1)
        right = answer == targets
        shares = {"accuracy": right[is_asked], "known": right[is_asked & ~is_void]}
        shares |= {"void": right[is_void], "stale": (answer == old)[is_void]}
        return {name: x.double().mean().item() for name, x in shares.items()}

    return validate
