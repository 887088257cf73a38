"""The mixture of experts: each token by hand, the loop, the official code's outputs, routing's corners."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from evolve import moe as moe_module
from evolve.decoder import GatedFeedForward, swiglu
from evolve.moe import Experts, LatentMoE, Router, Routing, grouped_experts, loop_experts, route, situ_glu
from evolve.norms import RMSNorm
from tests.oracles import GOLDENS

SMALL = {"num_experts": 6, "top_k": 2, "expert_size": 8, "num_shared_experts": 2, "latent_size": 4}
layers = pytest.mark.parametrize(
    "options",
    [
        {},
        {"latent_size": None, "activation": swiglu, "num_shared_experts": 1, "scaling": 2.446},
        {"num_shared_experts": 0, "renormalize": False, "activation": partial(situ_glu, beta=0.5)},
        {"top_k": 6, "latent_size": 16},
        {"top_k": 1, "num_experts": 1},
    ],
    ids=["k3", "kimi-linear", "not-renormalized", "all-chosen", "one-expert"],
)


def layer(dtype: torch.dtype = torch.float64, **options) -> LatentMoE:
    torch.manual_seed(0)
    net = LatentMoE(8, **SMALL | options).to(dtype)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(0.0, 0.7)
        net.gate.e_score_correction_bias.normal_(0.0, 0.2)
    return net


def same(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol, check_dtype=False)


# ------------------------------------------------------------------ by hand, number by number


def act_by_hand(net, g, u):
    if net.experts.activation is swiglu:
        return g / (1 + math.exp(-g)) * u
    beta = getattr(net.experts.activation, "keywords", {}).get("beta", 4.0)
    return beta * math.tanh(g / beta) / (1 + math.exp(-g)) * 25 * math.tanh(u / 25)


def expert_by_hand(net, gate, up, down, x):
    hidden = [act_by_hand(net, g, u) for g, u in zip((gate @ x).tolist(), (up @ x).tolist())]
    return down @ torch.tensor(hidden, dtype=torch.float64)


def by_hand(net: LatentMoE, x: torch.Tensor) -> torch.Tensor:
    """One token [D], from the weights by their released names; shared experts one by one."""
    w = {name: t.double() for name, t in net.state_dict().items()}
    s = [1 / (1 + math.exp(-logit)) for logit in w["gate.weight"] @ x]
    biased = [a + b for a, b in zip(s, w["gate.e_score_correction_bias"].tolist())]
    chosen = sorted(range(len(s)), key=biased.__getitem__, reverse=True)[: net.gate.top_k]
    total = sum(s[j] for j in chosen) + 1e-20 if net.gate.renormalize else 1.0
    z = x if net.latent_size is None else w["routed_expert_down_proj.weight"] @ x
    u = sum(
        s[j]
        / total
        * net.gate.scaling
        * expert_by_hand(net, *(w[f"experts.{j}.w{i}.weight"] for i in (1, 3, 2)), z)
        for j in chosen
    )
    if net.latent_size is not None:
        u = w["routed_expert_norm.weight"] * u / math.sqrt(sum(a * a for a in u.tolist()) / len(u) + 1e-5)
        u = w["routed_expert_up_proj.weight"] @ u
    if net.shared_experts is not None:
        names = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (w[f"shared_experts.{name}.weight"] for name in names)
        for part in range(0, len(gate), 8):
            rows = slice(part, part + 8)
            u = u + expert_by_hand(net, gate[rows], up[rows], down[:, rows], x)
    return u


def test_matrices_are_taken_from_a_sequence_one_by_one_and_only_where_a_token_chose():
    """The same numbers as from a stack, and no expert without tokens is asked for."""

    class Watched(list):
        def __getitem__(self, e):
            asked.append(e)
            return super().__getitem__(e)

    x, gate_up, down = torch.randn(7, 8), torch.randn(6, 10, 8), torch.randn(6, 8, 5)
    routing = Routing(torch.tensor([[1, 4]] * 7), torch.rand(7, 2), torch.rand(7, 6))
    want, asked = grouped_experts(x, routing, gate_up, down, swiglu), []
    got = grouped_experts(x, routing, Watched(gate_up), Watched(down), swiglu)
    torch.testing.assert_close(got, want)
    assert asked == [1, 4, 1, 4]


@layers
def test_a_layer_is_the_formula_token_by_token(options):
    net, x = layer(**options), torch.randn(2, 7, 8, dtype=torch.float64)
    y = net(x)
    same(y, torch.stack([by_hand(net, token) for token in x.view(-1, 8)]).view_as(x))
    same(net.float()(x.float()), y, 1e-4)


@layers
def test_gradients_are_the_differences(options):
    net, x = layer(**options), torch.randn(3, 8, dtype=torch.float64)
    names = [n for n, p in net.named_parameters() if p.requires_grad]
    inputs = [x.requires_grad_(), *(net.get_parameter(n).detach().requires_grad_() for n in names)]

    def f(x, *values):
        return torch.func.functional_call(net, dict(zip(names, values)), (x,))

    assert torch.autograd.gradcheck(f, inputs, fast_mode=True)


def test_equals_the_official_codes_feed_forward_networks():
    """A tiny official K3 in float64: the dense layer, and one of the layers with experts."""
    x = {name: t.double() for name, t in load_file(GOLDENS / "moe_k3.safetensors").items()}
    dense = GatedFeedForward(64, 128, situ_glu)
    sparse = LatentMoE(64, num_experts=8, top_k=2, expert_size=32, latent_size=32, num_shared_experts=2)
    for l, name, net in ((0, "mlp", dense), (11, sparse.name_in_layer, sparse)):
        prefix = f"layers.{l}.{name}."
        net.double().load_state_dict(
            {n.removeprefix(prefix): t for n, t in x.items() if n.startswith(prefix)}
        )
        norm = RMSNorm(64).double()
        norm.load_state_dict({"weight": x[f"layers.{l}.post_attention_layernorm.weight"]})
        want = x[f"layers.{l}.ffn_out"]
        assert want.abs().max() > 0.5
        same(net(norm(x[f"layers.{l}.ffn_mix"])), want, 1e-13)


# ---------------------------------------------------------------- sorted dispatch against the loop


def operands(N: int, E: int, k: int, D: int, width: int, dtype: torch.dtype):
    x = torch.randn(N, D).to(dtype)
    routing = route(torch.rand(N, E), 0.1 * torch.randn(E), k)
    gate_up = (torch.randn(E, 2 * width, D) / D**0.5).to(dtype)
    down = (torch.randn(E, D, width) / width**0.5).to(dtype)
    tensors = [t.requires_grad_() for t in (x, routing.weights.detach(), gate_up, down)]
    return tensors, lambda experts, x, weights, gate_up, down: experts(
        x, routing._replace(weights=weights), gate_up, down, swiglu
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("N", "E", "k", "D", "width"),
    [(40, 8, 3, 16, 8), (40, 8, 3, 6, 5), (1, 16, 4, 8, 8), (5, 8, 8, 8, 16), (3, 64, 2, 8, 8)],
)
def test_sorted_dispatch_equals_the_loop(N, E, k, D, width, dtype):
    """Output and every gradient, in sizes that the grouped product takes, and in others."""
    tensors, run = operands(N, E, k, D, width, dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    a, b = run(grouped_experts, *tensors), run(loop_experts, *tensors)
    assert a.dtype == torch.promote_types(dtype, torch.float32)
    same(a, b, tolerance)
    grad = torch.randn_like(a)
    for g, h in zip(torch.autograd.grad(a, tensors, grad), torch.autograd.grad(b, tensors, grad)):
        same(g, h, tolerance * max(1.0, h.abs().max().item()))


def test_one_grouped_product_runs_all_experts_where_pytorch_has_it(monkeypatch):
    calls, grouped = [], F.grouped_mm
    monkeypatch.setattr(
        moe_module.F, "grouped_mm", lambda *args, **kw: calls.append(1) or grouped(*args, **kw)
    )
    for dtype, N, D, expected in (
        (torch.float32, 40, 16, 2),
        (torch.bfloat16, 40, 16, 2),
        (torch.float64, 40, 16, 0),  # not implemented
        (torch.float32, 40, 6, 0),  # rows of 24 bytes
        (torch.float32, 1, 16, 0),  # a decoded token
    ):
        tensors, run = operands(N, 8, 2, D, 16, dtype)
        calls.clear()
        run(grouped_experts, *tensors)
        assert len(calls) == expected, (dtype, N, D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("N", [0, 1, 30])
def test_an_expert_without_tokens_gets_a_gradient_of_zero(N, dtype):
    net = layer(dtype, num_experts=8, expert_size=4)
    net.gate.e_score_correction_bias.zero_()[3] = -10.0
    net(torch.randn(N, 8, dtype=dtype)).sum().backward()
    for name, p in net.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, name
    for stack in net.experts.parameters():
        assert not stack.grad[3].any()
        assert stack.grad.any() == (N > 0)


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8), (0, 8), (8,)])
def test_empty_batches_and_single_tokens(shape):
    net = layer()
    y = net(torch.randn(shape, dtype=torch.float64))
    assert y.shape == shape
    assert y.isfinite().all()


def test_tokens_know_nothing_of_each_other():
    net, x = layer(), torch.randn(20, 8, dtype=torch.float64)
    order = torch.randperm(20)
    same(net(x[order]), net(x)[order])
    same(net(x[3:4]), net(x)[3:4])
    x = x.requires_grad_()
    net(x)[4].sum().backward()
    assert not x.grad[torch.arange(20) != 4].any()


# ------------------------------------------------------------------------------------- routing


def test_the_bias_chooses_and_never_weighs():
    scores = torch.tensor([[0.9, 0.8, 0.1, 1e-8]])
    routing = route(scores, torch.tensor([0.0, 0.0, 0.0, 12.0]), 2)
    assert routing.indices.tolist() == [[3, 0]]
    # In float32, (12 + 1e-8) − 12 is 0: the weight has to come from the score itself.
    same(routing.weights, torch.tensor([[1e-8 / (0.9 + 1e-8), 1.0]]), 1e-12)
    alone = route(scores, torch.tensor([0.0, 0.0, 0.0, 12.0]), 1)
    assert alone.weights.tolist() == [[1.0]]
    plain = route(scores, torch.tensor([0.0, 0.0, 0.0, 12.0]), 2, renormalize=False, scaling=3.0)
    same(plain.weights, torch.tensor([[3e-8, 2.7]]), 1e-6)
    assert plain.weights[0, 0].item() == pytest.approx(3e-8)


def test_choices_below_zero_and_ties():
    scores = torch.rand(50, 8)
    low = route(scores, torch.full((8,), -2.0), 3)
    assert (scores + -2.0 < 0).all()
    assert torch.equal(low.indices, route(scores, torch.zeros(8), 3).indices)
    tied = route(torch.full((50, 8), 0.5), torch.zeros(8), 3)
    assert all(len(set(row)) == 3 for row in tied.indices.tolist())
    same(tied.weights, torch.full((50, 3), 1 / 3), 1e-7)
    two = route(torch.tensor([[0.2, 0.7, 0.7, 0.1]]), torch.zeros(4), 2)
    assert sorted(two.indices[0].tolist()) == [1, 2]


def test_scores_that_vanish_give_finite_weights():
    routing = route(torch.zeros(2, 4), torch.zeros(4), 2)
    assert routing.weights.tolist() == [[0.0, 0.0]] * 2


def test_all_experts_chosen_is_the_dense_sum():
    net, x = layer(top_k=6, latent_size=None), torch.randn(9, 8, dtype=torch.float64)
    s = torch.sigmoid(x @ net.gate.weight.T)
    p = s / s.sum(-1, keepdim=True)
    w = net.experts.state_dict()
    dense = sum(
        p[:, j, None]
        * (situ_glu(x @ w[f"{j}.w1.weight"].T, x @ w[f"{j}.w3.weight"].T) @ w[f"{j}.w2.weight"].T)
        for j in range(6)
    )
    same(net(x), dense + net.shared_experts(x))


def test_the_router_is_exact_in_half_precision_and_under_autocast():
    net = layer(torch.bfloat16)
    x = torch.randn(64, 8).bfloat16()
    routing = net.gate(x)
    exact = torch.sigmoid(x.double() @ net.gate.weight.double().T)
    assert routing.scores.dtype == routing.weights.dtype == torch.float32
    same(routing.scores, exact, 1e-6)
    assert net(x).dtype == torch.bfloat16
    net = layer(torch.float32, num_experts=4, expert_size=16)
    want = net.gate(x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, y = net.gate(x.float()), net(x.float())
    assert torch.equal(got.scores, want.scores)
    assert torch.equal(got.indices, want.indices)
    want = net(x.float())
    assert (y - want).abs().max() < 0.02 * want.abs().max()


def test_the_bias_stays_in_float32_and_gets_no_gradient():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        router = Router(8, 4, 2)
    finally:
        torch.set_default_dtype(before)
    assert (router.weight.dtype, router.e_score_correction_bias.dtype) == (torch.bfloat16, torch.float32)
    net = layer()
    net(torch.randn(5, 8, dtype=torch.float64)).sum().backward()
    assert net.gate.e_score_correction_bias.grad is None
    assert net.gate.weight.grad.any()
    net.reset_parameters()
    assert not net.gate.e_score_correction_bias.any()


# ------------------------------------------------------------------------------------ activation


def test_situ_is_the_formula_and_bounded():
    g, u = torch.randn(2, 500, dtype=torch.float64).mul(20)
    want = [
        4 * math.tanh(a / 4) / (1 + math.exp(-a)) * 25 * math.tanh(b / 25)
        for a, b in zip(g.tolist(), u.tolist())
    ]
    same(situ_glu(g, u), torch.tensor(want, dtype=torch.float64), 1e-12)
    far = torch.tensor([1e4, -1e4, 3e38])
    assert situ_glu(far, far).abs().max() <= 100
    assert situ_glu(far, far)[0].item() == pytest.approx(100)
    assert situ_glu(far, far).isfinite().all()
    same(situ_glu(g, u, beta=1e7, linear_beta=1e7), swiglu(g, u), 1e-4)
    small = 1e-3 * g
    same(situ_glu(small, small), swiglu(small, small), 1e-6)
    half = situ_glu(g.bfloat16(), u.bfloat16())
    assert torch.equal(half, situ_glu(g.bfloat16().float(), u.bfloat16().float()).bfloat16())
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: situ_glu(4 * x[0], 20 * x[1], beta=2.0), [x])


# ------------------------------------------------------------------------------- weights by name


def test_weights_have_the_released_names_and_come_back():
    net = layer(torch.float32)
    state = net.state_dict()
    experts = {f"experts.{j}.w{i}.weight" for j in range(6) for i in (1, 2, 3)}
    assert {n for n in state if n.startswith("experts.")} == experts
    assert set(state) - experts == {
        "gate.weight",
        "gate.e_score_correction_bias",
        *(f"routed_expert_{part}.weight" for part in ("down_proj", "norm", "up_proj")),
        *(f"shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    assert state["experts.0.w1.weight"].shape == state["experts.0.w3.weight"].shape == (8, 4)
    assert state["experts.0.w2.weight"].shape == (4, 8)
    other = LatentMoE(8, **SMALL)
    other.load_state_dict(state)
    x = torch.randn(5, 8)
    assert torch.equal(other(x), net(x))
    state["experts.1.w2.weight"].zero_()  # as everywhere, a state dict shows the weights themselves
    assert not net.experts.down_proj[1].any()


def test_what_does_not_fit_is_reported_and_a_model_on_meta_takes_nothing():
    net = layer(torch.float32)
    state = dict(net.state_dict())
    del state["experts.2.w1.weight"]
    state["experts.6.w1.weight"] = torch.zeros(8, 4)
    state["experts.3.w2.weight"] = torch.zeros(8, 4)
    with pytest.raises(RuntimeError) as error:
        LatentMoE(8, **SMALL).load_state_dict(state)
    message = str(error.value)
    assert 'Missing key(s) in state_dict: "experts.2.w1.weight"' in message
    assert 'Unexpected key(s) in state_dict: "experts.6.w1.weight"' in message
    assert "experts.3.w2.weight is [8, 4], expected [4, 8]" in message
    with torch.device("meta"):
        empty = LatentMoE(8, **SMALL)
    with pytest.raises(RuntimeError, match="call to_empty before loading"):
        empty.load_state_dict(net.state_dict(), assign=True)
    empty.to_empty(device="cpu").load_state_dict(net.state_dict())
    x = torch.randn(5, 8)
    assert torch.equal(empty(x), net(x))


def test_idle_parameters_are_those_of_the_experts_not_chosen():
    assert layer().idle_parameters == 4 * (3 * 4 * 8)
    assert layer(top_k=6).idle_parameters == 0


def test_one_repr_one_function():
    assert repr(layer()) == repr(layer())
    options = ({"scaling": 2.0}, {"top_k": 3}, {"renormalize": False}, {"activation": swiglu})
    others = [*options, {"activation": partial(situ_glu, beta=1.0)}]
    assert len({repr(layer(**o)) for o in others} | {repr(layer())}) == 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer(num_experts=0), "num_experts must be an integer >= 1, got 0"),
        (lambda: layer(top_k=0), "top_k must be an integer >= 1, got 0"),
        (lambda: layer(top_k=7), "top_k must be at most the 6 experts, got 7"),
        (lambda: layer(expert_size=2.0), "expert_size must be an integer >= 1, got 2.0"),
        (lambda: layer(latent_size=0), "latent_size must be an integer >= 1, got 0"),
        (lambda: layer(num_shared_experts=-1), "num_shared_experts must be an integer >= 0, got -1"),
        (lambda: layer(scaling=0.0), "scaling must be positive and finite, got 0.0"),
        (lambda: layer(norm_eps=-1.0), "norm_eps must be positive and finite, got -1.0"),
        (lambda: layer(renormalize="no"), "renormalize must be true or false, got 'no'"),
        (lambda: layer(activation="silu"), "activation must be callable, got 'silu'"),
        (lambda: layer()(torch.zeros(2, 7)), r"x must be \[..., D\] = \[..., 8\], got \[2, 7\]"),
        (lambda: layer()(torch.zeros(2, 8, dtype=torch.int64)), "x must be floating point"),
        (lambda: route(torch.zeros(4), torch.zeros(4), 1), r"scores must be \[N, E\]"),
        (lambda: route(torch.zeros(1, 4), torch.zeros(3), 1), r"bias must be \[E\] = \[4\], got \[3\]"),
        (lambda: route(torch.zeros(1, 4), torch.zeros(4), True), "top_k must be an integer >= 1, got True"),
        (lambda: situ_glu(torch.zeros(2), torch.zeros(3)), "up must be .* = .2., got .3."),
        (lambda: situ_glu(torch.zeros(2), torch.zeros(2), beta=0.0), "beta must be positive"),
        (
            lambda: situ_glu(torch.zeros(2), torch.zeros(2), linear_beta=math.inf),
            "linear_beta must be positive and finite, got inf",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_experts_alone_take_any_routing():
    experts = Experts(3, 4, 8, swiglu)
    x, routing = torch.randn(2, 4), Routing(torch.tensor([[0], [2]]), torch.ones(2, 1), torch.rand(2, 3))
    one = experts(x, routing)
    twice = experts(x, routing._replace(weights=2 * routing.weights))
    same(twice, 2 * one, 1e-6)
