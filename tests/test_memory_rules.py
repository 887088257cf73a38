"""What every memory rule must pass: equality, gradients, hand-over, causality, packing, meaning."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles import oracle
from tests.rule_cases import (
    BETAS,
    DELTA,
    GATED,
    GATED_RULES,
    GATES,
    KDA,
    LINEAR,
    LINEAR_ELU,
    RULES,
    Rule,
    as_tuple,
    assert_blocks_close,
    assert_gradients_close,
    leaves,
    make,
    pairwise_cases,
)

GOLDENS = Path(__file__).parent / "goldens" / "ops"
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
every_gated_rule = pytest.mark.parametrize("rule", GATED_RULES, ids=lambda r: r.name)
both_forms = pytest.mark.parametrize("kind", ["recurrent", "chunk"])


def length(steps: str, C: int) -> int:
    return {"1": 1, "2": 2, "C-1": C - 1, "C": C, "C+1": C + 1, "2C+1": 2 * C + 1, "3C-1": 3 * C - 1}[steps]


def rule_cases() -> list:
    axes = {
        "steps": ("1", "2", "C-1", "C", "C+1", "2C+1", "3C-1"),
        "B": (1, 3),
        "heads": ((1, 1), (2, 2), (2, 4)),
        "K": (12, 16, 60),
        "C": (16, 64),
    }
    cases = []
    for rule in RULES:
        more = {"gate": GATES} if "g" in rule.inputs else {}
        more |= {"beta": BETAS} if "beta" in rule.inputs else {}
        for case in pairwise_cases(**axes, **more):
            label = "-".join(str(v).replace(" ", "") for v in case.values())
            cases.append(pytest.param(rule, case, id=f"{rule.name}-{label}"))
    return cases


def grads(rule: Rule, x: dict, run, weights: tuple) -> tuple:
    """o, the last state and the gradients of Σ w·o + Σ w'·S for every input."""
    inputs = [t.requires_grad_() for t in leaves(x)]
    o, S = run(x)
    outputs = (o, *as_tuple(S))
    if not weights:
        weights = [torch.randn(t.shape, dtype=torch.float64) for t in outputs]
    loss = sum((w * t).sum() for w, t in zip(weights, outputs))
    got = torch.autograd.grad(loss, inputs, allow_unused=True)
    return outputs, [torch.zeros_like(t) if d is None else d for t, d in zip(inputs, got)], weights


def compare_with_oracle(rule: Rule, kind: str, dtype: torch.dtype, how: dict, **sizes) -> None:
    x64 = make(rule, **sizes)
    want, want_grads, weights = grads(rule, x64, lambda x: oracle(rule, x), ())
    x = make(rule, **sizes, dtype=dtype)
    got, got_grads, _ = grads(rule, x, lambda x: rule.run(kind, x, **how), weights)
    exact = dtype == torch.float64
    for name, a, b in zip(("o", "S", "z"), got, want):
        assert_blocks_close(name, a, b, 1e-10 if exact else 1e-5, time_axis=name == "o")
    names = [*rule.inputs, "S0", "z0"]
    assert_gradients_close(names, got_grads, want_grads, 1e-8 if exact else 1e-4)


@pytest.mark.parametrize(("rule", "case"), rule_cases())
def test_chunk_equals_oracle(rule: Rule, case: dict) -> None:
    C, (H, HV) = case["C"], case["heads"]
    sizes = {n: case[n] for n in ("B", "K", "gate", "beta") if n in case}
    for dtype in (torch.float64, torch.float32):
        compare_with_oracle(
            rule, "chunk", dtype, {"chunk_size": C}, T=length(case["steps"], C), H=H, HV=HV, **sizes
        )


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_recurrent_equals_oracle(rule: Rule, dtype: torch.dtype) -> None:
    for T, gate, beta in ((1, "-20", "two"), (33, "mixed", "uniform"), (33, "one at -1000", "one")):
        compare_with_oracle(rule, "recurrent", dtype, {}, T=T, H=2, HV=4, gate=gate, beta=beta)


