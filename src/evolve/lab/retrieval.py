"""Exact retrieval: names with strings of digits in a long text, and small hybrids to look them up with.

A fact that must come back digit by digit, such as a telephone number, is what a state of fixed size is worst
at. N names are written, each with its digits; later some of the names are asked, and every digit counts::

    anna 4 1 7   bert 0 0 2   ~ ~   carl 9 3 3   ~     bert 0 0 2 anna 4 1 7        inputs
    .    . . .   .    . . .   . .   .    . . .   .     0    0 2 . 4    1 7 .        targets, -100 at the dots
    1 + digits a string, filler between them           1 + digits a question

While a question is answered the model reads its own earlier digits, right ones in training and in the exam: a
string is found if all its digits are right, which is when greedy decoding would give it back whole.

Token ids: names, then the ten digits, then filler.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolve.cache import LayerCache
from evolve.checks import check_count, require
from evolve.decoder import Decoder
from evolve.kda import KimiDeltaAttention
from evolve.lab.accounting import parameters
from evolve.lab.seeds import generator
from evolve.lab.tasks import IGNORE, Batch
from evolve.mla import MultiHeadLatentAttention
from evolve.short_conv import ShortConvolution


@dataclass(frozen=True)
class DigitStrings:
    """Sizes of the task; ``task(n)`` is batch n, a function of the fields and of n alone."""

    num_strings: int = 16  # N, names with their digits
    digits: int = 3  # of a string
    asked: int = 8  # names that are asked at the end, all different
    filler: int = 0  # tokens without meaning, spread between the strings
    num_names: int = 64
    num_fillers: int = 16  # different filler tokens
    batch_size: int = 32  # B
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_strings", "digits", "asked", "num_names", "num_fillers", "batch_size"):
            check_count(name, getattr(self, name), 1)
        for name in ("filler", "seed"):
            check_count(name, getattr(self, name), 0)
        N = self.num_strings
        require(N <= self.num_names, f"num_names must be at least num_strings = {N}, got {self.num_names}")
        require(self.asked <= N, f"asked must be at most num_strings = {N}, got {self.asked}")

    @property
    def vocab_size(self) -> int:
        return self.num_names + 10 + self.num_fillers

    @property
    def first_question(self) -> int:
        """The position of the first name that is asked."""
        return self.num_strings * (1 + self.digits) + self.filler

    @property
    def length(self) -> int:
        """T, tokens in a sequence."""
        return self.first_question + self.asked * (1 + self.digits)

    def __call__(self, n: int) -> Batch:
        """Batch ``n`` of the stream."""
        check_count("n", n, 0)
        B, N, D, rng = self.batch_size, self.num_strings, self.digits, generator(self.seed, n)
        names = torch.rand(B, self.num_names, generator=rng).argsort(1)[:, :N]
        strings = torch.randint(10, (B, N, D), generator=rng) + self.num_names
        entries = torch.cat([names[..., None], strings], dim=-1)  # [B, N, 1 + D]
        order = torch.rand(B, N, generator=rng).argsort(1)[:, : self.asked]
        questions = entries.gather(1, order[..., None].expand(-1, -1, 1 + D))
        inputs = torch.cat([self._spread(entries, rng), questions.flatten(1)], dim=1)
        answers = F.pad(questions[..., 1:], (0, 1), value=IGNORE).flatten(1)
        return Batch(inputs, F.pad(answers, (self.first_question, 0), value=IGNORE))

    def _spread(self, entries: Tensor, rng: torch.Generator) -> Tensor:
        """Entries [B, N, 1 + D] in their order, whole, with the filler in random places between them."""
        B, N, width = entries.shape
        if not self.filler:
            return entries.flatten(1)
        pieces = torch.rand(B, N + self.filler, generator=rng).argsort(1) < N  # which piece is an entry
        sizes = 1 + pieces * (width - 1)
        starts = sizes.cumsum(1) - sizes
        text = torch.randint(self.num_fillers, (B, N * width + self.filler), generator=rng)
        text += self.num_names + 10
        at = starts[pieces].view(B, N, 1) + torch.arange(width)
        return text.scatter(1, at.flatten(1), entries.flatten(1))


def found(model: nn.Module, task: DigitStrings, n: int) -> tuple[Tensor, Tensor]:
    """Which asked strings of batch n come back whole, and how far back each was. Both [B, asked].

    The distance is the number of tokens between the name in the text and the same name as a question.
    """
    batch, start, width = task(n), task.first_question, 1 + task.digits
    right = model(batch.input_ids).argmax(-1) == batch.targets
    whole = right[:, start:].unflatten(1, (task.asked, width))[..., :-1].all(-1)
    asked_at = torch.arange(start, task.length, width)
    text, names = batch.input_ids[:, :start], batch.input_ids[:, asked_at]
    written_at = (text[:, None] == names[..., None]).float().argmax(-1)
    return whole, asked_at - written_at


class ConvMLA(MultiHeadLatentAttention):
    """MLA behind a short convolution of its input: the means to see that a digit follows a name.

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
        return super().forward(self.conv1d(x)[0])


#: What the letters of a layout mean, lowest layer first: "kkkm" is the hybrid of Kimi Linear.
LETTERS = {"k": "KDA", "m": "MLA", "c": "MLA behind a short convolution"}
REFERENCE = "kkkm"  # its number of parameters is everybody's


def small_hybrid(
    layout: str,
    *,
    vocab_size: int,
    hidden_size: int = 64,
    num_heads: int = 2,
    head_dim: int = 8,
    kv_lora_rank: int = 16,
    mla_head_dim: int = 16,
    shared_dim: int = 8,
    intermediate_size: int = 128,
    seed: int = 0,
) -> Decoder:
    """A decoder with one layer for each letter of ``layout`` (``LETTERS``), all of the same size.

    ``head_dim`` K = V of KDA. ``kv_lora_rank`` R, ``mla_head_dim`` Kn = V and ``shared_dim`` Kr of MLA.
    ``intermediate_size`` is that of the layout "kkkm", repeated or cut to the same number of layers; the
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
        "k": lambda: KimiDeltaAttention(hidden_size, num_heads, head_dim),
        "m": lambda: MultiHeadLatentAttention(hidden_size, num_heads, **latent),
        "c": lambda: ConvMLA(hidden_size, num_heads, **latent),
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
