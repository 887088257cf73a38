"""Edges of the memory rules: half precision, empty and odd inputs, bad input, and other people's code."""

import pytest
import torch

from evolve.kda import kda_gate
from tests.oracles import fla_function, oracle, transformers_function
from tests.rule_cases import DELTA, GATED, KDA, LINEAR, LINEAR_ELU, RULES, Rule, as_tuple, leaves, make

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
both_forms = pytest.mark.parametrize("kind", ["recurrent", "chunk"])


@every_rule
@both_forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_inputs_keep_a_float32_state(rule: Rule, kind: str, dtype: torch.dtype) -> None:
    """Only o is rounded: everything else is what the same numbers give in float32."""
    half = {n: t.to(dtype) for n, t in make(rule, T=40, gate="-1e-3").items() if n != "S0"}
    state = make(rule, T=40, dtype=torch.float32)["S0"]
    o, S = rule.run(kind, half | {"S0": state})
    want, want_S = rule.run(kind, {n: t.float() for n, t in half.items()} | {"S0": state})
    assert o.dtype == dtype
    assert all(t.dtype == torch.float32 for t in as_tuple(S))
    torch.testing.assert_close(S, want_S, rtol=0, atol=0)
    torch.testing.assert_close(o, want.to(dtype), rtol=0, atol=0)


