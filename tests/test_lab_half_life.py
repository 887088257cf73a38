"""Decays are read off the layers as they are, half-lives are what they say, stored runs come out again."""

import dataclasses
import platform

import pytest
import torch
from benchmarks import half_life as script

from evolve.kda import recurrent_kda
from evolve.lab import half_life
from evolve.lab.inside import channel_decays
from evolve.lab.small import small_model
from evolve.norms import l2_normalize

IDS = torch.arange(24).view(2, 12) % 7


@pytest.mark.parametrize("mixer", ["kda", "kda_bounded"])
def test_the_rule_with_the_decays_found_gives_what_the_layer_gives(mixer):
    net = small_model(
        mixer, vocab_size=7, hidden_size=16, intermediate_size=64, head_dim=4, head_v_dim=6
    ).double()
    first, second = channel_decays(net, IDS)
    assert first.shape == second.shape == (2, 12, 2, 4)
    block = net.layers[0]
    layer, x = block.self_attn, block.input_layernorm(net.embed_tokens(IDS))
    q, k, v = (
        getattr(layer, f"{n}_conv1d")(getattr(layer, f"{n}_proj")(x))[0].unflatten(-1, (2, -1)) for n in "qkv"
    )
    o, _ = recurrent_kda(l2_normalize(q), l2_normalize(k), v, first, layer.b_proj(x).sigmoid())
    y = layer.o_proj(layer.read_out(o, x).flatten(-2))
    torch.testing.assert_close(y, layer(x), atol=1e-12, rtol=0)
    if mixer == "kda_bounded":
        assert first.min() > -5


def test_other_layers_are_refused_by_name():
    with pytest.raises(ValueError, match="model must have a layer of KDA, got none"):
        channel_decays(small_model("gated_delta_rule", vocab_size=7), IDS)


def test_half_of_a_write_is_left_after_a_half_life():
    g = [[-0.1, -2.0], [-1e-3, -0.5]]
    lives = half_life.half_lives(g)
    assert lives.tolist() == sorted(lives.tolist())
    decays = torch.tensor(g).flatten().sort().values
    torch.testing.assert_close((decays * lives).exp(), torch.full((4,), 0.5))


RUNS = half_life.load_runs()


def test_the_stored_runs_are_those_of_the_script():
    plain = [(r.mixer, r.seed, r.run.config) for r in RUNS]
    assert plain == [(r.mixer, r.seed, r.run.config) for r in script.plans()]


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"{r.mixer}-{r.seed}")
def test_the_first_steps_of_a_stored_run_come_out_again(run):
    assert len(run.run.loss) == run.run.config.steps
    loss = run.repeat(3)[1].loss
    assert loss == pytest.approx(
        run.run.loss[:3], rel=1e-3 if platform.python_version_tuple()[1] == "11" else 0.1
    )


def test_the_stored_decays_of_an_untrained_model_come_out_again():
    for run in RUNS[::3]:
        found = torch.tensor(half_life.mean_decays(dataclasses.replace(run).build())[0])
        torch.testing.assert_close(found, torch.tensor(run.before), rtol=0.05, atol=1e-3)
