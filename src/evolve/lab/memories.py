"""Memories as the probes see them: a way to write pairs into a state and a way to read the state.

Seven are ready-made, one for each memory of rungs 1 to 5, one for the normalised form of rung 2 and one for
the latent cache of rung 6; three lines make another one.
Shapes: R repetitions (all at once), N pairs, M queries, K key and V value channels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evolve.checks import require
from evolve.deltanet import recurrent_delta_rule
from evolve.full_attention import softmax_attention
from evolve.gated_deltanet import recurrent_gated_delta_rule
from evolve.kda import recurrent_kda
from evolve.lab.seeds import generator
from evolve.linear_attention import elu1, recurrent_linear_attention


class Writes(NamedTuple):
    """Tokens for a memory: k [R, N, K], v [R, N, V], strength beta [R, N], log-decay g [R, N, K]."""

    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor


@dataclass(frozen=True)
class MemoryRule:
    """A memory as the probes see it; a state of ``None`` is the empty memory.

    ``write(state, writes) -> state`` takes N tokens in order. ``read(state, q) -> o`` reads with
    q [R, M, K], o [R, M, V], and changes nothing. ``decay``: "none", "scalar" (one number a token; the
    channels of g must agree) or "channel". ``strength``: false where beta only says whether to write at all.
    """

    name: str
    write: Callable[[Any, Writes], Any]
    read: Callable[[Any, Tensor], Tensor]
    decay: str = "none"
    strength: bool = True


def _matrix_rule(name: str, run: Callable, decay: str = "none", strength: bool = True) -> MemoryRule:
    """A rule whose state is one matrix S [R, 1, K, V], read by o = Sᵀq."""

    def write(S: Tensor | None, w: Writes) -> Tensor:
        k, v, beta, g = (x[:, :, None] for x in w)  # one head
        return run(k, v, beta, g, initial_state=S, output_final_state=True)[1]

    return MemoryRule(name, write, lambda S, q: q @ S[:, 0], decay, strength)


linear = _matrix_rule(
    "linear attention",
    lambda k, v, beta, g, **kw: recurrent_linear_attention(k, k, v, scale=1.0, **kw),
    strength=False,
)
delta = _matrix_rule(
    "delta rule", lambda k, v, beta, g, **kw: recurrent_delta_rule(k, k, v, beta, scale=1.0, **kw)
)
gated = _matrix_rule(
    "gated delta rule",
    lambda k, v, beta, g, **kw: recurrent_gated_delta_rule(k, k, v, g[..., 0], beta, scale=1.0, **kw),
    "scalar",
)
kda = _matrix_rule(
    "KDA", lambda k, v, beta, g, **kw: recurrent_kda(k, k, v, g, beta, scale=1.0, **kw), "channel"
)


def _stored(w: Writes) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens that write at all. These memories know no strength, only presence: a
    zero key would still take a share of the softmax, or of the normaliser."""
    writes = w.beta.ne(0).any(dim=0)
    return w.k[:, writes], w.v[:, writes]


def _write_normalised(state: tuple[Tensor, Tensor] | None, w: Writes) -> tuple[Tensor, Tensor]:
    k, v = (x[:, :, None] for x in _stored(w))
    options = {"feature_map": "elu1", "normalize": True, "output_final_state": True}
    return recurrent_linear_attention(k, k, v, initial_state=state, **options)[1]


def _read_normalised(state: tuple[Tensor, Tensor], q: Tensor) -> Tensor:
    (S, z), q = state, elu1(q)
    return (q @ S[:, 0]) / (q @ z[:, 0, :, None])


linear_elu1 = MemoryRule("linear attention, elu + 1", _write_normalised, _read_normalised, strength=False)


def softmax(scale: float = 64.0) -> MemoryRule:
    """Softmax attention. ``scale`` is its sharpness: at 1, unit keys hardly stand out from each other."""
    require(math.isfinite(scale), f"scale must be finite, got {scale}")

    def write(state: tuple[Tensor, Tensor] | None, w: Writes) -> tuple[Tensor, Tensor]:
        new = _stored(w)
        return new if state is None else tuple(torch.cat(pair, dim=1) for pair in zip(state, new))

    def read(state: tuple[Tensor, Tensor], q: Tensor) -> Tensor:
        q, k, v = (x[:, :, None] for x in (q, *state))
        return softmax_attention(q, k, v, scale=scale, causal=False)[:, :, 0]

    return MemoryRule("softmax attention", write, read, strength=False)


def latent(scale: float = 64.0) -> MemoryRule:
    """MLA's cache for one head. Of a pair only a latent is kept, c = Wᵀ[k; v] with W = [W_k; W_v] orthogonal,
    K + V numbers; a read never makes keys or values of it: the query goes into the latent space and the
    result out of it. (One head saves nothing. The gain is that any number of heads can read the same c.)
    """
    require(math.isfinite(scale), f"scale must be finite, got {scale}")

    def write(state: tuple[Tensor, Tensor] | None, w: Writes) -> tuple[Tensor, Tensor]:
        k, v = _stored(w)
        n = k.shape[-1] + v.shape[-1]
        W = torch.linalg.qr(torch.randn(n, n, generator=generator(n), dtype=torch.float64)).Q.to(k.dtype)
        c = torch.cat([k, v], dim=-1) @ W
        return (c, W) if state is None else (torch.cat([state[0], c], dim=1), W)

    def read(state: tuple[Tensor, Tensor], q: Tensor) -> Tensor:
        (c, W), K = state, q.shape[-1]
        q, c = (x[:, :, None] for x in (q @ W[:K], c))
        return softmax_attention(q, c, c, scale=scale, causal=False)[:, :, 0] @ W[K:].T

    return MemoryRule("MLA, latent cache", write, read, strength=False)


RULES = (softmax(), linear, linear_elu1, delta, gated, kda, latent())


def plain_writes(k: Tensor, v: Tensor, beta: float = 1.0) -> Writes:
    """Writes of strength ``beta`` without decay."""
    return Writes(k, v, torch.full_like(k[..., 0], beta), torch.zeros_like(k))


def idle(R: int, N: int, K: int, V: int, g: Tensor | float) -> Writes:
    """N tokens that write nothing and let the memory decay by exp(g), g broadcast to [R, N, K]."""
    k, v = torch.zeros(R, N, K, dtype=torch.float64), torch.zeros(R, N, V, dtype=torch.float64)
    return Writes(k, v, k[..., 0], k + g)
