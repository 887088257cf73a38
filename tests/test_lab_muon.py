"""Muon: orthogonal steps, one block for each head, and a run that can be resumed."""

import dataclasses

import pytest
import torch

from evolve.k3 import K3, K3Config
from evolve.lab import muon
from evolve.lab.seeds import generator
from evolve.lab.tasks import Batch
from evolve.lab.training import TrainingConfig, _optimizer, train

CONFIG = TrainingConfig(steps=12, peak=1e-2, warm_up=2, optimizer="muon", save_every=4)


def batches(n):
    ids = torch.randint(256, (2, 9), generator=generator(0, n))
    return Batch(ids[:, :-1], ids[:, 1:])


def small() -> K3:
    torch.manual_seed(0)
    return K3(K3Config.nano(num_hidden_layers=4))


@pytest.mark.parametrize("shape", [(8, 8), (5, 40), (40, 5), (3, 16, 24)])
def test_singular_values_become_about_one_and_directions_stay(shape):
    M = torch.randn(shape, generator=generator(1), dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(M, full_matrices=False)
    found = U.mT @ muon.orthogonalized(M) @ Vh.mT
    values = found.diagonal(dim1=-2, dim2=-1)
    assert (found - torch.diag_embed(values)).abs().max() < 1e-12
    assert 0.3 < values.min() < values.max() < 1.3
    assert (values[S / S.norm(dim=-1, keepdim=True) > 0.05] > 0.65).all()
    assert torch.equal(muon.orthogonalized(torch.zeros(shape)), torch.zeros(shape))


def test_whole_matrices_move_as_in_torchs_muon():
    ours, theirs = (torch.nn.Parameter(torch.randn(24, 16, generator=generator(2))) for _ in range(2))
    optimizers = [
        muon.Muon([{"params": [ours]}], lr=0.02, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    before = ours.detach().clone()
    for step in range(4):
        gradient = torch.randn(24, 16, generator=generator(3, step))
        for p, optimizer in zip((ours, theirs), optimizers):
            p.grad = gradient.clone()
            optimizer.step()
    moved = (ours - before).norm()
    assert (ours - theirs).norm() < 0.02 * moved  # torch's computes the rounds in bfloat16


def test_a_block_moves_as_if_it_were_alone():
    p = torch.nn.Parameter(torch.randn(12, 10, generator=generator(4)))
    parts = [torch.nn.Parameter(part.clone()) for part in p.detach().split(4)]
    gradient = torch.randn(12, 10, generator=generator(5))
    gradient[:4] *= 1e4  # would leave nothing of the other heads' steps
    p.grad = gradient
    muon.Muon([{"params": [p], "rows": 4}], lr=0.1).step()
    for part, g in zip(parts, gradient.split(4)):
        part.grad = g
    muon.Muon([{"params": parts}], lr=0.1).step()
    assert torch.allclose(p, torch.cat(parts), atol=1e-6)


def test_it_serves_the_layers_matrices_head_by_head_and_adamw_the_rest():
    net, served = small(), muon.matrices(small())
    mla, moe = "layers.3.self_attn.", "layers.3.block_sparse_moe."
    rows = {
        "layers.0.self_attn.q_proj.weight": 16,
        "layers.0.self_attn.v_proj.weight": 16,
        "layers.0.self_attn.o_proj.weight": 0,
        "layers.0.mlp.down_proj.weight": 0,
        f"{mla}q_b_proj.weight": 16 + 8,
        f"{mla}kv_b_proj.weight": 16,
        f"{mla}kv_a_proj_with_mqa.weight": 0,
        f"{moe}experts.gate_up_proj": 32,
        f"{moe}experts.down_proj": 0,
    }
    assert rows.items() <= served.items()
    left = {n for n, p in net.named_parameters() if p.ndim > 1 and p.requires_grad} - served.keys()
    known = ("embed_tokens.", "lm_head.", "conv1d.", "_res_proj.", "gate.weight")
    assert all(any(k in n for k in known) for n in left), left
    groups = _optimizer(net, CONFIG).param_groups
    counted = sum(p.numel() for g in groups for p in g["params"])
    assert counted == sum(p.numel() for p in net.parameters() if p.requires_grad)


def test_a_killed_run_goes_on_exactly(tmp_path):
    whole, parts, file = small(), small(), tmp_path / "run.pt"
    run = train(whole, batches, CONFIG)
    train(parts, batches, CONFIG, checkpoint=file, until=8)
    resumed = small()
    assert train(resumed, batches, CONFIG, checkpoint=file).loss == run.loss
    for a, b in zip(whole.parameters(), resumed.parameters()):
        assert torch.equal(a, b)
    other = dataclasses.replace(CONFIG, optimizer="adamw")
    with pytest.raises(ValueError, match="another run: optimizer"):
        train(small(), batches, other, checkpoint=file)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="optimizer must be one of"):
        TrainingConfig(steps=1, optimizer="sgd")
    with pytest.raises(ValueError, match=r"blocks of 5 rows, got \[12, 10\]"):
        muon.Muon([{"params": [torch.nn.Parameter(torch.zeros(12, 10))], "rows": 5}], lr=0.1)
    with pytest.raises(ValueError, match="matrices in its layers"):
        train(torch.nn.Linear(2, 2), batches, CONFIG)
