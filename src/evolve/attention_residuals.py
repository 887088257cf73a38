"""Rung 7, Attention Residuals (AttnRes): a layer asks for what earlier layers made of the token.

The problem: in a residual stream every layer reads one sum, in which each earlier output is one term of
many, and fades as the sum grows.
What changed: the input of a sub-layer is a softmax-weighted mix of the outputs before it, with a learned
pseudo-query w for every site (arXiv 2603.15031, eqs. 2 to 4):

    k_i = v_i / sqrt(mean v_i² + eps)      s_i = Σ_c γ_c w_c k_ic      h = Σ_i softmax(s)_i v_i

Keys are normed, values are not; there is no temperature. w and γ are parameters and no functions of the
token, so the reads of many sites can be done at once. At first w = 0, and every site reads the mean.

*Full*: the sources are the embedding and each sub-layer's output. *Block*: outputs are summed within blocks
of ``block_size`` sub-layers; the sources are the embedding, the sums of finished blocks, and the sum so far
of the present one. ``block_size = 1`` is the full form. (Kimi K3 counts 12 decoder layers: 24 sub-layers.)

Shapes: v, sources [M, ..., D]; h [..., D]; query w, gain γ [D]; M sources, S sites.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from evolve.cache import Cache, LayerCache
from evolve.checks import check_count, check_flag, check_float, check_shape, require
from evolve.decoder import Decoder, DecoderLayer
from evolve.memory_rule import check_backend, runs_on_triton
from evolve.norms import RMSNorm, at_least_float32


def attention_residual(
    sources: Tensor | Sequence[Tensor],
    query: Tensor,
    gain: Tensor,
    *,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """The mix of M sources at one site (Attention Residuals, eqs. 2 to 4).

    Args:
        sources: [M, ..., D], or M tensors [..., D]. query, gain: [D].
        backend: ``"torch"``, ``"triton"``, or ``None``: Triton on a GPU where it is installed. The kernel
            wants its sources in one piece: they are copied for it.
    Returns: [..., D] in the sources' dtype (the widest, if they differ); computed in float32 at least.
    Raises: ValueError on no source or shapes that do not fit.
    """
    sources = _checked(sources, query, gain, eps)
    check_backend(backend)
    if _in_a_kernel(backend, sources, (query * gain)[None]):
        from evolve_kernels.attention_residuals import depth_read

        dtype = sources[0].dtype
        return depth_read(torch.stack(sources), (query * gain)[None], eps=eps, dtype=dtype)[0][0]
    read = read_sources(sources, (query * gain)[None], eps)
    return (read.o[0] / read.l[0, ..., None]).to(sources[0].dtype)


def source_weights(
    sources: Tensor | Sequence[Tensor], query: Tensor, gain: Tensor, *, eps: float = 1e-5
) -> Tensor:
    """softmax(s) [M, ...], what a site gives to each of its M sources (for looking at it).

    Arguments and errors as ``attention_residual``.
    """
    sources = _checked(sources, query, gain, eps)
    scores = [_scores(at_least_float32(v), (query * gain)[None], eps)[0] for v in sources]
    return torch.stack(scores).softmax(0)


class Read(NamedTuple):
    """Softmax-weighted sums of S sites that have not been divided yet, so that more sources can be added.

    o [S, ..., D] = Σ e^(s_i − m) v_i;  m [S, ...] = max s_i;  l [S, ...] = Σ e^(s_i − m).
    """

    o: Tensor
    m: Tensor
    l: Tensor


def read_sources(sources: Sequence[Tensor], folded: Tensor, eps: float) -> Read:
    """S sites read the same sources: each source is read once. folded: γ·w of every site, [S, D]."""
    sources = [at_least_float32(v) for v in sources]
    scores = torch.stack([_scores(v, folded, eps) for v in sources], dim=1)  # [S, M, ...]
    m = scores.amax(1)
    p = (scores - m[:, None]).exp()
    if len(folded) == 1:  # a lone site needs no copy of its sources
        o = sum(p[:, i, ..., None] * v for i, v in enumerate(sources))
    else:
        o = torch.einsum("sm...,m...d->s...d", p, torch.stack(sources))
    return Read(o, m, p.sum(1))


def add_source(read: Read, v: Tensor, folded: Tensor, eps: float) -> Read:
    """One source more for every site, by the online softmax: what was read before is rescaled, not redone."""
    v = at_least_float32(v)
    s = _scores(v, folded, eps)  # [S, ...]
    m = torch.maximum(read.m, s)
    old, new = (read.m - m).exp(), (s - m).exp()
    return Read(old[..., None] * read.o + new[..., None] * v, m, old * read.l + new)


def two_phases(
    blocks: Sequence[Tensor], folded: Tensor, eps: float, *, backend: str | None = None
) -> list[Callable[[Tensor | None], Tensor]]:
    """Phase 1 for all sites of a block at once; of each site its phase 2, a function of the sum so far.

    Args: blocks: M finished blocks [..., D]. folded: γ·w of the S sites, [S, D]. backend: as in
        ``attention_residual``.
    Returns: for every site mix(p) -> h [..., D] in the first block's dtype, with p [..., D] among the sources
        or, if it is ``None``, without.
    """
    dtype = blocks[0].dtype
    if _in_a_kernel(backend, blocks, folded):
        from evolve_kernels.attention_residuals import depth_read
        from evolve_kernels.attention_residuals_add import depth_add

        widest = reduce(torch.promote_types, (v.dtype for v in blocks))
        reads = depth_read(torch.stack([v.to(widest) for v in blocks]), folded, eps=eps)

        def mix(h: Tensor, lse: Tensor, f: Tensor, p: Tensor | None) -> Tensor:
            return h.to(dtype) if p is None else depth_add(h, lse, p, f, eps=eps, dtype=dtype)

        return [partial(mix, *site) for site in zip(*(x.unbind() for x in reads), folded.unbind())]
    reads = read_sources(blocks, folded, eps)

    def mix_read(j: int, p: Tensor | None) -> Tensor:
        read = Read(*(x[j : j + 1] for x in reads))
        if p is not None:
            read = add_source(read, p, folded[j : j + 1], eps)
        return (read.o[0] / read.l[0, ..., None]).to(dtype)

    return [partial(mix_read, j) for j in range(len(folded))]


def _in_a_kernel(backend: str | None, sources: Sequence[Tensor], folded: Tensor) -> bool:
    """Whether the kernels read these sources: asked for by name they insist, else they take what fits."""
    if not runs_on_triton(backend, (*sources, folded)):
        return False
    from evolve_kernels import attention_residuals, attention_residuals_add

    fits = attention_residuals.fits(len(sources), len(folded))
    return backend == "triton" or (fits and folded.shape[1] <= attention_residuals_add.WIDEST)


def _scores(v: Tensor, folded: Tensor, eps: float) -> Tensor:
    """s = γ·w·v / sqrt(mean v² + eps), [S, ...], for one source v [..., D].

    In float32 the squares of numbers above about 1.8e19 overflow: such a source gets a key of zeros.
    """
    inverse_size = (v.square().mean(-1) + eps).rsqrt()
    return torch.einsum("...d,sd->s...", v, folded.to(v.dtype)) * inverse_size


def _checked(sources: Tensor | Sequence[Tensor], query: Tensor, gain: Tensor, eps: float) -> list[Tensor]:
    """The sources as a list, if they, a site's parameters and eps fit each other."""
    given = isinstance(sources, Tensor | list | tuple)
    require(given, f"sources must be a tensor [M, ..., D] or a list of tensors, got {type(sources).__name__}")
    sources = list(sources)
    require(len(sources) > 0, "sources must hold at least one tensor, got none")
    for v in sources:
        check_float("sources", v)
        fits = v.ndim >= 1 and v.shape == sources[0].shape
        require(fits, f"sources must have one shape [..., D], got {[list(v.shape) for v in sources]}")
    for name, x in (("query", query), ("gain", gain)):
        check_float(name, x)
        check_shape(name, x, D=sources[0].shape[-1])
    _check_eps(eps)
    dtype = reduce(torch.promote_types, (v.dtype for v in sources))  # they differ under autocast
    return [v.to(dtype) for v in sources]


