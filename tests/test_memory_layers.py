"""The four layers: padding, packing, caches, initialisation, and parity with transformers' layers."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from evolve.deltanet import DeltaNet
from evolve.gated_deltanet import GatedDeltaNet, split_qwen3_next
from evolve.kda import KimiDeltaAttention
from evolve.linear_attention import LinearAttention
from evolve.norms import l2_normalize, rms_norm
from evolve.short_conv import ShortConvolution, short_conv
from tests.oracles import transformers_model

LAYERS = {
    "linear": (LinearAttention, {}),
    "linear-conv": (LinearAttention, {"conv_size": 4, "normalize": False}),
    "delta": (DeltaNet, {}),
    "delta-no-conv": (DeltaNet, {"conv_size": None}),
    "gated": (GatedDeltaNet, {}),
    "kimi-linear": (KimiDeltaAttention, {}),
    "k3": (KimiDeltaAttention, {"gate_lower_bound": -5.0, "full_rank_gate": True}),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A layer whose random weights are large enough that every part changes the output."""
    cls, options = LAYERS[name]
    layer = cls(20, 2, 12, num_v_heads=4, head_v_dim=8, **options)
    for weight in layer.parameters():
        nn.init.normal_(weight, 0.0, 0.4)
    return layer.to(dtype)