@both_forms
def test_the_error_is_taken_before_rounding(kind: str) -> None:
    """A value the memory almost knows: v − Sᵀk is 2⁻⁹ here, and bfloat16 would round Sᵀk to v."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    x = {"q": one, "k": one, "v": one, "beta": one[..., 0], "S0": torch.full((1, 1, 1, 1), 1 - 2.0**-9)}
    _, S = DELTA.run(kind, x | {"beta": x["beta"] * 0.5})
    assert S.item() == 1 - 2.0**-10


@every_rule
@both_forms
def test_autocast_leaves_the_recurrence_alone(rule: Rule, kind: str) -> None:
    x = make(rule, T=40, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = rule.run(kind, x)
    torch.testing.assert_close(inside, rule.run(kind, x), rtol=0, atol=0)


@pytest.mark.parametrize("rule", [LINEAR, DELTA, GATED, KDA], ids=lambda r: r.name)  # φ(0) = 1 writes
@both_forms
def test_zero_keys_read_and_write_nothing(rule: Rule, kind: str) -> None:
    x = make(rule, T=20, gate="zero")
    x |= {"k": torch.zeros_like(x["k"]), "q": torch.zeros_like(x["q"])}
    o, S = rule.run(kind, x)
    assert torch.equal(S, x["S0"])
    assert torch.equal(o, torch.zeros_like(o))


@both_forms
def test_normalised_linear_attention_reads_zero_from_an_empty_memory(kind: str) -> None:
    x = {n: t.requires_grad_() for n, t in make(LINEAR, T=5, dtype=torch.float32).items() if n != "S0"}
    far = {"q": x["q"], "k": x["k"] - 1000, "v": x["v"]}  # φ(k) underflows to 0
    o, _ = LINEAR_ELU.run(kind, far)
    assert torch.equal(o, torch.zeros_like(o))
    assert all(d.isfinite().all() for d in torch.autograd.grad(o.sum(), list(x.values()), allow_unused=True))


@every_rule
@both_forms
@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}, {"T": 0, "B": 0}, {"V": 1, "K": 1}], ids=str)
def test_empty_and_tiny_inputs(rule: Rule, kind: str, sizes: dict) -> None:
    x = make(rule, **({"T": 3, "HV": 4} | sizes))
    o, S = rule.run(kind, x)
    assert o.shape == x["v"].shape
    if x["v"].shape[1] == 0:
        torch.testing.assert_close(S, x["S0"], rtol=0, atol=0)
    want = oracle(rule, x)
    torch.testing.assert_close((o, S), want, rtol=0, atol=1e-11)


@every_rule
@both_forms
def test_no_sequence_at_all(rule: Rule, kind: str) -> None:
    x = make(rule, T=0, B=1) | {"S0": None}
    o, S = rule.run(kind, x, cu_seqlens=torch.tensor([0]))
    assert o.shape == x["v"].shape
    assert all(t.shape[0] == 0 for t in as_tuple(S))


@every_rule
@both_forms
def test_views_and_inputs_left_alone(rule: Rule, kind: str) -> None:
    """Transposed and expanded inputs are as good as contiguous ones, and none is written to."""
    x = make(rule, T=20)
    x["v"] = x["v"][:, :1].expand_as(x["v"])
    odd = {n: t if n == "S0" else t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in x.items()}
    odd["v"] = x["v"]
    before = [t.clone() for t in leaves(odd)]
    torch.testing.assert_close(rule.run(kind, odd), rule.run(kind, x), rtol=0, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(before, leaves(odd)))


@every_rule
@both_forms
def test_options(rule: Rule, kind: str) -> None:
    """scale multiplies q; no last state unless asked; no first state means zeros."""
    x = make(rule, T=20)
    o, S = rule.run(kind, x, output_final_state=False)
    assert S is None
    if not rule.options:
        torch.testing.assert_close(rule.run(kind, x, scale=3.0)[0], o * 3 * 12**0.5, rtol=0, atol=1e-11)
    zeros = tuple(torch.zeros_like(t) for t in as_tuple(x["S0"]))
    start = rule.run(kind, x | {"S0": zeros if len(zeros) > 1 else zeros[0]})
    torch.testing.assert_close(rule.run(kind, x | {"S0": None}), start, rtol=0, atol=0)


BAD = [
    ({"q": torch.zeros(2, 8, 2)}, "q must be"),
    ({"k": torch.zeros(2, 8, 2, 5)}, r"k must be \[B, T, H, K\] = \[2, 8, 2, 4\], got \[2, 8, 2, 5\]"),
    ({"v": torch.zeros(2, 7, 4, 6)}, "v must be"),
    ({"v": torch.zeros(2, 8, 3, 6)}, "multiple of H = 2, got HV = 3"),
    ({"v": torch.zeros(2, 8, 4, 6, dtype=torch.long)}, "v must be floating point"),
    ({"beta": torch.zeros(2, 8, 2)}, r"beta must be \[B, T, HV\] = \[2, 8, 4\], got \[2, 8, 2\]"),
    ({"g": torch.zeros(2, 8, 4)}, r"g must be \[B, T, HV, K\] = \[2, 8, 4, 4\]"),
    ({"initial_state": torch.zeros(2, 4, 6, 4)}, r"initial_state must be \[B, HV, K, V\] = \[2, 4, 4, 6\]"),
    ({"initial_state": "zeros"}, "initial_state must be a torch.Tensor"),
    ({"cu_seqlens": torch.tensor([0, 8])}, "B must be 1, got 2"),
    ({"cu_seqlens": torch.tensor([0.0, 8.0])}, "cu_seqlens must be int32 or int64"),
    ({"scale": float("nan")}, "scale must be"),
    ({"scale": "big"}, "scale must be"),
    ({"chunk_size": 0}, "chunk_size must be a positive int, got 0"),
    ({"chunk_size": 16.0}, "chunk_size must be a positive int"),
    ({"backend": "cuda"}, 'backend must be None, "torch" or "triton"'),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input_is_refused_by_name(change: dict, message: str) -> None:
    x = make(KDA, T=8, HV=4, K=4, V=6, dtype=torch.float32)
    given = {n: x[n] for n in KDA.inputs} | {"initial_state": x["S0"]} | change
    with pytest.raises(ValueError, match=message):
        KDA.form("chunk")(**given)


@pytest.mark.parametrize("ends", [[0, 5], [1, 8], [0, 5, 4, 8], [], [0, 9]], ids=str)
def test_bad_cu_seqlens_are_refused(ends: list[int]) -> None:
    x = make(DELTA, T=8, B=1)
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 8"):
        DELTA.run("chunk", x | {"S0": None}, cu_seqlens=torch.tensor(ends, dtype=torch.long))


def test_linear_attention_refuses_the_wrong_kind_of_state() -> None:
    x = make(LINEAR_ELU, T=4)
    with pytest.raises(ValueError, match="must be S alone"):
        LINEAR.run("chunk", x)
    with pytest.raises(ValueError, match=r"must be the pair \(S, z\)"):
        LINEAR_ELU.run("chunk", x | {"S0": x["S0"][0]})
    with pytest.raises(ValueError, match="z must be"):
        LINEAR_ELU.run("chunk", x | {"S0": (x["S0"][0], x["S0"][1][:, :1])})
    with pytest.raises(ValueError, match="feature_map must be"):
        LINEAR.run("chunk", make(LINEAR, T=4), feature_map="relu")


# ------------------------------------------------------------------------------ other people's code


def close(got, want, tolerance: float = 2e-6) -> None:
    for a, b in zip(got, want):
        assert ((a - b).abs().max() / b.abs().max()).item() < tolerance


@both_forms
@pytest.mark.parametrize("gate", ["zero", "-1e-3", "-1.5"])
def test_fla_naive_functions(kind: str, gate: str) -> None:
    """FLA's references, on a length their chunked form can take; all in float32."""
    sizes = {"T": 64, "gate": gate, "dtype": torch.float32}
    x = make(KDA, **sizes, HV=4)
    tokens = {n: x[n] for n in KDA.inputs}
    for name in ("naive_recurrent_kda", "naive_chunk_kda"):
        fla = fla_function("kda", name)
        close(KDA.run(kind, x), fla(**tokens, initial_state=x["S0"], output_final_state=True))
    x = make(GATED, **sizes)
    fla = fla_function("gated_delta_rule", "naive_recurrent_gated_delta_rule")
    tokens = {n: x[n] for n in GATED.inputs}  # by keyword: its positional order is (q, k, v, beta, g)
    close(GATED.run(kind, x), fla(**tokens, initial_state=x["S0"], output_final_state=True))
    x = make(DELTA, **sizes)
    heads_first = [x[n].transpose(1, 2) for n in DELTA.inputs]
    o, S = fla_function("delta_rule", "delta_rule_recurrence")(*heads_first, initial_state=x["S0"])
    close(DELTA.run(kind, x), (o.transpose(1, 2), S))
    x = make(LINEAR, **sizes)
    fla = fla_function("linear_attn", "naive_recurrent_linear_attn")
    close(LINEAR.run(kind, x), fla(x["q"], x["k"], x["v"], initial_state=x["S0"], output_final_state=True))