def _check_eps(eps: float) -> None:
    fits = isinstance(eps, int | float) and not isinstance(eps, bool) and 0 <= eps < math.inf
    require(fits, f"eps must be finite and >= 0, got {eps!r}")


class DepthMemory:
    """What a token has been turned into so far: finished blocks, and the sum of the present one.

    ``before(i)`` opens sub-layer i: the first of a block moves the finished sum to the sources, and the sum
    starts again from nothing (not from zero plus the embedding). ``add`` takes a sub-layer's output in.
    """

    def __init__(self, embedding: Tensor, block_size: int) -> None:
        check_float("embedding", embedding)
        check_count("block_size", block_size)
        self.block_size = block_size
        self.blocks: list[Tensor] = []
        self.partial: Tensor | None = embedding

    def before(self, i: int) -> None:
        if i % self.block_size == 0:
            self.blocks.append(self.partial)
            self.partial = None

    def add(self, output: Tensor) -> None:
        self.partial = output if self.partial is None else self.partial + output

    @property
    def sources(self) -> list[Tensor]:
        return self.blocks if self.partial is None else [*self.blocks, self.partial]


class PseudoQuery(nn.Linear):
    """w of one site as the checkpoints keep it, [1, D]; zero at first: stability requires it."""

    def __init__(self, hidden_size: int) -> None:
        check_count("hidden_size", hidden_size)
        super().__init__(hidden_size, 1, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class AttentionResidual(nn.Module):
    """One site: its pseudo-query and the gain of its keys. sources [M, ..., D] -> [..., D].

    ``backend``: as in ``attention_residual``.
    """

    def __init__(self, hidden_size: int, *, eps: float = 1e-5, backend: str | None = None) -> None:
        check_count("hidden_size", hidden_size)
        _check_eps(eps)
        check_backend(backend)
        super().__init__()
        self.backend = backend
        add_site(self, "res", hidden_size, eps)

    def forward(self, sources: Tensor | Sequence[Tensor]) -> Tensor:
        return attention_residual(sources, *site(self, "res"), eps=self.res_norm.eps, backend=self.backend)


def add_site(module: nn.Module, name: str, hidden_size: int, eps: float) -> None:
    """Give a module the two parameters of a site under the checkpoints' names, NAME_norm and NAME_proj."""
    module.add_module(f"{name}_norm", RMSNorm(hidden_size, eps=eps))
    module.add_module(f"{name}_proj", PseudoQuery(hidden_size))


def site(module: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """Query and gain [D] of a site that ``add_site`` made."""
    return getattr(module, f"{name}_proj").weight[0], getattr(module, f"{name}_norm").weight


class AttnResLayer(DecoderLayer):
    """A decoder layer whose two sub-layers each read a mix of their own, and do not add to what they read."""

    SITES = ("self_attention_res", "mlp_res")

    def __init__(self, mixer: nn.Module, feed_forward: nn.Module, hidden_size: int, norm_eps: float) -> None:
        super().__init__(mixer, feed_forward, hidden_size, norm_eps)
        for name in self.SITES:
            add_site(self, name, hidden_size, norm_eps)

    def sublayers(self, cache: LayerCache | None, attention_mask: Tensor | None) -> Iterator[Callable]:
        """Attention and feed-forward, each from a mix h [B, T, D] to its output."""
        yield lambda h: self.self_attn(self.input_layernorm(h), cache, attention_mask)
        yield lambda h: self.feed_forward(self.post_attention_layernorm(h))


class AttnResDecoder(Decoder):
    """``Decoder`` with Attention Residuals in the place of the residual stream, around any mixers.

    Args:
        block_size: sub-layers a block; 1 is the full form.
        two_phase: read the finished blocks once for all sites of a block (the same function).
        Others as ``Decoder``. The attribute ``backend`` is that of ``attention_residual``.
    """

    layer_class = AttnResLayer

    def __init__(
        self,
        mixers: Sequence[nn.Module],
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        block_size: int,
        two_phase: bool = False,
        norm_eps: float = 1e-5,
        feed_forwards: Sequence[nn.Module | None] | None = None,
    ) -> None:
        check_count("block_size", block_size)
        check_flag("two_phase", two_phase)
        super().__init__(
            mixers,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            norm_eps=norm_eps,
            feed_forwards=feed_forwards,
        )
        self.block_size, self.two_phase, self.eps = block_size, two_phase, norm_eps
        self.backend: str | None = None
        add_site(self, "output_attn_res", hidden_size, norm_eps)

    def run_layers(self, x: Tensor, cache: Cache | None, attention_mask: Tensor | None) -> Tensor:
        """What the last norm reads, [B, T, D], from the embedding x."""
        memory, run = (
            DepthMemory(x, self.block_size),
            self.run_two_phase if self.two_phase else self.run_plain,
        )
        run(memory, list(self._sublayers(cache, attention_mask)))
        return self._mix(memory.sources, site(self, "output_attn_res"))

    def run_plain(self, memory: DepthMemory, sublayers: list[tuple[tuple, Callable]]) -> None:
        """The definition: every site reads all of its sources."""
        for i, (parameters, sublayer) in enumerate(sublayers):
            memory.before(i)
            memory.add(sublayer(self._mix(memory.sources, parameters)))

    def run_two_phase(self, memory: DepthMemory, sublayers: list[tuple[tuple, Callable]]) -> None:
        """The same with less to read: queries are no functions of the token, so a block's sites read the
        finished blocks together, before any of them runs, and later add the sum so far one by one."""
        for start in range(0, len(sublayers), self.block_size):
            memory.before(start)
            block = sublayers[start : start + self.block_size]
            folded = torch.stack([query * gain for (query, gain), _ in block])
            mixes = two_phases(memory.blocks, folded, self.eps, backend=self.backend)  # phase 1
            for mix, (_, sublayer) in zip(mixes, block):
                memory.add(sublayer(mix(memory.partial)))  # phase 2

    def _sublayers(self, cache: Cache | None, attention_mask: Tensor | None) -> Iterator[tuple]:
        for l, layer in enumerate(self.layers):
            slot = cache.layers[l] if cache is not None else None
            for name, sublayer in zip(layer.SITES, layer.sublayers(slot, attention_mask)):
                yield site(layer, name), sublayer

    def _mix(self, sources: list[Tensor], parameters: tuple[Tensor, Tensor]) -> Tensor:
        if len(sources) == 1:  # the first site has nothing to choose from, and its query no effect
            return sources[0]
        return attention_residual(sources, *parameters, eps=self.eps, backend=self.backend)
