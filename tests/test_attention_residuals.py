"""Attention Residuals: the formula, the bookkeeping of blocks, two phases, and the official code's mixes."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from evolve import generate
from evolve.attention_residuals import (
    AttentionResidual,
    AttnResDecoder,
    DepthMemory,
    PseudoQuery,
    add_source,
    attention_residual,
    read_sources,
    source_weights,
)
from evolve.deltanet import DeltaNet
from evolve.kda import KimiDeltaAttention
from tests.oracles import GOLDENS

IDS = torch.arange(24).view(2, 12) * 5 % 17
SIZES = {"vocab_size": 17, "hidden_size": 12, "intermediate_size": 16}


def model(num_layers: int, block_size: int, two_phase: bool = False, **options) -> AttnResDecoder:
    torch.manual_seed(0)
    mixers = [DeltaNet(12, 2, 6) for _ in range(num_layers)]
    net = AttnResDecoder(mixers, block_size=block_size, two_phase=two_phase, **SIZES | options).double()
    for name, weight in net.named_parameters():
        if "_res_" in name:
            nn.init.normal_(weight, 0.0, 1.0)
    return net.eval()


def same(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def by_hand(sources, query, gain, eps=1e-5):
    keys = torch.stack([v / (v.square().mean(-1, keepdim=True) + eps).sqrt() * gain for v in sources])
    alpha = (keys @ query).softmax(0)
    return sum(a[..., None] * v for a, v in zip(alpha, sources))


@pytest.mark.parametrize("M", [1, 2, 9])
def test_a_mix_is_the_formula(M):
    sources = 3 * torch.randn(M, 2, 5, 8, dtype=torch.float64)
    query, gain = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    same(attention_residual(sources, query, gain), by_hand(sources, query, gain))
    same(attention_residual(list(sources), query, gain, eps=0.5), by_hand(sources, query, gain, 0.5))
    same(attention_residual(sources, 0 * query, gain), sources.mean(0))


def test_what_a_source_is_times_matters_for_the_value_and_not_for_the_key():
    sources, query = torch.randn(3, 1, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    ones = torch.ones(8, dtype=torch.float64)
    scaled = sources * torch.tensor([1.0, 100.0, 1.0]).double()[:, None, None]
    a, b = (attention_residual(x, query, ones, eps=0.0) for x in (sources, scaled))
    weight = (by_hand(sources, query, ones, 0.0) - a).abs().max()
    assert weight < 1e-12
    alpha = torch.stack([v @ query / v.square().mean(-1).sqrt() for v in sources]).softmax(0)
    same(b - a, 99 * alpha[1][..., None] * sources[1])


def test_huge_scores_and_half_precision_stay_finite():
    sources = torch.randn(4, 3, 8)
    query = 1e4 * torch.randn(8)
    assert attention_residual(sources, query, torch.ones(8)).isfinite().all()
    y = attention_residual(sources.bfloat16(), query.bfloat16() / 1e4, torch.ones(8).bfloat16())
    assert y.dtype == torch.bfloat16
    exact = attention_residual(sources, query / 1e4, torch.ones(8))
    assert (y.float() - exact).abs().max() < 0.05


def test_sources_can_be_added_one_by_one():
    sources = torch.randn(5, 2, 8, dtype=torch.float64)
    folded = 3 * torch.randn(4, 8, dtype=torch.float64)  # four sites
    whole = read_sources(list(sources), folded, 1e-5)
    read = read_sources(list(sources[:2]), folded, 1e-5)
    for v in sources[2:]:
        read = add_source(read, v, folded, 1e-5)
    for a, b in zip(read, whole):
        same(a, b)


def sources_of(num_layers, block_size):
    """How many sources the sites of each layer see, attention and feed-forward, and the last site."""
    memory, seen = DepthMemory(torch.zeros(1), block_size), []
    for i in range(2 * num_layers):
        memory.before(i)
        seen.append(len(memory.sources))
        memory.add(torch.zeros(1))
    return seen, len(memory.sources)


@pytest.mark.parametrize("num_layers", [1, 12, 13, 25, 93])
def test_counts_of_sources_at_k3s_block_size(num_layers):
    """Blocks of N = 12 layers: ⌈l/N⌉ blocks and the sum at attention, ⌊l/N⌋ + 1 and the sum at the other."""
    seen, last = sources_of(num_layers, 24)
    for l in range(num_layers):
        blocks = -(-l // 12)
        at_border = l % 12 == 0  # there the sum so far is the block that has just been finished
        assert seen[2 * l] == blocks + 1
        assert seen[2 * l] == l // 12 + (1 if at_border else 2)
        assert seen[2 * l + 1] == l // 12 + 2
    assert last == (num_layers - 1) // 12 + 2
    if num_layers == 93:
        assert last == max(seen) == 9


def test_full_form_keeps_every_output():
    seen, last = sources_of(7, 1)
    assert seen == list(range(1, 15))
    assert last == 15


def full_by_hand(net, ids):
    """The full form written out: every sub-layer reads the embedding and all outputs before it."""
    outputs = [net.embed_tokens(ids)]
    for layer in net.layers:
        for name, norm, inner in (
            ("self_attention_res", layer.input_layernorm, layer.self_attn),
            ("mlp_res", layer.post_attention_layernorm, layer.mlp),
        ):
            query, gain = getattr(layer, f"{name}_proj").weight[0], getattr(layer, f"{name}_norm").weight
            outputs.append(inner(norm(by_hand(outputs, query, gain))))
    mix = by_hand(outputs, net.output_attn_res_proj.weight[0], net.output_attn_res_norm.weight)
    return net.lm_head(net.norm(mix))


def test_blocks_of_one_are_the_full_form():
    net = model(3, 1)
    same(net(IDS), full_by_hand(net, IDS), 1e-11)
    assert not torch.allclose(model(3, 2)(IDS), net(IDS), atol=1e-3)


@pytest.mark.parametrize(
    ("num_layers", "block_size"), [(1, 1), (3, 1), (3, 2), (5, 3), (4, 8), (3, 100), (6, 5)]
)
def test_two_phases_are_the_same_function(num_layers, block_size):
    plain, fast = model(num_layers, block_size), model(num_layers, block_size, two_phase=True)
    fast.load_state_dict(plain.state_dict())
    a, b = plain(IDS), fast(IDS)
    same(a, b, 1e-12 * a.abs().max().item())
    for net in (plain, fast):
        net.loss(IDS, IDS).backward()
    for (name, p), q in zip(plain.named_parameters(), fast.parameters()):
        if p.grad is None:
            assert "layers.0.self_attention_res" in name
            assert q.grad is None or not q.grad.any()
        else:
            same(p.grad, q.grad, 1e-12 * max(1, p.grad.abs().max().item()))


@pytest.mark.parametrize("two_phase", [False, True])
def test_cached_equals_full_padded_equals_bare_and_it_generates(two_phase):
    net = model(3, 4, two_phase)
    whole, cache = net(IDS), net.new_cache(2)
    same(torch.cat([net(part, cache) for part in IDS.split([5, 1, 6], 1)], 1), whole, 1e-10)
    mask = nn.functional.pad(torch.ones_like(IDS, dtype=torch.bool), (3, 2))
    padded = net(nn.functional.pad(IDS, (3, 2), value=-1), attention_mask=mask)[mask]
    same(padded, whole.flatten(0, 1), 1e-10)
    assert generate(net, IDS, 3).shape == (2, 15)


def test_at_first_every_site_reads_the_mean_and_the_first_query_never_learns():
    torch.manual_seed(0)
    mixers = [KimiDeltaAttention(12, 2, 6) for _ in range(2)]
    net = AttnResDecoder(mixers, block_size=1, **SIZES).double()
    embedding = net.embed_tokens(IDS)
    first = net.layers[0].self_attn(net.layers[0].input_layernorm(embedding))
    reads = []
    net.layers[0].post_attention_layernorm.register_forward_pre_hook(lambda _, args: reads.append(args[0]))
    net.loss(IDS, IDS).backward()
    same(reads[0], (embedding + first) / 2)
    queries = {n: p for n, p in net.named_parameters() if n.endswith("_res_proj.weight")}
    assert len(queries) == 5
    unused = queries.pop("layers.0.self_attention_res_proj.weight")
    assert unused.grad is None or not unused.grad.any()
    assert all(p.grad.abs().max() > 0 for p in queries.values())
    assert not any(p.any() for p in queries.values())


def test_equals_the_mixes_of_the_official_code():
    """Outputs of a tiny official K3 (float64, 13 layers, blocks of 3) go in; every recorded mix comes out."""
    x = {name: t.double() for name, t in load_file(GOLDENS / "attention_residuals_k3.safetensors").items()}
    memory = DepthMemory(
        x["layers.0.attn_mix"], block_size=6
    )  # what the first sub-layer reads: the embedding
    for i in range(26):
        l, part = divmod(i, 2)
        prefix = f"layers.{l}.{('self_attention_res', 'mlp_res')[part]}"
        want = x[f"layers.{l}.{('attn_mix', 'ffn_mix')[part]}"]
        memory.before(i)
        if i:
            query, gain = x[f"{prefix}_proj.weight"][0], x[f"{prefix}_norm.weight"]
            same(attention_residual(memory.sources, query, gain), want)
        memory.add(x[f"layers.{l}.{('attn_out', 'ffn_out')[part]}"])
    query, gain = x["output_attn_res_proj.weight"][0], x["output_attn_res_norm.weight"]
    same(attention_residual(memory.sources, query, gain), x["final_mix"])


def test_names_are_the_checkpoints_and_a_site_alone_works():
    names = {n for n in model(1, 1).state_dict() if "res_" in n}
    assert names == {
        *(f"layers.0.{s}_res_{p}.weight" for s in ("self_attention", "mlp") for p in ("norm", "proj")),
        "output_attn_res_norm.weight",
        "output_attn_res_proj.weight",
    }
    sources = torch.randn(3, 2, 8)
    same(AttentionResidual(8)(sources), sources.mean(0), 1e-6)


def mix(**changes):
    fits = {"sources": torch.zeros(2, 3, 8), "query": torch.zeros(8), "gain": torch.ones(8), "eps": 1e-5}
    arguments = fits | changes
    look = source_weights(arguments.pop("sources"), **arguments)
    return look, attention_residual(**fits | changes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention_residual([], torch.zeros(8), torch.zeros(8)), "sources must hold at least one"),
        (lambda: attention_residual(torch.zeros(2, 3, 8), torch.zeros(7), torch.ones(8)), "query must be"),
        (lambda: attention_residual(torch.zeros(2, 3, 8), torch.zeros(8), torch.ones(1)), "gain must be"),
        (
            lambda: attention_residual([torch.zeros(8), torch.zeros(2, 8)], torch.zeros(8), torch.ones(8)),
            "sources must have one shape",
        ),
        (
            lambda: attention_residual(torch.zeros(2, 8).long(), torch.zeros(8), torch.ones(8)),
            "sources must be floating point",
        ),
        (lambda: model(1, 0), "block_size must be an integer >= 1, got 0"),
        (lambda: mix(sources=None), "sources must be a tensor .* or a list of tensors, got NoneType"),
        (lambda: mix(query=None), "query must be"),
        (lambda: mix(query=torch.zeros(1, 8)), "query must be"),
        (lambda: mix(query=torch.zeros(8).long()), "query must be floating point"),
        (lambda: mix(gain=torch.ones(8).int()), "gain must be floating point"),
        (lambda: mix(eps=-1), "eps must be finite and >= 0, got -1"),
        (lambda: mix(eps=float("nan")), "eps must be finite and >= 0, got nan"),
        (lambda: mix(eps=True), "eps must be finite and >= 0, got True"),
        (lambda: mix(eps="1"), "eps must be finite and >= 0, got '1'"),
        (lambda: AttentionResidual(8, eps=None), "eps must be finite and >= 0, got None"),
        (lambda: AttentionResidual(0), "hidden_size must be an integer >= 1, got 0"),
        (lambda: PseudoQuery(True), "hidden_size must be an integer >= 1, got True"),
        (lambda: DepthMemory(torch.zeros(8), 0), "block_size must be an integer >= 1, got 0"),
        (lambda: DepthMemory(None, 2), "embedding must be"),
        (lambda: model(1, 1, two_phase="no"), "two_phase must be true or false, got 'no'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_sources_of_two_dtypes_are_read_in_the_wider_one():
    sources = [torch.randn(3, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    mixed = [sources[0], sources[1].bfloat16()]
    w, gain = torch.linspace(-1, 1, 8), torch.ones(8)
    h = attention_residual(mixed, w, gain)
    assert h.dtype == torch.float32
    assert torch.equal(h, attention_residual([sources[0], sources[1].bfloat16().float()], w, gain))
