"""What the experts' lab measures, on cases that can be counted; the stored runs begin again as they began."""

import math

import pytest
import torch
from benchmarks import experts as benchmark

from evolve.decoder import GatedFeedForward
from evolve.lab import accounting, experts, stored
from evolve.lab.experts import KINDS, RULES
from evolve.lab.tasks import Batch
from evolve.lab.text import documentation, encode, standard_library
from evolve.moe import LatentMoE

IDS = torch.arange(40).view(2, 20) * 7 % 256


def test_the_dense_networks_have_the_experts_parameters():
    dense, wide, sparse = (experts.expert_model(kind) for kind in KINDS)
    used = [accounting.activated_parameters(m) for m in (dense, sparse)]
    held = [accounting.parameters(m) for m in (wide, sparse)]
    assert used[0] == pytest.approx(used[1], rel=0.005)
    assert held[0] == pytest.approx(held[1], rel=0.005)
    again = experts.expert_model("experts")
    assert all(torch.equal(a, b) for a, b in zip(sparse.parameters(), again.parameters()))
    with pytest.raises(ValueError, match="kind must be one of dense, wide, experts, got 'x'"):
        experts.expert_model("x")


def test_costs_are_two_flops_for_each_activated_parameter():
    with torch.device("meta"):
        dense = GatedFeedForward(8, 12)
        sparse = LatentMoE(16, num_experts=4, top_k=2, expert_size=8, latent_size=8, num_shared_experts=1)
    assert experts.layer_cost(dense, 8) == {"parameters": 288, "activated": 288, "flops": 576}
    cost = experts.layer_cost(sparse, 16)
    routed, others = 3 * 8 * 8, 4 * 16 + 2 * 8 * 16 + 3 * 8 * 16
    assert cost["parameters"] == 4 * routed + others + 8 + 4  # the norm and the router's bias
    assert cost["flops"] == 2 * (2 * routed + others)


@pytest.mark.parametrize("rule", RULES)
def test_loads_are_kept_step_by_step(rule):
    net = experts.expert_model("experts")
    batch = Batch(IDS, IDS.roll(-1, 1))
    with experts.balanced_and_watched(net, RULES[rule]) as counts:
        for _ in range(3):
            net.train().loss(batch.input_ids, batch.targets)
        net.eval()(IDS)  # not a training step
    loads = experts.by_layer(counts)
    assert loads.shape == (2, 3, 16)
    assert (loads.sum(-1) == IDS.numel() * 2).all()
    moved = [layer.feed_forward.gate.e_score_correction_bias.any().item() for layer in net.layers]
    assert moved == [rule != "none"] * 2
    with experts.balanced_and_watched(experts.expert_model("dense"), RULES[rule]) as counts:
        assert counts == []
    with pytest.raises(ValueError, match="counts must hold at least one load"):
        experts.by_layer([])


def test_every_byte_has_a_class():
    classes = experts.byte_classes(torch.arange(256))
    assert classes.unique().tolist() == list(range(len(experts.CLASSES)))
    named = [experts.CLASSES[i] for i in experts.byte_classes(encode('aZ7_ \n)"+')[0])]
    assert named == list(experts.CLASSES)


def test_shares_kept_and_guessed_choices_by_hand():
    indices = torch.tensor([[0, 1], [0, 2], [3, 1], [0, 1]])
    found = experts.shares(indices, torch.tensor([0, 0, 1, 1]), 3, 4)
    assert found.tolist() == [[0.5, 0.25, 0.25, 0], [0.25, 0.5, 0, 0.25], [0, 0, 0, 0]]
    after = torch.tensor([[1, 0], [0, 3], [0, 2], [0, 1]])
    assert experts.kept_choices(indices, after) == pytest.approx((2 + 1 + 0 + 2) / 8)
    with pytest.raises(ValueError, match="groups must be"):
        experts.shares(indices, torch.zeros(3, dtype=torch.int64), 1, 4)


def test_a_guess_is_examined_on_tokens_it_was_not_counted_on():
    indices = torch.tensor([[0, 1], [2, 3], [0, 1], [0, 1], [1, 0], [3, 2], [3, 0], [3, 0]])
    bytes_of = torch.tensor([5, 6, 5, 7, 5, 6, 8, 8])
    # Counted on the first four, 5, 6 and 7 are known and 8 is not: {0, 1} then, which most are given.
    # Counted on the last four, 7 is not known: {0, 3}. So the halves have 2 + 2 + 1 + 1 and 2 + 2 + 2 + 1.
    assert experts.guessed_choices(indices, bytes_of, num_experts=4) == pytest.approx(13 / 16)
    # A single group: {0, 1} for the last four, {0, 3} for the first: 2 + 0 + 1 + 1 and 1 + 1 + 1 + 1.
    assert experts.guessed_choices(indices, torch.zeros(8, dtype=torch.int64), 1, 4) == pytest.approx(8 / 16)
    own = torch.arange(8)  # a group for each token: what was counted is never examined
    assert experts.guessed_choices(indices, own, 8, 4) == experts.guessed_choices(indices, own * 0, 1, 4)


