"""The decoder around a mixer, and the small models that differ in their mixer alone."""

import pytest
import torch

from evolve import generate
from evolve.attention_residuals import AttnResDecoder
from evolve.decoder import Decoder
from evolve.deltanet import DeltaNet
from evolve.lab import accounting, small, tasks
from evolve.moe import LatentMoE

RECURRENT = [name for name in small.MIXERS if name != "softmax_attention"]
TASK = tasks.AssociativeRecall(num_pairs=3, num_keys=6, num_values=6, batch_size=3)
SIZES = {"vocab_size": 4, "hidden_size": 8, "intermediate_size": 8}


def model(name, **options):
    return small.small_model(name, vocab_size=TASK.vocab_size, **options).double()


@pytest.mark.parametrize("name", RECURRENT)
def test_cached_equals_full_in_any_pieces(name):
    net, ids = model(name), TASK(0).input_ids
    whole, cache = net(ids), net.new_cache(3)
    pieces = [net(part, cache) for part in ids.split([4, 1, 1, 3], dim=1)]
    assert torch.allclose(torch.cat(pieces, dim=1), whole, atol=1e-10, rtol=0)
    assert cache.length == ids.shape[1]


@pytest.mark.parametrize("name", RECURRENT)
def test_padding_on_either_side_changes_nothing(name):
    net, ids = model(name), TASK(0).input_ids
    whole = net(ids)
    for left, right in ((4, 0), (0, 4), (2, 2)):
        mask = torch.nn.functional.pad(torch.ones_like(ids, dtype=torch.bool), (left, right))
        padded = torch.nn.functional.pad(ids, (left, right), value=-7)
        assert torch.allclose(net(padded, attention_mask=mask)[mask], whole.flatten(0, 1), atol=1e-10, rtol=0)


def test_every_mixer_is_causal_and_as_large_as_the_others():
    sizes = {}
    for name in small.MIXERS:
        net, ids = model(name), TASK(0).input_ids
        changed = ids.clone()
        changed[:, 5:] = (changed[:, 5:] + 1) % TASK.vocab_size
        assert torch.allclose(net(ids)[:, :5], net(changed)[:, :5], atol=1e-12, rtol=0), name
        assert not torch.allclose(net(ids)[:, 5:], net(changed)[:, 5:]), name
        sizes[name] = accounting.parameters(net)
    assert max(sizes.values()) <= 1.02 * min(sizes.values()), sizes


def test_linear_attention_with_unit_keys_is_deltanet_where_no_key_comes_near_another():
    linear, delta = small.UnitKeyLinearAttention(8, 1, 4).double(), DeltaNet(8, 1, 4).double()
    missing = delta.load_state_dict(linear.state_dict(), strict=False)
    assert missing.missing_keys == ["b_proj.weight"]
    assert not missing.unexpected_keys
    torch.nn.init.zeros_(delta.b_proj.weight)  # beta 1/2, and the output norm takes the half out again
    x = torch.randn(1, 1, 8, dtype=torch.float64)
    linear.o_norm.eps = delta.o_norm.eps = 1e-30
    assert torch.allclose(linear(x), delta(x), atol=1e-10)
    assert not torch.allclose(linear(x.repeat(1, 3, 1))[:, 2], delta(x.repeat(1, 3, 1))[:, 2], atol=1e-3)


def test_seed_draws_the_weights_and_nothing_else():
    before = torch.random.get_rng_state()
    a, b, c = (small.small_model("kda", vocab_size=9, seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)


def test_generate_goes_on_from_the_cache_at_constant_size():
    net = model("delta_rule").eval()
    ids = TASK(0).input_ids
    out = generate(net, ids, 5)
    for n in range(5):
        assert torch.equal(net(out[:, : 9 + n])[:, -1].argmax(-1), out[:, 9 + n])
    cache = net.new_cache(3)
    net(ids, cache)
    size = cache.nbytes
    net(ids, cache)
    assert cache.nbytes == size


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: small.small_model("rnn", vocab_size=4),
            "mixer must be one of softmax_attention, .* got 'rnn'",
        ),
        (
            lambda: small.small_model("kda", vocab_size=4, intermediate_size=2),
            "intermediate_size must leave room for the gates of kda, got 2",
        ),
        (
            lambda: Decoder([], vocab_size=4, hidden_size=8, intermediate_size=8),
            "mixers must hold at least one layer",
        ),
        (
            lambda: Decoder([DeltaNet(8, 1, 4)], vocab_size=0, hidden_size=8, intermediate_size=8),
            "vocab_size must be an integer >= 1, got 0",
        ),
        (lambda: model("kda")(torch.full((1, 2), 99)), r"input_ids must lie in \[0, 15\)"),
        (lambda: model("kda")(TASK(0).input_ids, cache={}), "cache must be a Cache, got dict"),
        (
            lambda: model("kda")(TASK(0).input_ids, model("kda", num_layers=1).new_cache(3)),
            "cache must have this model's 2 layers, got 1",
        ),
        (
            lambda: (lambda m: m(TASK(0).input_ids, m.new_cache(3)))(model("softmax_attention")),
            "cache must be None",
        ),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_refused_call_leaves_the_cache_as_it_was():
    net, ids = model("delta_rule"), TASK(0).input_ids
    cache = net.new_cache(3)
    net(ids, cache)
    kept = cache.layers[1].get("state").clone()
    with pytest.raises(ValueError, match="input_ids"):
        net(ids + 100, cache)
    assert cache.length == 9
    assert torch.equal(cache.layers[1].get("state"), kept)


