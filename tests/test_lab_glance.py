"""What is recorded of a model's memories is what the model used; what is taken away comes back."""

import pytest
import torch

from evolve.hybrid import Hybrid
from evolve.k3 import K3, K3Config
from evolve.lab.glance import MEMORIES, glance, look_back, without
from evolve.lab.small import small_model

SIZES = {"num_hidden_layers": 4, "linear_num_heads": 2, "attn_res_block_size": 1, "initializer_range": 0.1}
IDS = torch.randint(0, 41, (1, 23), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    net = K3(K3Config.nano(vocab_size=41, **SIZES)).double().eval()
    with torch.no_grad():  # a site that prefers nothing would hide a mistake
        for name, p in net.named_parameters():
            if "_res_proj" in name or name.startswith("output_attn_res_proj"):
                p.normal_(0, 0.3)
    return net


def test_a_look_back_gives_what_the_layer_reads(model):
    mixer = model.layers[3].self_attn
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(1)).double()
    p = look_back(mixer, x)
    assert p.shape == (2, 4, 9, 9)
    assert torch.equal(p, p.tril())
    c = mixer.latents(x)[..., : mixer.kv_lora_rank]
    v = mixer.kv_b_proj(c).unflatten(-1, (4, -1))[..., mixer.qk_nope_head_dim :]
    o = torch.einsum("bhts,bshv->bthv", p, v).flatten(2) * mixer.g_proj(x).sigmoid()
    torch.testing.assert_close(mixer.o_proj(o), mixer(x), atol=1e-12, rtol=0)


def test_depth_weights_remake_the_model(model):
    """Every site's mix, taken again with the recorded weights, leads to the same logits."""
    seen = glance(model, IDS)
    assert list(seen.depth) == [f"{l} {p}" for l in range(1, 5) for p in ("attention", "network")] + ["head"]
    blocks, p = [], model.embed_tokens(IDS)
    for l, layer in enumerate(model.layers, 1):
        h = mixed([*blocks, p], seen.depth[f"{l} attention"]) if blocks else p
        blocks, p = [*blocks, p], layer.self_attn(layer.input_layernorm(h))  # blocks of one layer
        h = mixed([*blocks, p], seen.depth[f"{l} network"])
        p = p + layer.feed_forward(layer.post_attention_layernorm(h))
    h = mixed([*blocks, p], seen.depth["head"])
    torch.testing.assert_close(model.lm_head(model.norm(h)), model(IDS), atol=1e-10, rtol=0)


def mixed(sources, weights):
    return sum(w[None, :, None] * v for w, v in zip(weights, sources, strict=True))


def test_every_memory_is_there_and_the_model_is_as_before(model):
    before = model(IDS)
    seen = glance(model, IDS)
    assert torch.equal(model(IDS), before)
    assert "_mix" not in vars(model)
    assert list(seen.decays) == [1, 2, 3]
    assert list(seen.look_backs) == [4]
    assert list(seen.experts) == [2, 3, 4]
    assert seen.decays[1].shape == (23, 2, 16)
    assert seen.half_lives(1).shape == (23, 32)
    g = seen.decays[1].flatten(1)
    torch.testing.assert_close((g * seen.half_lives(1)).exp(), torch.full_like(g, 0.5))
    assert seen.experts[2].shape == seen.shares[2].shape == (23, 2)
    torch.testing.assert_close(seen.shares[2].sum(1), torch.ones(23).double())


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_memory_that_is_taken_away_is_missed_and_comes_back(model, memory):
    before = model(IDS)
    with without(model, memory):
        changed = model(IDS)
    assert (changed - before).abs().max() > 1e-3
    with pytest.raises(ValueError, match="input_ids must be"), without(model, memory):
        model(IDS[0])
    assert torch.equal(model(IDS), before)


def test_without_pseudo_queries_every_site_reads_the_mean(model):
    with without(model, "depth"):
        depth = glance(model, IDS).depth
    for p in depth.values():
        torch.testing.assert_close(p, torch.full_like(p, 1 / len(p)))


def test_what_has_no_such_memory_is_refused(model):
    plain = small_model("delta_rule", vocab_size=41)
    for memory in MEMORIES:
        with pytest.raises(ValueError, match="must have"), without(plain, memory):
            pass
    with pytest.raises(ValueError, match="memory must be one of KDA, MLA, depth, experts, got 'x'"):
        without(model, "x").__enter__()
    with pytest.raises(ValueError, match="must have Attention Residuals"):
        glance(Hybrid(model.config), IDS)
    with pytest.raises(ValueError, match=r"one sequence, \[1, T\], got \[2, 23\]"):
        glance(model, IDS.expand(2, -1))
    with pytest.raises(ValueError, match="must not be two_phase"):
        glance(K3(model.config, two_phase=True), IDS)
