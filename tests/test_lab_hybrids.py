"""Small hybrids of one size, what they recall pair by pair, and their stored runs."""

import dataclasses

import pytest
import torch
from benchmarks import hybrids

from evolve.kda import KimiDeltaAttention
from evolve.lab import stored
from evolve.lab.accounting import parameters
from evolve.lab.hybrids import (
    ConvMLA,
    ShortAndLong,
    cut_to,
    latent_tables,
    recalled,
    silenced,
    small_hybrid,
    whole_numbers,
)
from evolve.lab.tasks import AssociativeRecall, accuracy
from evolve.lab.training import TrainingConfig
from evolve.mla import MultiHeadLatentAttention

TASK = AssociativeRecall(num_pairs=4, num_keys=9, num_values=5, batch_size=6)


def test_a_layout_names_its_layers_and_all_have_one_size():
    sizes = {}
    for layout in ("kkkm", "kkkk", "kmkm", "mmmm", "cccc"):
        model = small_hybrid(layout, vocab_size=67, seed=1)
        kinds = {"k": KimiDeltaAttention, "m": MultiHeadLatentAttention, "c": ConvMLA}
        assert [type(layer.self_attn) for layer in model.layers] == [kinds[letter] for letter in layout]
        sizes[layout] = parameters(model)
        again = small_hybrid(layout, vocab_size=67, seed=1)
        assert torch.equal(model.lm_head.weight, again.lm_head.weight)
    assert max(sizes.values()) / min(sizes.values()) < 1.02
    with pytest.raises(ValueError, match="layout must be made of the letters k, m, c, got 'kx'"):
        small_hybrid("kx", vocab_size=9)
    with pytest.raises(ValueError, match="intermediate_size must leave room for m"):
        small_hybrid("m", vocab_size=9, intermediate_size=1, mla_head_dim=64)


