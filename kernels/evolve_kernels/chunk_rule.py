"""Rungs 2 to 5 on a GPU: one chunked forward and backward for every memory rule.

    gate none | one per head | one per channel      with or without erasing

Forward is ``chunk_prepare`` (all chunks at once) and ``chunk_walk`` (in order). Backward keeps nothing but
the inputs: it prepares and walks again, walks back, and differentiates the parts. Five kernels, and no rung
has one of its own: what a rung leaves out is left out when its kernel is compiled. Two costs of that are
known: a gate per channel without erasing computes products of keys that it does not need, and q_in and
k_out are written even where no gate changes q and k.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evolve_kernels.chunk_prepare import chunk_prepare_kernel
from evolve_kernels.chunk_prepare_backward import chunk_prepare_backward_kernel
from evolve_kernels.chunk_walk import chunk_walk_backward_kernel, chunk_walk_kernel, state_gradients_kernel
from evolve_kernels.launch import check_device, check_tensor, launch, precision, tile
from evolve_kernels.spans import Spans, spans_of

Gate = Literal["none", "head", "channel"]
CHUNK_SIZES = (16, 32, 64)
SAFE_BOUND = -5.8  # 15 gates of it stay above −88, the logarithm of float32's largest number


@dataclass(frozen=True)
class Plan:
    """Everything about a call that is fixed when its kernels are compiled, and how its tokens are cut."""

    spans: Spans
    sizes: dict[str, int]  # H, HV, K, V, C
    gate: Gate
    erase: bool
    first: int  # tokens per tile of the smallest products: 1, or 16 for bounded gates
    scale: float
    precision: str

    @property
    def tables(self) -> dict[str, Tensor]:
        return {"starts": self.spans.starts, "chunk_starts": self.spans.chunk_starts}

    @property
    def rule(self) -> dict[str, Any]:
        named = {name: self.sizes[name] for name in ("HV", "K", "V", "C")}
        return named | {"GATE": self.gate, "ERASE": self.erase, "PRECISION": self.precision}

    @property
    def levels(self) -> dict[str, Any]:
        C = self.sizes["C"]
        levels = (C // self.first).bit_length() - 1
        return {"H": self.sizes["H"], "FIRST": self.first, "LEVELS": levels}


@dataclass(frozen=True)
class Parts:
    """What ``chunk_prepare`` makes of the tokens (its docstring has the letters)."""

    q_in: Tensor
    k_out: Tensor
    w: Tensor | None
    u: Tensor
    a_q: Tensor
    inverse: Tensor | None
    decay: Tensor | None


def prepare(plan: Plan, tokens: dict[str, Tensor | None], keep_inverse: bool) -> Parts:
    HV, K, V, C = (plan.sizes[name] for name in ("HV", "K", "V", "C"))
    q, v, NT = tokens["q"], tokens["v"], plan.spans.NT
    n_tokens = q.shape[0] * q.shape[1]
    float32 = {"dtype": torch.float32}
    parts = Parts(
        q_in=q.new_empty(n_tokens, HV, K),
        k_out=q.new_empty(n_tokens, HV, K),
        w=q.new_empty(n_tokens, HV, K, **float32) if plan.erase else None,
        u=q.new_empty(n_tokens, HV, V, **float32) if plan.erase else v,
        a_q=q.new_empty(NT, HV, C, C),
        inverse=q.new_empty(NT, HV, C, C, **float32) if keep_inverse and plan.erase else None,
        decay=None
        if plan.gate == "none"
        else q.new_empty(NT, HV, *([K] if plan.gate == "channel" else []), **float32),
    )
    arguments = tokens | vars(parts) | plan.tables | {"chunk_rows": plan.spans.chunk_rows}
    if not plan.erase:
        arguments |= {"v": None, "u": None}  # the walk writes v as it is
    arguments |= {"scale": plan.scale} | plan.rule | plan.levels
    arguments |= {"BK": tile(K, 32), "BV": tile(V, 64), "LOG_C": C.bit_length() - 1}
    arguments |= {"KEEP_INVERSE": keep_inverse}
    launch(chunk_prepare_kernel, NT * HV, arguments, num_warps=8, num_stages=1)
    return parts


def walk(plan: Plan, parts: Parts, first_state: Tensor | None, keep: bool, dtype: torch.dtype) -> tuple:
    """(o, last state), or with ``keep`` what backward needs: (S before each chunk, u − w S)."""
    HV, K, V = (plan.sizes[name] for name in ("HV", "K", "V"))
    new, n_tokens = parts.q_in.new_empty, parts.q_in.shape[0]
    float32 = {"dtype": torch.float32}
    o = None if keep else new(n_tokens, HV, V, dtype=dtype)
    last_state = None if keep else new(plan.spans.N, HV, K, V, **float32)
    states = new(plan.spans.NT, HV, K, V, **float32) if keep else None
    u_new = torch.empty_like(parts.u) if keep and plan.erase else None
    arguments = {name: getattr(parts, name) for name in ("q_in", "k_out", "w", "u", "a_q", "decay")}
    if keep:
        arguments |= {"q_in": None, "a_q": None}
    arguments |= {"first_state": first_state, "o": o, "last_state": last_state, "states": states}
    arguments |= {"u_new": u_new} | plan.tables | plan.rule | {"KEEP": keep} | walk_tiles(plan)
    blocks = -(-V // arguments["BV"])
    launch(chunk_walk_kernel, plan.spans.N * HV * blocks, arguments, **walk_options(arguments))
    return (states, parts.u if u_new is None else u_new) if keep else (o, last_state)


def walk_tiles(plan: Plan) -> dict[str, int]:
    """Columns of the state per program: wide, so that few programs read the same keys, unless heads are few.

    A GPU has over a hundred multiprocessors, and the walk keeps them busy with heads and columns only.
    """
    many = plan.spans.N * plan.sizes["HV"] >= 64 and plan.sizes["K"] <= 128
    return {"BK": tile(plan.sizes["K"]), "BV": tile(plan.sizes["V"], 64 if many else 16)}


def walk_options(tiles: dict[str, int]) -> dict[str, int]:
    return {"num_warps": 8 if tiles["BK"] * tiles["BV"] > 4096 else 4, "num_stages": 1}


class ChunkRule(torch.autograd.Function):
    """(q, k, v, g, beta, first state) -> (o, last state), by the plan."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
                first_state: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, g, beta, first_state)
        tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        parts = prepare(plan, tokens, keep_inverse=False)
        o, last_state = walk(plan, parts, first_state, keep=False, dtype=v.dtype)
        return o.view(v.shape), last_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_last_state: Tensor) -> tuple[Tensor | None, ...]:
        *tokens, first_state = ctx.saved_tensors
        tokens, plan = dict(zip(("q", "k", "v", "g", "beta"), tokens)), ctx.plan
        parts = prepare(plan, tokens, keep_inverse=True)
        states, u_new = walk(plan, parts, first_state, keep=True, dtype=tokens["v"].dtype)
        given = {"d_o": d_o.contiguous(), "u_new": u_new}
        given["d_u"], d_states, d_first = walk_back(plan, parts, given["d_o"], d_last_state.contiguous())
        given |= state_gradients(plan, states, d_states, given)
        grads = prepare_back(plan, tokens, parts, given)
        return None, *grads, None if first_state is None else d_first.to(first_state.dtype)