@pytest.mark.parametrize("path", sorted(GOLDENS.glob("[!s]*_T*.safetensors")), ids=lambda p: p.stem)
@both_forms
def test_goldens(path: Path, kind: str) -> None:
    """Stored float64 results of an independent implementation, with their gradients (softmax is rung 1's)."""
    rules = {"delta": DELTA, "gated": GATED, "kda": KDA}
    rule = rules.get(path.stem.split("_")[0], LINEAR if "identity" in path.stem else LINEAR_ELU)
    if "unnorm" in path.stem:
        rule = Rule(
            "elu", "linear_attention", "linear_attention", ("q", "k", "v"), options={"feature_map": "elu1"}
        )
    stored = safetensors.torch.load_file(path)
    cases = sorted({name.rpartition(".")[0] for name in stored if name.rpartition(".")[2] == "o"})
    for case in cases:
        d = {name: t for name, t in stored.items() if "." not in name}
        d |= {n.rpartition(".")[2]: t for n, t in stored.items() if case and n.startswith(f"{case}.")}
        x = {name: d[name] for name in rule.inputs}
        if "S0" in d:
            x["S0"] = (d["S0"], d["z0"]) if "z0" in d else d["S0"]
        weights = (d["w"], d["ws"])  # the stored loss has no term in z
        outputs, got, _ = grads(rule, x, lambda x: rule.run(kind, x), weights)
        for name, a in zip(("o", "S", "z"), outputs):
            error = (a - d[name]).abs().max() / d[name].abs().max()
            assert error < 2e-6, f"{case} {name}: {error:.1e}"
        names = [*rule.inputs, *(n for n in ("S0", "z0") if n in d)]
        assert_gradients_close(names, got, [d[f"d{n}"] for n in names], 1e-4)


@every_gated_rule
@both_forms
@pytest.mark.parametrize("g", [-1.5, -5.0, -20.0, -88.0, -100.0, -1000.0, float("-inf")])
def test_strong_decay_has_finite_right_gradients(rule: Rule, kind: str, g: float) -> None:
    """Where references give NaN: chunks of 64, every channel and one channel at g, in float32."""
    for everywhere in (True, False):
        x = make(rule, T=130, B=1, gate="-1e-3", dtype=torch.float32)
        if everywhere:
            x["g"][:] = g
        elif rule is KDA:
            x["g"][..., 3] = g
        else:
            x["g"][:, 5::9] = g
        want, want_grads, weights = grads(
            rule, {n: t.double() for n, t in x.items()}, lambda x: oracle(rule, x), ()
        )
        got, got_grads, _ = grads(rule, x, lambda x: rule.run(kind, x), weights)
        assert all(t.isfinite().all() for t in (*got, *got_grads))
        assert_blocks_close("o", got[0], want[0], 1e-5, time_axis=True)
        assert_gradients_close([*rule.inputs, "S0"], got_grads, want_grads, 1e-4)


@every_gated_rule
def test_error_is_smooth_in_the_gate(rule: Rule) -> None:
    """No zone of g in which the result is quietly wrong: the float32 error stays flat from 0 to −300."""
    for g in torch.logspace(-3, 2.5, 40).neg().tolist():
        x = make(rule, T=64, B=1, H=1, gate=str(g), dtype=torch.float32)
        o, S = rule.run("chunk", x)
        want, want_S = oracle(rule, x)
        error = max(((o - want).abs().max() / want.abs().max()).item(), ((S - want_S).abs().max()).item())
        assert error < 3e-6, f"g = {g}: {error:.1e}"


@every_rule
@pytest.mark.parametrize("split", [0, 1, 15, 16, 17, 63, 64, 65, 100])
def test_split_anywhere(rule: Rule, split: int) -> None:
    """Two calls with the state handed over equal one; the second half token by token as well."""
    x = make(rule, T=100, HV=4)
    first = {n: x[n][:, :split] for n in rule.inputs}
    second = {n: x[n][:, split:] for n in rule.inputs}
    o, S = rule.run("chunk", x)
    o_1, S_1 = rule.run("chunk", first | {"S0": x["S0"]})
    for kind in ("chunk", "recurrent"):
        o_2, S_2 = rule.run(kind, second | {"S0": S_1})
        torch.testing.assert_close(torch.cat([o_1, o_2], 1), o, rtol=0, atol=1e-11)
        torch.testing.assert_close(S_2, S, rtol=0, atol=1e-11)


@every_rule
@both_forms
@pytest.mark.parametrize("t", [0, 1, 7, 15, 16, 40, 63, 64, 69])
def test_future_never_touches_the_past(rule: Rule, kind: str, t: int) -> None:
    """Bit for bit: nothing after token t changes an output up to t; its gradients are exact zeros."""
    x = make(rule, T=70, HV=4, gate="-1.5", dtype=torch.float32)
    o, _ = rule.run(kind, x)
    other = make(rule, T=70, HV=4, gate="mixed", dtype=torch.float32, seed=1)
    changed = {n: torch.cat([x[n][:, : t + 1], other[n][:, t + 1 :]], 1) for n in rule.inputs}
    again, _ = rule.run(kind, changed | {"S0": x["S0"]})
    assert torch.equal(o[:, : t + 1], again[:, : t + 1])
    inputs = [x[n].requires_grad_() for n in rule.inputs]
    o, _ = rule.run(kind, x)
    for name, d in zip(rule.inputs, torch.autograd.grad(o[:, : t + 1].square().sum(), inputs)):
        assert (d[:, t + 1 :] == 0).all(), f"a past output has a gradient in a future {name}"


