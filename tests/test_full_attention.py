"""Rung 1: softmax attention, GPT-2 and its published layout."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from evolve import GPT2, GPT2Config
from evolve.full_attention import PUBLISHED_SIZES, softmax_attention

TINY = GPT2Config(vocab_size=97, n_positions=32, n_embd=24, n_layer=3, n_head=4)


def lively(config: GPT2Config = TINY, dtype=torch.float64) -> GPT2:
    """A model whose random weights are large enough that every part changes the logits."""
    torch.manual_seed(0)
    model = GPT2(config).to(dtype).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0, 0.3)
    return model


def ids(B: int, T: int, seed: int = 0, vocab: int = TINY.vocab_size) -> torch.Tensor:
    return torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------- the operation


def numpy_attention(q, k, v, scale, causal, key_mask):
    """Loops over rows, heads and queries: the oracle shares nothing with the code."""
    B, T, H, _ = q.shape
    S, HV, V = v.shape[1:]
    o = np.zeros((B, T, HV, V))
    for b in range(B):
        for hv in range(HV):
            h = hv // (HV // H)
            for t in range(T):
                seen = [
                    s
                    for s in range(S)
                    if (not causal or s <= t + S - T) and (key_mask is None or key_mask[b, s])
                ]
                if seen:
                    score = np.array([scale * q[b, t, h] @ k[b, s, h] for s in seen])
                    p = np.exp(score - score.max())
                    o[b, t, hv] = sum(w * v[b, s, hv] for w, s in zip(p / p.sum(), seen))
    return o


@pytest.mark.parametrize("backend", ["torch", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "S", "H", "HV"), [(2, 5, 5, 3, 3), (1, 1, 7, 2, 4), (2, 3, 7, 1, 2), (1, 7, 3, 2, 2)]
)
def test_attention_equals_numpy(B, T, S, H, HV, masked, causal, backend):
    g = torch.Generator().manual_seed(1)
    q = torch.randn(B, T, H, 6, generator=g, dtype=torch.float64)
    k = torch.randn(B, S, H, 6, generator=g, dtype=torch.float64)
    v = torch.randn(B, S, HV, 5, generator=g, dtype=torch.float64)
    key_mask = (torch.rand(B, S, generator=g) > 0.5) if masked else None
    o = softmax_attention(q, k, v, scale=0.7, causal=causal, key_mask=key_mask, backend=backend)
    expected = numpy_attention(q.numpy(), k.numpy(), v.numpy(), 0.7, causal, key_mask)
    np.testing.assert_allclose(o.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_fused_gradients_equal_the_written_ones_also_for_queries_that_see_nothing(causal):
    g = torch.Generator().manual_seed(2)
    key_mask = torch.tensor([[False, False, True, True], [False] * 4])
    results = []
    for backend in ("torch", "sdpa"):
        g.manual_seed(2)
        leaves = [torch.randn(2, 4, 2, 8, generator=g, dtype=torch.float64).requires_grad_() for _ in "qkv"]
        o = softmax_attention(*leaves, causal=causal, key_mask=key_mask, backend=backend)
        (o * torch.randn(o.shape, generator=g, dtype=o.dtype)).sum().backward()
        assert o[1].abs().max() == 0
        results.append([o.detach()] + [x.grad for x in leaves])
    for a, b in zip(*results):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "sdpa"])
def test_hidden_keys_may_hold_anything(backend):
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in "qkv")
    key_mask = torch.tensor([[True, False, True, True]])
    clean = softmax_attention(q, k, v, key_mask=key_mask, backend=backend)
    k[:, 1], v[:, 1] = torch.nan, torch.inf
    assert torch.equal(softmax_attention(q, k, v, key_mask=key_mask, backend=backend), clean)


@pytest.mark.parametrize("backend", ["torch", "sdpa"])
def test_the_future_never_changes_the_past(backend):
    q, k, v = (torch.randn(2, 300, 2, 8) for _ in "qkv")
    before = softmax_attention(q, k, v, backend=backend)
    for t in (256, 37, 6, 1):
        k[:, t:], v[:, t:] = 100.0, -100.0
        assert torch.equal(softmax_attention(q, k, v, backend=backend)[:, :t], before[:, :t])


def test_attention_matches_stored_float64_results():
    for file in sorted((Path(__file__).parent / "goldens" / "ops").glob("softmax_*.safetensors")):
        case = safetensors.torch.load_file(file)
        q, k, v = (case[n].double().requires_grad_() for n in "qkv")
        for backend in ("torch", "sdpa"):
            o = softmax_attention(q, k, v, backend=backend)
            torch.testing.assert_close(o, case["o"], atol=1e-12, rtol=0)
            grads = torch.autograd.grad((o * case["w"].double()).sum(), (q, k, v))
            for got, name in zip(grads, ("dq", "dk", "dv")):
                torch.testing.assert_close(got.float(), case[name].float(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_accumulate_in_float32(dtype):
    q, k, v = (torch.randn(1, 64, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    low = [x.to(dtype) for x in (q, k, v)]
    exact = softmax_attention(*(x.double() for x in low))
    o = softmax_attention(*low, backend="torch")
    assert o.dtype == dtype
    assert torch.equal(o, exact.to(dtype)) or (o.double() - exact).abs().max() <= torch.finfo(dtype).eps


BAD_OPERANDS = [
    ({"q": torch.zeros(2, 3, 8)}, r"q must be \[B, T, H, K\]"),
    ({"k": torch.zeros(2, 4, 2, 7)}, r"k must be \[B, S, H, K\] = \[2, any, 2, 8\], got \[2, 4, 2, 7\]"),
    ({"v": torch.zeros(2, 3, 2, 5)}, r"v must be \[B, S, HV, V\]"),
    ({"v": torch.zeros(2, 4, 3, 5)}, "v must have HV a multiple of H = 2"),
    ({"v": torch.zeros(2, 4, 2, 5, dtype=torch.long)}, "v must be floating point"),
    ({"k": torch.zeros(2, 4, 2, 8, dtype=torch.float64)}, "k must have q's dtype"),
    ({"key_mask": torch.ones(2, 4)}, "key_mask must be bool"),
    ({"key_mask": torch.ones(2, 3, dtype=torch.bool)}, r"key_mask must be \[B, S\]"),
    ({"backend": "cuda"}, "backend must be"),
    ({"scale": float("nan")}, "scale must be"),
    ({"q": [1.0]}, "q must be a torch.Tensor"),
]


@pytest.mark.parametrize(("change", "message"), BAD_OPERANDS)
def test_bad_operands_are_named(change, message):
    good = {"q": torch.zeros(2, 4, 2, 8), "k": torch.zeros(2, 4, 2, 8), "v": torch.zeros(2, 4, 2, 5)}
    with pytest.raises(ValueError, match=message):
        softmax_attention(**(good | change))


# -------------------------------------------------------------------------- GPT-2 against the peer


def peer(config: GPT2Config):
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.n_positions,
            n_embd=config.n_embd,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_inner=config.n_inner,
            layer_norm_epsilon=config.layer_norm_epsilon,
        )
    ).eval()


@pytest.mark.parametrize(
    ("config", "B", "T"),
    [
        (TINY, 3, 17),
        (GPT2Config(vocab_size=31, n_positions=16, n_embd=30, n_layer=1, n_head=3, n_inner=50), 1, 16),
        pytest.param(GPT2Config(), 1, 64, marks=pytest.mark.slow, id="124M"),
    ],
)
def test_weights_travel_both_ways_and_logits_agree(config, B, T, tmp_path):
    theirs = peer(config)
    if config.n_embd < 100:  # their initialisation is timid: biases and gains would go untested
        for p in theirs.parameters():
            torch.nn.init.normal_(p, 0.0, 0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = GPT2.from_pretrained(tmp_path / "theirs")
    x = ids(B, T, vocab=config.vocab_size)
    with torch.no_grad():
        expected = theirs(x).logits
        assert (ours(x) - expected).abs().max() <= 1e-4
        ours.save_pretrained(tmp_path / "ours")
        again = type(theirs).from_pretrained(tmp_path / "ours")
        assert (again(x).logits - expected).abs().max() <= 1e-4
    for (name, a), (other, b) in zip(again.state_dict().items(), theirs.state_dict().items()):
        assert name == other
        assert torch.equal(a, b)


def test_published_sizes_have_the_published_parameter_counts():
    from evolve.lab.accounting import parameters

    counts = {}
    for name in PUBLISHED_SIZES:
        with torch.device("meta"):
            counts[name] = parameters(GPT2(GPT2Config.published(name)))
    assert counts == {
        "gpt2": 124_439_808,
        "gpt2-medium": 354_823_168,
        "gpt2-large": 774_030_080,
        "gpt2-xl": 1_557_611_200,
    }


def test_initialisation_follows_the_release():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=2000, n_positions=256, n_embd=128, n_layer=8, n_head=4))
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.wpe.weight.std().item() == pytest.approx(0.01, rel=0.03)
    assert model.h[3].attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.h[3].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert model.h[0].ln_1.weight.min() == 1
    assert model.h[0].attn.c_attn.bias.abs().max() == 0
    x, targets = ids(2, 128, vocab=2000), ids(2, 128, seed=1, vocab=2000)
    assert model.loss(x, targets).item() == pytest.approx(np.log(2000), abs=0.1)


# ------------------------------------------------------------------------------ cache and padding


@pytest.mark.parametrize("splits", [[16], [1] * 16, [5, 1, 10], [15, 1], [0, 7, 0, 9]])
def test_cached_pieces_equal_the_full_pass(splits):
    model, x = lively(), ids(2, 16)
    with torch.no_grad():
        cache = model.new_cache(2)
        logits = torch.cat([model(piece, cache=cache) for piece in x.split(splits, dim=1)], dim=1)
        torch.testing.assert_close(logits, model(x), atol=1e-12, rtol=0)
    assert cache.length == 16
    assert cache.nbytes == 2 * 16 * 3 * 2 * 24 * 8  # B T L (k and v) D float64


def test_a_cache_carries_gradients():
    model, x = lively(), ids(1, 8)
    cache = model.new_cache(1)
    pieces = torch.cat([model(x[:, :5], cache=cache), model(x[:, 5:], cache=cache)], dim=1)
    pieces.square().mean().backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(x).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, atol=1e-10, rtol=1e-8)


def padded(rows: list[torch.Tensor], side: str, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(r) for r in rows)
    x, mask = torch.full((len(rows), width), fill), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        x[i, where], mask[i, where] = row, True
    return x, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("fill", [0, 50, 10**6, -1])
def test_padded_rows_equal_unpadded_ones(side, fill):
    model, rows = lively(), [ids(1, n, seed=n)[0] for n in (9, 4, 1)]
    x, mask = padded(rows, side, fill)
    with torch.no_grad():
        logits = model(x, attention_mask=mask)
        for i, row in enumerate(rows):
            torch.testing.assert_close(logits[i][mask[i]], model(row[None])[0], atol=1e-12, rtol=0)
        cache = model.new_cache(len(rows))
        model(x, cache=cache, attention_mask=mask)
        for step in range(3):  # decoding goes on from the last real token of each row
            token = ids(len(rows), 1, seed=70 + step)
            rows = [torch.cat([row, new]) for row, new in zip(rows, token)]
            logits = model(token, cache=cache)
            for i, row in enumerate(rows):
                torch.testing.assert_close(logits[i, -1], model(row[None])[0, -1], atol=1e-12, rtol=0)


def test_padding_does_not_use_up_positions():
    model = lively()
    row = ids(1, TINY.n_positions)[0]
    x, mask = padded([row, row[:3]], "left", 0)
    x = torch.cat([torch.zeros(2, 9, dtype=torch.long), x], dim=1)
    mask = torch.cat([torch.zeros(2, 9, dtype=torch.bool), mask], dim=1)
    with torch.no_grad():
        logits = model(x, attention_mask=mask)
        torch.testing.assert_close(logits[0, 9:], model(row[None])[0], atol=1e-12, rtol=0)


def test_a_failed_call_leaves_the_cache_as_it_was():
    model, x = lively(), ids(2, 8)
    with torch.no_grad():
        cache = model.new_cache(2)
        model(x[:, :4], cache=cache)
        hook = model.h[2].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x[:, :3] * 0, cache=cache)
        hook.remove()
        for bad in (torch.full((2, 1), 97), ids(3, 1), ids(2, 29), torch.zeros(2, 1)):
            with pytest.raises(ValueError, match="input_ids"):
                model(bad, cache=cache)
        assert (cache.length, cache.nbytes) == (4, 2 * 4 * 3 * 2 * 24 * 8)
        torch.testing.assert_close(model(x[:, 4:], cache=cache), model(x)[:, 4:], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("x", "kwargs", "message"),
    [
        (torch.zeros(4, dtype=torch.long), {}, r"input_ids must be \[B, T\]"),
        (torch.zeros(1, 4), {}, "input_ids must be int64 or int32"),
        (torch.tensor([[-1]]), {}, r"input_ids must lie in \[0, 97\), got values from -1 to -1"),
        (torch.tensor([[97]]), {}, "input_ids must lie in"),
        (torch.zeros(1, 33, dtype=torch.long), {}, "n_positions = 32, got 33"),
        (
            torch.zeros(1, 4, dtype=torch.long),
            {"attention_mask": torch.ones(1, 4)},
            "attention_mask must be bool",
        ),
        (
            torch.zeros(1, 4, dtype=torch.long),
            {"attention_mask": torch.ones(1, 5, dtype=torch.bool)},
            r"attention_mask must be \[B, T\] = \[1, 4\]",
        ),
        ([[1, 2]], {}, "input_ids must be a torch.Tensor"),
    ],
)
def test_bad_model_input_is_named(x, kwargs, message):
    with pytest.raises(ValueError, match=message):
        lively()(x, **kwargs)


def test_an_empty_batch_and_an_empty_sequence_give_empty_logits():
    model = lively()
    assert model(torch.zeros(0, 5, dtype=torch.long)).shape == (0, 5, 97)
    assert model(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 97)


def test_loss_counts_only_what_is_asked():
    model, x = lively(), ids(2, 6)
    targets = torch.full_like(x, -100)
    targets[0, 2], targets[1, 5] = 7, 11
    logp = model(x).log_softmax(-1)
    expected = -(logp[0, 2, 7] + logp[1, 5, 11]) / 2
    assert model.loss(x, targets).item() == pytest.approx(expected.item(), rel=1e-6)
    for bad, message in [
        (torch.full_like(x, -100), "targets must ask"),
        (targets[:, :5], r"targets must be \[B, T\]"),
        (targets + 200, "targets must lie in"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.loss(x, bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_embd": 25}, "n_embd must be a multiple of n_head"),
        ({"n_layer": 0}, r"n_layer must be a positive integer below 2\*\*31, got 0"),
        ({"vocab_size": 1.5}, "vocab_size must be a positive integer"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon must be positive"),
        ({"initializer_range": float("nan")}, "initializer_range must be positive"),
        ({"n_head": None}, "n_head must be a positive integer"),
    ],
)
def test_bad_sizes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        GPT2Config(**({"vocab_size": 97, "n_embd": 24, "n_head": 4} | change))


# --------------------------------------------------------------------------- the published layout


@pytest.fixture
def folder(tmp_path):
    lively(dtype=torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder, change) -> None:
    """Apply ``change`` to the folder's tensors and write them back."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def test_a_round_trip_keeps_every_bit_and_a_second_save_every_byte(folder, tmp_path):
    model = GPT2.from_pretrained(folder)
    for (name, a), b in zip(lively(dtype=torch.float32).state_dict().items(), model.state_dict().values()):
        assert torch.equal(a, b), name
    model.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert all(p.requires_grad for p in model.parameters())


