"""Rung 8 on a GPU: K3's activation, and its gradient, in one pass over gate and up.

    y = B(g) C(u)      B = β tanh(g/β) sigmoid(g)      C = β' tanh(u/β')
    dg = dy C(u) B'(g)      B' = (1 − tanh²) sigmoid + β tanh sigmoid (1 − sigmoid)
    du = dy B(g) C'(u)      C' = 1 − tanh²

One program takes BF numbers of one row. Rows may lie apart, so that both halves of one product's output are
read where they are. Backward keeps the inputs alone and computes the rest anew.

Bytes per number: forward 3 a, backward 5 a, a those of the dtype; everything inside is float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from evolve_kernels.launch import check_device, check_form, launch, tile


@triton.jit
def tanh(x):
    """(tanh x, 1 − tanh² x), each with its digits: near 0 1 − e^−2x has few, far from it 1 − tanh² has."""
    square = x * x
    near = x * (1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315))))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    t = tl.where(square < 0.04, near, tl.where(x < 0, -far, far))
    return t, 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def load_part(x, row, stride, cols, F):
    """cols of one row, in float32."""
    at = tl.cast(row, tl.int64) * stride + cols
    return tl.load(x + at, mask=cols < F, other=0.0).to(tl.float32)


@triton.jit
def store_part(x, part, row, cols, F):
    tl.store(x + tl.cast(row, tl.int64) * F + cols, part.to(x.dtype.element_ty), mask=cols < F)


@triton.jit
def situ_glu_kernel(
    gate, up, y, gate_stride, up_stride, beta, linear_beta, F: tl.constexpr, BF: tl.constexpr
):  # fmt: skip
    blocks: tl.constexpr = (F + BF - 1) // BF
    row, cols = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BF + tl.arange(0, BF)
    g, u = load_part(gate, row, gate_stride, cols, F), load_part(up, row, up_stride, cols, F)
    t, _ = tanh(g / beta)
    t_up, _ = tanh(u / linear_beta)
    bounded = beta * t * tl.sigmoid(g)  # the sigmoid takes g itself, not g/β
    store_part(y, bounded * (linear_beta * t_up), row, cols, F)


@triton.jit
def situ_glu_backward_kernel(
    gate, up, d_y, d_gate, d_up, gate_stride, up_stride, beta, linear_beta, F: tl.constexpr, BF: tl.constexpr
):  # fmt: skip
    blocks: tl.constexpr = (F + BF - 1) // BF
    row, cols = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BF + tl.arange(0, BF)
    g, u = load_part(gate, row, gate_stride, cols, F), load_part(up, row, up_stride, cols, F)
    dy = load_part(d_y, row, F, cols, F)
    t, slope = tanh(g / beta)
    t_up, slope_up = tanh(u / linear_beta)
    s = tl.sigmoid(g)
    slope = slope * s + beta * t * s * tl.sigmoid(-g)
    store_part(d_gate, dy * (linear_beta * t_up) * slope, row, cols, F)
    store_part(d_up, dy * (beta * t * s) * slope_up, row, cols, F)


class SituGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        rows, F = gate.shape
        y = gate.new_empty(rows, F)
        ctx.numbers = {"gate_stride": gate.stride(0), "up_stride": up.stride(0)}
        ctx.numbers |= {"beta": beta, "linear_beta": linear_beta, "F": F, "BF": tile(F, 1024)}
        ctx.programs = rows * triton.cdiv(F, ctx.numbers["BF"])
        given = {"gate": gate, "up": up, "y": y}
        launch(situ_glu_kernel, ctx.programs, given | ctx.numbers, num_warps=4, num_stages=1)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
        given = {"gate": gate, "up": up, "d_y": d_y.contiguous(), "d_gate": d_gate, "d_up": d_up}
        launch(situ_glu_backward_kernel, ctx.programs, given | ctx.numbers, num_warps=4, num_stages=1)
        return d_gate, d_up, None, None


def rows_of(x: Tensor) -> Tensor:
    """x [..., F] as rows [n, F] of neighbours; a copy only where it has to be."""
    x = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    return x if x.stride(1) == 1 else x.contiguous()


def situ_glu(gate: Tensor, up: Tensor, *, beta: float = 4.0, linear_beta: float = 25.0) -> Tensor:
    """β tanh(g/β) sigmoid(g) · β' tanh(u/β'), differentiable in gate and up.

    Args: gate, up: [..., F], float32, float16 or bfloat16.
    Returns: [..., F] in gate's dtype.
    Raises: ValueError on shapes, dtypes (float64 among them), betas or a device that do not fit.
    """
    check_device(gate.device)
    check_form("gate", gate, gate.device, *gate.shape)
    check_form("up", up, gate.device, *gate.shape)
    for name, x in {"beta": beta, "linear_beta": linear_beta}.items():
        if not 0 < x < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {x!r}")
    if gate.numel() == 0:
        return gate * up.to(gate.dtype)
    return SituGLU.apply(rows_of(gate), rows_of(up), float(beta), float(linear_beta)).view(gate.shape)