@every_rule
@both_forms
def test_packed_rows_equal_separate_rows(rule: Rule, kind: str) -> None:
    """Bit for bit, forward; empty sequences hand their state on; gradients stay in their sequence."""
    lengths = [0, 5, 64, 1, 0, 70, 17, 0]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    rows = [make(rule, T=n, B=1, HV=4, seed=i, dtype=torch.float32) for i, n in enumerate(lengths)]
    packed = {n: torch.cat([r[n] for r in rows], 1) for n in rule.inputs}
    states = [torch.cat(s) for s in zip(*(as_tuple(r["S0"]) for r in rows))]
    packed["S0"] = tuple(states) if len(states) > 1 else states[0]
    o, S = rule.run(kind, packed, cu_seqlens=ends)
    for i, row in enumerate(rows):
        o_i, S_i = rule.run(kind, row)
        assert torch.equal(o[:, ends[i] : ends[i + 1]], o_i)
        for a, b in zip(as_tuple(S), as_tuple(S_i)):
            assert torch.equal(a[i : i + 1], b)


@every_rule
@both_forms
def test_batch_rows_are_independent(rule: Rule, kind: str) -> None:
    x = make(rule, T=40, B=3, dtype=torch.float32)
    y = {n: t.clone() for n, t in x.items() if n != "S0"} | {"S0": x["S0"]}
    for name in rule.inputs:
        y[name][1] = -7.0
    o_x, o_y = rule.run(kind, x)[0], rule.run(kind, y)[0]
    assert torch.equal(o_x[::2], o_y[::2])
    assert not torch.equal(o_x[1], o_y[1])


@every_rule
@both_forms
def test_grouped_heads_equal_repeated_heads(rule: Rule, kind: str) -> None:
    """Value heads 0, 1 read with key head 0 and value heads 2, 3 with key head 1."""
    x = make(rule, T=20, H=2, HV=4)
    wide = x | {n: x[n][:, :, [0, 0, 1, 1]] for n in "qk"}
    torch.testing.assert_close(rule.run(kind, x), rule.run(kind, wide), rtol=0, atol=1e-12)


@both_forms
def test_each_rule_contains_the_one_before(kind: str) -> None:
    x = make(KDA, T=70, HV=4, gate="mixed")
    equal = x | {"g": x["g"][..., :1].expand_as(x["g"])}
    one_per_head = x | {"g": x["g"][..., 0]}
    torch.testing.assert_close(KDA.run(kind, equal), GATED.run(kind, one_per_head), rtol=0, atol=1e-11)
    no_gate = x | {"g": torch.zeros_like(x["g"])}
    delta = DELTA.run(kind, x)
    torch.testing.assert_close(KDA.run(kind, no_gate), delta, rtol=0, atol=1e-11)
    torch.testing.assert_close(
        GATED.run(kind, no_gate | {"g": no_gate["g"][..., 0]}), delta, rtol=0, atol=1e-11
    )


