"""Load balancing of experts: three rules for the router's bias, and the numbers that tell whether they work.

Left alone, a router sends ever more tokens to the experts that have learned most. A bias that is added to the
scores for the choice only (``evolve.moe``) evens the load without a second loss. A rule maps the scores of a
step's tokens and the bias they were routed with to the bias of the next step:

    sign      b_j ← b_j + γ sign(mean load − load_j)          DeepSeek-V3, arXiv 2412.19437, section 2.1.2
    quantile  b_j ← −quantile_{1−k/E} over tokens i of (s_ij − α_i), then centred      Kimi K3's report

α_i, the (k+1)-th largest of s_i + b, is what an expert must exceed to be chosen by token i. The quantile is
the bias with which expert j would be chosen by its fair share of m·k/E tokens, were the cutoffs to stay: one
exact step for one expert on the dual of balanced assignment, of which the sign rule is SignSGD.

Shapes: scores s [m, E]; bias b [E]; counts [E] or [E, bins]. m tokens, k experts a token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from evolve.checks import check_count, check_float, check_positive, check_shape, check_tensor, require
from evolve.moe import Router, Routing, check_top_k, route

Rule = Callable[[Tensor, Tensor, int], Tensor]  # (scores, bias, top_k) -> bias of the next step


class Load(NamedTuple):
    """How evenly experts are used. Look at these and not at the router's entropy, which is high even when
    most experts are dead."""

    counts: Tensor  # [E] tokens of each expert
    dead: int  # experts without a token
    max_over_mean: float  # 1 is even; 0 if there is no token at all


def expert_load(indices: Tensor, num_experts: int) -> Load:
    """The load of ``num_experts`` experts under a routing's ``indices`` [..., k]."""
    check_count("num_experts", num_experts)
    check_tensor("indices", indices)
    is_int = indices.dtype in (torch.int64, torch.int32)
    require(is_int, f"indices must be integers (int64 or int32), got {indices.dtype}")
    inside = not indices.numel() or (indices.min() >= 0 and indices.max() < num_experts)
    require(bool(inside), f"indices must lie in [0, {num_experts})")
    counts = torch.bincount(indices.flatten(), minlength=num_experts)
    mean = counts.sum().item() / num_experts
    return Load(counts, int((counts == 0).sum()), counts.max().item() / mean if mean else 0.0)


# ----------------------------------------------------------------------------------------- the rules


@torch.no_grad()
def sign_balance(scores: Tensor, bias: Tensor, top_k: int, *, rate: float = 1e-3) -> Tensor:
    """DeepSeek's rule: one step of ``rate`` up for experts below the mean load, down for those above."""
    _check_rule(scores, bias, top_k)
    check_positive("rate", rate)
    counts = expert_load(route(scores, bias, top_k).indices, len(bias)).counts
    return bias + rate * torch.sign(counts.double().mean() - counts).to(bias.dtype)


