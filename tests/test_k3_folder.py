"""Folders in K3's released layout: both ways byte for byte, packed experts, refusals, and streaming."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from evolve import generate, k3_experts, k3_layout, mxfp4
from evolve.checkpoint import CONFIG, INDEX, WEIGHTS
from evolve.k3 import K3, K3Config, VisionConfig, released_tensors
from evolve.k3_experts import PackedExperts
from evolve.k3_layout import released_config
from evolve.lab import accounting
from evolve.moe import Experts, LatentMoE
from tests.oracles import GOLDENS

FIXTURES = ("tiny", "tiny-mxfp4")
IDS = torch.arange(48).view(2, 24) * 7 % 256
LAYERS = "language_model.model.layers"
SMALL_VISION = VisionConfig(
    vt_hidden_size=8, qkv_hidden_size=12, vt_intermediate_size=16, vt_num_hidden_layers=2, patch_size=2
)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, of whatever files."""
    files = sorted(folder.glob("model*.safetensors"))
    return {name: t for file in files for name, t in load_file(file).items()}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    whole = a.dtype == b.dtype and a.shape == b.shape
    return whole and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def edited(name: str, folder: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of a fixture with tensors set or, for ``None``, taken away."""
    tensors = load_file(GOLDENS / "k3" / name / WEIGHTS) | changes
    folder.mkdir(exist_ok=True)
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / WEIGHTS)
    (folder / CONFIG).write_text((GOLDENS / "k3" / name / CONFIG).read_text())
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / CONFIG).read_text())
    raw["text_config"] |= changes
    (folder / CONFIG).write_text(json.dumps(raw))


# ------------------------------------------------------------------------------------- both ways


@pytest.mark.parametrize("max_shard_bytes", [None, 100_000, 1])
@pytest.mark.parametrize("name", FIXTURES)
def test_loaded_and_saved_is_the_same_folder_byte_for_byte(name, max_shard_bytes, tmp_path):
    """Padded rates, float32 islands, packed experts; codes and scales may lie in different shards."""
    source = GOLDENS / "k3" / name
    net = K3.from_pretrained(source)
    net.save_pretrained(tmp_path, max_shard_bytes=max_shard_bytes)
    want, got = stored(source), stored(tmp_path)
    assert got.keys() == want.keys()
    assert [n for n in want if not same_bytes(got[n], want[n])] == []
    config = json.loads((source / CONFIG).read_text())
    written = json.loads((tmp_path / CONFIG).read_text())
    assert dict(k3_layout._flatten(written)) == dict(k3_layout._flatten(config))
    assert (tmp_path / INDEX).exists() == (max_shard_bytes is not None)
    assert torch.equal(K3.from_pretrained(tmp_path)(IDS), net(IDS))


def test_what_is_in_the_folder_is_what_the_configuration_lists(tmp_path):
    for name in FIXTURES:
        config = K3Config.from_json(GOLDENS / "k3" / name)
        listed = {n: (t.shape, t.dtype) for n, t in stored(GOLDENS / "k3" / name).items()}
        assert released_tensors(config) == listed


def test_expanded_experts_learn_and_are_packed_again_to_the_same_numbers(tmp_path):
    source = GOLDENS / "k3" / "tiny-mxfp4"
    net = K3.from_pretrained(source, packed=False)
    experts = net.layers[1].feed_forward.experts
    assert isinstance(experts, Experts)
    assert experts.gate_up_proj.requires_grad and experts.gate_up_proj.dtype == torch.bfloat16  # noqa: PT018
    want = stored(source)
    for kind, stack in (("w2", experts.down_proj), ("w1", experts.gate_up_proj[:, :64])):
        names = [f"{LAYERS}.1.block_sparse_moe.experts.{e}.{kind}.weight" for e in range(8)]
        exact = [mxfp4.unpack(want[f"{n}_packed"], want[f"{n}_scale"]) for n in names]
        assert torch.equal(stack.float(), torch.stack(exact))
    net.save_pretrained(tmp_path)
    got = stored(tmp_path)
    assert got.keys() == want.keys()
    assert all(same_bytes(got[n], want[n]) for n in want if ".experts." not in n)
    assert torch.equal(K3.from_pretrained(tmp_path)(IDS), net(IDS))


def test_packed_experts_stay_packed_and_only_chosen_ones_are_expanded(monkeypatch):
    net = K3.from_pretrained(GOLDENS / "k3" / "tiny-mxfp4")
    experts = net.layers[1].feed_forward.experts
    assert isinstance(experts, PackedExperts)
    assert {t.dtype for t in experts.buffers()} == {torch.uint8}
    assert not list(experts.parameters())
    calls = []
    monkeypatch.setattr(mxfp4, "unpack", lambda *a, f=mxfp4.unpack, **o: calls.append(a) or f(*a, **o))
    net(IDS[:1, :1])
    assert len(calls) == 4 * 2 * 2  # layers with experts, matrices, experts of the one token
    x = torch.randn(3, 64, requires_grad=True, dtype=torch.bfloat16)
    net.layers[1].feed_forward(x).sum().backward()
    assert x.grad.any()


def test_packed_weights_are_counted_as_the_weights_they_stand_for():
    packed, whole = (K3.from_pretrained(GOLDENS / "k3" / "tiny-mxfp4", packed=p) for p in (True, False))
    assert accounting.parameters(packed) == sum(p.numel() for p in whole.parameters())
    assert accounting.activated_parameters(packed) == accounting.activated_parameters(whole)


def test_packing_a_model_in_place_rounds_it_once():
    net = K3(K3Config.nano(initializer_range=0.2)).eval()
    twin = K3(net.config).eval()
    twin.load_state_dict(net.state_dict())
    k3_experts.pack_experts(net)
    y = net(IDS)
    assert 0 < (y - twin(IDS)).abs().max() < 2
    k3_experts.expand_experts(net, torch.float32)
    torch.testing.assert_close(net(IDS), y)
    assert net.state_dict().keys() == twin.state_dict().keys()


def test_a_quantized_model_that_was_trained_is_packed_when_it_is_saved(tmp_path):
    net = K3(K3Config.nano(quantized=True, dtype="bfloat16")).eval()
    net.save_pretrained(tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["dtype"] == "float32"  # that of the weights
    again = K3.from_pretrained(tmp_path)
    k3_experts.pack_experts(net)
    assert torch.equal(again(IDS), net(IDS))


def test_dtypes_and_float32_islands():
    half = K3.from_pretrained(GOLDENS / "k3" / "tiny")
    in_float32 = {n.split(".", 2)[2] for n, p in half.named_parameters() if p.dtype == torch.float32}
    convs = {f"self_attn.{x}_conv1d.weight" for x in "qkv"}
    gates = {"self_attn.A_log", "self_attn.dt_bias", "self_attn.o_norm.weight"}
    assert in_float32 == convs | gates | {"block_sparse_moe.gate.e_score_correction_bias"}
    assert half(IDS).dtype == torch.bfloat16
    exact = K3.from_pretrained(GOLDENS / "k3" / "tiny", dtype=torch.float64)
    assert {p.dtype for p in exact.parameters()} == {torch.float64}
    assert torch.get_default_dtype() == torch.float32


def test_a_vision_tower_is_checked_and_left_where_it_is(tmp_path):
    shapes = k3_layout.vision_tensors(SMALL_VISION, 64)
    tower = {name: torch.randn(shape) for name, shape in shapes.items()}
    folder = edited("tiny", tmp_path / "all", **tower)
    with pytest.raises(
        ValueError, match=r"has tensors of a vision tower, but no vision_config: mm_projector"
    ):
        K3.from_pretrained(folder)
    base = K3Config.from_json(GOLDENS / "k3" / "tiny")
    config = released_config(type(base)(**{**vars(base), "vision": SMALL_VISION}))
    (folder / CONFIG).write_text(json.dumps(config))
    net = K3.from_pretrained(folder)
    assert net.config.vision == SMALL_VISION
    assert torch.equal(net(IDS), K3.from_pretrained(GOLDENS / "k3" / "tiny")(IDS))
    edited("tiny", folder, **tower | {"mm_projector.post_norm.weight": None})
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"missing: mm_projector\.post_norm\.weight"):
        K3.from_pretrained(folder)


# -------------------------------------------------------------------------------------- refusals


def refused(folder: Path, *parts: str) -> None:
    """Loading and streaming both say so."""
    for load in (K3.from_pretrained, K3.streamed):
        with pytest.raises(ValueError, match=re.escape(str(folder))) as error:
            load(folder)
        for part in parts:
            assert part in str(error.value)


EXPERT = f"{LAYERS}.2.block_sparse_moe.experts.3"
RATES = f"{LAYERS}.0.self_attn.A_log"


def test_everything_that_does_not_fit_is_reported_at_once(tmp_path):
    changes = {
        f"{EXPERT}.w1.weight_scale": None,
        f"{EXPERT}.w2.weight_packed": torch.zeros(32, 16, dtype=torch.uint8),
        f"{EXPERT}.w3.weight_packed": torch.zeros(64, 16),
        "language_model.model.norm.weight": torch.zeros(64, dtype=torch.uint8),
        f"{LAYERS}.0.bogus": torch.zeros(1),
    }
    refused(
        edited("tiny-mxfp4", tmp_path, **changes),
        "missing: layers.2.block_sparse_moe.experts.3.w1.weight_scale",
        "unexpected: layers.0.bogus",
        "experts.3.w2.weight_packed is [32, 16], expected [32, 32]",
        "not float: norm.weight",
        "not whole: layers.2.block_sparse_moe.experts.3.w3.weight_packed",
    )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tiny", {RATES: torch.arange(16.0)}, f"{RATES} must be zero from 4 on (one rate a head)"),
        ("tiny", {RATES: torch.zeros(8)}, "layers.0.self_attn.A_log is [8], expected [4]"),
        ("tiny", {RATES.removeprefix("language_model."): torch.zeros(16)}, "twice, once as"),
        ("tiny", {f"{LAYERS}.13.input_layernorm.weight": torch.zeros(64)}, "unexpected: layers.13"),
        ("tiny", {"language_model.model.embed_tokens.weight": torch.zeros(256, 64)}, "says dtype bfloat16"),
        ("tiny-mxfp4", {f"{EXPERT}.w1.weight": torch.zeros(64, 32)}, "unexpected: layers.2"),
    ],
)
def test_tensors_of_another_model_are_refused(name, changes, message, tmp_path):
    refused(edited(name, tmp_path, **changes), message)


def test_two_names_for_one_tensor_are_refused_in_the_file(tmp_path):
    folder = edited("tiny", tmp_path, **{RATES.replace("language_model.model.", ""): torch.zeros(16)})
    refused(folder, "layers.0.self_attn.A_log twice")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 2**20}, "num_experts is 1048576, but the weights have 8 experts"),
        ({"num_experts": 9}, "missing: layers.1.block_sparse_moe.experts.8.w1.weight_packed"),
        ({"quantization_config": None}, "missing: layers.1.block_sparse_moe.experts.0.w1.weight"),
        ({"hidden_size": 96}, "expected [96]"),
        ({"rope_theta": 1}, "unknown: text_config.rope_theta"),
    ],
)
def test_a_configuration_that_does_not_fit_the_weights_is_refused(changes, message, tmp_path):
    folder = edited("tiny-mxfp4", tmp_path)
    edit_config(folder, **changes)
    refused(folder, message)


def test_another_depth_is_refused(tmp_path):
    folder = edited("tiny-mxfp4", tmp_path)
    linear = json.loads((folder / CONFIG).read_text())["text_config"]["linear_attn_config"]
    kda = [l for l in range(1, 10**6 + 1) if l not in linear["full_attn_layers"]]
    edit_config(folder, num_hidden_layers=10**6, linear_attn_config=linear | {"kda_layers": kda})
    refused(folder, "num_hidden_layers is 1000000, but the weights have 5 layers")


def test_damaged_folders_are_refused_with_the_file_named(tmp_path):
    K3.from_pretrained(GOLDENS / "k3" / "tiny-mxfp4").save_pretrained(tmp_path, max_shard_bytes=200_000)
    shard, other = sorted(tmp_path.glob("model-*.safetensors"))[:2]
    whole, config = shard.read_bytes(), (tmp_path / CONFIG).read_bytes()
    for n in (len(whole) - 1, len(whole) // 2, 9, 7, 0):
        shard.write_bytes(whole[:n])
        refused(tmp_path, f"{shard.name} is not a complete safetensors file")
    shard.write_bytes((2**62).to_bytes(8, "little") + whole[8:])
    refused(tmp_path, f"{shard.name} is not a complete safetensors file")
    shard.write_bytes(other.read_bytes())
    refused(tmp_path, f"{shard.name} lacks what {INDEX} says it holds")
    shard.unlink()
    refused(tmp_path, f"lists {shard.name}, but there is no such file")
    shard.write_bytes(whole)
    index = (tmp_path / INDEX).read_text()
    (tmp_path / INDEX).write_text(index.replace(shard.name, "../" + shard.name))
    refused(tmp_path, "weight_map must give every tensor a safetensors file beside the index")
    (tmp_path / INDEX).write_text(index)
    for text in (config[:-20], b"[]", b"\xff", b"[" * 100_000):
        (tmp_path / CONFIG).write_bytes(text)
        refused(tmp_path, CONFIG)
    (tmp_path / CONFIG).write_bytes(config)
    K3.from_pretrained(tmp_path)


def twice(text: str, name: str, value: object) -> str:
    """A JSON text whose object that has ``name`` has it again."""
    at = text.index(json.dumps(name))
    return f"{text[:at]}{json.dumps(name)}: {json.dumps(value)}, {text[at:]}"


def test_a_name_that_stands_twice_is_refused_in_every_file(tmp_path):
    K3.from_pretrained(GOLDENS / "k3" / "tiny-mxfp4").save_pretrained(tmp_path, max_shard_bytes=200_000)
    shard, last = sorted(tmp_path.glob("model-*.safetensors"))[::3]
    for file, name, value in (
        (CONFIG, "hidden_size", 32),
        (INDEX, "language_model.lm_head.weight", last.name),
    ):
        text = (tmp_path / file).read_text()
        (tmp_path / file).write_text(twice(text, name, value))
        refused(tmp_path, file, f"twice in one object: {name}")
        (tmp_path / file).write_text(text)
    whole = shard.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    name = next(n for n in header if n != "__metadata__")
    again = twice(json.dumps(header), name, header[name]).encode()
    again += b" " * (-len(again) % 8)
    shard.write_bytes(len(again).to_bytes(8, "little") + again + whole[end:])
    refused(tmp_path, shard.name, f"twice in one object: {name}")


def test_folders_of_two_models_and_impossible_names_are_refused_and_links_followed(tmp_path):
    folder, store = tmp_path / "model", tmp_path / "blobs"
    net = K3.from_pretrained(GOLDENS / "k3" / "tiny-mxfp4")
    net.save_pretrained(folder, max_shard_bytes=200_000)
    store.mkdir()
    shard = min(folder.glob("model-*.safetensors"))
    shard.rename(store / "blob")
    shard.symlink_to(store / "blob")  # as in the hub's cache
    assert torch.equal(K3.from_pretrained(folder)(IDS), net(IDS))
    (folder / WEIGHTS).write_bytes(b"")
    refused(folder, f"holds {WEIGHTS} and {INDEX}")
    (folder / WEIGHTS).unlink()
    index = (folder / INDEX).read_text()
    (folder / INDEX).write_text(index.replace(shard.name, "a" * 5000 + ".safetensors"))
    refused(folder, "but there is no such file")


def test_saving_over_a_vision_tower_is_refused(tmp_path):
    tower = {n: torch.randn(s) for n, s in k3_layout.vision_tensors(SMALL_VISION, 64).items()}
    folder = edited("tiny", tmp_path, **tower)
    before = (folder / WEIGHTS).read_bytes()
    with pytest.raises(ValueError, match="holds a vision tower, which the model has not"):
        K3.from_pretrained(GOLDENS / "k3" / "tiny").save_pretrained(folder)
    assert (folder / WEIGHTS).read_bytes() == before


@pytest.mark.parametrize("stop_at", [0, 1, 2, 3])
def test_a_save_stopped_while_files_get_their_names_loses_nothing(stop_at, tmp_path, monkeypatch):
    source, calls, replace = GOLDENS / "k3" / "tiny-mxfp4", [], os.replace
    net = K3.from_pretrained(source)
    net.save_pretrained(tmp_path)

    def stopped(a: Path, b: Path) -> None:
        calls.append(a)
        if len(calls) > stop_at:
            raise KeyboardInterrupt
        replace(a, b)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            net.save_pretrained(tmp_path, max_shard_bytes=200_000)
    refused(tmp_path, "a save was stopped there")
    files = [f for f in tmp_path.iterdir() if "index" not in f.name and CONFIG not in f.name]
    got = {name: t for f in files for name, t in load_file(f).items()}
    want = stored(source)
    assert got.keys() == want.keys()
    assert all(same_bytes(got[n], want[n]) for n in want)


# ------------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-3), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", FIXTURES)
def test_streamed_is_the_same_model(name, dtype, limit, tmp_path):
    source = GOLDENS / "k3" / name
    whole = K3.from_pretrained(source, dtype=dtype)
    whole.save_pretrained(tmp_path, max_shard_bytes=50_000)
    for folder in (source, tmp_path):
        net = K3.streamed(folder, dtype=dtype)
        assert (net(IDS) - whole(IDS)).abs().max() < limit
        assert torch.equal(generate(net, IDS[:, :5], 3), generate(whole, IDS[:, :5], 3))
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[0, :3] = False
    assert (net(IDS, attention_mask=mask) - whole(IDS, attention_mask=mask)).abs().max() < limit
    assert K3.streamed(source)(IDS).dtype == torch.bfloat16


def resident(net: nn.Module) -> set[str]:
    small = ("norm", "_res_")
    names = (n for n, p in net.named_parameters() if not p.is_meta)
    return {n for n in names if ".self_attn." in n or not any(s in n for s in small)}


def last_of(network: nn.Module) -> nn.Module:
    return network.routed_expert_up_proj if isinstance(network, LatentMoE) else network.down_proj


def test_one_part_is_resident_at_a_time_and_none_afterwards():
    net, seen = K3.streamed(GOLDENS / "k3" / "tiny"), []
    for layer in net.layers:
        for part in (layer.self_attn.o_proj, last_of(layer.feed_forward)):
            part.register_forward_hook(lambda *_: seen.append(resident(net)))
    net(IDS)
    assert len(seen) == 26
    assert all(len({re.match(r"layers\.\d+\.[^.]+", n)[0] for n in names}) == 1 for names in seen)
    assert not resident(net)
    with pytest.raises(ValueError, match="the model has no weights to save"):
        net.save_pretrained("unused")
    assert not Path("unused").exists()


def test_a_pass_that_fails_lets_go_of_everything_and_the_next_one_runs(monkeypatch):
    net = K3.streamed(GOLDENS / "k3" / "tiny", dtype=torch.float64)
    want, cache = net(IDS), net.new_cache(2)
    net(IDS[:, :6], cache)
    with monkeypatch.context() as patched:
        patched.setattr(net.layers[7].self_attn.o_proj, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            net(IDS[:, 6:], cache)
    assert not resident(net)
    torch.testing.assert_close(net(IDS[:, 6:], cache), want[:, 6:], rtol=0, atol=1e-9)


def test_progress_counts_the_parts(monkeypatch):
    from evolve import k3_stream

    bars = []

    class Bar:
        def __init__(self, steps: int, label: str) -> None:
            self.steps, self.done, self.closed = steps, 0, False
            bars.append(self)

        def update(self, n: int) -> None:
            self.done += n

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(k3_stream, "progress", Bar)
    K3.streamed(GOLDENS / "k3" / "tiny")(IDS)
    assert [(b.steps, b.done, b.closed) for b in bars] == [(27, 27, True)]  # two a layer, and the head


LARGE = K3Config(
    vocab_size=2048, hidden_size=768, intermediate_size=3072, num_hidden_layers=9, num_attention_heads=8,
    kv_lora_rank=192, q_lora_rank=384, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
    linear_num_heads=16, linear_head_dim=64, num_experts=80, num_experts_per_token=4, num_shared_experts=1,
    moe_intermediate_size=768, routed_expert_hidden_size=384, attn_res_block_size=3, vision=None,
)  # fmt: skip


def write_large(folder: Path) -> int:
    """A checkpoint of random numbers, layer l in shard l + 1 as in the release; its bytes."""
    weight_map, size = {}, 0
    tensors = released_tensors(LARGE)
    for shard in range(LARGE.num_hidden_layers + 1):
        own, file = {}, f"model-{shard + 1:05d}-of-{LARGE.num_hidden_layers + 1:05d}.safetensors"
        for name, (shape, dtype) in tensors.items():
            layer = re.search(r"layers\.(\d+)\.", name)
            if (int(layer[1]) if layer else LARGE.num_hidden_layers) == shard:
                own[name] = random_tensor(name, shape, dtype)
        save_file(own, folder / file)
        weight_map |= dict.fromkeys(own, file)
        size += sum(t.nbytes for t in own.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
    (folder / CONFIG).write_text(json.dumps(released_config(LARGE)))
    return size


def random_tensor(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if name.endswith("_packed"):
        return torch.randint(0, 256, shape, dtype=torch.uint8)
    if name.endswith("_scale"):
        return torch.full(shape, 121, dtype=torch.uint8)
    if name.endswith("A_log"):
        return torch.zeros(shape, dtype=dtype)
    return (torch.randn(shape) * 0.03 + ("norm" in name)).to(dtype)


def anonymous() -> int:
    """Bytes of this process that no file stands behind."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


def child(load: str, folder: str) -> None:
    """One forward pass in a process of its own; prints by how much anonymous memory grew at most."""
    torch.set_num_threads(1)
    ids = torch.arange(24).view(1, 24) * 37 % LARGE.vocab_size
    with torch.no_grad():
        K3.streamed(GOLDENS / "k3" / "tiny")(ids % 256)  # what a first pass allocates once and for all
    base, peak, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with torch.no_grad():
        net = getattr(K3, load)(folder, dtype=torch.float32)
        y = net(ids)
    done.set()
    watcher.join()
    print(json.dumps({"peak": peak[0] - base, "sum": y.double().abs().sum().item()}))


def run_child(load: str, folder: Path) -> dict:
    code = f"from tests.test_k3_folder import child; child({load!r}, {str(folder)!r})"
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    return json.loads(result.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measured from /proc")
def test_streaming_a_checkpoint_several_times_larger_than_its_memory(tmp_path):
    """The peak is a small multiple of the largest layer, in a process that the whole model would not fit."""
    size = write_large(tmp_path)
    largest = max(
        sum(
            4 * shape.numel()
            for name, (shape, _) in released_tensors(LARGE).items()
            if f"layers.{l}." in name and ".experts." not in name
        )
        for l in range(LARGE.num_hidden_layers)
    )
    streamed, loaded = run_child("streamed", tmp_path), run_child("from_pretrained", tmp_path)
    assert streamed["sum"] == loaded["sum"]
    assert streamed["peak"] < 2 * largest
    assert size > 5 * streamed["peak"]
    assert loaded["peak"] > size  # the instrument sees what a model that is there takes
    assert loaded["peak"] < 1.3 * size + largest  # experts are packed; the rest is in float32: no second copy
    print(f"checkpoint {size:,}, largest layer {largest:,}, {streamed=}, {loaded=}")
