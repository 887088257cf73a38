"""The hybrid: both kinds of memory in one cache, whole-model parity, folders in one file and in shards."""

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from evolve import generate
from evolve.cache import Cache
from evolve.hybrid import Hybrid, HybridConfig
from evolve.kda import KimiDeltaAttention
from evolve.lab import accounting
from evolve.mla import MultiHeadLatentAttention
from tests.oracles import transformers_model

SMALL = HybridConfig(
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
    initializer_range=0.2,
)
K3_LIKE = dataclasses.replace(
    SMALL, q_lora_rank=10, gate_lower_bound=-5.0, use_full_rank_gate=True, mla_use_output_gate=True
)
IDS = torch.arange(60).view(2, 30) * 7 % 50
configs = pytest.mark.parametrize("config", [SMALL, K3_LIKE], ids=["kimi-linear", "k3"])


def model(config: HybridConfig = SMALL, dtype: torch.dtype = torch.float64) -> Hybrid:
    torch.manual_seed(0)
    return Hybrid(config).to(dtype).eval()


def test_every_fourth_layer_and_the_last_look_back():
    kinds = [type(layer.self_attn) for layer in model().layers]
    assert kinds == [*[KimiDeltaAttention] * 3, *[MultiHeadLatentAttention] * 2]
    assert dataclasses.replace(SMALL, num_hidden_layers=93, full_attn_layers=None).full_attn_layers == (
        *range(4, 93, 4),
        93,
    )
    assert dataclasses.replace(SMALL, full_attn_layers=(2,)).full_attn_layers == (2,)


