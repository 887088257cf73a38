"""What the four memory rules share: checks of arguments, working precision, grouped heads, packing, the loop.

A memory rule keeps one matrix S [K, V] per head, changes it once per token and reads it with a query.
Shapes: B batch, T time, H key heads, HV value heads (a multiple of H), K and V head dims, N packed
sequences. q, k [B, T, H, K]; v, o [B, T, HV, V]; g [B, T, HV] or [B, T, HV, K]; beta [B, T, HV];
state [B, HV, K, V], or [N, HV, K, V] when ``cu_seqlens`` packs N sequences into one row.
"""

import importlib.util
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, reduce
from itertools import pairwise

import torch
from torch import Tensor

from evolve.checks import check_float, check_shape, require

Tensors = tuple[Tensor, ...]
Form = Callable[..., tuple[Tensor, Tensor]]  # form(*tokens, S) -> (o, S)


def check_cu_seqlens(cu_seqlens: Tensor, B: int, T: int) -> None:
    """``cu_seqlens`` [N+1] must rise from 0 to T; equal neighbours are an empty sequence."""
    check_shape("cu_seqlens", cu_seqlens, **{"N+1": None})
    is_int = cu_seqlens.dtype in (torch.int32, torch.int64)
    require(is_int, f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    require(B == 1, f"cu_seqlens packs sequences into one row: B must be 1, got {B}")
    ends = cu_seqlens.tolist()
    rises = bool(ends) and ends[0] == 0 and ends[-1] == T and all(a <= b for a, b in pairwise(ends))
    require(rises, f"cu_seqlens must rise from 0 to T = {T}, got {ends}")


def check_rule_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    gate: str,
) -> None:
    """Raise ``ValueError`` unless the tensors fit each other (shapes at the head of this file)."""
    check_shape("q", q, B=None, T=None, H=None, K=None)
    B, T, H, K = q.shape
    check_shape("k", k, B=B, T=T, H=H, K=K)
    check_shape("v", v, B=B, T=T, HV=None, V=None)
    HV, V = v.shape[2:]
    require(K > 0 and H > 0, f"q must have heads and channels, got {list(q.shape)}")
    require(HV > 0 and HV % H == 0, f"v must have HV heads, a multiple of H = {H}, got HV = {HV}")
    if gate != "none":
        check_shape("g", g, B=B, T=T, HV=HV, **({"K": K} if gate == "channel" else {}))
    if beta is not None:
        check_shape("beta", beta, B=B, T=T, HV=HV)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    rows = {"B": B} if cu_seqlens is None else {"N": cu_seqlens.numel() - 1}
    if initial_state is not None:
        check_shape("initial_state", initial_state, **rows, HV=HV, K=K, V=V)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    for name, x in given.items():
        if x is not None:
            check_float(name, x)
            require(x.device == q.device, f"{name} must be on q's device {q.device}, got {x.device}")


def check_options(scale: float | None, chunk_size: int, backend: str | None) -> None:
    """``scale`` must be a finite number, ``chunk_size`` a positive int, ``backend`` one that can run."""
    is_number = scale is None or (isinstance(scale, int | float) and math.isfinite(scale))
    require(is_number, f"scale must be None or a finite number, got {scale!r}")
    is_count = isinstance(chunk_size, int) and not isinstance(chunk_size, bool) and chunk_size > 0
    require(is_count, f"chunk_size must be a positive int, got {chunk_size!r}")
    check_backend(backend)


def check_backend(backend: object) -> None:
    """``backend`` must be ``None`` (what is there), ``"torch"`` or ``"triton"``."""
    known = backend is None or (isinstance(backend, str) and backend in ("torch", "triton"))
    require(known, f'backend must be None, "torch" or "triton", got {backend!r}')