def assert_same(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


@every_layer
def test_prefill_and_decode_equal_the_full_pass(name: str) -> None:
    layer, x = build(name), torch.randn(2, 80, 20, dtype=torch.float64)
    y, cache = layer(x), {}
    pieces = [
        layer(x[:, :66], cache),
        *(layer(x[:, t : t + 1], cache) for t in range(66, 70)),
        layer(x[:, 70:], cache),
    ]
    assert_same(torch.cat(pieces, 1), y)
    assert cache["state"].shape == (2, 4, 12, 8)
    assert all(cache[n].shape[1] == 3 for n in cache if n.endswith("conv"))


@every_layer
@pytest.mark.parametrize("side", ["left", "right", "holes", "batch of one", "an empty row"])
def test_padding_never_matters(name: str, side: str) -> None:
    """Outputs and cache of padded rows are those of the bare rows, whatever padding holds (here NaN)."""
    layer = build(name)
    B = 1 if side == "batch of one" else 3
    mask = torch.ones(B, 30, dtype=torch.bool)
    if side == "holes":
        mask[:, [0, 3, 4, 29]] = False
    elif side == "an empty row":
        mask[0] = False
    else:
        mask[0, slice(9) if side != "right" else slice(21, None)] = False
    x = torch.randn(B, 30, 20, dtype=torch.float64).masked_fill(~mask[..., None], float("nan"))
    cache, cuts = {}, (0, 10, 20, 21, 30)
    y = torch.cat([layer(x[:, a:b], cache, mask[:, a:b]) for a, b in pairwise(cuts)], 1)
    assert torch.equal(y[~mask], torch.zeros_like(y[~mask]))
    for row in range(B):
        alone = {}
        assert_same(y[row, mask[row]], layer(x[row, mask[row]][None], alone)[0])
        for entry, value in alone.items():
            assert_same(cache[entry][row], value[0])


@every_layer
def test_padding_gets_no_gradient(name: str) -> None:
    layer, x = build(name), torch.randn(2, 9, 20, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    (d,) = torch.autograd.grad(layer(x, attention_mask=mask).sum(), x)
    assert (d[~mask] == 0).all()
    assert (d[mask] != 0).any(-1).all()


@every_layer
def test_causal_and_every_weight_learns(name: str) -> None:
    layer, x = build(name), torch.randn(1, 40, 20, dtype=torch.float64)
    changed = torch.cat([x[:, :17], torch.randn(1, 23, 20, dtype=torch.float64)], 1)
    assert torch.equal(layer(x)[:, :17], layer(changed)[:, :17])
    layer(x).square().sum().backward()
    for weight_name, weight in layer.named_parameters():
        assert weight.grad.isfinite().all(), weight_name
        assert weight.grad.abs().max() > 0, weight_name


@every_layer
def test_bad_input_changes_nothing(name: str) -> None:
    layer, cache, x = build(name), {}, torch.randn(2, 5, 20, dtype=torch.float64)
    layer(x, cache)
    before = {n: t.clone() for n, t in cache.items()}
    bad = [
        ((x[..., :3], cache), "x must be"),
        ((x, cache, torch.ones(2, 4, dtype=torch.bool)), "attention_mask must be"),
        ((x, cache, torch.ones(2, 5)), "attention_mask must be bool"),
        ((x[:1], cache), "history must be|initial_state must be"),
    ]
    for args, message in bad:
        with pytest.raises(ValueError, match=message):
            layer(*args)
    assert cache.keys() == before.keys()
    assert all(torch.equal(cache[n], t) for n, t in before.items())


@every_layer
@pytest.mark.parametrize("way", ["float32", "bfloat16", "meta"])
def test_initialisation_is_finite_however_built(name: str, way: str) -> None:
    cls, options = LAYERS[name]
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16 if way == "bfloat16" else torch.float32)
        with torch.device("meta" if way == "meta" else "cpu"):
            layer = cls(20, 2, 12, num_v_heads=4, head_v_dim=8, **options)
    finally:
        torch.set_default_dtype(default)
    if way == "meta":
        layer = layer.to_empty(device="cpu")
        for weight in layer.parameters():
            nn.init.constant_(weight, float("nan"))
        layer.reset_parameters()
    assert all(weight.isfinite().all() for weight in layer.parameters())
    x = torch.randn(2, 20, 20).to(torch.bfloat16 if way == "bfloat16" else torch.float32)
    y = layer(x)
    assert y.dtype == x.dtype
    assert y.isfinite().all()
    if hasattr(layer, "A_log"):
        assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
        dt = nn.functional.softplus(layer.dt_bias)
        assert dt.min() > 0.99e-3
        assert dt.max() < 1.01e-1
        bounded = getattr(layer, "gate_lower_bound", None) is not None
        assert (layer.A_log == 0).all() if bounded else ((layer.A_log >= 0) & (layer.A_log < 2.8)).all()


# ------------------------------------------------------------------------------- convolution and norms


def test_short_conv_is_the_formula() -> None:
    u, w = torch.randn(2, 7, 3, dtype=torch.float64), torch.randn(3, 1, 4, dtype=torch.float64)
    y, history = short_conv(u, w)
    want = nn.functional.conv1d(nn.functional.pad(u.mT, (3, 0)), w, groups=3).mT
    assert_same(y, nn.functional.silu(want))
    assert torch.equal(history, u[:, -3:])
    for kernel_size in (1, 2, 5):
        conv = ShortConvolution(3, kernel_size).double()
        full, last = conv(u)
        first, h = conv(u[:, :2])
        second, h = conv(u[:, 2:], h)
        assert_same(torch.cat([first, second], 1), full)
        assert torch.equal(h, last)


def test_packed_rows_never_see_each_other_in_the_convolution() -> None:
    w, lengths = torch.randn(3, 1, 4, dtype=torch.float64), [2, 0, 5, 1]
    ends = torch.tensor([0, 2, 2, 7, 8])
    rows = [torch.randn(1, n, 3, dtype=torch.float64) for n in lengths]
    pasts = torch.randn(4, 3, 3, dtype=torch.float64)
    y, history = short_conv(torch.cat(rows, 1), w, pasts, cu_seqlens=ends)
    for i, row in enumerate(rows):
        y_i, h_i = short_conv(row, w, pasts[i : i + 1])
        assert torch.equal(y[:, ends[i] : ends[i + 1]], y_i)
        assert torch.equal(history[i : i + 1], h_i)


def test_norms_are_the_formulas() -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64) * 1e-3  # small, so that where eps stands shows
    assert_same(l2_normalize(x), x / (25e-6 + 1e-6) ** 0.5, 1e-15)
    assert_same(rms_norm(x, 1e-5), x / (12.5e-6 + 1e-5) ** 0.5, 1e-15)
    assert l2_normalize(x.half()).dtype == torch.float32
    assert l2_normalize(x * 0).isfinite().all()


