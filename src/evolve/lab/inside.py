"""A look into a trained memory: what its first layer writes, how it decays, what is left of an old context.

Shapes: B sequences, T tokens, HV heads, K key and V value channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from evolve.checks import require
from evolve.decoder import Decoder
from evolve.deltanet import DeltaNet
from evolve.gated_deltanet import GatedDeltaNet, gated_delta_gate, recurrent_gated_delta_rule
from evolve.kda import KimiDeltaAttention
from evolve.memory_rule import group_heads
from evolve.norms import at_least_float32, l2_normalize


class Written(NamedTuple):
    """What a layer does to its state: k [B, T, HV, K], v [B, T, HV, V], log-decay g and beta [B, T, HV]."""

    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


@torch.no_grad()
def first_layer_writes(model: Decoder, input_ids: Tensor) -> Written:
    """Keys, values, log-decays and write strengths of ``model``'s first layer on ``input_ids`` [B, T].

    The layer must be a DeltaNet or a GatedDeltaNet with its convolution; a DeltaNet's g is 0.
    """
    layer = model.layers[0].self_attn
    fits = isinstance(layer, DeltaNet | GatedDeltaNet) and layer.k_conv1d is not None
    require(fits, f"model must start with a convolved (Gated)DeltaNet, got {type(layer).__name__}")
    x = model.layers[0].input_layernorm(model.embed_tokens(input_ids))
    k = layer.k_conv1d(layer.k_proj(x))[0].unflatten(-1, (-1, layer.head_dim))
    v = layer.v_conv1d(layer.v_proj(x))[0].unflatten(-1, (-1, layer.head_v_dim))
    beta = at_least_float32(layer.b_proj(x)).sigmoid()
    g = torch.zeros_like(beta)
    if isinstance(layer, GatedDeltaNet):
        g = gated_delta_gate(layer.a_proj(x), layer.A_log, layer.dt_bias)
    return Written(group_heads(l2_normalize(k), layer.num_v_heads), v, g, beta)


@torch.no_grad()
def energy_left(w: Written, start: int) -> list[float]:
    """What the state still holds of the tokens before ``start``, after each token from there on.

    The rule is linear in the values, so the later tokens act on the old state as they are, with values of
    zero, and what is then in the state is the old context's part alone. Energies ‖S‖², summed over sequences
    and heads, as shares of the first. [T − start + 1]

    A lower bound in a layer with a short convolution: the first few values after ``start`` still hold some of
    the tokens before it, and count here as new.
    """
    T = w.k.shape[1]
    require(0 < start <= T, f"start must be 1 to T = {T}, got {start}")
    v = w.v.clone()
    v[:, start:] = 0

    def run(a: int, b: int, S: Tensor | None) -> Tensor:
        k, v_, g, beta = (x[:, a:b] for x in (w.k, v, w.g, w.beta))
        return recurrent_gated_delta_rule(k, k, v_, g, beta, initial_state=S, output_final_state=True)[1]

    states = [run(0, start, None)]
    for t in range(start, T):
        states.append(run(t, t + 1, states[-1]))
    energy = [S.square().sum().item() for S in states]
    return [e / energy[0] for e in energy]


@torch.no_grad()
def channel_decays(model: Decoder, input_ids: Tensor) -> list[Tensor]:
    """Log-decays g [B, T, HV, K] of every KDA layer of ``model`` on ``input_ids`` [B, T], lowest first.

    Raises ``ValueError`` where the model has none.
    """
    found = []
    layers = [block.self_attn for block in model.layers if isinstance(block.self_attn, KimiDeltaAttention)]
    require(bool(layers), "model must have a layer of KDA, got none")
    hooks = [
        layer.register_forward_pre_hook(lambda module, args: found.append(module.log_decays(args[0])))
        for layer in layers
    ]
    try:
        model(input_ids)
    finally:
        for hook in hooks:
            hook.remove()
    return found
