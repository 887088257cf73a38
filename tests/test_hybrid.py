"""The hybrid: both kinds of memory in one cache, whole-model parity, folders in one file and in shards."""

import dataclasses
import itertools
import json
import math
import os
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from evolve import checkpoint, generate
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


def model(config: HybridConfig = SMALL, dtype: torch.dtype = torch.float64, seed: int = 0) -> Hybrid:
    torch.manual_seed(seed)
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


def test_a_cache_that_another_model_filled_is_refused():
    """Sizes alike, kinds of layers not: what is missing must not be made up."""
    nets = [model(dataclasses.replace(SMALL, full_attn_layers=layers)) for layers in ((), (1,), (4,), (1, 2))]
    for a, b in itertools.permutations(nets, 2):
        cache = a.new_cache(2)
        with torch.no_grad():
            a(IDS[:, :20], cache)
            with pytest.raises(ValueError, match="cache must have been filled by this model"):
                b(IDS[:, 20:21], cache)
            torch.testing.assert_close(a(IDS[:, 20:], cache), a(IDS)[:, 20:], atol=1e-10, rtol=0)


@pytest.mark.parametrize("trained", ["q_proj", "kv_b_proj", "kv_a_proj_with_mqa"])
def test_gradients_pass_through_a_cache_when_only_some_weights_are_trained(trained):
    net = model()
    for name, p in net.named_parameters():
        p.requires_grad_(f"layers.3.self_attn.{trained}" in name)
    weight = getattr(net.layers[3].self_attn, trained).weight
    (whole,) = torch.autograd.grad(net(IDS).square().sum(), weight)
    cache = net.new_cache(2)
    pieces = torch.cat([net(x, cache) for x in IDS.split([4, 1, 1, IDS.shape[1] - 6], dim=1)], dim=1)
    (in_pieces,) = torch.autograd.grad(pieces.square().sum(), weight)
    torch.testing.assert_close(in_pieces, whole, atol=1e-10, rtol=1e-10)


def test_a_cache_filled_in_inference_mode_goes_on_outside_it():
    net, cache = model(), model().new_cache(2)
    with torch.inference_mode():
        net(IDS[:, :9], cache)
        net(IDS[:, 9:10], cache)
    with torch.no_grad():
        torch.testing.assert_close(net(IDS[:, 10:], cache), net(IDS)[:, 10:], atol=1e-12, rtol=0)


