"""Kimi Linear whole: parity with transformers, folders both ways, padding and cache, the released size."""

import dataclasses
import json
import re

import pytest
import torch
from torch import nn

from evolve import generate
from evolve.hybrid import Hybrid
from evolve.kda import KimiDeltaAttention
from evolve.kimi_linear import KimiLinear, KimiLinearConfig
from evolve.lab import accounting
from evolve.mla import MultiHeadLatentAttention
from evolve.moe import LatentMoE
from tests.oracles import transformers_model

SMALL = KimiLinearConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=5,
    num_attention_heads=2,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    linear_num_heads=2,
    linear_head_dim=16,
    num_experts=6,
    num_experts_per_token=2,
    moe_intermediate_size=12,
    initializer_range=0.2,
)
IDS = torch.arange(60).view(2, 30) * 7 % 50


def model(dtype: torch.dtype = torch.float64, **changes) -> KimiLinear:
    torch.manual_seed(0)
    net = KimiLinear(dataclasses.replace(SMALL, **changes))
    for module in net.modules():
        if isinstance(module, LatentMoE):
            nn.init.normal_(module.gate.e_score_correction_bias, 0.0, 0.1)
    return net.to(dtype).eval()


def same(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_layers_are_those_of_the_configuration():
    net = model(num_hidden_layers=9, full_attn_layers=None, first_k_dense_replace=2)
    kinds = [(type(layer.self_attn), type(layer.feed_forward) is LatentMoE) for layer in net.layers]
    is_mla = [l in (4, 8, 9) for l in range(1, 10)]
    mixers = [MultiHeadLatentAttention if mla else KimiDeltaAttention for mla in is_mla]
    assert kinds == list(zip(mixers, [l > 2 for l in range(1, 10)]))
    moe = net.layers[2].block_sparse_moe
    assert (moe.gate.scaling, moe.gate.renormalize, moe.latent_size) == (2.446, True, None)
    assert net.layers[2].feed_forward is moe
    assert net.layers[0].feed_forward is net.layers[0].mlp


def test_cached_equals_full_in_any_pieces_and_generates():
    net = model()
    whole, cache = net(IDS), net.new_cache(2)
    same(torch.cat([net(part, cache) for part in IDS.split([4, 1, 1, 9, 15], dim=1)], 1), whole)
    out = generate(net, IDS, 4)
    for n in range(4):
        assert torch.equal(net(out[:, : 30 + n])[:, -1].argmax(-1), out[:, 30 + n])


def test_padding_on_either_side_changes_nothing():
    net = model()
    whole = net(IDS)
    for left, right in ((4, 0), (0, 4), (2, 2)):
        mask = nn.functional.pad(torch.ones_like(IDS, dtype=torch.bool), (left, right))
        padded = nn.functional.pad(IDS, (left, right), value=-7)
        same(net(padded, attention_mask=mask)[mask], whole.flatten(0, 1))
    cache, mask = net.new_cache(2), torch.ones(2, 10, dtype=torch.bool)
    mask[0, :3] = False
    net(IDS[:, :10], cache, mask)
    same(net(IDS[:, 10:11], cache)[:1], net(IDS[:1, 3:11])[:, -1:])
    cache.reorder(torch.tensor([1, 0]))
    same(net(IDS[:, 11:12].flip(0), cache)[1:], net(IDS[:1, 3:12])[:, -1:])


def test_rows_are_independent_and_empty_batches_run():
    net = model()
    same(net(IDS[1:]), net(IDS)[1:])
    assert net(IDS[:0]).shape == (0, 30, 50)
    assert net(IDS[:, :0]).shape == (2, 0, 50)


def test_every_weight_learns_but_the_routers_bias():
    net = model(torch.float32).train()
    net.loss(IDS, IDS).backward()
    for name, p in net.named_parameters():
        if "e_score_correction_bias" in name:
            assert p.grad is None
        else:
            assert p.grad.any(), name


def test_first_weights_have_the_configured_size():
    net = KimiLinear(
        dataclasses.replace(SMALL, hidden_size=64, moe_intermediate_size=64, initializer_range=0.02)
    )
    for name, weight in net.named_parameters():
        if "experts" in name or name.endswith("mlp.up_proj.weight"):
            assert weight.std().item() == pytest.approx(0.02, rel=0.05), name
        if "e_score_correction_bias" in name:
            assert not weight.any()


# ------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("max_shard_bytes", [None, 20_000, 1])
def test_saved_and_loaded_is_the_same_model(max_shard_bytes, tmp_path):
    net = model(torch.float32)
    net.save_pretrained(tmp_path, max_shard_bytes=max_shard_bytes)
    again = KimiLinear.from_pretrained(tmp_path)
    assert again.config == net.config
    assert torch.equal(again(IDS), net(IDS))
    flags = {n: p.requires_grad for n, p in net.named_parameters()}
    assert {n: p.requires_grad for n, p in again.named_parameters()} == flags
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes is not None)


