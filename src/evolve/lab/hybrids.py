"""Small hybrids: KDA and MLA in any order, all of one size, and what they recall of long lists.

What the comparisons of rung 6 train. Pairs are those of ``AssociativeRecall``. A state of fixed size may
answer most of them and still be of no use where every digit counts, so four pairs that were written one after
the other also count as the four places of one *number*, which is found if all four answers are right.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from evolve.cache import LayerCache
from evolve.checks import require
from evolve.decoder import Decoder
from evolve.kda import KimiDeltaAttention
from evolve.lab.accounting import parameters
from evolve.lab.seeds import generator
from evolve.lab.tasks import AssociativeRecall, Batch
from evolve.mla import MultiHeadLatentAttention
from evolve.short_conv import ShortConvolution

PLACES = 4  # of a number


@dataclass(frozen=True)
class ShortAndLong(AssociativeRecall):
    """Recall with lists of changing length: batch n has 1, 2, 4, … or ``num_pairs`` pairs, drawn by n alone.

    Short lists teach how to look up at all, long ones fill the memory; a deep stack that only ever sees long
    ones can stay for hundreds of steps with the best answer that needs no look-up.
    """

    shortest: int = 1

    def __call__(self, n: int) -> Batch:
        sizes = [self.num_pairs >> i for i in range(self.num_pairs.bit_length())]
        sizes = [N for N in sizes if self.shortest <= N]
        drawn = sizes[int(torch.randint(len(sizes), (), generator=generator(self.seed, n, 1)))]
        return self.plain(drawn)(n)

    def plain(self, num_pairs: int, **changes: int) -> AssociativeRecall:
        """The task with lists of ``num_pairs`` only."""
        sizes = dataclasses.asdict(self) | {"num_pairs": num_pairs} | changes
        del sizes["shortest"]
        return AssociativeRecall(**sizes)


@torch.no_grad()
def recalled(model: nn.Module, task: AssociativeRecall, n: int) -> Tensor:
    """Which pairs of batch ``n`` are answered right, in the order in which they were written. [B, N] bool

    Raises ``ValueError`` for a task with rewrites, contexts or empty slots, where pairs have no such order.
    """
    N = task.num_pairs
    plain = task.length == 3 * N
    require(plain, "task must be plain: no rewrites, one context, as many slots as pairs")
    batch = task(n)
    right = (model(batch.input_ids).argmax(-1) == batch.targets)[:, 2 * N :]
    keys, questions = batch.input_ids[:, 0 : 2 * N : 2], batch.input_ids[:, 2 * N :]
    asked_at = (questions[:, None] == keys[:, :, None]).float().argmax(-1)  # each pair's question, [B, N]
    return right.gather(1, asked_at)


def whole_numbers(right: Tensor) -> float:
    """Share of numbers that are right in every place. right: [B, N] of ``recalled``, N a multiple of 4."""
    N = right.shape[1]
    require(N % PLACES == 0, f"right must be [B, N] with N a multiple of 4, got {N}")
    return right.unflatten(1, (-1, PLACES)).all(-1).double().mean().item()


@contextmanager
def silenced(model: nn.Module, kind: type[nn.Module]) -> Iterator[None]:
    """Inside the ``with`` every part of ``model`` of the class ``kind``, a mixer or experts, returns zeros.

    Raises ``ValueError`` where the model has no such part.
    """
    parts = [m for m in model.modules() if isinstance(m, kind)]
    require(bool(parts), f"model must have a part of the class {kind.__name__}, got none")
    hooks = [m.register_forward_hook(lambda _, __, out: torch.zeros_like(out)) for m in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def latent_tables(model: Decoder, input_ids: Tensor) -> list[Tensor]:
    """The latents c that each MLA layer of ``model`` makes of ``input_ids`` [B, T], lowest first. [B·T, R]"""
    tables, mixers = [], _mla(model)
    hooks = [m.kv_a_layernorm.register_forward_hook(lambda _, __, c: tables.append(c)) for m in mixers]
    try:
        model(input_ids)
    finally:
        for hook in hooks:
            hook.remove()
    return [c.flatten(0, -2) for c in tables]


@contextmanager
def cut_to(model: Decoder, directions: Sequence[Tensor]) -> Iterator[None]:
    """Inside the ``with`` keys and values of each MLA layer keep only what lies along its ``directions``.

    directions: for each MLA layer, lowest first, orthonormal rows [r, H·(Kn + V)].
    """
    weights = [m.kv_b_proj.weight for m in _mla(model)]
    require(
        len(weights) == len(directions),
        f"directions must be one for each of {len(weights)} MLA layers, got {len(directions)}",
    )
    whole = [W.detach().clone() for W in weights]
    try:
        with torch.no_grad():
            for W, Vh in zip(weights, directions):
                W.copy_(Vh.T @ (Vh @ W))
        yield
    finally:
        with torch.no_grad():
            for W, before in zip(weights, whole):
                W.copy_(before)


def _mla(model: Decoder) -> list[MultiHeadLatentAttention]:
    return [b.self_attn for b in model.layers if isinstance(b.self_attn, MultiHeadLatentAttention)]


class ConvMLA(MultiHeadLatentAttention):
    """MLA of x + convolution(x): the short convolution is its means to see that a value follows a key.

    For comparisons with layers that have one; without a cache.
    """

    def __init__(self, hidden_size: int, num_heads: int, **sizes: int) -> None:
        super().__init__(hidden_size, num_heads, **sizes)
        self.conv1d = ShortConvolution(hidden_size, 4)

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        require(cache is None, "cache must be None: ConvMLA keeps none")
        require(attention_mask is None or bool(attention_mask.all()), "attention_mask must be all true")
        return super().forward(x + self.conv1d(x)[0])


#: What the letters of a layout mean, lowest layer first: "kkkm" is the order of Kimi Linear.
LETTERS = {"k": "KDA", "m": "MLA", "c": "MLA behind a short convolution"}
REFERENCE = "kkkc"  # its number of parameters is everybody's


def small_hybrid(
    layout: str,
    *,
    vocab_size: int,
    hidden_size: int = 64,
    kda_heads: int = 2,
    head_dim: int = 8,
    head_v_dim: int = 16,
    mla_heads: int = 2,
    kv_lora_rank: int = 16,
    mla_head_dim: int = 16,
    shared_dim: int = 8,
    intermediate_size: int = 64,
    seed: int = 0,
) -> Decoder:
    """A decoder with one layer for each letter of ``layout`` (``LETTERS``), all of the same size.

    KDA, with the bounded gate: ``head_dim`` K, ``head_v_dim`` V. MLA: ``kv_lora_rank`` R, ``mla_head_dim``
    Kn = V, ``shared_dim`` Kr.
    ``intermediate_size`` is that of the layout "kkkc", repeated or cut to the same number of layers; the
    others get what brings their number of parameters nearest to its. Raises ``ValueError`` for an unknown
    letter or where the layers outweigh the budget.
    """
    fits = bool(layout) and set(layout) <= set(LETTERS)
    require(fits, f"layout must be made of the letters {', '.join(LETTERS)}, got {layout!r}")
    L = len(layout)
    latent = {
        "kv_lora_rank": kv_lora_rank, "qk_nope_head_dim": mla_head_dim, "qk_rope_head_dim": shared_dim,
        "v_head_dim": mla_head_dim,
    }  # fmt: skip
    make = {
        "k": lambda: KimiDeltaAttention(
            hidden_size, kda_heads, head_dim, head_v_dim=head_v_dim, gate_lower_bound=-5.0
        ),
        "m": lambda: MultiHeadLatentAttention(hidden_size, mla_heads, **latent),
        "c": lambda: ConvMLA(hidden_size, mla_heads, **latent),
    }

    def build(letters: Sequence[str], inner: int) -> Decoder:
        mixers = [make[letter]() for letter in letters]
        return Decoder(mixers, vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=inner)

    with torch.device("meta"):
        reference = (REFERENCE * L)[:L]
        budget, spent = (parameters(build(letters, intermediate_size)) for letters in (reference, layout))
    inner = intermediate_size + round((budget - spent) / (3 * hidden_size * L))
    require(inner >= 1, f"intermediate_size must leave room for {layout}, got {intermediate_size}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(layout, inner)