@both_forms
def test_orthogonal_keys_make_the_delta_rule_linear_attention(kind: str) -> None:
    """Nothing stored along a key means nothing to erase; and any key, in the limit of a small β."""
    x = make(DELTA, T=12, K=12, H=1, B=1, beta="one")
    x["k"] = torch.eye(12, dtype=torch.float64)[None, :, None]
    x["S0"] = torch.zeros_like(x["S0"])
    torch.testing.assert_close(DELTA.run(kind, x), LINEAR.run(kind, x), rtol=0, atol=1e-12)
    x, tiny = make(DELTA, T=40), 1e-7
    x |= {"beta": torch.full_like(x["beta"], tiny), "S0": torch.zeros_like(x["S0"])}
    o, S = DELTA.run(kind, x)
    torch.testing.assert_close((o / tiny, S / tiny), LINEAR.run(kind, x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rule", [DELTA, GATED, KDA], ids=lambda r: r.name)
@both_forms
class TestMeaning:
    """scale = 1 and g = 0 unless said."""

    def test_orthonormal_keys_recall_exactly_and_in_any_order(self, rule: Rule, kind: str) -> None:
        x = make(rule, T=12, K=12, beta="one", gate="zero")
        x["k"] = torch.linalg.qr(torch.randn(2, 2, 12, 12, dtype=torch.float64))[0].transpose(1, 2)
        _, S = rule.run(kind, x | {"S0": None})
        torch.testing.assert_close(torch.einsum("bhkv,bthk->bthv", S, x["k"]), x["v"], rtol=0, atol=1e-12)

    def test_the_last_write_to_a_key_wins_and_is_read_after_writing(self, rule: Rule, kind: str) -> None:
        x = make(rule, T=3, beta="one", gate="zero")
        x["q"] = x["k"] = F.normalize(x["k"][:, :1], dim=-1).expand(-1, 3, -1, -1)
        o, _ = rule.run(kind, x, scale=1.0)
        torch.testing.assert_close(o, x["v"], rtol=0, atol=1e-12)  # every token reads what it just wrote

    def test_beta_zero_writes_nothing(self, rule: Rule, kind: str) -> None:
        x = make(rule, T=20, beta="zero", gate="zero")
        torch.testing.assert_close(rule.run(kind, x)[1], x["S0"], rtol=0, atol=0)

    def test_decay_acts_before_the_error_is_taken(self, rule: Rule, kind: str) -> None:
        """One token, by hand: a = e^g, S' = a S, S = S' + β k (v − S'ᵀk)ᵀ, o = Sᵀq."""
        x = make(rule, T=1, B=1, H=1, K=2, V=1, gate="zero", beta="one")
        x |= {
            "k": torch.tensor([[[[1.0, 0.0]]]]),
            "q": torch.tensor([[[[1.0, 1.0]]]]),
            "v": torch.tensor([[[[3.0]]]]),
        }
        x |= {"S0": torch.tensor([[[[4.0], [8.0]]]]), "beta": torch.tensor([[[0.5]]])}
        if "g" in rule.inputs:
            x["g"] = torch.full_like(x["g"], 0.5).log()
        a = 0.5 if "g" in rule.inputs else 1.0
        S = torch.tensor([[[[4 * a + 0.5 * (3 - 4 * a)], [8 * a]]]])
        o, last = rule.run(kind, {n: t.float() for n, t in x.items()}, scale=1.0)
        torch.testing.assert_close(last, S)
        torch.testing.assert_close(o, S.sum(2)[:, None])


@every_gated_rule
@both_forms
def test_a_closed_gate_resets(rule: Rule, kind: str) -> None:
    x = make(rule, T=20, gate="zero", dtype=torch.float32)
    x["g"][:, 7] = float("-inf")
    late = {n: x[n][:, 7:] for n in rule.inputs}
    got, want = rule.run(kind, x), rule.run(kind, late | {"S0": None})
    torch.testing.assert_close((got[0][:, 7:], got[1]), want, rtol=1e-5, atol=1e-6)


@every_rule
@given(data=st.data())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_any_sizes_any_split_any_packing(rule: Rule, data) -> None:
    """Chunk = loop in float64 for drawn sizes; a drawn split; the same rows packed."""

    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    H, groups = draw(1, 2), draw(1, 3)
    sizes = {"T": draw(0, 70), "B": draw(0, 3), "H": H, "HV": H * groups, "K": draw(1, 20), "V": draw(1, 20)}
    gate, beta, C = data.draw(st.sampled_from(GATES)), data.draw(st.sampled_from(BETAS)), draw(1, 70)
    x = make(rule, **sizes, gate=gate, beta=beta, seed=draw(0, 9))
    o, S = rule.run("chunk", x, chunk_size=C)
    torch.testing.assert_close((o, S), rule.run("recurrent", x), rtol=0, atol=1e-9)
    cut, B, T = draw(0, sizes["T"]), sizes["B"], sizes["T"]
    parts = [{n: x[n][:, a:b] for n in rule.inputs} for a, b in ((0, cut), (cut, T))]
    o_1, S_1 = rule.run("chunk", parts[0] | {"S0": x["S0"]}, chunk_size=C)
    o_2, S_2 = rule.run("chunk", parts[1] | {"S0": S_1}, chunk_size=C)
    torch.testing.assert_close((torch.cat([o_1, o_2], 1), S_2), (o, S), rtol=0, atol=1e-9)
    packed = {n: x[n].flatten(0, 1)[None] for n in rule.inputs} | {"S0": x["S0"]}
    o_p, S_p = rule.run("chunk", packed, chunk_size=C, cu_seqlens=torch.arange(B + 1) * T)
    torch.testing.assert_close((o_p[0], S_p), (o.flatten(0, 1), S), rtol=0, atol=1e-9)


def test_gradcheck_of_every_chunked_form() -> None:
    """First and second derivatives against finite differences, which share no code with the other checks."""
    for rule in RULES:
        x = make(rule, T=5, B=1, H=1, K=2, V=1, gate="-1.5")
        state = as_tuple(x["S0"])

        def run(*inputs, rule=rule):
            n = len(rule.inputs)
            S0 = tuple(inputs[n:]) if rule is LINEAR_ELU else inputs[n]
            o, S = rule.run("chunk", dict(zip(rule.inputs, inputs)) | {"S0": S0}, chunk_size=4)
            return o, *as_tuple(S)

        inputs = [t.clone().requires_grad_() for t in (*(x[n] for n in rule.inputs), *state)]
        assert torch.autograd.gradcheck(run, inputs)
        assert torch.autograd.gradgradcheck(run, inputs)
