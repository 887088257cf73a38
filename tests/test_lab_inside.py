"""A look inside: what is read out is what the layer does, and what is left is due to the old values."""

import pytest
import torch

from evolve.deltanet import recurrent_delta_rule
from evolve.gated_deltanet import recurrent_gated_delta_rule
from evolve.lab.inside import energy_left, first_layer_writes
from evolve.lab.small import small_model
from evolve.norms import l2_normalize

IDS = torch.arange(24).view(2, 12) % 7


def model(mixer, **sizes):
    made = small_model(
        mixer, vocab_size=7, hidden_size=16, intermediate_size=64, head_dim=4, head_v_dim=6, **sizes
    )
    return made.double()


@pytest.mark.parametrize("mixer", ["delta_rule", "gated_delta_rule"])
def test_the_rule_on_what_is_read_out_gives_what_the_layer_gives(mixer):
    net = model(mixer)
    block = net.layers[0]
    w = first_layer_writes(net, IDS)
    x = block.input_layernorm(net.embed_tokens(IDS))
    q = l2_normalize(block.self_attn.q_conv1d(block.self_attn.q_proj(x))[0].unflatten(-1, (-1, 4)))
    if mixer == "delta_rule":
        assert not w.g.any()
        o, _ = recurrent_delta_rule(q, w.k, w.v, w.beta)
    else:
        assert (w.g < 0).all()
        o, _ = recurrent_gated_delta_rule(q, w.k, w.v, w.g, w.beta)
    y = block.self_attn.o_proj(block.self_attn.read_out(o, x).flatten(-2))
    torch.testing.assert_close(y, block.self_attn(x), atol=1e-12, rtol=0)


def test_energy_left_is_the_part_of_the_state_that_is_due_to_the_old_values():
    w = first_layer_writes(model("gated_delta_rule"), IDS)

    def state(v, end):
        k, v, g, beta = (x[:, :end] for x in (w.k, v, w.g, w.beta))
        return recurrent_gated_delta_rule(k, k, v, g, beta, output_final_state=True)[1]

    forgotten = w.v.clone()
    forgotten[:, :5] = 0
    energy = [(state(w.v, end) - state(forgotten, end)).square().sum() for end in range(5, 13)]
    expected = [(e / energy[0]).item() for e in energy]
    assert energy_left(w, 5) == pytest.approx(expected, abs=1e-12)
    assert len(energy_left(w, 12)) == 1


def test_a_reset_and_a_write_along_the_old_key_leave_what_they_should():
    w = first_layer_writes(model("gated_delta_rule"), IDS)
    w = w._replace(g=torch.zeros_like(w.g), beta=torch.ones_like(w.beta))
    w.g[:, 5] = -3.0
    w.beta[:, 5:] = 0
    assert energy_left(w, 5) == pytest.approx([1.0] + 7 * [torch.tensor(-6.0).exp().item()], abs=1e-6)
    w.k[:, :6] = w.k[:, :1]  # one key only: a write of strength 1 along it leaves nothing
    w.beta[:, 5] = 1
    assert energy_left(w, 5)[1] == pytest.approx(0, abs=1e-10)  # keys are unit vectors up to their eps


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"model must start with a convolved \(Gated\)DeltaNet, got Kimi"):
        first_layer_writes(model("kda"), IDS)
    with pytest.raises(ValueError, match=r"model must start with a convolved \(Gated\)DeltaNet, got Delta"):
        first_layer_writes(model("delta_rule", conv_size=None), IDS)
    w = first_layer_writes(model("delta_rule"), IDS)
    for start in (0, 13):
        with pytest.raises(ValueError, match=f"start must be 1 to T = 12, got {start}"):
            energy_left(w, start)
