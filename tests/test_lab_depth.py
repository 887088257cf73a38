"""What a trace along depth records, against the definition; the stored runs begin again as they began."""

import math

import pytest
import torch
from benchmarks import depth as benchmark

from evolve.attention_residuals import AttnResDecoder
from evolve.decoder import Decoder
from evolve.lab import accounting, depth, stored
from evolve.lab.tasks import Batch

IDS = torch.arange(40).view(2, 20) * 7 % 256
SIZES = (None, 1, 2, 3, 5, 10, 99)


def model(block_size: int | None, spread: float = 0.0) -> Decoder:
    net = depth.deep_model(block_size, num_layers=5).double().eval()
    for name, w in net.named_parameters():
        if name.endswith("res_proj.weight"):
            torch.nn.init.normal_(w, std=spread, generator=torch.Generator().manual_seed(len(name)))
    return net


@pytest.mark.parametrize("size", SIZES)
def test_reads_are_the_weighted_sums_of_the_outputs(size):
    """At a single token the mean over tokens is the token's own weight, so the sum must be exact."""
    net = model(size, spread=0.5)
    with torch.no_grad():
        seen = depth.trace(net, IDS[:1, :1])
    outputs = torch.stack(seen.outputs)
    sums = torch.einsum("ij,jbtd->ibtd", seen.weights.double(), outputs)
    torch.testing.assert_close(sums, torch.stack(seen.reads), atol=1e-6, rtol=1e-6)
    assert (seen.weights.triu(1) == 0).all()
    assert seen.lengths().shape == seen.output_lengths().shape == (11,)
    first = outputs[1].norm() * seen.weights[-1, 1] / seen.reads[-1].norm()
    assert seen.shares()[-1].item() == pytest.approx(first.item(), rel=1e-6)
    assert seen.shares(3).shape == (8,)


@pytest.mark.parametrize("size", SIZES[1:])
def test_with_queries_of_zero_it_computes_what_a_residual_stream_computes(size):
    """Sources always add up to the embedding and all outputs, and a norm forgives the division."""
    net, stream = model(size), model(None)
    net.load_state_dict(stream.state_dict(), strict=False)
    for module in (*net.modules(), *stream.modules()):
        if hasattr(module, "eps"):
            module.eps = 1e-14
    torch.testing.assert_close(net(IDS), stream(IDS), atol=1e-9, rtol=1e-9)


def test_gradients_are_those_of_each_layers_own_parameters():
    for size in (None, 2):
        net = model(size, spread=0.5)
        batch = Batch(IDS, IDS.roll(-1, 1))
        net.loss(batch.input_ids, batch.targets).backward()
        named = [[p for n, p in layer.named_parameters() if "_res_" not in n] for layer in net.layers]
        by_hand = [math.sqrt(sum(p.grad.square().sum().item() for p in ps)) for ps in named]
        assert depth.gradients(net, batch).tolist() == pytest.approx(by_hand, rel=1e-9)


def test_the_models_differ_in_their_wiring_alone():
    plain, full = depth.deep_model(None), depth.deep_model(1)
    assert type(plain) is Decoder
    assert isinstance(full, AttnResDecoder)
    ours = full.state_dict()
    assert all(torch.equal(w, ours[name]) for name, w in plain.state_dict().items())
    assert accounting.parameters(full) / accounting.parameters(plain) < 1.01
    with pytest.raises(ValueError, match="model must be a Decoder, got Linear"):
        depth.trace(torch.nn.Linear(2, 2), IDS)
    seen = depth.trace(depth.deep_model(1, num_layers=1), torch.zeros(1, 4, dtype=torch.long))
    assert [len(seen.shares(j)) for j in range(3)] == [3, 2, 1]
    for j in (-1, 3, True):
        with pytest.raises(ValueError, match=f"j must be an output's index, 0 to 2, got {j}"):
            seen.shares(j)


RUNS = depth.load_runs()


def test_the_stored_runs_are_those_of_the_script():
    def plain(run):
        return run.name, run.block_size, run.seed, run.run.config

    assert [plain(r) for r in RUNS] == [plain(r) for r in benchmark.plans()]
    assert stored.command("depth") == benchmark.COMMAND
    for size, best in benchmark.BEST.items():
        tried = {
            (r.run.config.peak, r.run.config.query_rate): r.run.validation[-1]["loss"]
            for r in RUNS
            if r.name == "tried" and r.block_size == size
        }
        assert list(tried) == benchmark.TRIED[size]
        assert best == min(tried, key=tried.get)


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"{r.name}-{r.block_size}-{r.seed}")
def test_the_first_steps_of_a_stored_run_come_out_again(run):
    assert len(run.run.loss) == run.run.config.steps
    assert run.repeat(2)[1].loss == pytest.approx(run.run.loss[:2], rel=1e-3)


def test_what_is_stored_can_be_measured_again():
    run = next(r for r in RUNS if r.block_size == 4)
    again = depth.look(run.build())
    for name, values in run.looks["before"].items():
        torch.testing.assert_close(torch.tensor(again[name]), torch.tensor(values), rtol=2e-3, atol=1e-4)
    assert set(run.looks["after"]) == set(again)
