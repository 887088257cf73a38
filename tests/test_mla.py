"""Multi-head latent attention: expanded = absorbed, cached = whole, padded, packed, and transformers."""

import math
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evolve.cache import Cache
from evolve.mla import MultiHeadLatentAttention, absorbed_mla, expanded_mla
from evolve.norms import rms_norm
from tests.oracles import GOLDENS, transformers_model

SIZES = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
LAYERS = {
    "kimi-linear": {},
    "k3": {"q_lora_rank": 7, "output_gate": True},
    "gate only": {"output_gate": True},
    "no shared part": {"qk_rope_head_dim": 0},
    "shared part only": {"qk_nope_head_dim": 0},
    "wide latent": {"kv_lora_rank": 40},
    "narrow latent": {"kv_lora_rank": 1},
}
every_layer = pytest.mark.parametrize("name", LAYERS)
both_forms = pytest.mark.parametrize("form", [expanded_mla, absorbed_mla])


def build(name: str, dtype: torch.dtype = torch.float64) -> MultiHeadLatentAttention:
    layer = MultiHeadLatentAttention(20, 3, **SIZES | LAYERS[name])
    for weight in layer.parameters():
        nn.init.normal_(weight, 0.0, 0.4)
    return layer.to(dtype)


def operands(B: int, T: int, S: int, H: int = 3) -> list[torch.Tensor]:
    """q [B, T, H, 6 + 4], latent [B, S, 10 + 4], kv_b [H·(6 + 5), 10] in float64."""
    shapes = [(B, T, H, 10), (B, S, 14), (H * 11, 10)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def by_hand(q, latent, kv_b, scale=10**-0.5):
    """The definition, one head, query and key after the other."""
    (B, T, H, _), S = q.shape, latent.shape[1]
    o = torch.zeros(B, T, H, 5, dtype=q.dtype)
    W = kv_b.view(H, 11, 10)
    for b in range(B):
        for h in range(H):
            k_n, v = latent[b, :, :10] @ W[h, :6].T, latent[b, :, :10] @ W[h, 6:].T
            for t in range(T):
                n = S - T + t + 1
                scores = k_n[:n] @ q[b, t, h, :6] + latent[b, :n, 10:] @ q[b, t, h, 6:]
                o[b, t, h] = (scale * scores).softmax(0) @ v[:n]
    return o


def same(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


@both_forms
@pytest.mark.parametrize(("B", "T", "S"), [(2, 5, 5), (1, 1, 9), (3, 4, 11), (2, 1, 1)])
def test_both_forms_are_the_definition(form, B, T, S):
    q, latent, kv_b = operands(B, T, S)
    same(form(q, latent, kv_b), by_hand(q, latent, kv_b), 1e-12)
    same(form(q, latent, kv_b, scale=0.3), by_hand(q, latent, kv_b, 0.3), 1e-12)


def test_the_forms_have_the_same_gradients():
    found = []
    for form in (expanded_mla, absorbed_mla):
        torch.manual_seed(0)
        inputs = [x.requires_grad_() for x in operands(2, 4, 9)]
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[0, :3] = False
        found.append(torch.autograd.grad(form(*inputs, key_mask=mask).square().sum(), inputs))
    for a, b in zip(*found):
        same(a, b)
        assert a.abs().max() > 0.1


@both_forms
def test_hidden_keys_do_not_matter_and_who_sees_none_reads_zero(form):
    q, latent, kv_b = operands(2, 6, 6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2], mask[1, 3] = False, False
    o = form(q, latent.masked_fill(~mask[..., None], float("nan")), kv_b, key_mask=mask)
    assert torch.equal(o[0, :2], torch.zeros(2, 3, 5, dtype=torch.float64))
    same(o[0, 2:], form(q[:1, 2:], latent[:1, 2:], kv_b)[0])
    real = mask[1]
    same(o[1, real], form(q[1:, real], latent[1:, real], kv_b)[0])


@both_forms
def test_packed_rows_equal_separate_rows(form):
    q, latent, kv_b = operands(1, 12, 12)
    ends = torch.tensor([0, 3, 3, 8, 12])
    packed = form(q, latent, kv_b, cu_seqlens=ends)
    for a, b in pairwise(ends.tolist()):
        if b > a:
            assert torch.equal(packed[:, a:b], form(q[:, a:b], latent[:, a:b], kv_b))
    empty = form(q[:, :0], latent[:, :0], kv_b, cu_seqlens=torch.tensor([0, 0]))
    assert empty.shape == (1, 0, 3, 5)


@every_layer
@pytest.mark.parametrize("cuts", [(0, 30), (0, 1, 2, 3, 30), (0, 11, 29, 30), (0, 5, 5, 30)])
def test_cached_in_any_pieces_equals_the_full_pass(name, cuts):
    layer, x = build(name), torch.randn(2, 30, 20, dtype=torch.float64)
    cache, pieces = Cache(1, 2), []
    for a, b in pairwise(cuts):
        pieces.append(layer(x[:, a:b], cache.layers[0]))
        cache.advance(b - a, None)
    same(torch.cat(pieces, 1), layer(x))
    assert cache.nbytes == 2 * 30 * (layer.kv_lora_rank + layer.qk_rope_head_dim) * 8


@every_layer
@pytest.mark.parametrize("absorb", [False, True])
def test_the_layer_does_not_depend_on_the_form(name, absorb, monkeypatch):
    layer, x = build(name), torch.randn(2, 12, 20, dtype=torch.float64)
    whole = layer(x)
    monkeypatch.setattr(layer, "absorbing_is_cheaper", lambda T, S: absorb)
    cache = Cache(1, 2)
    first = layer(x[:, :9], cache.layers[0])
    cache.advance(9, None)
    same(torch.cat([first, layer(x[:, 9:], cache.layers[0])], 1), whole)


@every_layer
@pytest.mark.parametrize("side", ["left", "right", "holes", "an empty row"])
def test_padding_never_matters(name, side):
    layer, mask = build(name), torch.ones(3, 20, dtype=torch.bool)
    if side == "holes":
        mask[:, [0, 3, 4, 19]] = False
    elif side == "an empty row":
        mask[0] = False
    else:
        mask[0, slice(9) if side == "left" else slice(11, None)] = False
    x = torch.randn(3, 20, 20, dtype=torch.float64).masked_fill(~mask[..., None], float("nan"))
    cache, seen, pieces = Cache(1, 3), mask[:, :0], []
    for a, b in pairwise((0, 7, 8, 20)):
        pieces.append(layer(x[:, a:b], cache.layers[0], mask[:, a:b]))
        seen = torch.cat([seen, mask[:, a:b]], 1)
        cache.advance(b - a, seen)
    y = torch.cat(pieces, 1)
    assert torch.equal(y[~mask], torch.zeros_like(y[~mask]))
    for row in range(3):
        same(y[row, mask[row]], layer(x[row, mask[row]][None])[0])


@every_layer
def test_causal_and_every_weight_learns(name):
    layer, x = build(name), torch.randn(1, 16, 20, dtype=torch.float64)
    changed = torch.cat([x[:, :9], torch.randn(1, 7, 20, dtype=torch.float64)], 1)
    same(layer(x)[:, :9], layer(changed)[:, :9], 1e-13)
    layer(x).square().sum().backward()
    for weight_name, weight in layer.named_parameters():
        assert weight.grad.isfinite().all(), weight_name
        assert weight.grad.abs().max() > 0, weight_name


def test_without_the_order_that_kda_supplies_it_sees_a_set():
    """No positional encoding: shuffling what came before the last token changes nothing for it."""
    layer, x = build("k3"), torch.randn(1, 16, 20, dtype=torch.float64)
    shuffled = torch.cat([x[:, torch.randperm(15)], x[:, 15:]], 1)
    same(layer(x)[:, -1], layer(shuffled)[:, -1], 1e-12)


def test_which_form_is_cheaper():
    """Products counted from the two formulas; with K3's sizes the border for a long past is 171 tokens."""
    k3 = MultiHeadLatentAttention(
        8, 1, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert k3.absorbing_is_cheaper(1, 100)
    assert k3.absorbing_is_cheaper(170, 10**6)
    assert not k3.absorbing_is_cheaper(171, 10**6)
    for T in (1, 7, 64, 4096):
        assert not k3.absorbing_is_cheaper(T, T)
        expanded = 1000 * 512 * 256 + T * 1000 * (192 + 128)
        absorbed = T * 512 * 256 + T * 1000 * (2 * 512 + 64)
        assert k3.absorbing_is_cheaper(T, 1000) == (absorbed < expanded)


@pytest.mark.parametrize("name", ["kimi-linear", "k3"])
def test_half_precision_and_meta(name):
    x = torch.randn(2, 9, 20)
    exact, half = build(name, torch.float32), build(name, torch.float32)
    half.load_state_dict(exact.state_dict())
    y = half.bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert (y.float() - exact(x)).abs().max() < 0.05 * exact(x).abs().max()
    with torch.device("meta"):
        empty = MultiHeadLatentAttention(20, 3, **SIZES | LAYERS[name])
    empty = empty.to_empty(device="cpu")
    empty.reset_parameters()
    assert empty(x).isfinite().all()


@pytest.mark.parametrize("q_lora_rank", [None, 7])
@pytest.mark.parametrize(("T", "Kr"), [(1, 4), (9, 4), (40, 8)])
def test_equals_kimi_linears_attention_with_weights_both_ways(q_lora_rank, T, Kr):
    model = transformers_model("kimi_linear")
    sizes = SIZES | {"qk_rope_head_dim": Kr, "q_lora_rank": q_lora_rank}
    config = model.KimiLinearConfig(
        hidden_size=20, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=1, **sizes
    )
    config._attn_implementation = "eager"
    theirs, ours = model.KimiLinearAttention(config, 0).eval(), MultiHeadLatentAttention(20, 3, **sizes)
    x = torch.randn(2, T, 20)
    future = torch.full((T, T), -torch.inf).triu(1)[None, None]
    for source, target in ((theirs, ours), (ours, theirs)):
        for weight in source.parameters():
            nn.init.normal_(weight, 0.0, 0.4)
        target.load_state_dict(source.state_dict())
        want = theirs(x, future)[0]
        assert ((ours(x) - want).abs().max() / want.abs().max()).item() < 1e-5


def test_bad_input_is_named_and_changes_nothing():
    layer, cache, x = build("k3"), Cache(1, 2), torch.randn(2, 5, 20, dtype=torch.float64)
    layer(x, cache.layers[0])
    cache.advance(5, None)
    before = cache.layers[0].get("latent").clone()
    bad = [
        ((x[..., :3], cache.layers[0]), "x must be"),
        ((x, {}), "cache must be a slot of a Cache, got dict"),
        ((x, cache.layers[0], torch.ones(2, 4, dtype=torch.bool)), "attention_mask must be"),
        ((x, cache.layers[0], torch.ones(2, 5)), "attention_mask must be bool"),
        ((x[:1], cache.layers[0]), "cache must be for the batch"),
    ]
    for args, message in bad:
        with pytest.raises(ValueError, match=message):
            layer(*args)
    assert torch.equal(cache.layers[0].get("latent"), before)
    q, latent, kv_b = operands(2, 4, 6)
    bad = [
        ((q, latent[:, :3], kv_b), "latent must hold the queries' own tokens: S >= T = 4, got S = 3"),
        ((q, latent, kv_b[:-1]), r"kv_b must be \[H\*\(Kn\+V\), R\]"),
        ((q, latent, kv_b[:18]), r"kv_b must be \[H\*\(Kn\+V\), R\]"),
        ((q.float(), latent, kv_b), "latent must have q's dtype"),
        ((q[0], latent, kv_b), "q must be"),
    ]
    for args, message in bad:
        with pytest.raises(ValueError, match=message):
            absorbed_mla(*args)
    for options, message in (
        ({"key_mask": torch.ones(2, 6)}, "key_mask must be bool"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens needs T = S"),
    ):
        with pytest.raises(ValueError, match=message):
            expanded_mla(q, latent, kv_b, **options)
    for change in ({"v_head_dim": 0}, {"q_lora_rank": 0}, {"kv_lora_rank": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} must be an integer >= 1"):
            MultiHeadLatentAttention(20, 3, **SIZES | change)


@pytest.mark.parametrize("l", [3, 12])
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_equals_the_official_layers_of_a_tiny_k3(l, form, monkeypatch):
    """Gated MLA with query LoRA, weights in bfloat16, recorded in float64 by the official implementation."""
    x = {n: t.double() for n, t in load_file(GOLDENS / "mla_k3.safetensors").items()}
    x = {n.removeprefix(f"layers.{l}."): t for n, t in x.items() if n.startswith(f"layers.{l}.")}
    layer = MultiHeadLatentAttention(
        64, 4, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        q_lora_rank=24, output_gate=True,
    ).double()  # fmt: skip
    weights = {n.removeprefix("self_attn."): t for n, t in x.items() if n.startswith("self_attn.")}
    layer.load_state_dict(weights)
    monkeypatch.setattr(layer, "absorbing_is_cheaper", lambda T, S: form == "absorbed")
    h = rms_norm(x["attn_mix"], 1e-5) * x["input_layernorm.weight"]
    same(layer(h), x["attn_out"], 1e-12)


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1e-46, math.nan, math.inf, "x"])
def test_any_finite_scale_will_do_in_both_forms(scale):
    """A fused kernel that multiplies its mask by the scale makes nan of 0 and of negative ones."""
    rng = torch.Generator().manual_seed(0)
    q, latent, kv_b = (torch.randn(*n, generator=rng) for n in ((1, 3, 1, 2), (1, 3, 2), (3, 1)))
    if isinstance(scale, str) or not math.isfinite(scale):
        for form in (expanded_mla, absorbed_mla):
            with pytest.raises(ValueError, match="scale must be a finite number"):
                form(q, latent, kv_b, scale=scale)
        return
    expanded = expanded_mla(q, latent, kv_b, scale=scale)
    assert not expanded.isnan().any()
    torch.testing.assert_close(absorbed_mla(q, latent, kv_b, scale=scale), expanded, atol=1e-6, rtol=0)


def test_narrow_values_never_make_all_weights_at_once():
    """PyTorch's fused kernel on a CPU refuses values narrower than keys: they are padded for it."""

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            self.numbers = max([self.numbers, *(t.numel() for t in tensors)])
            return result

    T, H = 500, 2
    q, latent, kv_b = torch.randn(1, T, H, 12), torch.randn(1, T, 8), torch.randn(H * (8 + 6), 4)
    with Largest() as largest:
        expanded_mla(q, latent, kv_b)
    assert largest.numbers < T * T