@torch.no_grad()
def quantile_balance(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """Quantile Balancing, exact: the new bias [E], with mean 0.

    Without a token, or with k = E, where every load is even, the bias comes back as it was.
    Args: scores: [m, E] in (0, 1). bias: [E]. top_k: k.
    Raises: ValueError on arguments that do not fit.
    """
    _check_rule(scores, bias, top_k)
    (m, E), k = scores.shape, top_k
    if m == 0 or k == E:
        return bias.clone()
    # −quantile_{1−k/E}(s − α) is quantile_{k/E}(α − s); between two tokens the line through them.
    lacking = _lacking(scores, bias, k).sort(dim=0).values
    place = (m - 1) * k / E
    below = int(place)
    new = lacking[below].lerp(lacking[min(below + 1, m - 1)], place - below)
    return (new - new.mean()).to(bias.dtype)


@torch.no_grad()
def histogram_balance(scores: Tensor, bias: Tensor, top_k: int, *, bins: int = 1000) -> Tensor:
    """Quantile Balancing from counts: right to a bin's width, (2 + max b − min b) / bins, for each expert."""
    return bias_from_histogram(lacking_histogram(scores, bias, top_k, bins=bins), bias, top_k)


@torch.no_grad()
def lacking_histogram(scores: Tensor, bias: Tensor, top_k: int, *, bins: int = 1000) -> Tensor:
    """For each expert, the histogram of α_i − s_ij, what it lacks to be chosen: counts [E, bins] (int64).

    The bins divide [min b − 1, max b + 1], which holds every value. Counts from several devices are added:
    that one sum is all that balancing sends between them.
    """
    _check_rule(scores, bias, top_k)
    check_count("bins", bins)
    E = len(bias)
    require(top_k < E, f"top_k must be below the {E} experts for a histogram, got {top_k}")
    low, width = _bins(bias, bins)
    bin = ((_lacking(scores, bias, top_k) - low) / width).long().clamp(0, bins - 1)
    flat = bin + bins * torch.arange(E, device=bin.device)
    return torch.bincount(flat.flatten(), minlength=E * bins).view(E, bins)


@torch.no_grad()
def bias_from_histogram(counts: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The new bias [E] where the cumulative count reaches m·k/E, on a line within the bin; mean 0."""
    check_shape("bias", bias, E=None)
    check_shape("counts", counts, E=len(bias), bins=None)
    check_top_k(top_k, len(bias))
    _check_counts(counts)
    until = counts.cumsum(1).double()
    m, (E, bins) = until[0, -1].item(), counts.shape
    if m == 0:
        return bias.clone()
    share = until.new_full((E, 1), m * top_k / E)
    at = torch.searchsorted(until, share)
    before = until.gather(1, at) - counts.gather(1, at)
    low, width = _bins(bias, bins)
    new = low + width * (at + (share - before) / counts.gather(1, at))[:, 0]
    return (new - new.mean()).to(bias.dtype)


def _check_counts(counts: Tensor) -> None:
    """Every token is in one bin of every expert: a row that lacks some has lost a device's part."""
    is_int = counts.dtype in (torch.int64, torch.int32)
    require(is_int, f"counts must be int64 or int32, got {counts.dtype}")
    require(counts.shape[1] > 0, f"counts must have at least one bin, got {list(counts.shape)}")
    require(bool((counts >= 0).all()), f"counts must not be negative, got {counts.min().item()}")
    low, high = counts.sum(1).aminmax()
    require(bool(low == high), f"counts must have as many tokens for every expert, got from {low} to {high}")


def _lacking(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """α_i − s_ij [m, E]: with this bias or more, expert j would be among the choices of token i."""
    alpha = (scores + bias).topk(top_k + 1, dim=-1).values[:, -1:]
    return alpha - scores


def _bins(bias: Tensor, bins: int) -> tuple[float, float]:
    """Lower end and width of the bins."""
    low, high = bias.min().item() - 1, bias.max().item() + 1
    return low, (high - low) / bins


def _check_rule(scores: Tensor, bias: Tensor, top_k: int) -> None:
    check_shape("scores", scores, m=None, E=None)
    check_float("scores", scores)
    check_shape("bias", bias, E=scores.shape[1])
    check_top_k(top_k, len(bias))


# --------------------------------------------------------------------------------- rules in a model


@contextmanager
def balanced(model: nn.Module, rule: Rule) -> Iterator[None]:
    """Within, every forward pass in training mode moves each router's bias, by ``rule``, for the next pass.

    What a pass has routed is routed already, so its gradients know nothing of the new bias. Routers see all
    tokens, padding too.
    """

    def move(router: Router, _: object, routing: Routing) -> None:
        if router.training:
            bias = router.e_score_correction_bias
            bias.data.copy_(rule(routing.scores.detach(), bias.data, router.top_k))

    with _hooked(model, lambda name: move):
        yield


@contextmanager
def recorded_routing(model: nn.Module) -> Iterator[dict[str, list[Routing]]]:
    """Within, every routing is kept, detached: ``{name of the router: [Routing of each call]}``."""
    record: dict[str, list[Routing]] = {}

    def keep(name: str) -> Callable:
        calls = record.setdefault(name, [])
        return lambda _router, _inputs, routing: calls.append(Routing(*(t.detach() for t in routing)))

    with _hooked(model, keep):
        yield record


@contextmanager
def _hooked(model: nn.Module, hook_of: Callable[[str], Callable]) -> Iterator[None]:
    routers = {name: m for name, m in model.named_modules() if isinstance(m, Router)}
    require(bool(routers), "model must have a router, and has none")
    handles = [router.register_forward_hook(hook_of(name)) for name, router in routers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