def test_dtypes_and_float32_islands(tmp_path):
    net = model(torch.float32)
    net.save_pretrained(tmp_path)
    half = KimiLinear.from_pretrained(tmp_path, dtype=torch.bfloat16)
    in_float32 = {n.split(".", 2)[2] for n, p in half.named_parameters() if p.dtype == torch.float32}
    convs = {f"self_attn.{x}_conv1d.weight" for x in "qkv"}
    gates = {"self_attn.A_log", "self_attn.dt_bias", "self_attn.o_norm.weight"}
    assert in_float32 == convs | gates | {"block_sparse_moe.gate.e_score_correction_bias"}
    assert half(IDS).dtype == torch.bfloat16
    exact = KimiLinear.from_pretrained(tmp_path, dtype=torch.float64)
    assert {p.dtype for p in exact.parameters()} == {torch.float64}
    assert (exact(IDS) - net(IDS)).abs().max() < 1e-3


def test_what_does_not_fit_is_reported_at_once(tmp_path):
    model(torch.float32).save_pretrained(tmp_path, max_shard_bytes=20_000)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_experts": 7, "moe_intermediate_size": 13}))
    with pytest.raises(ValueError, match="do not fit the configuration") as error:
        KimiLinear.from_pretrained(tmp_path)
    assert "missing: layers.1.block_sparse_moe.experts.6.w1.weight" in str(error.value)
    assert "experts.0.w1.weight is [12, 32], expected [13, 32]" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_router_activation_func": "softmax"}, 'moe_router_activation_func must be "sigmoid"'),
        ({"num_expert_group": 8}, "num_expert_group must be 1, got 8"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
        ({"hidden_act": "situ"}, 'hidden_act must be "silu", got "situ"'),
        ({"num_experts_per_token": 7}, "top_k must be at most the 6 experts, got 7"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor must be positive"),
        ({"moe_renormalize": 1}, "moe_renormalize must be true or false, got 1"),
        ({"first_k_dense_replace": "1"}, "first_k_dense_replace must be an integer >= 0, got '1'"),
        ({"mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types must be dense layers, then sparse"),
    ],
)
def test_another_models_configuration_is_refused(change, message, tmp_path):
    model(torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        KimiLinear.from_pretrained(tmp_path)
    assert str(file) in str(error.value)


def test_the_names_of_other_families_mean_the_same_and_are_not_overlooked(tmp_path):
    """transformers reads these names: a folder that uses them must neither fail nor be another model."""
    net, file = model(torch.float32), tmp_path / "config.json"
    net.save_pretrained(tmp_path)
    released = json.loads(file.read_text())
    aliases = {
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
    }
    renamed = {aliases.get(key, key): value for key, value in released.items()}
    file.write_text(json.dumps(renamed))
    assert torch.equal(KimiLinear.from_pretrained(tmp_path)(IDS), net(IDS))
    for config, message in (
        (renamed | {"n_group": 2}, "num_expert_group must be 1, got 2"),
        (
            released | {"num_experts_per_tok": 3},
            "num_experts_per_tok must be num_experts_per_token = 2, got 3",
        ),
    ):
        file.write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            KimiLinear.from_pretrained(tmp_path)


def test_hybrids_and_kimi_linears_do_not_pass_for_one_another(tmp_path):
    model(torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="every layer must be dense"):
        Hybrid.from_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["num_experts"]
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="must say num_experts"):
        KimiLinear.from_pretrained(tmp_path)


# ------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_shared_experts": 2, "q_lora_rank": 10},
        {"num_shared_experts": 0, "moe_intermediate_size": 16, "num_experts_per_token": 6},
        {
            "full_attn_layers": (1, 3, 5),
            "first_k_dense_replace": 0,
            "short_conv_kernel_size": 7,
            "qk_rope_head_dim": 0,
            "v_head_dim": 20,
            "moe_renormalize": False,
        },
    ],
    ids=["released", "other", "no-shared-all-chosen", "odd"],
)
def test_equals_transformers_with_folders_both_ways(changes, tmp_path):
    """Logits and greedy generation; our folder in theirs, theirs (in shards) in ours."""
    theirs_module = transformers_model("kimi_linear")
    net = model(torch.float32, **changes)
    net.save_pretrained(tmp_path / "ours", max_shard_bytes=50_000)
    theirs = theirs_module.KimiLinearForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        want, got = theirs(IDS).logits, net(IDS)
    assert (want - got).abs().max() < 1e-4
    assert want.std() > 0.1
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    again = KimiLinear.from_pretrained(tmp_path / "theirs")
    assert again.config == net.config
    assert torch.equal(again(IDS), net(IDS))
    prompt = IDS[:, :9]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, **options)
    assert torch.equal(generate(net, prompt, 12), tokens)