@configs
def test_cached_equals_full_in_any_pieces_and_generates(config):
    net = model(config)
    whole, cache = net(IDS), net.new_cache(2)
    pieces = [net(part, cache) for part in IDS.split([4, 1, 1, 9, 15], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-10, rtol=0)
    out = generate(net, IDS, 4)
    for n in range(4):
        assert torch.equal(net(out[:, : 30 + n])[:, -1].argmax(-1), out[:, 30 + n])


@configs
def test_padding_on_either_side_changes_nothing(config):
    net = model(config)
    whole = net(IDS)
    for left, right in ((4, 0), (0, 4), (2, 2)):
        mask = torch.nn.functional.pad(torch.ones_like(IDS, dtype=torch.bool), (left, right))
        padded = torch.nn.functional.pad(IDS, (left, right), value=-7)
        y = net(padded, attention_mask=mask)[mask]
        torch.testing.assert_close(y, whole.flatten(0, 1), atol=1e-10, rtol=0)
    cache, mask = net.new_cache(2), torch.ones(2, 10, dtype=torch.bool)
    mask[0, :3] = False
    net(IDS[:, :10], cache, mask)
    step = net(IDS[:, 10:11], cache)
    alone = net(torch.cat([IDS[:1, 3:11]], 1))[:, -1:]
    torch.testing.assert_close(step[:1], alone, atol=1e-10, rtol=0)


def test_bytes_of_the_cache_counted():
    config = dataclasses.replace(SMALL, num_hidden_layers=8, full_attn_layers=None)  # 6 KDA, 2 MLA
    with torch.device("meta"):
        net = Hybrid(config)
    state, conv, latent = 2 * 16 * 16 * 4, 3 * (3 * 32) * 2, (12 + 4) * 2  # float32; bfloat16 for the others
    for n in (10, 1000):
        assert accounting.cache_bytes(net, n) == 6 * (state + conv) + 2 * n * latent


# ------------------------------------------------------------------------------------- the cache


def filled(rows: int = 2) -> tuple[Hybrid, Cache]:
    net = model()
    cache, mask = net.new_cache(rows), torch.ones(rows, 20, dtype=torch.bool)
    mask[0, :3] = False
    net(IDS[:rows, :20], cache, mask)
    return net, cache


def test_reorder_takes_rows_of_both_kinds_of_memory():
    net, cache = filled()
    step = net(IDS[:, 20:21], filled()[1])
    cache.reorder(torch.tensor([1, 0, 1]))
    assert cache.batch_size == 3
    got = net(IDS[[1, 0, 1], 20:21], cache)
    torch.testing.assert_close(got, step[[1, 0, 1]], atol=1e-12, rtol=0)
    cache.reorder(torch.tensor([], dtype=torch.int64))
    assert (cache.batch_size, cache.nbytes) == (0, 0)
    for rows, message in (
        (torch.tensor([2]), r"rows must lie in \[0, 2\)"),
        (torch.tensor([-1]), r"rows must lie in \[0, 2\)"),
        (torch.tensor([0.0]), "rows must be int64"),
        (torch.tensor([[0]]), "rows must be"),
    ):
        with pytest.raises(ValueError, match=message):
            filled()[1].reorder(rows)


def test_crop_cuts_rows_and_refuses_to_rewind_a_state():
    _, cache = filled()
    with pytest.raises(ValueError, match=r"a state cannot be rewound .*layer 0: .*state.* got 7"):
        cache.crop(7)
    assert cache.length == 20
    cache.crop(20)
    assert cache.length == 20
    cache.crop(0)
    assert (cache.length, cache.nbytes, cache.key_mask) == (0, 0, None)

    net = model(dataclasses.replace(SMALL, full_attn_layers=(1, 2, 3, 4, 5)))
    cache, fresh = net.new_cache(2), net.new_cache(2)
    net(IDS[:, :20], cache)
    cache.crop(11)
    net(IDS[:, :11], fresh)
    assert cache.nbytes == fresh.nbytes
    torch.testing.assert_close(net(IDS[:, 11:], cache), net(IDS[:, 11:], fresh), atol=1e-12, rtol=0)
    for length, message in ((31, "length must be at most"), (-1, "length must be an integer >= 0")):
        with pytest.raises(ValueError, match=message):
            cache.crop(length)


def test_a_saved_cache_goes_on_where_it_was(tmp_path):
    net, cache = filled()
    cache.save(tmp_path / "cache.safetensors")
    again = Cache.load(tmp_path / "cache.safetensors")
    assert (again.length, again.batch_size, again.nbytes) == (20, 2, cache.nbytes)
    assert torch.equal(net(IDS[:, 20:], again), net(IDS[:, 20:], cache))
    empty = net.new_cache(2)
    empty.save(tmp_path / "empty.safetensors")
    assert Cache.load(tmp_path / "empty.safetensors").length == 0


def test_a_file_that_is_no_whole_cache_is_refused_by_name(tmp_path):
    _, cache = filled()
    file = tmp_path / "cache.safetensors"
    cache.save(file)
    whole = file.read_bytes()
    tensors = load_file(file)
    damaged = {
        "cut": whole[:-9],
        "empty": b"",
        "text": b"hello",
        "torn header": whole[:40],
    }
    for name, content in damaged.items():
        other = tmp_path / f"{name}.safetensors"
        other.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{other.name} is not a cache"):
            Cache.load(other)
    sizes = json.dumps({"num_layers": 5, "batch_size": 2, "length": 20})
    for change in (
        {"9.growing.latent": tensors["3.growing.latent"].clone()},
        {"-1.fixed.state": tensors["0.fixed.state"].clone()},
        {"3.growing.latent": tensors["3.growing.latent"][:, :5].contiguous()},
        {"0.melting.state": tensors["0.fixed.state"].clone()},
        {"0.fixed.state": tensors["0.fixed.state"][:1].contiguous()},
        {"key_mask": tensors["key_mask"][:, :3].contiguous()},
    ):
        save_file(tensors | change, file, metadata={"evolve.cache": sizes})
        with pytest.raises(ValueError, match=r"cache\.safetensors is not a cache"):
            Cache.load(file)
    save_file(tensors, file)
    with pytest.raises(ValueError, match="is not a cache"):
        Cache.load(file)
    with pytest.raises(ValueError, match="is not a cache"):
        Cache.load(tmp_path / "absent")


# ------------------------------------------------------------------------------------- folders


@configs
@pytest.mark.parametrize("max_shard_bytes", [None, 20_000, 1])
def test_saved_and_loaded_is_the_same_model(config, max_shard_bytes, tmp_path):
    net = model(config, torch.float32)
    net.save_pretrained(tmp_path, max_shard_bytes=max_shard_bytes)
    again = Hybrid.from_pretrained(tmp_path)
    assert again.config == config
    assert torch.equal(again(IDS), net(IDS))
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes is not None)
    assert not [f for f in tmp_path.iterdir() if f.name.startswith(".")]


def test_dtypes_and_float32_islands(tmp_path):
    net = model(K3_LIKE, torch.float32)
    net.save_pretrained(tmp_path)
    half = Hybrid.from_pretrained(tmp_path, dtype=torch.bfloat16)
    in_float32 = {n.split(".", 2)[2] for n, p in half.named_parameters() if p.dtype == torch.float32}
    convs = {f"self_attn.{x}_conv1d.weight" for x in "qkv"}
    assert in_float32 == convs | {"self_attn.A_log", "self_attn.dt_bias", "self_attn.o_norm.weight"}
    assert half(IDS).dtype == torch.bfloat16
    half.save_pretrained(tmp_path / "half")
    again = Hybrid.from_pretrained(tmp_path / "half")  # the embedding's dtype
    assert {n: p.dtype for n, p in again.named_parameters()} == {
        n: p.dtype for n, p in half.named_parameters()
    }
    exact = Hybrid.from_pretrained(tmp_path, dtype=torch.float64)
    assert {p.dtype for p in exact.parameters()} == {torch.float64}
    assert torch.get_default_dtype() == torch.float32


