"""Rung 8, the mixture of experts: a token passes through a few of many feed-forward networks.

The problem: what a network knows is in its weights, and in a dense model every token pays for all of them.
What changed: a router chooses k of E experts for a token x (DeepSeek-V3, arXiv 2412.19437, eqs. 12 to 16):

    s = sigmoid(W_r x)      chosen: the k largest of s + b      p_j = s_j / Σ_chosen s      y = Σ p_j E_j(x)

The bias b steers the choice, so that all experts get work (``evolve.balancing``), and never the weights p.
Stable LatentMoE (Kimi K3's report, arXiv 2607.24653) puts the experts into a latent space of half the width
and bounds their activation, while router and shared experts keep the full width:

    z = W_down x      u = Σ p_j E_j(z)      y = W_up RMSNorm(u) + Shared(x)

Without ``latent_size`` the experts read x and y = u + Shared(x): Kimi Linear's and DeepSeek's layer.

Shapes: x [N, D]; scores s [N, E]; indices, weights [N, k]; gate_up [E, 2F, D], each expert's W_gate above its
W_up; down [E, D, F]; u [N, D]. N tokens, k experts a token, D the width that the experts read.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolve import mxfp4
from evolve.checks import check_count, check_flag, check_float, check_positive, check_shape, require
from evolve.decoder import Activation, GatedFeedForward, activation_name
from evolve.memory_layer import float32_parameter
from evolve.memory_rule import runs_on_triton, without_autocast
from evolve.norms import RMSNorm, at_least_float32


def situ_glu(gate: Tensor, up: Tensor, *, beta: float = 4.0, linear_beta: float = 25.0) -> Tensor:
    """β tanh(g/β) sigmoid(g) · β' tanh(u/β'): SwiGLU near 0, and never larger than β·β' (100 by default).

    Args: gate, up: [..., F]. beta, linear_beta: β and β'; both → ∞ is SwiGLU.
    Returns: [..., F] in gate's dtype; computed in float32 at least.
    Raises: ValueError on shapes that differ or a beta that is not positive.
    """
    check_float("gate", gate)
    check_shape("up", up, **{f"axis {i}": n for i, n in enumerate(gate.shape)})
    check_positive("beta", beta)
    check_positive("linear_beta", linear_beta)
    g, u = at_least_float32(gate), at_least_float32(up)
    bounded = beta * torch.tanh(g / beta) * torch.sigmoid(g)  # the sigmoid takes g itself, not g/β
    return (bounded * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)


# --------------------------------------------------------------------------------------- the router


class Routing(NamedTuple):
    """Which experts each token goes to, how much of each it takes, and the scores of all experts."""

    indices: Tensor  # [N, k]
    weights: Tensor  # [N, k], float32 at least
    scores: Tensor  # [N, E], float32 at least


def route(
    scores: Tensor, bias: Tensor, top_k: int, *, renormalize: bool = True, scaling: float = 1.0
) -> Routing:
    """Choose by ``scores + bias``, weigh by ``scores``.

    The weights are gathered from the scores: subtracting a bias of 12 from a sum would lose a score of 1e-8.

    Args:
        scores: [N, E], in (0, 1). bias: [E]. top_k: k, from 1 to E.
        renormalize: divide a token's weights by their sum (+ 1e-20). scaling: multiply them by this.
    Raises: ValueError on arguments that do not fit.
    """
    check_shape("scores", scores, N=None, E=None)
    check_float("scores", scores)
    check_shape("bias", bias, E=scores.shape[1])
    check_top_k(top_k, scores.shape[1])
    with torch.no_grad():
        indices = (scores + bias).topk(top_k, dim=-1).indices
    weights = scores.gather(1, indices)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(indices, weights * scaling, scores)


def check_top_k(top_k: object, num_experts: int) -> None:
    """``top_k`` must be an integer from 1 to ``num_experts``."""
    check_count("top_k", top_k)
    require(top_k <= num_experts, f"top_k must be at most the {num_experts} experts, got {top_k}")


class Router(nn.Linear):
    """x [N, D] -> ``Routing``. Scores in float32 whatever the model's dtype: nearby experts differ by little.

    ``e_score_correction_bias`` gets no gradient; ``evolve.balancing`` moves it.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        renormalize: bool = True,
        scaling: float = 1.0,
    ) -> None:
        super().__init__(hidden_size, num_experts, bias=False)
        self.top_k, self.renormalize, self.scaling = top_k, renormalize, scaling
        self.e_score_correction_bias = float32_parameter(num_experts).requires_grad_(False)
        nn.init.zeros_(self.e_score_correction_bias)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "e_score_correction_bias"):  # not yet, when the base class calls
            nn.init.zeros_(self.e_score_correction_bias)

    def extra_repr(self) -> str:
        options = ("top_k", "renormalize", "scaling")
        return ", ".join([super().extra_repr(), *(f"{name}={getattr(self, name)}" for name in options)])

    def forward(self, x: Tensor) -> Routing:
        with without_autocast(x.device):
            scores = F.linear(at_least_float32(x), at_least_float32(self.weight)).sigmoid()
        return route(
            scores,
            self.e_score_correction_bias,
            self.top_k,
            renormalize=self.renormalize,
            scaling=self.scaling,
        )