# ---------------------------------------------------------------------------------------- size


def on_meta(config: KimiLinearConfig) -> KimiLinear:
    with torch.device("meta"):
        return KimiLinear(config)


def closed_form(c: KimiLinearConfig) -> tuple[int, int]:
    """Parameters, and those that a token passes through, of the released form of a Kimi Linear."""
    D, H, K = c.hidden_size, c.linear_num_heads, c.linear_head_dim
    P, width = H * K, c.qk_nope_head_dim + c.qk_rope_head_dim
    kda = 4 * D * P + 3 * P * c.short_conv_kernel_size + 2 * (D * K + K * P) + D * H + H + P + K
    heads, R = c.num_attention_heads, c.kv_lora_rank
    mla = D * heads * width + D * (R + c.qk_rope_head_dim) + R
    mla += R * heads * (c.qk_nope_head_dim + c.v_head_dim) + heads * c.v_head_dim * D
    expert, E = 3 * D * c.moe_intermediate_size, c.num_experts
    dense, mlas = c.first_k_dense_replace, len(c.full_attn_layers)
    sparse = c.num_hidden_layers - dense
    rest = (c.num_hidden_layers - mlas) * kda + mlas * mla + (2 * c.num_hidden_layers + 1) * D
    rest += dense * 3 * D * c.intermediate_size + sparse * (E * D + E + c.num_shared_experts * expert)
    table = c.vocab_size * D
    active = rest + sparse * c.num_experts_per_token * expert + table
    return rest + sparse * E * expert + 2 * table, active


@pytest.mark.parametrize("changes", [{}, {"first_k_dense_replace": 3, "num_shared_experts": 2}])
def test_counts_equal_the_closed_form(changes):
    config = dataclasses.replace(SMALL, **changes)
    net = on_meta(config)
    assert (accounting.parameters(net), accounting.activated_parameters(net)) == closed_form(config)


def test_the_released_model_in_numbers():
    """20 KDA and 7 MLA layers, 49.1 billion parameters, 3.1 billion activated.

    transformers' defaults, in the place of the released list of layers, have six MLA layers (5, 9, …, 25),
    and it keeps the routers' biases as buffers, outside its count.
    """
    net, config = on_meta(KimiLinearConfig()), KimiLinearConfig()
    assert config.full_attn_layers == (4, 8, 12, 16, 20, 24, 27)
    assert (accounting.parameters(net), accounting.activated_parameters(net)) == closed_form(config)
    assert accounting.parameters(net) == 49_122_681_728
    assert accounting.activated_parameters(net) == 3_106_972_544
    other = on_meta(dataclasses.replace(config, full_attn_layers=(5, 9, 13, 17, 21, 25)))
    biases = 26 * 256
    assert accounting.parameters(other) - biases == 49_133_074_464
    assert accounting.activated_parameters(other) - biases == 3_117_365_280


def test_flops_follow_the_activated_parameters():
    net = on_meta(dataclasses.replace(SMALL, num_experts=40))
    more = on_meta(dataclasses.replace(SMALL, num_experts=80))
    chosen = on_meta(dataclasses.replace(SMALL, num_experts=40, num_experts_per_token=5))
    base = accounting.forward_flops(net, 7)
    assert accounting.forward_flops(more, 7) - base == 4 * 2 * 7 * 40 * 32  # the router alone
    assert accounting.forward_flops(chosen, 7) - base == 4 * 2 * 7 * 3 * (3 * 32 * 12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts must be an integer >= 1 and <= 1048576, got 0"),
        ({"num_experts_per_token": 7}, "top_k must be at most the 6 experts, got 7"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be an integer >= 1 and <= 1048576, got 0"),
        (
            {"first_k_dense_replace": -1},
            "first_k_dense_replace must be an integer >= 0 and <= 1048576, got -1",
        ),
        ({"num_shared_experts": None}, "num_shared_experts must be an integer >= 0 and <= 1048576, got None"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor must be positive and finite"),
    ],
)
def test_bad_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(SMALL, **change)
