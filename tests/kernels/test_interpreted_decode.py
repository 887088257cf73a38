"""The fused decode step in Triton's interpreter against the layer's own operations."""

import pytest
import torch

pytest.importorskip("triton")

from evolve.backends import set_backend
from evolve.kda import KimiDeltaAttention
from evolve.kimi_linear import KimiLinear, KimiLinearConfig
from tests.kernels.memory_guard import Guard, guarded

K3 = {"gate_lower_bound": -5.0, "full_rank_gate": True}
LAYERS = {
    "K3": (2, 16, K3),
    "Kimi Linear": (2, 20, {}),
    "grouped": (2, 12, K3 | {"num_v_heads": 6, "head_v_dim": 24}),
    "wide": (1, 130, K3 | {"head_v_dim": 20}),
    "short": (2, 16, K3 | {"conv_size": 2}),
}


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_prefill_and_decode_equal_the_layer(name: str, launches) -> None:
    """Three tokens after a prompt: outputs, states and histories; none written beyond its tensor."""
    H, K, options = LAYERS[name]
    layer = KimiDeltaAttention(24, H, K, **options)
    layer.A_log.normal_()
    layer.o_norm.weight.normal_()
    x = torch.randn(3, 8, 24)
    caches = {"torch": {}, "triton": {}}
    outputs = {}
    for backend, cache in caches.items():
        layer.backend = "torch"
        y = [layer(x[:, :5], cache)]
        layer.backend = backend
        for t in range(5, 8):
            for entry in list(cache) if backend == "triton" else []:
                cache[entry] = guarded(cache[entry])
            with Guard() as guard:
                y.append(layer(x[:, t : t + 1], cache))
            if backend == "triton":
                guard.check()
        outputs[backend] = torch.cat(y, 1)
    assert launches == {"kda_decode_kernel": 3}
    torch.testing.assert_close(outputs["triton"], outputs["torch"], rtol=2e-5, atol=2e-6)
    for entry, want in caches["torch"].items():
        torch.testing.assert_close(caches["triton"][entry], want, rtol=2e-5, atol=2e-6)


@torch.no_grad()
def test_softplus_keeps_the_digits_of_slow_decays() -> None:
    """A raw gate of −12 decays by 6e-6 a token: within float32 of the exact layer, not of zero."""
    layer = KimiDeltaAttention(8, 1, 16)
    layer.f_a_proj.weight.zero_()
    layer.dt_bias.copy_(torch.linspace(-14, 14, 16))
    layer.A_log.zero_()
    cache, S = {}, torch.full((1, 1, 16, 16), 1.0)
    layer(torch.randn(1, 3, 8), cache)
    layer.backend, cache["state"] = "triton", S
    layer.b_proj.weight.copy_(torch.full_like(layer.b_proj.weight, -20.0))  # β = 0 for a positive input
    layer(torch.ones(1, 1, 8), cache)
    want = torch.exp(-torch.nn.functional.softplus(torch.linspace(-14, 14, 16).double()))
    torch.testing.assert_close(cache["state"][0, 0, :, 0].double(), want, rtol=1e-6, atol=0)


@torch.no_grad()
def test_when_the_layer_decodes_in_a_kernel(launches) -> None:
    """Only one token a row, with a filled cache and without gradient; padding goes the other way."""
    layer, x = KimiDeltaAttention(8, 1, 16, backend="triton", **K3), torch.randn(2, 1, 8)
    cache, convolutions = {}, {"short_conv_kernel": 3}
    layer(x, cache)
    assert launches == convolutions  # the first token has no state yet
    launches.clear()
    layer(x, cache, torch.tensor([[True], [False]]))
    assert launches == convolutions
    launches.clear()
    layer(x, cache, torch.tensor([[True], [True]]))
    assert launches == {"kda_decode_kernel": 1}
    launches.clear()
    with torch.enable_grad():
        assert layer(x, dict(cache)).requires_grad
    assert launches == convolutions
    launches.clear()
    set_backend(layer, "torch")(x, cache)
    assert launches == {}


@torch.no_grad()
def test_a_model_decodes_with_the_kernel(launches) -> None:
    """Through the models' own cache: the logits of every further token are the PyTorch form's."""
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 1, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    sizes |= {"v_head_dim": 8, "linear_num_heads": 2, "linear_head_dim": 16, "num_experts": 2}
    sizes |= {"num_experts_per_token": 1, "moe_intermediate_size": 8}
    model = KimiLinear(KimiLinearConfig(**sizes)).eval()
    ids = torch.randint(20, (2, 6))
    want = model(ids)
    memories = [m for m in model.modules() if isinstance(m, KimiDeltaAttention)]
    cache = model.new_cache(2)
    got = [model(ids[:, :4], cache)]
    for memory in memories:
        memory.backend = "triton"
    got += [model(ids[:, t : t + 1], cache) for t in (4, 5)]
    assert launches == {"kda_decode_kernel": 2 * len(memories)}
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-4)