def test_conv_mla_sees_the_token_before_and_not_the_next():
    layer = ConvMLA(8, 2, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    changed = x.clone()
    changed[:, 4] += 1
    difference = (layer(changed) - layer(x)).abs().amax((0, 2))
    assert (difference[:4] == 0).all()
    assert difference[5] > 1e-6
    with pytest.raises(ValueError, match="cache must be None"):
        layer(x, cache=object())
    with pytest.raises(ValueError, match="attention_mask must be all true"):
        layer(x, attention_mask=torch.zeros(1, 6, dtype=torch.bool))


def test_recalled_sorts_answers_by_when_their_pair_was_written():
    batch = TASK(3)
    answers = torch.nn.functional.one_hot(batch.targets.clamp(min=0), TASK.vocab_size).float()
    assert recalled(lambda ids: answers, TASK, 3).all()
    oldest = batch.input_ids[:, 0]
    asked_at = 8 + (batch.input_ids[:, 8:] == oldest[:, None]).float().argmax(1)
    answers[torch.arange(6), asked_at] = 0  # the pair that was written first is answered wrong
    right = recalled(lambda ids: answers, TASK, 3)
    assert right.tolist() == [[False, True, True, True]] * 6
    assert right.double().mean() == pytest.approx(accuracy(answers, batch.targets))
    for fields in ({"rewrites": 1}, {"contexts": 2}, {"num_slots": 5}):
        with pytest.raises(ValueError, match="task must be plain"):
            recalled(lambda ids: answers, dataclasses.replace(TASK, **fields), 3)


def test_short_and_long_lists_are_plain_batches_of_their_length():
    task = ShortAndLong(num_pairs=6, num_keys=9, num_values=5, batch_size=2, seed=3)
    lengths = set()
    for n in range(24):
        batch = task(n)
        N = batch.input_ids.shape[1] // 3
        lengths.add(N)
        assert torch.equal(batch.input_ids, task.plain(N)(n).input_ids)
        assert torch.equal(batch.targets, task(n).targets)
    assert lengths == {1, 3, 6}
    assert {dataclasses.replace(task, shortest=4)(n).input_ids.shape[1] for n in range(9)} == {18}
    assert task.plain(2, batch_size=7)(0).input_ids.shape == (7, 6)
    assert dataclasses.asdict(task.plain(2)).keys() == dataclasses.asdict(TASK).keys()


def test_a_number_is_found_if_every_place_is_right():
    right = torch.ones(2, 8, dtype=torch.bool)
    assert whole_numbers(right) == 1
    right[0, 1] = right[0, 2] = right[1, 7] = False
    assert whole_numbers(right) == 0.5
    with pytest.raises(ValueError, match="N a multiple of 4, got 6"):
        whole_numbers(right[:, :6])


def test_runs_of_hybrids_are_stored_and_repeated(tmp_path):
    task = ShortAndLong(num_pairs=4, num_keys=9, num_values=5, batch_size=2)
    run = stored.planned("ratio", "km", task, TrainingConfig(steps=3), seed=2, hidden_size=16)
    run = run.measured(lambda model: {"parameters": parameters(model)})
    stored.save(tmp_path / "runs.json", [run], command="python -m tests")
    (read,) = stored.load("runs", tmp_path / "runs.json")
    assert dataclasses.replace(read, run=run.run) == run
    assert read.repeat(2)[1].loss == run.run.loss[:2]


HYBRIDS = stored.load("hybrids")


def test_the_stored_runs_are_those_of_the_script():
    planned = [dataclasses.replace(r, run=r.run.config, exams={}) for r in hybrids.plans()]
    assert [dataclasses.replace(r, run=r.run.config, exams={}) for r in HYBRIDS] == planned
    assert stored.command("hybrids") == hybrids.COMMAND


@pytest.mark.parametrize("run", HYBRIDS, ids=lambda r: f"{r.name}-{r.mixer}-{r.seed}")
def test_the_first_steps_of_a_stored_run_come_out_again(run):
    assert len(run.run.loss) == run.run.config.steps
    assert run.repeat(4)[1].loss == pytest.approx(run.run.loss[:4], rel=1e-3)


def test_a_silenced_layer_adds_nothing_and_comes_back():
    model, ids = small_hybrid("km", vocab_size=9, hidden_size=16).double(), TASK(0).input_ids % 9
    before = model(ids)
    with silenced(model, MultiHeadLatentAttention):
        quiet = model(ids)
    with torch.no_grad():
        model.layers[1].self_attn.o_proj.weight.zero_()
    assert torch.equal(quiet, model(ids))
    assert (quiet - before).abs().max() > 1e-3
    bare, refused = small_hybrid("k", vocab_size=9, hidden_size=16), "MultiHeadLatentAttention, got none"
    with pytest.raises(ValueError, match=refused), silenced(bare, MultiHeadLatentAttention):
        pass


def test_keys_and_values_cut_to_all_their_directions_are_whole_and_to_none_are_zero():
    model = small_hybrid("ccm", vocab_size=9, hidden_size=16, shared_dim=0, kv_lora_rank=6).double()
    ids = TASK(0).input_ids % 9
    latents, before = latent_tables(model, ids), model(ids)
    assert [list(c.shape) for c in latents] == [[ids.numel(), 6]] * 3
    maps = [layer.self_attn.kv_b_proj.weight for layer in model.layers]
    spaces = [torch.linalg.svd(c @ W.T, full_matrices=False).Vh for c, W in zip(latents, maps)]
    with cut_to(model, spaces):
        assert torch.allclose(model(ids), before, atol=1e-10)
    with cut_to(model, [Vh[:2] for Vh in spaces]):
        assert all(torch.linalg.matrix_rank(W) == 2 for W in maps)
    with cut_to(model, [Vh[:0] for Vh in spaces]), silenced(model, MultiHeadLatentAttention):
        quiet = model(ids)
    with cut_to(model, [Vh[:0] for Vh in spaces]):
        assert torch.allclose(model(ids), quiet, atol=1e-12)
    assert torch.equal(model(ids), before)
    with pytest.raises(ValueError, match="one for each of 3 MLA layers"), cut_to(model, spaces[:1]):
        pass