def test_reorder_changes_all_layers_or_none(monkeypatch):
    _, cache = filled()
    before = {(i, n): t.clone() for i, layer in enumerate(cache.layers) for n, t in layer.stored().items()}
    monkeypatch.setattr(type(cache.layers[3]), "stored", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.reorder(torch.tensor([1, 0, 0]))
    monkeypatch.undo()
    assert cache.batch_size == 2
    for (i, name), t in before.items():
        assert torch.equal(cache.layers[i].get(name), t)


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
    sizes = {"num_layers": 5, "batch_size": 2, "length": 20}
    for name in tensors:  # a cache that lacks what it had
        rest = {n: t for n, t in tensors.items() if n != name}
        save_file(rest, file, metadata={"evolve.cache": json.dumps(sizes | {"tensors": sorted(tensors)})})
        with pytest.raises(ValueError, match="is not a cache"):
            Cache.load(file)
    for change in (
        {"9.growing.latent": tensors["3.growing.latent"].clone()},
        {"-1.fixed.state": tensors["0.fixed.state"].clone()},
        {"03.growing.latent": tensors["3.growing.latent"].clone()},
        {"0.fixed.state": tensors["0.fixed.state"].long()},
        {"key_mask": tensors["key_mask"].float()},
        {"3.growing.latent": tensors["3.growing.latent"][:, :5].contiguous()},
        {"0.melting.state": tensors["0.fixed.state"].clone()},
        {"0.fixed.state": tensors["0.fixed.state"][:1].contiguous()},
        {"key_mask": tensors["key_mask"][:, :3].contiguous()},
        {"0.growing.state": torch.zeros(2, 20, 3)},  # a second time, and of the other kind
    ):
        names = {"tensors": sorted(tensors | change)}
        save_file(tensors | change, file, metadata={"evolve.cache": json.dumps(sizes | names)})
        with pytest.raises(ValueError, match=r"cache\.safetensors is not a cache"):
            Cache.load(file)
    for claim in ({"num_layers": 10**9}, {"length": 10**30}, {"batch_size": -1}):
        names = {"tensors": ["0.fixed.x"]}
        save_file(
            {"0.fixed.x": torch.zeros(2, 1)},
            file,
            metadata={"evolve.cache": json.dumps(sizes | names | claim)},
        )
        with pytest.raises(ValueError, match=f"is not a cache.*{next(iter(claim))} must be"):
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


@pytest.mark.parametrize("stopped", ["writing weights", "renaming weights", "renaming the configuration"])
@pytest.mark.parametrize("max_shard_bytes", [None, 20_000])
def test_a_save_that_is_stopped_never_mixes_two_models(stopped, max_shard_bytes, tmp_path, monkeypatch):
    old, new = model(dtype=torch.float32), model(dtype=torch.float32, seed=1)
    old.save_pretrained(tmp_path, max_shard_bytes=max_shard_bytes)
    what, file = stopped.split(" ", 1)
    module, function = (checkpoint, "save_file") if what == "writing" else (os, "replace")
    real, last = getattr(module, function), "config.json" if "config" in file else "safetensors"

    def stopping(source, target, **options):
        if last in str(target):
            raise OSError("no space left on device")
        return real(source, target, **options)

    monkeypatch.setattr(module, function, stopping)
    with pytest.raises(OSError, match="no space"):
        new.save_pretrained(tmp_path, max_shard_bytes=max_shard_bytes)
    monkeypatch.undo()
    if what == "writing":
        assert not list(tmp_path.glob(".*"))
        assert torch.equal(Hybrid.from_pretrained(tmp_path)(IDS), old(IDS))
    else:
        with pytest.raises(ValueError, match=r"must hold config\.json.* a save was stopped there"):
            Hybrid.from_pretrained(tmp_path)
    new.save_pretrained(tmp_path, max_shard_bytes=max_shard_bytes)
    assert not list(tmp_path.glob(".*"))
    assert torch.equal(Hybrid.from_pretrained(tmp_path)(IDS), new(IDS))


def test_nothing_of_an_older_model_stays_beside_a_new_one(tmp_path):
    """Other readers prefer a whole file to shards."""
    net = model(SMALL, torch.float32)
    (tmp_path / "model-notes.txt").write_text("mine")
    for limit, files in ((None, 1), (20_000, None), (40_000, None), (None, 1)):
        net.save_pretrained(tmp_path, max_shard_bytes=limit)
        index = tmp_path / "model.safetensors.index.json"
        listed = set(json.loads(index.read_text())["weight_map"].values()) if limit else {"model.safetensors"}
        assert {f.name for f in tmp_path.glob("*.safetensors")} == listed
        assert index.exists() == (limit is not None)
        assert files is None or len(listed) == files
    assert (tmp_path / "model-notes.txt").read_text() == "mine"


def test_tied_weights_and_numpy_sizes_are_saved(tmp_path):
    net = model(dataclasses.replace(SMALL, vocab_size=np.int64(50)), torch.float32)
    net.lm_head.weight = net.embed_tokens.weight
    net.save_pretrained(tmp_path)
    assert torch.equal(Hybrid.from_pretrained(tmp_path)(IDS), net(IDS))


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
        ({"num_key_value_heads": 1}, "num_key_value_heads must be 2"),
        ({"vocab_size": -1}, "vocab_size must be an integer >= 1 and <= 1048576, got -1"),
        ({"linear_attn_config": None}, "must say linear_attn_config.num_heads"),
        ({"linear_attn_config": []}, "must say linear_attn_config.num_heads"),
        ({"num_hidden_layers": "5"}, "config.json: num_hidden_layers must be an integer"),
        ({"num_hidden_layers": None}, "config.json: num_hidden_layers must be an integer"),
        ({"first_k_dense_replace": "5"}, "first_k_dense_replace must be an integer"),
        ({"mlp_layer_types": 5}, "mlp_layer_types must be dense layers"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types must be dense layers"),
        ({"hidden_size": 2**62}, "hidden_size must be an integer >= 1 and <= 1048576"),
        ({"mla_use_output_gate": "false"}, "mla_use_output_gate must be true or false, got 'false'"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be positive and finite"),
        ({"attn_res_block_size": 12}, "attn_res_block_size must not be set"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types and linear_attn_config disagree"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types must be full_ or linear_attention 5 times"),
        ({"linear_head_dim": 7}, "linear_head_dim must be linear_attn_config.head_dim"),
    ],
)
def test_another_models_configuration_is_refused(change, message, tmp_path):
    check_refused(tmp_path, message, lambda config: config | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kda_layers": []}, "kda_layers must be the layers without full attention"),
        ({"kda_layers": "x"}, "kda_layers must be layers from 1 to 5"),
        ({"full_attn_layers": 5}, "full_attn_layers must be layers from 1 to 5"),
        ({"full_attn_layers": None}, "full_attn_layers or layer_types must be given"),
        ({"full_attn_layers": [True, 5]}, "full_attn_layers must be layers from 1 to 5"),
        ({"gate_lower_bound": "x"}, "gate_lower_bound must be below 0"),
        ({"gate_lower_bound": -math.inf}, "gate_lower_bound must be below 0 and finite"),
        ({"use_full_rank_gate": "false"}, "use_full_rank_gate must be true or false"),
    ],
)
def test_another_linear_attention_is_refused(change, message, tmp_path):
    def edit(config):
        return config | {"linear_attn_config": config["linear_attn_config"] | change}

    check_refused(tmp_path, message, edit)