@both_forms
@pytest.mark.parametrize("gate", ["zero", "-1.5", "mixed"])
def test_transformers_functions(kind: str, gate: str) -> None:
    """Its chunked forms subtract running sums, which costs float32 digits in mixed gates: 5e-5 there."""
    how = {"initial_state": None, "output_final_state": True}
    tolerance = 5e-5 if gate == "mixed" else 2e-6
    x = make(KDA, T=70, gate=gate, dtype=torch.float32)
    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        theirs = transformers_function("kimi_linear", name)
        want = theirs(*(x[n] for n in KDA.inputs), **(how | {"initial_state": x["S0"]}))
        close(KDA.run(kind, x), want, tolerance)
    x = make(GATED, T=70, HV=4, gate=gate, dtype=torch.float32)
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        theirs = transformers_function("qwen3_next", name)
        want = theirs(*(x[n] for n in GATED.inputs), **(how | {"initial_state": x["S0"]}))
        close(GATED.run(kind, x), want, tolerance)


# ------------------------------------------------------------------------------------ the gate of KDA


def test_kda_gates() -> None:
    """Both gates against their formulas in float64; bounded is another function, not a clamp."""
    z = torch.linspace(-60, 60, 2 * 3 * 2 * 5, dtype=torch.float64).view(2, 3, 2, 5)
    A_log, b = torch.tensor([0.3, -0.7], dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    A, x = A_log.exp()[:, None], z + b.view(2, 5)
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    torch.testing.assert_close(kda_gate(z, A_log, b), -A * softplus, rtol=1e-14, atol=0)
    bounded = kda_gate(z, A_log, b, lower_bound=-5.0)
    torch.testing.assert_close(bounded, -5 / (1 + torch.exp(-A * x)), rtol=1e-13, atol=1e-25)
    assert kda_gate(z.bfloat16(), A_log, b).dtype == torch.float32
    for bad in ({"lower_bound": 0.0}, {"A_log": A_log[:1]}, {"dt_bias": b[:5]}, {"z": z[0]}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            kda_gate(**({"z": z, "A_log": A_log, "dt_bias": b} | bad))


@pytest.mark.parametrize("x", [0.0, -12.0, -17.0, -30.0, -60.0])
@pytest.mark.parametrize("scale", [None, 1e-3])
def test_one_normalised_write_is_read_in_full_however_small_its_features(
    x: float, scale: float | None
) -> None:
    """φ cancels between numerator and normaliser; an ε in the denominator would eat the value silently."""
    from evolve.linear_attention import chunk_linear_attention, recurrent_linear_attention

    q = torch.full((1, 1, 1, 16), x)
    v = torch.ones(1, 1, 1, 3)
    for form in (recurrent_linear_attention, chunk_linear_attention):
        o, _ = form(q, q, v, feature_map="elu1", normalize=True, scale=scale)
        if x > -40:  # exp(-60)² underflows in float32: zero, and not a nan
            torch.testing.assert_close(o, v)
        assert o.isfinite().all()


def test_what_a_cache_keeps_is_no_view_of_a_whole_prefill() -> None:
    from evolve.linear_attention import chunk_linear_attention
    from evolve.short_conv import short_conv

    q, k, v = (torch.randn(1, 640, 1, 8) for _ in "qkv")
    _, S = chunk_linear_attention(q, k, v, output_final_state=True)
    _, history = short_conv(torch.randn(1, 1000, 8), torch.randn(8, 1, 4))
    for kept in (S, history):
        assert kept.untyped_storage().nbytes() == kept.nbytes


@pytest.mark.parametrize("cu_seqlens", [[0, 3], [2, 5], [0, 5, 3, 5]])
def test_the_short_convolution_refuses_packing_that_does_not_fit(cu_seqlens: list[int]) -> None:
    from evolve.short_conv import short_conv

    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 5"):
        short_conv(torch.zeros(1, 5, 2), torch.zeros(2, 1, 4), cu_seqlens=torch.tensor(cu_seqlens))


def test_the_float32_islands_of_a_kda_layer_are_float32_when_built_in_bf16() -> None:
    from evolve.kda import KimiDeltaAttention

    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = KimiDeltaAttention(32, 2, 16)
    finally:
        torch.set_default_dtype(torch.float32)
    islands = [n for n, p in layer.named_parameters() if p.dtype == torch.float32]
    assert sorted(islands) == sorted(
        ["A_log", "dt_bias", "o_norm.weight", *(f"{x}_conv1d.weight" for x in "qkv")]
    )