# -------------------------------------------------------------------------------------- the experts


def loop_experts(
    x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    """u = Σ p_j E_j(x) by its definition: every expert in turn, on the tokens that chose it.

    Returns: u [N, D], summed in float32 at least.
    """
    u = torch.zeros_like(at_least_float32(x))
    for e, (W_gate_up, W_down) in enumerate(zip(gate_up.unbind(), down.unbind())):
        token, choice = torch.where(routing.indices == e)
        gate, up = (x[token] @ W_gate_up.mT).chunk(2, dim=-1)
        y = activation(gate, up) @ W_down.mT
        u = u.index_add(0, token, routing.weights[token, choice, None] * at_least_float32(y))
    return u


def grouped_experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor | Sequence[Tensor],
    down: Tensor | Sequence[Tensor],
    activation: Activation,
    *,
    backend: str | None = None,
) -> Tensor:
    """The same function. Choices are sorted by expert: each expert's tokens lie together, and one grouped
    product runs all experts. An expert without tokens gets a gradient of zero.

    The matrices may come in any sequence of E instead of a stack: then they are taken from it one by one,
    each when it is multiplied by, and those of experts without tokens never. ``backend``: ``"torch"``,
    ``"triton"`` (a stack, or an ``mxfp4.PackedStack``), or ``None``: Triton on a GPU where it is installed.
    """
    N, k = routing.indices.shape
    expert, order = routing.indices.flatten().sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(len(gate_up), device=x.device), right=True, out_int32=True)
    rows = x.index_select(0, order // k)
    gate, up = expert_products(rows, gate_up, ends, backend=backend).chunk(2, dim=-1)
    y = expert_products(activation(gate, up), down, ends, backend=backend)
    y = y.index_select(0, order.argsort()).view(N, k, y.shape[1])  # back to the order of the tokens
    return (routing.weights[..., None] * at_least_float32(y)).sum(1)


def expert_products(
    rows: Tensor, weight: Tensor | Sequence[Tensor], ends: Tensor, *, backend: str | None = None
) -> Tensor:
    """Each expert's matrix times its own rows: [S, n_in], [E, n_out, n_in] -> [S, n_out].

    ``ends`` [E] (int32): where each expert's rows end. ``backend``, ``weight``: as in ``grouped_experts``.
    """
    in_a_kernel = _runs_on_triton(backend, rows, weight)
    if rows.is_meta or not len(rows):  # any expert's matrix has the shape (and gives all the zero gradient)
        return rows @ weight[0].mT
    if in_a_kernel:
        from evolve_kernels.moe import grouped_product

        packed = isinstance(weight, mxfp4.PackedStack)
        w, scale = (weight.packed, weight.scale) if packed else (weight, None)
        return grouped_product(rows, w, ends, scale=scale)
    stacked = isinstance(weight, Tensor)
    if stacked and _grouped_product_fits(rows, weight):
        return F.grouped_mm(rows, weight.mT, offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    chosen = [e for e, n in enumerate(counts) if n]
    # The gradient of weight[e] is as large as all experts; unbind has one for all of them.
    matrices = weight.unbind() if stacked and torch.is_grad_enabled() and weight.requires_grad else weight
    parts = rows.split([counts[e] for e in chosen])
    return torch.cat([part @ matrices[e].mT for e, part in zip(chosen, parts)])


def _runs_on_triton(backend: str | None, rows: Tensor, weight: Tensor | Sequence[Tensor]) -> bool:
    known = backend in (None, "torch", "triton")
    require(known, f'backend must be None, "torch" or "triton", got {backend!r}')
    stacked = isinstance(weight, Tensor | mxfp4.PackedStack)
    require(stacked or backend != "triton", 'backend "triton" needs a stack of matrices, got a sequence')
    return stacked and runs_on_triton(backend, (rows,))


def _grouped_product_fits(rows: Tensor, weight: Tensor) -> bool:
    """PyTorch's grouped product has no float64 and wants rows of whole 16 bytes. On a CPU it walks through
    all experts, so a decoded token does better with a loop over those it chose."""
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    whole = all(n * rows.element_size() % 16 == 0 for n in weight.shape[1:])
    return whole and (rows.device.type != "cpu" or len(rows) >= len(weight))


class Experts(nn.Module):
    """E gated networks D -> F -> D, stacked: (x [N, D], routing) -> u [N, D] in float32 at least.

    In a ``state_dict`` each has the released checkpoints' names: ``N.w1.weight`` (gate), ``N.w3.weight``
    (up), ``N.w2.weight`` (down). They are views of the stacks. ``backend``: as in ``grouped_experts``.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        expert_size: int,
        activation: Activation,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.backend = activation, backend
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * expert_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, expert_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Each matrix as ``nn.Linear`` draws it."""
        for stack in self.parameters():
            stack.uniform_(-1, 1).mul_(stack.shape[-1] ** -0.5)

    def extra_repr(self) -> str:
        E, D, F = self.down_proj.shape
        return f"{E} x ({D} -> {F} -> {D}), activation={activation_name(self.activation)}"

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        x = x.to(self.gate_up_proj.dtype)  # they differ under autocast
        stacks = self.gate_up_proj, self.down_proj
        return grouped_experts(x, routing, *stacks, self.activation, backend=self.backend)

    def named_matrices(self) -> Iterator[tuple[str, Tensor]]:
        """The matrices by their released names."""
        for e, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj)):
            w1, w3 = gate_up.chunk(2)
            yield from ((f"{e}.w1.weight", w1), (f"{e}.w2.weight", down), (f"{e}.w3.weight", w3))

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        for name, matrix in self.named_matrices():
            destination[prefix + name] = matrix if keep_vars else matrix.detach()

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        matrices = {prefix + name: matrix for name, matrix in self.named_matrices()}
        found = {name: t for name, t in state_dict.items() if name.startswith(prefix)}
        if found and self.down_proj.is_meta:  # copying into nothing would lose them without a word
            error_msgs.append(f"{prefix}*: experts are loaded in place, call to_empty before loading")
            return
        for name, matrix in matrices.items():
            if name not in found:
                missing_keys.append(name)
            elif found[name].shape != matrix.shape:
                error_msgs.append(f"{name} is {list(found[name].shape)}, expected {list(matrix.shape)}")
            else:
                matrix.copy_(found[name])
        unexpected_keys.extend(found.keys() - matrices.keys() if strict else ())