def test_a_part_put_back_is_the_old_one_and_the_rest_is_not():
    old, new = (experts.expert_model("experts", seed=seed) for seed in (0, 1))
    names = set()
    for part, belongs in experts.PARTS.items():
        mixed = experts.with_part_back(old, new, part).state_dict()
        for name, w in mixed.items():
            expected = old if belongs(name) else new
            assert torch.equal(w, expected.state_dict()[name])
            names |= {name} if belongs(name) else set()
    left = {name for name in old.state_dict() if "norm" in name and "self_attn" not in name}
    assert names | left == set(old.state_dict())  # only norms belong to no part
    with pytest.raises(ValueError, match="part must be one of nothing, routers"):
        experts.with_part_back(old, new, "all")


def test_the_two_kinds_of_text_are_different_and_held_out():
    prose = documentation()
    assert prose.training.numel() > 300_000
    assert prose.validation.numel() == prose.nbytes // 10
    assert bytes(prose.training[:4000].tolist()).decode().count(" the ") > 10
    usual = [
        torch.bincount(c().training.long(), minlength=256).double() for c in (standard_library, documentation)
    ]
    one, two = (u / u.sum() for u in usual)
    assert (one - two).abs().sum() > 0.2


RUNS = experts.load_runs()


def test_the_stored_runs_are_those_of_the_script():
    assert [benchmark.key(r) for r in RUNS] == [benchmark.key(r) for r in benchmark.plans()]
    assert stored.command("experts") == benchmark.COMMAND
    tried = [r for r in RUNS if r.name == "tried"]
    for kind, best in benchmark.BEST.items():
        loss = {
            r.first.config.peak: r.first.validation[-1]["code"]
            for r in tried
            if r.kind == kind and r.rule != "sign"
        }
        assert tuple(loss) == benchmark.PEAKS
        assert best == min(loss, key=loss.get)
    peaks = {r.sign_rate: late_peak(r) for r in tried if r.rule == "sign"}
    assert tuple(peaks) == benchmark.SIGN_RATES
    assert min(peaks, key=peaks.get) == experts.SIGN_RATE


def late_peak(run):
    late = torch.tensor(run.loads)[:, -10:].double()
    return (late.amax(-1) / late.mean(-1)).mean().item()


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"{r.name}-{r.kind}-{r.rule}-{r.seed}")
def test_the_first_steps_of_a_stored_run_come_out_again(run):
    assert len(run.first.loss) == run.first.config.steps
    live, counts = run.learn(run.build(), 0, until=2)
    assert live.loss == pytest.approx(run.first.loss[:2], rel=1e-3)
    if run.kind == "experts":
        again, kept = experts.by_layer(counts)[:, 0], torch.tensor(run.loads)[:, 0]
        assert (again - kept).abs().sum() <= 0.02 * kept.sum()
    assert (run.second is None) == (run.name == "tried")
    if run.second is not None:
        assert len(run.second.loss) == run.second.config.steps
        assert run.looks["back"]["nothing"]["code"] == pytest.approx(
            run.second.validation[-1]["code"], rel=1e-3
        )


CONTROLS = [r for r in RUNS if r.control]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda r: f"{r.kind}-{r.rule}-{r.held}-{r.seed}")
def test_a_control_differs_from_its_run_in_the_second_text_only(control):
    (run,) = [
        r
        for r in RUNS
        if not r.control and benchmark.key(r)[1:5] == benchmark.key(control)[1:5] and r.second is not None
    ]
    assert control.first == run.first
    assert control.second.config == run.second.config
    assert control.second.loss[0] != run.second.loss[0]
    assert control.looks.get("guessed") == run.looks.get("guessed")


def test_a_control_goes_on_with_code_it_has_not_had():
    control, read = CONTROLS[0], []
    net = control.build()
    loss = net.loss
    net.loss = lambda ids, targets: read.append(ids.clone()) or loss(ids, targets)
    control.learn(net, 1, until=1)
    stream = experts.TextBatches(standard_library().training, experts.BLOCK, experts.BATCH, seed=control.seed)
    assert torch.equal(read[0], stream(control.first.config.steps).input_ids)


def test_at_rest_the_second_text_moves_no_bias():
    run = next(r for r in RUNS if r.held)
    net = run.build()
    run.learn(net, 0, until=2)
    biases = [layer.feed_forward.gate.e_score_correction_bias.clone() for layer in net.layers]
    assert all(b.any() for b in biases)
    run.learn(net, 1, until=2)
    assert all(
        torch.equal(b, layer.feed_forward.gate.e_score_correction_bias)
        for b, layer in zip(biases, net.layers)
    )


def test_a_look_finds_nothing_changed_where_nothing_is():
    net = experts.expert_model("experts")
    found = experts.look(net, net)
    assert found["kept"] == [1, 1]
    assert len({tuple(two.values()) for two in found["back"].values()}) == 1
    assert all(0 <= x <= 1 for layers in found["guessed"].values() for x in layers)
    assert set(found["guessed"]) == {"byte", "class", "nothing"}
    assert found["apart"][0] == found["apart"][1]
    assert math.isclose(sum(found["classes"][0][0]), 1, abs_tol=1e-2)
    assert set(experts.look(*[experts.expert_model("dense")] * 2)) == {"back"}
