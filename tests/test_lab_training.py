"""The training loop: learns, resumes exactly after kill -9, refuses damaged or foreign checkpoints."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evolve.lab.depth import deep_model
from evolve.lab.seeds import generator
from evolve.lab.tasks import Batch
from evolve.lab.training import Run, TrainingConfig, _optimizer, _step, learning_rate, train
from evolve.moe import LatentMoE
from evolve.short_conv import ShortConvolution

CONFIG = TrainingConfig(steps=12, warm_up=3, eval_every=5, save_every=1)


class Toy(torch.nn.Module):
    """Predicts the token after the next from one token, with dropout so that the random state matters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(16, width), torch.nn.Linear(width, 16)

    def loss(self, input_ids, targets):
        x = F.dropout(self.embed(input_ids), 0.2, self.training)
        return F.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


def batches(n: int) -> Batch:
    x = torch.randint(16, (4, 9), generator=generator(7, n))
    return Batch(x[:, :-1], (x[:, :-1] + 3) % 16)


def toy(width: int = 8) -> Toy:
    torch.manual_seed(0)
    return Toy(width)


def validate(model) -> dict[str, float]:
    batch = batches(10_000)
    torch.rand(3)  # a validation that draws must not change the training
    return {"loss": model.loss(batch.input_ids, batch.targets).item(), "training": float(model.training)}


def same(a: Run, b: Run, x: Toy, y: Toy) -> bool:
    weights = all(torch.equal(p, q) for p, q in zip(x.parameters(), y.parameters()))
    return weights and a.loss == b.loss and a.validation == b.validation


def test_it_learns_and_measures():
    model = toy()
    run = train(model, batches, dataclasses.replace(CONFIG, steps=300, peak=3e-2), validate=validate)
    assert run.loss[0] == pytest.approx(math.log(16), abs=0.5)
    assert run.curve("loss")[-1] < 0.05
    assert run.steps == [*range(5, 301, 5)]
    assert set(run.curve("training")) == {0.0}
    with pytest.raises(ValueError, match="metric must be one of"):
        run.curve("accuracy")


def test_the_same_seed_gives_the_same_numbers_and_the_global_state_stays():
    before = torch.random.get_rng_state()
    first, second, other = toy(), toy(), toy()
    torch.random.set_rng_state(before)
    a, b = train(first, batches, CONFIG), train(second, batches, CONFIG)
    c = train(other, batches, dataclasses.replace(CONFIG, seed=1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert same(a, b, first, second)
    assert a.loss != c.loss


def test_stacked_experts_decay_like_matrices_and_a_routers_bias_is_left_alone():
    net = nn.ModuleList([LatentMoE(8, num_experts=4, top_k=2, expert_size=4), ShortConvolution(8)])
    decayed, kept = (group["params"] for group in _optimizer(net, TrainingConfig(steps=1)).param_groups)
    moe, conv = net
    matrices = [moe.gate.weight, *moe.experts.parameters()]
    assert {id(p) for p in decayed} == {id(p) for p in matrices}
    assert [id(p) for p in kept] == [id(conv.weight)]


def test_one_step_is_adamw_by_hand():
    model = toy().eval()
    model.train = lambda mode=True: model  # no dropout: the arithmetic alone
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    batch = batches(0)
    model.loss(batch.input_ids, batch.targets).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    norm = math.sqrt(sum(g.square().sum().item() for g in grads.values()))
    config = TrainingConfig(steps=4, warm_up=2, peak=0.1, clip=norm / 2, weight_decay=0.3)
    model.zero_grad()
    _step(model, batches, _optimizer(model, config), Run(config))
    for name, p in model.named_parameters():
        g = grads[name] / 2  # clipped to half its norm
        decay = 0.3 if p.ndim == 2 else 0.0
        expected = weights[name] * (1 - 0.05 * decay) - 0.05 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(p.detach(), expected, atol=1e-5, rtol=1e-4)


def test_the_schedule_rises_in_a_line_and_falls_on_a_cosine():
    config = TrainingConfig(steps=110, warm_up=10, peak=2.0)
    rates = [learning_rate(config, n) for n in range(110)]
    assert rates[:10] == pytest.approx([0.2 * (n + 1) for n in range(10)])
    assert rates[10] == 2.0
    assert rates[60] == pytest.approx(1.0)
    assert 0 < rates[109] < 1e-3
    assert learning_rate(TrainingConfig(steps=2, warm_up=5), 1) == pytest.approx(3e-3 * 2 / 5)


@pytest.mark.parametrize("stop_at", [0, 1, 4, 5, 11])
def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path, stop_at):
    whole, model, again = toy(), toy(), toy()
    expected = train(whole, batches, CONFIG, validate=validate)

    def interrupted(n):
        if n == stop_at:
            raise KeyboardInterrupt
        return batches(n)

    first_batch = batches(0)
    calls = []

    def source(n):  # the identity looks at batch 0 before training starts
        calls.append(n)
        return first_batch if len(calls) == 1 else interrupted(n)

    with pytest.raises(KeyboardInterrupt):
        train(model, source, CONFIG, validate=validate, checkpoint=tmp_path / "run.pt")
    got = train(again, batches, CONFIG, validate=validate, checkpoint=tmp_path / "run.pt")
    assert same(got, expected, again, whole)
    finished = train(toy(), batches, CONFIG, validate=validate, checkpoint=tmp_path / "run.pt")
    assert finished.loss == expected.loss  # nothing left to do
    assert os.listdir(tmp_path) == ["run.pt"]


VICTIM = """
import sys
import torch
from tests.test_lab_training import LONG, batches, toy, train, validate
torch.set_num_threads(1)

def announced(n):
    print(n, flush=True)
    return batches(n)

train(toy(), announced, LONG, validate=validate, checkpoint=sys.argv[1])
"""
LONG = dataclasses.replace(CONFIG, steps=800, save_every=3)


def kill_after(steps: int, delay: float, file: Path) -> int:
    """Start a training process, kill it ``delay`` seconds after it has made some steps; what it has saved."""
    root = Path(__file__).parent.parent
    path = os.pathsep.join([str(root), str(root / "src"), *sys.path[1:]])
    command = [sys.executable, "-c", VICTIM, str(file)]
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    ) as process:
        for _ in range(steps + 1):  # the first line is the look at batch 0
            assert process.stdout.readline().strip().isdigit()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    return len(torch.load(file, weights_only=True)["loss"])