def test_what_does_not_fit_is_reported_at_once(tmp_path):
    model(dtype=torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    tensors["model.layers.1.self_attn.extra"] = torch.zeros(1)
    tensors["model.norm.weight"] = torch.zeros(31)
    tensors["lm_head.weight"] = torch.zeros(50, 32, dtype=torch.int64)
    save_file(tensors, file)
    with pytest.raises(ValueError, match="do not fit") as error:
        Hybrid.from_pretrained(tmp_path)
    for part in (
        "missing: layers.0.self_attn.q_proj.weight",
        "unexpected: layers.1.self_attn.extra",
        "wrong shape: norm.weight is [31], expected [32]",
        "not float: lm_head.weight",
    ):
        assert part in str(error.value)


def test_damaged_folders_are_refused_with_the_file_named(tmp_path):
    model(dtype=torch.float32).save_pretrained(tmp_path, max_shard_bytes=20_000)
    index = tmp_path / "model.safetensors.index.json"
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    content = {f: f.read_bytes() for f in (*shards, index)}
    listing = json.loads(content[index])
    first = next(
        n for n, f in listing["weight_map"].items() if list(listing["weight_map"].values()).count(f) > 1
    )

    def refused(message):
        with pytest.raises(ValueError, match=message):
            Hybrid.from_pretrained(tmp_path)
        for file, whole in content.items():
            file.write_bytes(whole)

    second = shards[1]
    second.write_bytes(content[second][:-1])
    refused(rf"{second.name} is not a complete safetensors file")
    second.unlink()
    refused(rf"lists {second.name}, but there is no such file")
    second.write_bytes(content[shards[2]])
    refused(rf"{second.name} lacks what model.safetensors.index.json says")
    for change, message in (
        ({first: "../model.safetensors"}, "weight_map must give every tensor a safetensors file beside"),
        ({first: "/etc/passwd"}, "weight_map must give every tensor"),
        ({first: 3}, "weight_map must give every tensor"),
        ({"model.layers.0.bogus": shards[0].name}, "lacks what .* says it holds: model.layers.0.bogus"),
    ):
        index.write_text(json.dumps({"weight_map": listing["weight_map"] | change}))
        refused(message)
    fewer = {n: f for n, f in listing["weight_map"].items() if n != first}
    index.write_text(json.dumps({"weight_map": fewer}))
    refused(rf"holds what .* does not list there: {re.escape(first)}")
    for text in ("", "[]", "{}", "{"):
        index.write_text(text)
        refused("index.json is not an index with a weight_map")
    assert Hybrid.from_pretrained(tmp_path).config == SMALL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "kimi_k3"}, 'model_type must be "kimi_linear", got "kimi_k3"'),
        ({"mla_use_nope": False}, "mla_use_nope must be true"),
        ({"first_k_dense_replace": 1}, "every layer must be dense"),
        (
            {"num_hidden_layers": 6, "first_k_dense_replace": 6},
            "num_hidden_layers is 6, but the weights have 5",
        ),
        ({"num_key_value_heads": 1}, "num_key_value_heads must be 2"),
        ({"vocab_size": -1}, "vocab_size must be an integer >= 1, got -1"),
        ({"linear_attn_config": None}, "must say linear_attn_config.num_heads"),
        ({"linear_attn_config": []}, "must say linear_attn_config.num_heads"),
    ],
)
def test_another_models_configuration_is_refused(change, message, tmp_path):
    model(dtype=torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(message)):
        Hybrid.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"full_attn_layers": (0,)}, "full_attn_layers must be different layers from 1 to 5, got [0]"),
        ({"full_attn_layers": (6,)}, "full_attn_layers must be different layers"),
        ({"full_attn_layers": (2, 2)}, "full_attn_layers must be different layers"),
        ({"hidden_size": 0}, "hidden_size must be an integer >= 1, got 0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive"),
        ({"gate_lower_bound": 1.0}, "lower_bound must be below 0, got 1.0"),
    ],
)
def test_bad_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Hybrid(dataclasses.replace(SMALL, **change))(IDS)


# ------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("q_lora_rank", [None, 10])
def test_equals_transformers_kimi_linear_with_folders_both_ways(q_lora_rank, tmp_path):
    """A dense Kimi Linear: logits, and greedy generation; our folder in theirs, theirs (sharded) in ours."""
    theirs_module = transformers_model("kimi_linear")
    config = dataclasses.replace(SMALL, q_lora_rank=q_lora_rank)
    net = model(config, torch.float32)
    net.save_pretrained(tmp_path / "ours")
    theirs = theirs_module.KimiLinearForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        want, got = theirs(IDS).logits, net(IDS)
    assert (want - got).abs().max() < 1e-4
    assert want.std() > 0.1
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    again = Hybrid.from_pretrained(tmp_path / "theirs")
    assert again.config == config
    assert torch.equal(again(IDS), net(IDS))
    prompt = IDS[:, :9]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, **options)
    assert torch.equal(generate(net, prompt, 12), tokens)