@pytest.mark.parametrize(
    ("depth", "message"),
    [(6, ", layers.5.self_attn.A_log, "), (4, "unexpected: layers.4."), (10**6, "have 5 layers")],
)
def test_another_depth_is_refused(depth, message, tmp_path):
    def edit(config):
        linear = config["linear_attn_config"] | {"kda_layers": None, "full_attn_layers": [4]}
        changes = {"num_hidden_layers": depth, "first_k_dense_replace": depth, "linear_attn_config": linear}
        return config | changes

    check_refused(tmp_path, message, edit)


def check_refused(folder, message, edit):
    """A saved model whose configuration is edited must not load, and the file must be named."""
    model(dtype=torch.float32).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(edit(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        Hybrid.from_pretrained(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"full_attn_layers": (0,)}, "full_attn_layers must be different layers from 1 to 5, got (0,)"),
        ({"full_attn_layers": (6,)}, "full_attn_layers must be different layers"),
        ({"full_attn_layers": (2, 2)}, "full_attn_layers must be different layers"),
        ({"hidden_size": 0}, "hidden_size must be an integer >= 1 and <= 1048576, got 0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive"),
        ({"gate_lower_bound": 1.0}, "gate_lower_bound must be below 0 and finite"),
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


def test_a_tensor_that_comes_under_two_names_is_refused(tmp_path):
    model(dtype=torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for twice in ("norm.weight", "model.layers.0.block_sparse_moe.gate_proj.weight"):
        other = "model.norm.weight" if twice == "norm.weight" else "model.layers.0.mlp.gate_proj.weight"
        save_file(tensors | {twice: tensors[other].clone()}, file)
        with pytest.raises(
            ValueError, match=r"the weights hold .* twice, once as .* in .*model\.safetensors"
        ):
            Hybrid.from_pretrained(tmp_path)