def test_kill_9_at_arbitrary_moments_changes_nothing(tmp_path):
    whole, model = toy(), toy()
    expected = train(whole, batches, LONG, validate=validate)
    file = tmp_path / "run.pt"
    saved = [kill_after(steps, delay, file) for steps, delay in [(5, 0.0), (40, 0.0213), (17, 0.1337)]]
    assert 0 < saved[0] < saved[1] < saved[2] < LONG.steps  # each was killed while at work, and went on
    got = train(model, batches, LONG, validate=validate, checkpoint=file)
    assert same(got, expected, model, whole)
    assert os.listdir(tmp_path) == ["run.pt"]  # nothing is left of files that were half written


def test_damaged_and_foreign_checkpoints_are_refused_and_kept(tmp_path):
    file, trained = tmp_path / "run.pt", toy()
    train(trained, batches, CONFIG, checkpoint=file)
    good = file.read_bytes()
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other.pt")
    flipped = bytearray(good)
    flipped[good.index(trained.embed.weight.detach().numpy().tobytes()) + 5] ^= 4  # one bit of a weight
    other = (tmp_path / "other.pt").read_bytes()
    for content in (good[:100], good[:-1000], b"", b"text", other, bytes(flipped)):
        file.write_bytes(content)
        model = toy()
        with pytest.raises(ValueError, match=r"checkpoint .*run\.pt is damaged"):
            train(model, batches, CONFIG, checkpoint=file)
        assert file.read_bytes() == content
        assert torch.equal(model.embed.weight, toy().embed.weight)
    file.write_bytes(good)
    for kwargs, differing in [
        ({"config": dataclasses.replace(CONFIG, peak=1e-2, seed=3)}, "peak, seed"),
        ({"model": toy(16)}, "model"),
        ({"batches": lambda n: batches(n + 1)}, "data"),
    ]:
        given = {"model": toy(), "batches": batches, "config": CONFIG} | kwargs
        with pytest.raises(ValueError, match=f"another run: {differing} differ"):
            train(**given, checkpoint=file)
        assert file.read_bytes() == good
    with pytest.raises(ValueError, match="existing folder"):
        train(toy(), batches, CONFIG, checkpoint=tmp_path / "no" / "run.pt")


def test_a_loss_that_is_not_finite_stops_at_the_last_good_step(tmp_path):
    def poisoned(n):
        if n == 4:
            with torch.no_grad():
                model.out.bias[0] = math.nan
        return batches(n)

    model = toy()
    with pytest.raises(FloatingPointError, match="the loss became nan at step 4"):
        train(model, poisoned, CONFIG, checkpoint=tmp_path / "run.pt")
    resumed = train(toy(), batches, CONFIG, checkpoint=tmp_path / "run.pt")
    assert resumed.loss == train(toy(), batches, CONFIG).loss