# ------------------------------------------------------------------------------------------- parity


def randomise(module: nn.Module) -> None:
    for weight in module.parameters():
        nn.init.normal_(weight, 0.0, 0.3)


@pytest.mark.parametrize("T", [1, 7, 70])
@pytest.mark.parametrize(("H", "HV"), [(2, 2), (2, 6)])
def test_gated_deltanet_equals_qwen3_next(T: int, H: int, HV: int) -> None:
    model = transformers_model("qwen3_next")
    config = model.Qwen3NextConfig(
        hidden_size=48,
        linear_num_key_heads=H,
        linear_num_value_heads=HV,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
        rms_norm_eps=1e-6,
    )
    theirs = model.Qwen3NextGatedDeltaNet(config, 0).eval()
    randomise(theirs)
    ours = GatedDeltaNet(48, H, 16, num_v_heads=HV, head_v_dim=24, norm_eps=1e-6)
    ours.load_state_dict(split_qwen3_next(theirs.state_dict(), ours))
    x = torch.randn(2, T, 48)
    want = theirs(x)
    assert ((ours(x) - want).abs().max() / want.abs().max()).item() < 1e-5


@pytest.mark.parametrize("T", [1, 7, 70])
@pytest.mark.parametrize("family", ["kimi_linear", "glm5_next"])
def test_kimi_delta_attention_equals_transformers(family: str, T: int) -> None:
    """Kimi Linear's unbounded gate, and the bounded one of GLM's KDA layer."""
    model, bounded = transformers_model(family), family == "glm5_next"
    config_class = model.Glm5NextTextConfig if bounded else model.KimiLinearConfig
    layer_class = model.Glm5NextTextLinearAttention if bounded else model.KimiLinearDeltaAttention
    sizes = {"hidden_size": 48, "linear_num_heads": 3, "linear_head_dim": 16}
    config = config_class(**sizes, num_hidden_layers=1, layer_types=["linear_attention"])
    theirs = layer_class(config, 0).eval()
    randomise(theirs)
    weights = {n.replace("forget_gate.", ""): w for n, w in theirs.state_dict().items()}
    convs = weights.pop("conv1d.weight").chunk(3)
    weights |= {f"{n}_conv1d.weight": w for n, w in zip("qkv", convs)}
    bound = config.linear_lower_bound if bounded else None
    ours = KimiDeltaAttention(48, 3, 16, gate_lower_bound=bound, norm_eps=config.rms_norm_eps)
    ours.load_state_dict(weights)  # A_log as released: [1, 1, H, 1] in Kimi Linear
    x = torch.randn(2, T, 48)
    want = theirs(x)
    assert ((ours(x) - want).abs().max() / want.abs().max()).item() < 1e-5


def test_kda_loads_k3s_padded_decay_rates() -> None:
    layer = KimiDeltaAttention(20, 2, 12, gate_lower_bound=-5.0, full_rank_gate=True)
    weights = layer.state_dict()
    padded = torch.cat([torch.tensor([0.5, -0.5]), torch.zeros(10)])
    layer.load_state_dict(weights | {"A_log": padded})
    assert layer.A_log.tolist() == [0.5, -0.5]
    assert "g_proj.weight" in weights
    assert "g_a_proj.weight" not in weights
    with pytest.raises(RuntimeError, match="size mismatch for A_log"):
        layer.load_state_dict(weights | {"A_log": torch.ones(12)})  # twelve rates, not two and padding