def walk_back(plan: Plan, parts: Parts, d_o: Tensor, d_last_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """du of every token, dS after every chunk, dS before the first."""
    HV, K, V = (plan.sizes[name] for name in ("HV", "K", "V"))
    d_u = d_o.new_empty(parts.q_in.shape[0], HV, V, dtype=torch.float32)
    d_states = d_u.new_empty(plan.spans.NT, HV, K, V)
    d_first = torch.empty_like(d_last_state)
    arguments = {name: getattr(parts, name) for name in ("q_in", "k_out", "w", "a_q", "decay")}
    arguments |= {"d_o": d_o, "d_last_state": d_last_state, "d_first_state": d_first}
    arguments |= {"d_states": d_states, "d_u": d_u} | plan.tables | plan.rule | walk_tiles(plan)
    blocks = -(-V // arguments["BV"])
    launch(chunk_walk_backward_kernel, plan.spans.N * HV * blocks, arguments, **walk_options(arguments))
    return d_u, d_states, d_first


def state_gradients(plan: Plan, states: Tensor, d_states: Tensor, given: dict) -> dict[str, Tensor | None]:
    HV, K, V = (plan.sizes[name] for name in ("HV", "K", "V"))
    n_tokens = given["d_u"].shape[0]
    found = {name: given["d_u"].new_empty(n_tokens, HV, K) for name in ("dq_in", "dk_out")}
    found["d_w"] = given["d_u"].new_empty(n_tokens, HV, K) if plan.erase else None
    found["d_decay"] = states.new_empty(plan.spans.NT, HV, K) if plan.gate != "none" else None
    arguments = {"states": states, "d_states": d_states} | given | found | plan.tables
    if not plan.erase:
        arguments["d_u"] = None
    arguments |= {"chunk_rows": plan.spans.chunk_rows} | plan.rule | {"BK": tile(K, 64), "BV": tile(V, 32)}
    blocks = -(-K // arguments["BK"])
    launch(state_gradients_kernel, plan.spans.NT * HV * blocks, arguments, num_warps=4, num_stages=1)
    return found


def prepare_back(plan: Plan, tokens: dict, parts: Parts, given: dict) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, g and β. A key head's are the sum over the value heads that it serves."""
    H, HV, K, V = (plan.sizes[name] for name in ("H", "HV", "K", "V"))
    q, k, v, g, beta = tokens.values()
    per_value_head = (*q.shape[:2], HV, K)
    dq, dk = (
        torch.empty(per_value_head, dtype=x.dtype if H == HV else torch.float32, device=x.device)
        for x in (q, k)
    )
    dv, dg, d_beta = (None if x is None else torch.empty_like(x) for x in (v, g, beta))
    arguments = tokens | {"inverse": parts.inverse, "decay": parts.decay} | given
    if not plan.erase:
        arguments["v"] = None
    arguments |= {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "d_beta": d_beta} | plan.tables
    arguments |= {"chunk_rows": plan.spans.chunk_rows, "scale": plan.scale} | plan.rule | plan.levels
    arguments |= {"BK": tile(K, 32), "BV": tile(V, 32)}
    launch(chunk_prepare_backward_kernel, plan.spans.NT * HV, arguments, num_warps=8, num_stages=1)
    if H != HV:
        dq, dk = (x.unflatten(2, (H, HV // H)).sum(3).to(y.dtype) for x, y in ((dq, q), (dk, k)))
    return dq, dk, dv, dg, d_beta


def checked(N: int, **given: Tensor | None) -> dict[str, Tensor | None]:
    """The inputs of ``chunk_rule``, contiguous, once their shapes fit those of q and v."""
    q, (HV, V) = given["q"], given["v"].shape[2:]
    B, T, H, K = q.shape
    sizes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "beta": (B, T, HV)}
    sizes |= {"initial_state": (N, HV, K, V)}
    per_channel = given["g"] is not None and given["g"].ndim == 4
    sizes["g"] = (B, T, HV, K) if per_channel else (B, T, HV)
    return {n: None if x is None else check_tensor(n, x, q.device, *sizes[n]) for n, x in given.items()}


def chunk_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """A memory rule in chunks: linear attention, the delta rule, the gated delta rule or KDA.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. float32, float16 or bfloat16.
        g: [B, T, HV, K] (KDA), [B, T, HV] (gated delta rule) or ``None``: natural log of the decay, ≤ 0.
        beta: [B, T, HV], write strength; ``None`` adds without erasing (linear attention).
        scale: multiplies q; K**-0.5 by default.
        initial_state: [B, HV, K, V]; [N, HV, K, V] with ``cu_seqlens``; zeros by default.
        cu_seqlens: [N+1] ends of N sequences packed into one row, B = 1, rising from 0 to T.
        chunk_size: C, one of 16, 32, 64. lower_bound: a promise that no gate per channel is below it: from
            −5.8 up, tiles of 16 tokens then take one product. A broken promise overflows.
    Returns: o [B, T, HV, V] in v's dtype, and the last state in float32.
    Raises: ValueError on shapes, dtypes (float64 among them) or a device that the kernels cannot take.
    """
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q and v must have four axes, got {list(q.shape)} and {list(v.shape)}")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    check_device(q.device)
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size must be one of {CHUNK_SIZES} in a Triton kernel, got {chunk_size}")
    if H == 0 or HV % H != 0 or not (0 < K <= 256 and V > 0):
        raise ValueError(f"HV must be a multiple of H, and K at most 256; got H={H}, HV={HV}, K={K}, V={V}")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row: B must be 1, got {B}")
    spans = spans_of(B, T, chunk_size, cu_seqlens, q.device)
    given = checked(spans.N, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    gate = "none" if g is None else "channel" if g.ndim == 4 else "head"
    bounded = gate == "channel" and lower_bound is not None and lower_bound >= SAFE_BOUND
    plan = Plan(
        spans=spans,
        sizes={"H": H, "HV": HV, "K": K, "V": V, "C": chunk_size},
        gate=gate,
        erase=beta is not None,
        first=16 if bounded else 1,
        scale=K**-0.5 if scale is None else float(scale),
        precision=precision(q.dtype),
    )
    return ChunkRule.apply(plan, *given.values())