class SharpEdge(Toy):
    """From its fifth call on the loss is finite and its gradient is not: the root of 0."""

    calls = 0

    def loss(self, input_ids, targets):
        self.calls += 1
        edge = (self.out.bias[0] * 0).sqrt() if self.calls > 4 else 0
        return super().loss(input_ids, targets) + edge


def test_a_gradient_that_is_not_finite_never_reaches_weights_or_checkpoint(tmp_path):
    torch.manual_seed(0)
    model = SharpEdge()
    with pytest.raises(FloatingPointError, match="the gradient's norm became nan at step 4"):
        train(model, batches, CONFIG, checkpoint=tmp_path / "run.pt")
    assert all(p.isfinite().all() for p in model.parameters())
    again = toy()
    resumed = train(again, batches, CONFIG, checkpoint=tmp_path / "run.pt")
    assert resumed.loss == train(toy(), batches, CONFIG).loss


def test_stored_runs_round_trip_with_their_command(tmp_path):
    run = train(toy(), batches, CONFIG, validate=validate)
    run.save(tmp_path / "run.json", command="python -m benchmarks.toy")
    stored = json.loads((tmp_path / "run.json").read_text())
    assert stored["command"] == "python -m benchmarks.toy"
    assert stored["versions"]["torch"] == torch.__version__
    assert Run.load(tmp_path / "run.json") == run
    for text in ("", "[]", "{}", '{"config": {"steps": 0}, "loss": [], "validation": []}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=r"run\.json is not a stored run"):
            Run.load(tmp_path / "run.json")


def test_nothing_is_printed_where_nobody_watches(capfd):
    train(toy(), batches, CONFIG)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"steps": 2.0}, "steps must be an integer"),
        ({"peak": 0}, "peak must be positive"),
        ({"peak": math.nan}, "peak must be positive and finite"),
        ({"clip": -1}, "clip must be positive"),
        ({"weight_decay": -0.1}, "weight_decay must be >= 0"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"eval_every": 0}, "eval_every must be"),
    ],
)
def test_bad_configurations_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**({"steps": 3} | change))


def test_an_incomplete_checkpoint_changes_nothing(tmp_path):
    file = tmp_path / "run.pt"
    train(toy(), batches, CONFIG, checkpoint=file)
    good = torch.load(file, weights_only=True)
    for key, value in [("optimizer", None), ("loss", "abcd"), ("model", {}), ("loss", [1.0] * 99)]:
        torch.save({**good, key: value}, file)
        model = toy()
        with pytest.raises(ValueError, match=r"run\.pt is damaged"):
            train(model, batches, CONFIG, checkpoint=file)
        for p, q in zip(model.parameters(), toy().parameters()):
            assert torch.equal(p, q)


def test_what_no_shape_shows_belongs_to_a_run_too(tmp_path):
    from evolve import GPT2, GPT2Config

    def model(heads):
        torch.manual_seed(0)
        return GPT2(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=heads))

    train(model(2), batches, CONFIG, checkpoint=tmp_path / "run.pt")
    for other in (model(4), model(2).double()):
        with pytest.raises(ValueError, match="another run: model differ"):
            train(other, batches, CONFIG, checkpoint=tmp_path / "run.pt")


def test_a_validation_that_fails_leaves_the_model_training():
    model = toy().train()
    with pytest.raises(ZeroDivisionError):
        train(model, batches, CONFIG, validate=lambda m: 1 / 0)
    assert model.training


def test_pseudo_queries_can_learn_at_a_rate_of_their_own():
    """AdamW's first step is the rate times the gradient's sign: it shows the rate itself."""
    moved, ids = {}, torch.arange(32).view(2, 16)
    for query_rate in (1.0, 0.1):
        net = deep_model(2, num_layers=2)
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        config = TrainingConfig(3, peak=1e-2, warm_up=1, weight_decay=0.0, query_rate=query_rate)
        train(net, lambda n: Batch(ids, ids.roll(-1, 1)), config, until=1)
        moved[query_rate] = {n: (p - before[n]).abs().max().item() for n, p in net.named_parameters()}
    for name, step in moved[1.0].items():
        factor = 0.1 if name.endswith("_res_proj.weight") else 1.0
        assert moved[0.1][name] == pytest.approx(factor * step, rel=1e-3)
    assert moved[1.0]["output_attn_res_proj.weight"] == pytest.approx(1e-2, rel=1e-3)