def test_each_name_is_its_mechanism():
    kinds = {name: model(name).layers[0].self_attn for name in small.MIXERS}
    assert {name: type(layer).__name__ for name, layer in kinds.items()} == {
        "softmax_attention": "ConvAttention",
        "linear_attention": "UnitKeyLinearAttention",
        "linear_attention_elu1": "LinearAttention",
        "delta_rule": "DeltaNet",
        "delta_rule_output_gate": "OutputGatedDeltaNet",
        "gated_delta_rule": "GatedDeltaNet",
        "kda": "KimiDeltaAttention",
        "kda_bounded": "KimiDeltaAttention",
    }
    assert kinds["kda"].gate_lower_bound is None
    assert kinds["kda_bounded"].gate_lower_bound == -5.0
    assert "gate_lower_bound=-5.0" in repr(kinds["kda_bounded"])


def test_padding_in_the_cache_is_remembered_and_eps_reaches_every_norm():
    net, ids = model("delta_rule"), TASK(0).input_ids
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :2] = False
    cache = net.new_cache(3)
    net(ids, cache, mask)
    assert torch.equal(cache.key_mask, mask)
    net(ids[:, :1], cache)
    assert cache.key_mask[:, -1].all()
    assert torch.equal(cache.key_mask[:, :-1], mask)
    other = Decoder([DeltaNet(8, 1, 4)], vocab_size=4, hidden_size=8, intermediate_size=8, norm_eps=1e-2)
    layer = other.layers[0]
    assert {other.norm.eps, layer.input_layernorm.eps, layer.post_attention_layernorm.eps} == {1e-2}


def moe(hidden_size: int) -> LatentMoE:
    return LatentMoE(hidden_size, num_experts=4, top_k=2, expert_size=4, latent_size=4, num_shared_experts=1)


def with_networks(networks: list, kind: type[Decoder] = Decoder, **options) -> Decoder:
    torch.manual_seed(0)
    mixers = [DeltaNet(8, 1, 4) for _ in range(2)]
    return kind(mixers, **SIZES, **options, feed_forwards=networks)


def test_layers_take_other_networks_under_their_own_name():
    net = with_networks([None, moe(8)])
    assert hasattr(net.layers[0], "mlp")
    assert net.layers[1].feed_forward is net.layers[1].block_sparse_moe
    assert not hasattr(net.layers[1], "mlp")
    x, layer = torch.randn(1, 3, 8), net.layers[1]
    read = x + layer.self_attn(layer.input_layernorm(x))
    assert torch.equal(layer(x), read + layer.block_sparse_moe(layer.post_attention_layernorm(read)))
    ids = torch.tensor([[0, 1, 2, 3, 1]])
    plain, fast = (
        with_networks([None, moe(8)], AttnResDecoder, block_size=3, two_phase=p) for p in (False, True)
    )
    fast.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(ids), fast(ids), atol=1e-5, rtol=0)
    assert not torch.allclose(plain(ids), with_networks([None, None], AttnResDecoder, block_size=3)(ids))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Decoder("ab", **SIZES), r"mixers must be modules, got \['str', 'str'\]"),
        (lambda: Decoder([DeltaNet(16, 1, 4)], **SIZES), "mixers must have hidden_size = 8, got"),
        (lambda: Decoder([DeltaNet(8, 1, 4)] * 2, **SIZES), "mixers must be different modules"),
        (lambda: Decoder([DeltaNet(8, 1, 4)], **SIZES, norm_eps=-1.0), "norm_eps must be a positive number"),
        (lambda: with_networks([]), "feed_forwards must be 2, one a layer, got 0"),
        (lambda: with_networks([None, "b"]), r"feed_forwards must be modules, got \['str'\]"),
        (lambda: with_networks([moe(4), None]), r"feed_forwards must have hidden_size = 8, got \[4, 8\]"),
        (lambda: with_networks(2 * [moe(8)]), "feed_forwards must be different modules, got one twice"),
        (lambda: model("kda", hidden_size=-4), "hidden_size must be an integer >= 1, got -4"),
        (lambda: model("kda", num_layers=0), "num_layers must be an integer >= 1, got 0"),
        (lambda: model("kda", head_dim=0), "head_dim must be an integer >= 1, got 0"),
        (lambda: model("kda", hidden_size=2, num_heads=4), "num_heads must be at most hidden_size = 2"),
        (lambda: model("kda", conv_size=2.5), "conv_size must be an integer >= 0, got 2.5"),
        (lambda: model("kda", seed=-1), "seed must be an integer >= 0, got -1"),
        (lambda: model(["kda"]), "mixer must be one of"),
    ],
)
def test_sizes_and_mixers_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
