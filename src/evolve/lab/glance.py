"""All memories of one K3 at once: what each did on one text, and what is left without it.

A K3 keeps a state in its KDA layers, a list of latents in its MLA layers, the sums of its blocks along depth,
and experts in its weights. ``glance`` records what they did; ``without`` takes one away from a trained model.

Shapes: B sequences, T tokens, H heads, HV value heads, K key channels, M depth sources, k experts a token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from evolve.attention_residuals import AttnResDecoder, PseudoQuery, source_weights
from evolve.balancing import recorded_routing
from evolve.checks import require
from evolve.decoder import Decoder
from evolve.kda import KimiDeltaAttention
from evolve.lab.hybrids import silenced
from evolve.lab.inside import channel_decays
from evolve.mla import MultiHeadLatentAttention
from evolve.moe import Experts


@dataclass(frozen=True)
class Glance:
    """What the memories of a model did on one sequence. Layers are counted from 1.

    decays: log-decays g [T, HV, K] of each KDA layer. look_backs: weights [H, T, T] of each MLA layer, a row
    for each asking token. depth: weights [M, T] of each site, in the order of the forward pass; its name
    says layer and sub-layer. experts, shares: the choices [T, k] of each layer with experts, and how much of
    each is taken.
    """

    decays: dict[int, Tensor]
    look_backs: dict[int, Tensor]
    depth: dict[str, Tensor]
    experts: dict[int, Tensor]
    shares: dict[int, Tensor]

    def half_lives(self, layer: int) -> Tensor:
        """Half-lives in tokens of a KDA layer's channels at every token, ln ½ / g. [T, HV·K]"""
        return (torch.tensor(0.5).log() / self.decays[layer]).flatten(1)


@torch.no_grad()
def glance(model: AttnResDecoder, input_ids: Tensor) -> Glance:
    """Run ``model`` on one sequence, [1, T], and record its memories.

    Raises ``ValueError`` for another batch size, or a model without depth weights or experts.
    """
    fits = input_ids.ndim == 2 and input_ids.shape[0] == 1
    require(fits, f"input_ids must be one sequence, [1, T], got {list(input_ids.shape)}")
    require(isinstance(model, AttnResDecoder), "model must have Attention Residuals to look at")
    require(not model.two_phase, "model must not be two_phase: it then keeps no weights to look at")
    mixers = {l: block.self_attn for l, block in enumerate(model.layers, 1)}
    numbers = {f"layers.{l - 1}.{block.feed_forward_name}.gate": l for l, block in enumerate(model.layers, 1)}
    looks: dict[int, Tensor] = {}
    hooks = [
        mixer.register_forward_pre_hook(lambda m, args, l=l: looks.update({l: look_back(m, args[0])[0]}))
        for l, mixer in mixers.items()
        if isinstance(mixer, MultiHeadLatentAttention)
    ]
    try:
        with recorded_routing(model) as record, _recorded_depth(model) as depth:
            decays = channel_decays(model, input_ids)
    finally:
        for hook in hooks:
            hook.remove()
    kda = [l for l, mixer in mixers.items() if isinstance(mixer, KimiDeltaAttention)]
    routings = {numbers[name]: calls[0] for name, calls in record.items()}
    return Glance(
        {l: g[0] for l, g in zip(kda, decays)},
        looks,
        depth,
        {l: routing.indices for l, routing in routings.items()},
        {l: routing.weights for l, routing in routings.items()},
    )


@torch.no_grad()
def look_back(mixer: MultiHeadLatentAttention, x: Tensor) -> Tensor:
    """Softmax weights [B, H, T, T] of an MLA layer on x [B, T, D], in the expanded form."""
    q, latent = mixer.queries(x), mixer.latents(x)
    c, k_s = latent.split([mixer.kv_lora_rank, mixer.qk_rope_head_dim], dim=-1)
    k_n = mixer.kv_b_proj(c).unflatten(-1, (mixer.num_heads, -1))[..., : mixer.qk_nope_head_dim]
    k = torch.cat([k_n, k_s[:, :, None].expand(-1, -1, mixer.num_heads, -1)], dim=-1)
    scores = torch.einsum("bthc,bshc->bhts", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)


@contextmanager
def _recorded_depth(model: AttnResDecoder) -> Iterator[dict[str, Tensor]]:
    """Within, the weights [M, T] of every site of a forward pass over one sequence, by the site's name."""
    names = [f"{l} {part}" for l in range(1, len(model.layers) + 1) for part in ("attention", "network")]
    names.append("head")
    found: dict[str, Tensor] = {}
    plain = model._mix

    def mix(sources: list[Tensor], parameters: tuple[Tensor, Tensor]) -> Tensor:
        found[names[len(found)]] = source_weights(sources, *parameters, eps=model.eps)[:, 0]
        return plain(sources, parameters)

    model._mix = mix
    try:
        yield found
    finally:
        del model._mix


#: What can be taken from a trained model, and what it then does instead.
MEMORIES = {
    "KDA": "KDA layers return zero: no state",
    "MLA": "MLA layers return zero: no look back",
    "depth": "pseudo-queries are zero: every site reads the mean of its sources",
    "experts": "routed experts return zero: shared experts alone",
}


@contextmanager
def without(model: Decoder, memory: str) -> Iterator[None]:
    """Inside the ``with``, ``model`` lacks that memory (a key of ``MEMORIES``); afterwards it is as before.

    Raises ``ValueError`` for an unknown one, and where the model has nothing of the kind.
    """
    require(memory in MEMORIES, f"memory must be one of {', '.join(MEMORIES)}, got {memory!r}")
    kinds = {"KDA": KimiDeltaAttention, "MLA": MultiHeadLatentAttention, "experts": Experts}
    with _zero_queries(model) if memory == "depth" else silenced(model, kinds[memory]):
        yield


@contextmanager
def _zero_queries(model: nn.Module) -> Iterator[None]:
    queries = [m.weight for m in model.modules() if isinstance(m, PseudoQuery)]
    require(bool(queries), "model must have pseudo-queries, got none")
    kept = [w.detach().clone() for w in queries]
    try:
        with torch.no_grad():
            for w in queries:
                w.zero_()
        yield
    finally:
        with torch.no_grad():
            for w, before in zip(queries, kept):
                w.copy_(before)
