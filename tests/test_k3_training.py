"""K3 as something that learns: gradients are those of the loss, bfloat16 is safe, balancing is live."""

import pytest
import torch

from evolve.balancing import balanced, quantile_balance
from evolve.k3 import K3, K3Config
from evolve.lab.tasks import AssociativeRecall
from evolve.lab.text import TextBatches, standard_library
from evolve.lab.training import TrainingConfig, train
from evolve.moe import Router

TASK = AssociativeRecall(num_pairs=3, num_keys=8, num_values=8, batch_size=4)


def small_k3(seed: int = 0, **changes: int | float) -> K3:
    torch.manual_seed(seed)
    return K3(K3Config.nano(vocab_size=256, initializer_range=0.1, **changes))


def test_gradients_are_the_slopes_of_the_loss():
    """Along a random direction of each parameter; the choice of experts has no slope, and rests."""
    model, batch = small_k3(hidden_size=32).double(), TASK(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "_res_proj" in name or "output_attn_res_proj" in name:
                p.normal_(0, 0.3)
    model.loss(batch.input_ids, batch.targets).backward()
    checked, step = 0, 1e-5
    for name, p in model.named_parameters():
        if not p.requires_grad or p.grad is None:
            continue
        u = torch.randn(p.shape, generator=torch.Generator().manual_seed(checked)).double()
        slope = (p.grad * u).sum().item()
        with torch.no_grad():
            losses = []
            for sign in (1, -2):
                p.add_(sign * step * u)
                losses.append(model.loss(batch.input_ids, batch.targets).item())
            p.add_(step * u)
        assert slope == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=2e-7, rel=2e-5), name
        checked += 1
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == ["layers.0.self_attention_res_norm.weight", "layers.0.self_attention_res_proj.weight"]
    assert checked > 80


def test_training_in_bfloat16_stays_finite_and_near_float32():
    batch = TASK(1)
    exact = small_k3().loss(batch.input_ids, batch.targets).item()
    half = small_k3().to(torch.bfloat16)
    mixed = small_k3()
    losses = [half.loss(batch.input_ids, batch.targets)]
    with torch.autocast("cpu", torch.bfloat16):
        losses.append(mixed.loss(batch.input_ids, batch.targets))
    for model, loss in zip((half, mixed), losses):
        # Near choices of experts fall the other way: 0.1 to 2.4 % were measured over four seeds.
        assert loss.item() == pytest.approx(exact, rel=0.05)
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_it_learns_in_bfloat16_with_balancing_live():
    model = small_k3().to(torch.bfloat16)
    config = TrainingConfig(12, peak=1e-2, warm_up=2, eval_every=99)
    text = TextBatches(standard_library().training, 32, 4)
    with balanced(model, quantile_balance):
        run = train(model, text, config)
    assert run.loss[-1] < run.loss[0] - 0.5
    routers = [m for m in model.modules() if isinstance(m, Router)]
    assert len(routers) == 4
    assert all(r.e_score_correction_bias.abs().max() > 0 for r in routers)
    assert all(r.e_score_correction_bias.mean().abs() < 1e-2 for r in routers)


def test_it_learns_to_recall():
    model = small_k3(num_hidden_layers=4, linear_num_heads=2)
    config = TrainingConfig(25, peak=1e-2, warm_up=5, eval_every=99)
    with balanced(model, quantile_balance):
        run = train(model, TASK, config)
    assert run.loss[-1] < run.loss[0] - 2