def test_dtype_is_the_files_unless_asked_for(folder):
    assert GPT2.from_pretrained(folder).wte.weight.dtype == torch.float32
    half = GPT2.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(ids(1, 4)).dtype == torch.bfloat16


def test_the_layout_variants_of_published_files_are_read(folder):
    expected = GPT2.from_pretrained(folder)(ids(1, 6))

    def disguise(tensors):
        for name in list(tensors):
            tensors[f"transformer.{name}"] = tensors.pop(name)
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
        tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()

    rewrite(folder, disguise)
    assert torch.equal(GPT2.from_pretrained(folder)(ids(1, 6)), expected)
    torch.save(safetensors.torch.load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(GPT2.from_pretrained(folder)(ids(1, 6)), expected)


class Hostile:
    """Unpickling this creates a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (open, (str(self.target), "w"))


def test_a_pickle_that_would_run_code_is_refused(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save({"wte.weight": Hostile(tmp_path / "owned")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read safely"):
        GPT2.from_pretrained(folder)
    assert not (tmp_path / "owned").exists()


def set_config(**change):
    def apply(folder):
        config = json.loads((folder / "config.json").read_text())
        config.update(change)
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))

    return apply


def cut_weights(to: int):
    def apply(folder):
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:to])

    return apply


def change_tensors(change):
    return lambda folder: rewrite(folder, change)


DAMAGE = [
    (lambda f: (f / "config.json").unlink(), "has none"),
    (lambda f: (f / "model.safetensors").unlink(), "has neither"),
    (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    (lambda f: (f / "config.json").write_text("[" * 100_000), "not valid JSON"),
    (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object"),
    (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "not valid JSON"),
    (set_config(n_layer="gone"), "must say n_layer"),
    (set_config(n_layer=10**9), "n_layer is 1000000000, but the weights have 3"),
    (set_config(n_embd=28), "wrong shape: wte.weight is"),
    (set_config(n_head=5), "n_embd must be a multiple"),
    (set_config(n_embd="24"), "n_embd must be a positive integer"),
    (set_config(model_type="llama"), 'model_type must be "gpt2", got "llama"'),
    (set_config(activation_function="relu"), "activation_function must be"),
    (set_config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx must be false"),
    (cut_weights(0), "not a complete safetensors file"),
    (cut_weights(500), "not a complete safetensors file"),
    (cut_weights(-1), "not a complete safetensors file"),
    (change_tensors(lambda t: t.pop("h.1.mlp.c_fc.bias")), r"missing: h\.1\.mlp\.c_fc\.bias"),
    (change_tensors(lambda t: t.update(extra=torch.zeros(1))), "unexpected: extra"),
    (
        change_tensors(lambda t: t.update({"wpe.weight": torch.zeros(3, 24)})),
        r"wrong shape: wpe\.weight is \[3, 24\], expected \[32, 24\]",
    ),
    (
        change_tensors(lambda t: t.update({"ln_f.bias": torch.zeros(24, dtype=torch.int32)})),
        r"not float: ln_f\.bias",
    ),
    (
        change_tensors(lambda t: t.update({"lm_head.weight": torch.zeros(97, 24)})),
        r"lm_head\.weight .* must equal wte\.weight",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damaged_folders_are_refused_with_the_reason(folder, damage, message):
    damage(folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(ValueError, match=message) as caught:
        GPT2.from_pretrained(folder)
    assert str(folder) in str(caught.value)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_every_difference_is_reported_at_once(folder):
    def change(tensors):
        del tensors["wpe.weight"]
        tensors["strange"] = torch.zeros(1)
        tensors["ln_f.weight"] = torch.zeros(25)

    rewrite(folder, change)
    with pytest.raises(ValueError, match=r"missing: wpe.*unexpected: strange.*wrong shape: ln_f"):
        GPT2.from_pretrained(folder)


@pytest.mark.parametrize("name", ["no/such/folder", "gpt3", ""])
def test_unknown_names_are_refused_without_asking_the_network(name):
    with pytest.raises(ValueError, match="path_or_name must be"):
        GPT2.from_pretrained(name)


def test_saving_over_a_file_or_from_meta_changes_nothing(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="dir must be a folder"):
        lively().save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    with torch.device("meta"):
        empty = GPT2(TINY)
    with pytest.raises(ValueError, match="no weights to save"):
        empty.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_interrupted_save_keeps_the_old_weights(folder, monkeypatch):
    before = (folder / "model.safetensors").read_bytes()

    def fail(tensors, file, metadata):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("evolve.checkpoint.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        lively(dtype=torch.float32).save_pretrained(folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_published_name_goes_through_the_hub_and_says_how_much(folder, monkeypatch, capsys):
    hub = pytest.importorskip("huggingface_hub")
    asked = []
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda url: type("M", (), {"size": 548_105_171}))
    monkeypatch.setattr(hub, "snapshot_download", lambda repo, **_: asked.append(repo) or str(folder))
    model = GPT2.from_pretrained("gpt2")
    assert asked == ["openai-community/gpt2"]
    assert "548 MB" in capsys.readouterr().out
    assert model.config == TINY


def test_the_tokenizer_comes_from_the_same_folder(folder):
    from evolve.checkpoint import load_tokenizer

    tokenizers = pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"must hold tokenizer\.json"):
        load_tokenizer(folder, {})
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(["def f(x): return x"] * 9, vocab_size=280, min_frequency=2)
    trained.save_model(str(folder))
    text = "return f(x)"
    assert load_tokenizer(folder, {}).decode(load_tokenizer(folder, {}).encode(text).ids) == text
    trained.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder, {}).decode(load_tokenizer(folder, {}).encode(text).ids) == text
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(folder, {})


@pytest.mark.parametrize(
    ("name", "target"), [("dtype", torch.int64), ("dtype", "float16"), ("device", "nowhere")]
)
def test_targets_that_no_model_runs_on_are_named(folder, name, target):
    with pytest.raises(ValueError, match=f"{name} must be one"):
        GPT2.from_pretrained(folder, **{name: target})


def test_more_odd_folders_are_refused_whole(folder, tmp_path):
    rewrite(folder, lambda t: t.update(x=torch.zeros(2, 2)))
    with pytest.raises(ValueError, match="unexpected: x"):
        GPT2.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    for content in ({3: torch.zeros(2)}, {"wte.weight": torch.zeros(2, 2).to_sparse()}, [torch.zeros(2)]):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match="dictionary of names and ordinary tensors"):
            GPT2.from_pretrained(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"config\.json is a folder"):
        lively().save_pretrained(folder)
    assert not (folder / "model.safetensors").exists()
    with pytest.raises(ValueError, match="dir must name a folder"):
        lively().save_pretrained("")


def test_a_cache_of_another_model_is_refused_and_a_failed_first_call_leaves_nothing():
    model, x = lively(), ids(2, 4)
    with torch.no_grad():
        with pytest.raises(ValueError, match="cache must have this model's 3 layers, got 2"):
            model(x, cache=lively(GPT2Config(97, 32, 24, 2, 4)).new_cache(2))
        with pytest.raises(ValueError, match="cache must be a Cache"):
            model(x, cache="x")
        cache = model.new_cache(2)
        lively(GPT2Config(97, 32, 36, 3, 4))(x, cache=cache)
        with pytest.raises(ValueError, match="cache must have been filled by this model"):
            model(x, cache=cache)
        cache = model.new_cache(2)
        hook = model.ln_f.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x, cache=cache)
        hook.remove()
        model.float()(x, cache=cache)  # another dtype: the failed call must not have fixed it
        assert cache.length == 4


def test_masks_on_meta_are_counted_and_foreign_devices_named():
    with torch.device("meta"):
        model, x = GPT2(TINY), torch.zeros(2, 4, dtype=torch.long)
        assert model(x, attention_mask=torch.ones(2, 4, dtype=torch.bool)).shape == (2, 4, 97)
    with pytest.raises(ValueError, match="input_ids must be on the model's device"):
        lively()(x)
    q = torch.zeros(1, 3, 2, 4)
    with pytest.raises(ValueError, match="key_mask must be on q's device"):
        softmax_attention(q, q, q, key_mask=torch.ones(1, 3, dtype=torch.bool, device="meta"))
