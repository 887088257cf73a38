"""The trainable memory cell is the probe's, its book-keeping is right, stored runs come out again."""

import dataclasses
import math

import pytest
import torch
from benchmarks import cell as script

from evolve.lab import cell, probes
from evolve.lab.cell import CellTask, TrainableCell, examine, train_cell
from evolve.lab.memories import idle, kda, plain_writes
from evolve.lab.training import TrainingConfig

TASK = CellTask(lifetimes=3, rounds=5, batch_size=8)


def set_decays(net, alpha_end):
    """No decay but END's, which is the same for every lifetime."""
    with torch.no_grad():
        net.z.fill_(-40.0)
        share = -torch.as_tensor(alpha_end).float().log() / 5
        net.z[net.lifetimes :] = torch.logit(share.clamp(1e-12, 1 - 1e-7))
    return net


@pytest.mark.parametrize(("rule", "alpha"), [("gated_delta_rule", 0.86), ("kda", None), ("delta_rule", 1.0)])
def test_with_the_probes_decays_it_is_the_probe(rule, alpha):
    net = TrainableCell(rule)
    if rule == "kda":
        net = set_decays(net, probes.LOCAL_DECAY.exp())
        expected = probes.memory_cell(kda, probes.LOCAL_DECAY)
    else:
        net = set_decays(net, alpha) if alpha < 1 else net
        expected = probes.memory_cell(kda, math.log(alpha))
    found = examine(net, CellTask())
    assert (found["fact"], found["stale"]) == pytest.approx(expected, abs=0.03)
    assert found["fresh"] < 1e-6


@pytest.mark.parametrize("options", [{}, {"reads_erase": True}, {"erase": True}])
def test_reads_are_those_of_the_package_token_by_token(options):
    x, net = TASK(3), TrainableCell("kda", lifetimes=3, learn_strengths=True, **options)
    g, beta, keys = (t.detach().double() for t in (net.g[:, 0], net.beta[:, 0], net.keys[:, 0]))
    keys = torch.nn.functional.normalize(keys, dim=-1)
    reads = net(x).detach()
    for b in range(3):
        state = None

        def write(state, kind, key, value):
            w = plain_writes(keys[key].view(1, 1, 16), value.double().view(1, 1, 16), beta[kind].item())
            return kda.write(state, w._replace(g=g[kind].view(1, 1, 16)))

        for i in range(4):
            state = write(state, 0, i, x.facts[b, i])
        for r in range(5):
            lifetime = x.lifetime[b, r].item()
            if r:
                state = write(state, 3 + lifetime, 12 + lifetime, torch.zeros(16))
            for i in range(2):
                state = write(state, lifetime, x.key[b, r, i].item(), x.value[b, r, i])
            torch.testing.assert_close(kda.read(state, keys[None, :12])[0].float(), reads[b, r])
            for key in range(12):
                w = plain_writes(keys[key].view(1, 1, 16), torch.zeros(1, 1, 16).double())
                state = kda.write(state, w._replace(beta=beta[6 + key // 4].view(1, 1)))


def test_targets_are_those_of_a_table():
    x = TASK(0)
    for b in range(8):
        table = dict(enumerate(x.facts[b]))
        for r in range(5):
            lifetime = x.lifetime[b, r].item()
            assert lifetime > 0
            table = {key: v for key, v in table.items() if r == 0 or key // 4 != lifetime}
            fresh = dict(zip(x.key[b, r].tolist(), x.value[b, r]))
            assert len(fresh) == 2
            assert {key // 4 for key in fresh} == {lifetime}
            table |= fresh
            for key in range(12):
                assert torch.equal(x.target[b, r, key], table.get(key, torch.zeros(16)))
                masks = x.fact[b, r, key], x.fresh[b, r, key], x.stale[b, r, key]
                kinds = key in table and key not in fresh, key in fresh, key not in table
                assert masks == tuple(kind and r > 0 for kind in kinds)


def test_heads_share_the_channels_and_nothing_is_asked_twice():
    net = TrainableCell("gated_delta_rule", heads=4, learn_keys=True, learn_strengths=True)
    assert net.keys.shape == (10, 4, 4)
    assert net.g.shape == (4, 4, 4)
    assert net(CellTask(batch_size=2)(0)).shape == (2, 6, 8, 16)
    assert not TrainableCell("delta_rule").g.any()
    late = TrainableCell("delta_rule").errors(CellTask()(1), read_last_only=True)
    assert late.stale > 0.5
    assert late.fact < 1e-6


def test_training_lowers_the_loss_and_walks_its_schedule():
    config = TrainingConfig(steps=30, peak=0.1, warm_up=5)
    nets = [TrainableCell("kda") for _ in range(2)]
    whole, part = train_cell(nets[0], CellTask(), config), train_cell(nets[1], CellTask(), config, until=3)
    assert whole[:3] == part
    assert whole[-1] < 0.7 * whole[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CellTask(lifetimes=1), "lifetimes must be an integer >= 2"),
        (lambda: CellTask(lifetimes=5), "lifetimes must be at most 4, got 5"),
        (lambda: TrainableCell("rnn"), "rule must be one of delta_rule, .* got 'rnn'"),
        (lambda: TrainableCell("kda", heads=3), "heads must be 1, 2 or 4, got 3"),
        (lambda: TrainableCell("kda", heads=2), "heads must be 1 for keys that are not learned, got 2"),
        (lambda: TrainableCell("kda", learn_keys=True, reads_erase=True), "reads_erase must be False"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


RUNS = cell.load_runs()


def test_the_stored_runs_are_those_of_the_script():
    assert [dataclasses.replace(r, loss=(), exam={}) for r in RUNS] == script.plans()


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"{r.name}-{r.rule}-{r.cell.get('heads', 1)}-{r.seed}")
def test_the_first_steps_of_a_stored_run_come_out_again(run):
    assert len(run.loss) == run.config.steps
    assert run.repeat(3)[1] == pytest.approx(run.loss[:3], rel=1e-3)


def test_idle_tokens_do_not_matter_here():
    """A token of β = 0 and g = 0 leaves the state alone, so reads may be left out of the cell."""
    keys = torch.eye(16).double()[None, :3]
    state = kda.write(None, plain_writes(keys, keys))
    assert torch.equal(kda.write(state, idle(1, 4, 16, 16, 0.0)), state)