class LatentMoE(nn.Module):
    """The layer of Kimi K3, and with ``latent_size=None`` that of Kimi Linear, by the checkpoints' names.

    Args:
        hidden_size: D of the model; the router and the shared experts read all of it.
        num_experts: E. top_k: experts a token. expert_size: F of each expert, shared ones too.
        latent_size: the width that the routed experts live in; ``None``: hidden_size, without projections.
        num_shared_experts: how many every token passes through (fused into one network; 0 is allowed).
        activation: of all experts, (gate, up) -> [..., F]; ``situ_glu``, or ``evolve.decoder.swiglu``.
        renormalize, scaling: of the weights, see ``route``. norm_eps: of the latent norm.
    Raises: ValueError on sizes that do not fit.
    """

    name_in_layer = "block_sparse_moe"

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        expert_size: int,
        latent_size: int | None = None,
        num_shared_experts: int = 0,
        activation: Activation = situ_glu,
        renormalize: bool = True,
        scaling: float = 1.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        width = hidden_size if latent_size is None else latent_size
        sizes = {"hidden_size": hidden_size, "num_experts": num_experts, "expert_size": expert_size}
        for name, n in (sizes | {"latent_size": width}).items():
            check_count(name, n)
        check_count("num_shared_experts", num_shared_experts, 0)
        check_top_k(top_k, num_experts)
        check_positive("scaling", scaling)
        check_positive("norm_eps", norm_eps)
        check_flag("renormalize", renormalize)
        require(callable(activation), f"activation must be callable, got {activation!r}")
        self.hidden_size, self.latent_size = hidden_size, latent_size
        self.gate = Router(hidden_size, num_experts, top_k, renormalize=renormalize, scaling=scaling)
        self.experts = Experts(num_experts, width, expert_size, activation)
        if latent_size is not None:
            self.routed_expert_down_proj = nn.Linear(hidden_size, latent_size, bias=False)
            self.routed_expert_norm = RMSNorm(latent_size, eps=norm_eps)
            self.routed_expert_up_proj = nn.Linear(latent_size, hidden_size, bias=False)
        shared_size = num_shared_experts * expert_size
        self.shared_experts = GatedFeedForward(hidden_size, shared_size, activation) if shared_size else None

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts that a token does not choose."""
        E = self.gate.out_features
        held = sum(p.numel() for p in self.experts.parameters())
        return (held + getattr(self.experts, "packed_parameters", 0)) // E * (E - self.gate.top_k)

    def reset_parameters(self) -> None:
        """Draw every parameter anew; call it after ``to_empty`` on a layer built on ``meta``."""
        for child in self.children():
            child.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> y [..., D]; every token on its own. Raises ``ValueError`` for another width."""
        check_float("x", x)
        require(
            x.ndim >= 1 and x.shape[-1] == self.hidden_size,
            f"x must be [..., D] = [..., {self.hidden_size}], got {list(x.shape)}",
        )
        tokens = x.reshape(-1, self.hidden_size)
        routing = self.gate(tokens)
        if self.latent_size is None:
            y = self.experts(tokens, routing).to(x.dtype)
        else:
            u = self.experts(self.routed_expert_down_proj(tokens), routing)
            y = self.routed_expert_up_proj(self.routed_expert_norm(u).to(x.dtype))
        y = y.view(x.shape)
        return y if self.shared_experts is None else y + self.shared_experts(x)