def prepare_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gate: str = "none",
    chunk_size: int = 64,
    backend: str | None = None,
) -> tuple[Tensors, Tensor]:
    """Check the arguments; return the tokens ready for a rule, and its first state.

    Everything recurrent runs in float32, or in float64 when an input is float64; a half-precision
    v - Sᵀk would lose the error it exists to measure. ``gate`` says what g must be: "none", "head"
    [B, T, HV] or "channel" [B, T, HV, K].

    Returns: (q·scale, k, v[, g][, beta]) with q and k repeated to HV heads, and S [B or N, HV, K, V].
    """
    check_options(scale, chunk_size, backend)
    check_rule_inputs(q, k, v, g, beta, initial_state, cu_seqlens, gate)
    given = [x for x in (q, k, v, g, beta) if x is not None]
    dtype = reduce(torch.promote_types, (x.dtype for x in given), torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    HV, V = v.shape[2:]
    tokens = [x.to(dtype) for x in given]
    tokens[0] = group_heads(tokens[0] * scale, HV)
    tokens[1] = group_heads(tokens[1], HV)
    if initial_state is None:
        rows = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        return tuple(tokens), tokens[2].new_zeros(rows, HV, q.shape[-1], V)
    return tuple(tokens), initial_state.to(dtype)


def group_heads(x: Tensor, HV: int) -> Tensor:
    """Repeat key heads for grouped values: head h serves value heads h·HV/H … (h+1)·HV/H − 1.

    x: [B, T, H, K] -> [B, T, HV, K]. Each head is repeated in place; tiling the whole list would pair
    value heads with the wrong keys.
    """
    return x if x.shape[2] == HV else x.repeat_interleave(HV // x.shape[2], dim=2)


def per_sequence(form: Form, tokens: Tensors, S: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run ``form(*tokens, S) -> (o, S)`` on each packed sequence alone, then pack the results.

    tokens: [1, T, ...] each; S: [N, HV, K, V]. Separate runs make packed rows equal separate ones by
    construction. Without ``cu_seqlens`` the batch is one run.
    """
    with without_autocast(S.device):
        if cu_seqlens is None:
            return form(*tokens, S)
        if cu_seqlens.numel() == 1:  # no sequence: nothing but the shape of o
            return form(*tokens, S.new_zeros(1, *S.shape[1:]))[0], S
        spans = enumerate(pairwise(cu_seqlens.tolist()))
        runs = [form(*(x[:, a:b] for x in tokens), S[n : n + 1]) for n, (a, b) in spans]
    o, states = zip(*runs)
    return torch.cat(o, dim=1), torch.cat(states)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context that keeps ``torch.autocast`` from running the recurrence's products in half precision."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


@cache
def has_triton() -> bool:
    """Whether Triton (Linux only) and the project's kernels can be imported; nothing is imported yet."""
    return all(importlib.util.find_spec(name) is not None for name in ("triton", "evolve_kernels"))


def runs_on_triton(backend: str | None, inputs: Tensors) -> bool:
    """Whether a kernel takes these tensors: ``None`` asks what is there, ``"triton"`` insists on it.

    Raises: ValueError where ``"triton"`` cannot be: without Triton, or with float64 inputs.
    """
    half_or_single = all(x.dtype != torch.float64 for x in inputs)
    if backend == "triton":
        install = "pip install evolve-k3[kernels], Linux only"
        hint = 'backend=None or "torch" runs the PyTorch form'
        require(has_triton(), f'backend "triton" needs Triton, which is not installed ({install}): {hint}')
        require(half_or_single, f'backend "triton" computes in float32 and takes no float64 inputs: {hint}')
        return True
    return backend is None and half_or_single and all(x.is_cuda for x in inputs) and has_triton()


def run_chunked(
    form: Form,
    *tokens: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    gate: str,
    chunk_size: int,
    backend: str | None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A chunked rule where ``backend`` says: Triton kernels, or ``form(C, *tokens, S)`` in PyTorch.

    tokens: q, k, v, then g unless gate is "none", then beta unless the rule only adds.
    """
    q, k, v, *more = tokens
    g = more.pop(0) if gate != "none" else None
    beta = more.pop(0) if more else None
    options = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    check_options(scale, chunk_size, backend)
    check_rule_inputs(q, k, v, g, beta, initial_state, cu_seqlens, gate)
    inputs = tokens if initial_state is None else (*tokens, initial_state)
    if runs_on_triton(backend, inputs) and (backend or (chunk_size in (16, 32, 64) and q.shape[-1] <= 256)):
        from evolve_kernels.chunk_rule import chunk_rule

        o, S = chunk_rule(q, k, v, g, beta, **options, chunk_size=chunk_size, lower_bound=lower_bound)
    else:
        ready, S = prepare_rule(
            q, k, v, g, beta, **options, gate=gate, chunk_size=chunk_size, backend=backend
        )
        o, S = per_sequence(partial(form, chunk_size), ready, S, cu_seqlens)
    return o.to(v.dtype), S if output_final_state else None


def token_loop(step: Form) -> Form:
    """A rule's definition: ``step(*token, S) -> (o_t, S)`` applied to one token after the other."""

    def form(*args: Tensor) -> tuple[Tensor, Tensor]:
        *tokens, S = args
        o = []
        for token in zip(*(x.unbind(1) for x in tokens)):
            o_t, S = step(*token, S)
            o.append(o_t)
        return torch.stack(o, dim=1) if o else torch.zeros_like(tokens[2]), S

    return form


def read(S: Tensor, x: Tensor) -> Tensor:
    """Sᵀx, what the memory answers to x. S: [B, HV, K, V]; x: [B, HV, K] -> [B, HV, V]."""
    return torch.einsum("bhkv,bhk->bhv", S, x)


def outer(k: Tensor, u: Tensor) -> Tensor:
    """k uᵀ, the write of u under key k. k: [B, HV, K]; u: [B, HV, V] -> [B, HV, K, V]."""
    return k[..., :, None] * u[..., None, :]
