"""Kimi K3 whole: parity with the official implementation, its configuration, pieces, padding, training."""

import copy
import dataclasses
import json
import re

import pytest
import torch
from safetensors import safe_open
from torch import nn

from evolve import generate, k3_layout
from evolve.attention_residuals import PseudoQuery
from evolve.k3 import K3, K3Config, VisionConfig, released_tensors
from evolve.k3_config import SIZES
from evolve.k3_layout import CONSTANTS, LINEAR, TEXT, VISION, _flatten, released_config
from evolve.kda import KimiDeltaAttention
from evolve.mla import MultiHeadLatentAttention
from evolve.moe import LatentMoE
from tests.oracles import GOLDENS

FIXTURES = ("tiny", "tiny-mxfp4")
IDS = torch.arange(60).view(2, 30) * 7 % 256
OFFICIAL = json.loads((GOLDENS / "k3" / "official_config.json").read_text())


def expected(name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(GOLDENS / "k3" / name / "expected.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def official(name: str, dtype: torch.dtype = torch.float64, **options) -> K3:
    return K3.from_pretrained(GOLDENS / "k3" / name, dtype=dtype, **options)


def model(dtype: torch.dtype = torch.float64, **changes) -> K3:
    torch.manual_seed(0)
    net = K3(K3Config.nano(**{"initializer_range": 0.2} | changes))
    for module in net.modules():
        if isinstance(module, PseudoQuery):
            nn.init.normal_(module.weight)
        elif isinstance(module, LatentMoE):
            nn.init.normal_(module.gate.e_score_correction_bias, 0.0, 0.1)
    return net.to(dtype).eval()


def same(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


# ----------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 2e-3)])
@pytest.mark.parametrize("name", FIXTURES)
def test_equals_the_official_implementation(name, dtype, limit, packed):
    """Logits, and sixteen greedy tokens with their logits, decoded one by one."""
    want, metadata = expected(name)
    net, n = official(name, dtype, packed=packed), int(metadata["prompt_length"])
    ids, tokens = want["input_ids"], want["greedy_tokens"]
    with torch.no_grad():
        assert (net(ids) - want["logits"]).abs().max() < limit
        assert torch.equal(generate(net, ids[:, :n], 16)[:, n:], tokens)
        cache = net.new_cache(2)
        net(ids[:, :n], cache)
        got = [net(token, cache) for token in tokens.split(1, 1)]  # theirs are those after each new token
    assert (torch.cat(got, 1) - want["greedy_logits"]).abs().max() < limit
    assert want["logits"].std() > 0.1


@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("name", FIXTURES)
def test_every_sublayer_equals_the_official_one(name, two_phase):
    want, metadata = expected(name)
    net, seen = official(name), {}
    net.two_phase = two_phase

    def watch(module: nn.Module, key: str, of_input: bool) -> None:
        module.register_forward_hook(lambda _, x, y: seen.update({key: x[0] if of_input else y}))

    for l, layer in enumerate(net.layers):
        watch(layer.input_layernorm, f"layers.{l}.attn_mix", True)
        watch(layer.self_attn, f"layers.{l}.attn_out", False)
        watch(layer.post_attention_layernorm, f"layers.{l}.ffn_mix", True)
        watch(layer.feed_forward, f"layers.{l}.ffn_out", False)
    watch(net.norm, "final_mix", True)
    with torch.no_grad():
        net(want["input_ids"])
    names = {key for key in want if key.startswith("layers.")} | {"final_mix"}
    assert seen.keys() == names
    for key in names:
        got = seen[key][:, :: int(metadata.get("stride", 1))]
        assert (got - want[key]).abs().max() < 1e-9, key


@pytest.mark.parametrize("name", FIXTURES)
def test_cached_equals_full_in_any_pieces(name):
    ids, net = expected(name)[0]["input_ids"], official(name)
    T = ids.shape[1]
    for pieces in ([4, 1, 1, 9, T - 15], [1] * T, [T - 1, 1]):
        cache = net.new_cache(2)
        with torch.no_grad():
            same(torch.cat([net(part, cache) for part in ids.split(pieces, dim=1)], 1), net(ids), 1e-9)
        assert cache.length == T


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


def test_rows_are_independent_empty_batches_run_and_bad_ids_change_nothing():
    net = model()
    same(net(IDS[1:]), net(IDS)[1:])
    assert net(IDS[:0]).shape == (0, 30, 256)
    assert net(IDS[:, :0]).shape == (2, 0, 256)
    cache = net.new_cache(2)
    net(IDS[:, :5], cache)
    with pytest.raises(ValueError, match=r"input_ids must lie in \[0, 256\)"):
        net(IDS[:, 5:] + 256, cache)
    same(net(IDS[:, 5:], cache), net(IDS)[:, 5:])


# ------------------------------------------------------------------------------------ the assembly


def test_layers_are_those_of_the_configuration():
    net = model(num_hidden_layers=9, first_k_dense_replace=2, attn_res_block_size=3, rms_norm_eps=1e-4)
    kinds = [(type(layer.self_attn), type(layer.feed_forward) is LatentMoE) for layer in net.layers]
    mixers = [MultiHeadLatentAttention if l in (4, 8, 9) else KimiDeltaAttention for l in range(1, 10)]
    assert kinds == list(zip(mixers, [l > 2 for l in range(1, 10)]))
    assert net.block_size == 6
    moe, kda, mla = net.layers[2].feed_forward, net.layers[0].self_attn, net.layers[3].self_attn
    assert (moe.latent_size, moe.gate.scaling, moe.gate.renormalize) == (32, 1.0, True)
    assert (kda.gate_lower_bound, kda.g_proj.weight.shape) == (-5.0, (64, 64))
    assert (mla.q_lora_rank, mla.g_proj.weight.shape) == (32, (64, 64))
    wide = {"kv_a_layernorm", "q_a_layernorm"}  # always 1e-6
    eps = {name.split(".")[-1]: m.eps for name, m in net.named_modules() if hasattr(m, "eps") and name}
    assert {name for name, x in eps.items() if x != 1e-4} == wide


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_lone_choice_keeps_its_score(top_k):
    """The official router renormalises from two experts on; a norm after it hides most of the difference."""
    net = model(num_experts_per_token=top_k, routed_expert_hidden_size=None)
    moe, x = net.layers[1].feed_forward, torch.randn(7, 64, dtype=torch.float64)
    routing = moe.gate(x)
    chosen = routing.scores.gather(1, routing.indices)
    same(routing.weights, chosen if top_k == 1 else chosen / (chosen.sum(1, keepdim=True) + 1e-20))


def test_first_weights():
    net = K3(K3Config.nano(hidden_size=128))
    for name, weight in net.named_parameters():
        if re.search(r"experts|(q|o|down|up|gate)_proj|embed_tokens|lm_head", name) and "_res_" not in name:
            assert weight.std().item() == pytest.approx(0.02, rel=0.1), name
        elif "_res_proj" in name or name.endswith(("A_log", "e_score_correction_bias")):
            assert not weight.any(), name
        elif "norm" in name:
            assert (weight == 1).all(), name


@pytest.mark.parametrize("name", SIZES)
def test_sizes_for_training_have_every_mechanism(name):
    config = K3Config.sized(name)
    with torch.device("meta"):
        net = K3(config)
    assert config.num_hidden_layers > 2 * config.attn_res_block_size  # three sources at the end
    assert {type(layer.self_attn) for layer in net.layers} == {KimiDeltaAttention, MultiHeadLatentAttention}
    assert config.expert_width % 32 == 0
    assert config.moe_intermediate_size % 32 == 0
    assert dataclasses.replace(config, quantized=True).quantized


def test_every_weight_learns_but_the_routers_bias_and_the_site_without_choice():
    net = model(torch.float32, pad_token_id=0).train()
    net.loss(IDS, IDS).backward()
    without = {"layers.0.self_attention_res_proj.weight", "layers.0.self_attention_res_norm.weight"}
    for name, p in net.named_parameters():
        if "e_score_correction_bias" in name or name in without:
            assert p.grad is None, name
        else:
            assert p.grad.any(), name
    assert not net.embed_tokens.weight.grad[0].any()
    assert net.embed_tokens.weight.grad[7].any()


def test_a_few_steps_of_training_lower_the_loss():
    net = K3(K3Config.nano()).train()
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    losses = []
    for _ in range(12):
        loss = net.loss(IDS[:, :-1], IDS[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_longer_texts_than_trained_for_are_refused_by_generate():
    net = model(max_position_embeddings=32)
    assert generate(net, IDS, 3).shape == (2, 33)
    with pytest.raises(ValueError, match="max_new_tokens must be at most 3"):
        generate(net, IDS, 4)


# --------------------------------------------------------------------------------- configuration


def changed(name: str, value: object) -> dict:
    """The released configuration with one dotted name set; ``KeyError`` as a value takes it away."""
    raw = copy.deepcopy(OFFICIAL)
    *path, last = name.split(".")
    part = raw
    for step in path:
        part = part[step]
    if value is KeyError:
        del part[last]
    else:
        part[last] = value
    return raw


def test_the_released_configuration_is_the_one_in_the_code():
    assert K3Config.from_json(OFFICIAL) == K3Config.official()
    for path in (GOLDENS / "k3" / "tiny", GOLDENS / "k3" / "tiny" / "config.json"):
        tiny = K3Config.from_json(path)
        assert (tiny.num_hidden_layers, tiny.quantized, tiny.vision) == (13, False, None)
    assert K3Config.official().full_attn_layers == (*range(4, 93, 4), 93)


@pytest.mark.parametrize(
    "config",
    [K3Config.official(), *map(K3Config.sized, SIZES), K3Config.nano(quantized=True, gate_lower_bound=None)],
    ids=lambda c: str(c.hidden_size),
)
def test_written_and_read_is_the_same_configuration(config):
    assert K3Config.from_json(json.loads(json.dumps(released_config(config)))) == config


def test_what_is_written_for_the_released_model_says_what_was_released():
    assert dict(_flatten(released_config(K3Config.official()))) == dict(_flatten(OFFICIAL))


def test_everything_that_does_not_fit_is_named_at_once(tmp_path):
    raw = changed(f"{TEXT}.rope_theta", 10000.0)
    raw["text_config"]["linear_attn_config"]["kda_layers"] = [1, 2]
    raw["text_config"]["num_key_value_heads"] = 8
    raw["text_config"]["hidden_act"] = "silu"
    raw["bos_token_id"] = 7
    raw["vision_config"]["text_hidden_size"] = 64
    raw["surprise"] = {"inside": 1}
    del raw["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"]
    raw["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    file = tmp_path / "config.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=re.escape(str(file))) as error:
        K3Config.from_json(file)
    for part in (
        "unknown: text_config.rope_theta, surprise.inside",
        f'{TEXT}.hidden_act must be "situ", got "silu"',
        "weights.num_bits must be 4, got 8",
        f"{TEXT}.num_key_value_heads must be {TEXT}.num_attention_heads = 96, got 8",
        f"bos_token_id must be {TEXT}.bos_token_id = 163584, got 7",
        f"{VISION}.text_hidden_size must be {TEXT}.hidden_size = 7168, got 64",
        f"{LINEAR}.kda_layers must be the layers that are not in full_attn_layers, got [1, 2]",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("text_config", KeyError, "text_config.vocab_size, text_config.hidden_size"),
        ("text_config", [1], "text_config.vocab_size, text_config.hidden_size"),
        ("model_type", KeyError, 'model_type must be "kimi_k3", got nothing'),
        ("model_type", "kimi_linear", 'model_type must be "kimi_k3", got "kimi_linear"'),
        (f"{TEXT}.num_experts", KeyError, "text_config.num_experts must be given"),
        (f"{TEXT}.num_experts", "896", "num_experts must be an integer >= 1"),
        (f"{TEXT}.num_experts", {"many": 1}, "unknown: text_config.num_experts.many"),
        (f"{TEXT}.hidden_size", 2**62, "hidden_size must be an integer >= 1 and <= 1048576"),
        (f"{TEXT}.tie_word_embeddings", 0, "tie_word_embeddings must be false, got 0"),
        (f"{TEXT}.mla_use_nope", False, "mla_use_nope must be true"),
        (f"{TEXT}.latent_moe_use_norm", False, "latent_moe_use_norm must be true"),
        (
            f"{TEXT}.routed_expert_hidden_size",
            3585,
            "must be a multiple of 32 for quantized experts, got 3585",
        ),
        (f"{TEXT}.dtype", "float32", 'text_config.dtype must be dtype = "bfloat16", got "float32"'),
        ("dtype", "int8", "dtype must be one of bfloat16"),
        (f"{LINEAR}.full_attn_layers", [0], "full_attn_layers must be different layers from 1 to 93"),
        (f"{LINEAR}.gate_lower_bound", 5, "gate_lower_bound must be below 0"),
        (f"{TEXT}.attn_res_block_size", 0, "attn_res_block_size must be an integer >= 1"),
        (f"{VISION}.merge_kernel_size", [2], "merge_kernel_size must be two sizes, got [2]"),
        (f"{VISION}.norm_type", "layernorm", 'norm_type must be "rmsnorm", got "layernorm"'),
        ("vision_config", [], "unknown: vision_config"),
    ],
)
def test_another_models_configuration_is_refused(name, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        K3Config.from_json(changed(name, value))


def test_a_text_model_alone_has_no_vision_and_ids_may_be_absent():
    raw = changed("vision_config", None)
    for name in ("bos_token_id", "pad_token_id", "media_placeholder_token_id"):
        del raw[name]
        raw["text_config"].pop(name, None)
    config = K3Config.from_json(raw)
    assert (config.vision, config.bos_token_id, config.eos_token_id) == (None, None, 163586)


CHANGES = {  # where one more does not do (the latent norm undoes a scaling, but for its eps)
    "full_attn_layers": (2, 5), "gate_lower_bound": -3.0, "use_full_rank_gate": False,
    "mla_use_output_gate": False, "rms_norm_eps": 1e-2, "initializer_range": 0.3, "moe_renormalize": False,
    "routed_scaling_factor": 1e-3, "activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0,
    "routed_expert_hidden_size": 64, "moe_intermediate_size": 64, "q_lora_rank": None, "pad_token_id": 3,
    "dtype": "float16", "quantized": True, "vision": VisionConfig(), "num_hidden_layers": 6,
    "first_k_dense_replace": 2, "max_position_embeddings": 64,
}  # fmt: skip
NAMES_ONLY = {"bos_token_id", "eos_token_id", "media_placeholder_token_id"}  # for tokenizers and generate


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(K3Config) if f.name not in NAMES_ONLY])
def test_every_field_changes_the_model(field):
    base = K3Config.nano(initializer_range=0.2)
    value = CHANGES.get(field)
    if field not in CHANGES:
        value = getattr(base, field) + 1
    other = dataclasses.replace(base, **{field: value})

    def facts(config: K3Config) -> tuple:
        torch.manual_seed(0)
        net = K3(config)
        for module in net.modules():
            if isinstance(module, PseudoQuery):
                nn.init.normal_(module.weight)
        loss = net.loss(IDS, IDS)
        loss.backward()
        row = net.embed_tokens.weight.grad[3].any().item()
        return released_tensors(config), loss.item(), row, net.context_length

    assert facts(base) == facts(base)
    assert facts(base) != facts(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_situ_beta": 0}, "activation_situ_beta must be positive and finite, got 0"),
        ({"attn_res_block_size": 0}, "attn_res_block_size must be an integer >= 1"),
        ({"quantized": "yes"}, "quantized must be true or false, got 'yes'"),
        ({"vision": {}}, "vision must be a VisionConfig or None, got {}"),
        ({"pad_token_id": -1}, "pad_token_id must be an integer >= 0"),
        ({"size": 1}, "changes must be fields of K3Config, got size"),
        ({"num_experts_per_token": 9}, "top_k must be at most the 8 experts, got 9"),
    ],
)
def test_bad_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        K3Config.nano(**change)
    with pytest.raises(ValueError, match="name must be one of nano, micro, mini, small, got 'huge'"):
        K3Config.sized("huge")


def test_no_constant_is_a_size_too():
    assert not CONSTANTS.keys() & k3_layout.SIZES.keys()
