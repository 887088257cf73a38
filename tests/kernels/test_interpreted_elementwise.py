"""SiTU-GLU and the short convolution in Triton's interpreter against the PyTorch forms in float64."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from evolve.moe import situ_glu
from evolve.short_conv import ShortConvolution, short_conv
from evolve.situ import SituGLU
from evolve_kernels.short_conv import short_conv as conv_kernel
from evolve_kernels.situ_glu import situ_glu as situ_kernel
from tests.kernels.memory_guard import Guard, guarded
from tests.rule_cases import assert_gradients_close

SITU = {"situ_glu_kernel": 1, "situ_glu_backward_kernel": 1}
CONV = {"short_conv_kernel": 1, "short_conv_backward_kernel": 1}


def assert_close(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Relative to each number, and to 1e-30 where it is smaller."""
    error = ((got.double() - want.double()).abs() / want.abs().clamp(min=1e-30)).max()
    assert error <= tolerance, f"{name}: {error:.1e} > {tolerance:.0e}"


def compare_situ(launches: dict, shape: tuple[int, ...], size: float, **betas) -> None:
    """Output and gradients of the two halves of one tensor, all memory guarded."""
    joint = guarded(size * torch.randn(*shape[:-1], 2 * shape[-1])).requires_grad_()
    exact = joint.detach().double().requires_grad_()
    w = guarded(torch.randn(shape))
    want = situ_glu(*exact.chunk(2, -1), **betas)
    (d_want,) = torch.autograd.grad(want, exact, w.double())
    launches.clear()
    with Guard() as guard:
        got = SituGLU(**betas, backend="triton")(*joint.chunk(2, -1))
        (d_got,) = torch.autograd.grad(got, joint, w)
    guard.check()
    assert launches == SITU
    assert_close("output", got, want, 2e-6)
    assert_gradients_close(["gate and up"], [d_got], [d_want], 2e-6)


@pytest.mark.parametrize("size", [1e-4, 0.2, 1.0, 20.0])
@pytest.mark.parametrize("shape", [(1,), (3, 20), (1, 1, 1025), (2, 3, 17)])
def test_situ_glu_equals_the_pytorch_form(shape, size, launches) -> None:
    compare_situ(launches, shape, size)
    compare_situ(launches, shape, size, beta=0.5, linear_beta=3.0)


def test_situ_glu_at_the_edges_of_numbers() -> None:
    """Zeros, the smallest and the largest numbers, infinities: float64's results, gradients too."""
    far = [0.0, -0.0, 1e-30, 1e-20, 0.8, -0.8, 30.0, -30.0, 80.0, 1e30, -1e30, torch.inf, -torch.inf]
    pairs = torch.meshgrid(torch.tensor(far), torch.tensor(far), indexing="ij")
    gate, up = (x.flatten().clone().requires_grad_() for x in pairs)
    y, want = situ_kernel(gate, up), situ_glu(gate.double(), up.double())
    grads = (torch.autograd.grad(x.sum(), (gate, up)) for x in (y, want))
    for a, b in [(y, want), *zip(*grads)]:
        # float64 computes 1 − tanh² as a difference, good to 1e-16 of the 25 or 100 that it multiplies
        torch.testing.assert_close(a.double(), b.double(), rtol=5e-6, atol=1e-14)
    assert y.abs().max() <= 100
    nan = situ_kernel(torch.tensor([torch.nan, 1.0]), torch.tensor([1.0, torch.nan]))
    assert nan.isnan().all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str)
def test_situ_glu_in_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    gate, up = ((2 * torch.randn(5, 30)).to(dtype).requires_grad_() for _ in range(2))
    y, want = situ_kernel(gate, up), situ_glu(gate.double(), up.double())
    assert y.dtype == dtype
    assert_close("output", y, want, tolerance)
    w = torch.randn(5, 30).to(dtype)
    for a, b in zip(torch.autograd.grad(y, (gate, up), w), torch.autograd.grad(want, (gate, up), w.double())):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_situ_glu_takes_any_strides_and_nothing() -> None:
    x = torch.randn(4, 6, 10)
    gate, up = x.transpose(0, 2), torch.randn(6, 1).expand(10, 6, 4)
    torch.testing.assert_close(situ_kernel(gate, up), situ_glu(gate, up))
    assert situ_kernel(x[:0], x[:0]).shape == (0, 6, 10)
    assert situ_kernel(x[0, 0, 0], x[0, 0, 1]).shape == ()


def compare_conv(
    launches: dict, B: int, T: int, D: int, W: int, history: bool, ends: tuple | None = None
) -> None:
    """y, the new history and every gradient, all memory guarded."""
    cu_seqlens = None if ends is None else torch.tensor(ends)
    N = B if ends is None else len(ends) - 1
    x = {"u": torch.randn(B, T, D), "weight": torch.randn(D, 1, W)}
    if history:
        x["history"] = torch.randn(N, W - 1, D)
    exact = {name: t.double().requires_grad_() for name, t in x.items()}
    x = {name: guarded(t).requires_grad_() for name, t in x.items()}
    want = short_conv(**exact, cu_seqlens=cu_seqlens)
    weights = [guarded(torch.randn(y.shape)) for y in want]
    asked = [n for n in exact if exact[n].numel()]
    d_want = torch.autograd.grad(want, [exact[n] for n in asked], [w.double() for w in weights])
    launches.clear()
    with Guard() as guard:
        got = short_conv(**x, cu_seqlens=cu_seqlens, backend="triton")
        d_got = torch.autograd.grad(got, [x[n] for n in asked], weights)
    guard.check()
    assert launches == CONV
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[1].double(), want[1]), "histories are copies"
    assert_gradients_close(asked, list(d_got), list(d_want), 1e-5)


CASES = [
    (1, 1, 5, 4, True, None),
    (3, 1, 20, 4, False, None),
    (2, 2, 17, 4, True, None),
    (1, 67, 130, 4, True, None),
    (2, 33, 9, 3, False, None),
    (2, 5, 9, 1, True, None),
    (1, 3, 9, 7, True, None),
    (1, 38, 18, 4, True, (0, 2, 2, 37, 38)),
    (1, 5, 18, 4, False, (0, 0, 5, 5)),
]


@pytest.mark.parametrize(("B", "T", "D", "W", "history", "ends"), CASES)
def test_short_conv_equals_the_pytorch_form(B, T, D, W, history, ends, launches) -> None:
    compare_conv(launches, B, T, D, W, history, ends)


@torch.no_grad()
def test_short_conv_split_anywhere_is_one_convolution(launches) -> None:
    """Token by token, and a prompt with tokens after it, give the whole; no token sees the next one."""
    conv, u = ShortConvolution(6, 4, backend="triton"), torch.randn(2, 9, 6)
    whole, last = conv(u)
    for cuts in ((5, 1, 1, 2), (1,) * 9):
        history, pieces = None, []
        for piece in u.split(cuts, dim=1):
            y, history = conv(piece, history)
            pieces.append(y)
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-6, atol=1e-6)
        assert torch.equal(history, last)
    other = torch.cat([u[:, :4], torch.randn(2, 5, 6)], dim=1)
    assert torch.equal(conv(other)[0][:, :4], whole[:, :4])
    assert launches == {"short_conv_kernel": 15}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_short_conv_in_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    """float32 weights and a float32 history beside rounded inputs, as the layers have them."""
    u, weight, history = torch.randn(2, 7, 12).to(dtype), torch.randn(12, 1, 4), torch.randn(2, 3, 12)
    leaves = [x.requires_grad_() for x in (u, weight, history)]
    y, kept = conv_kernel(*leaves)
    assert (y.dtype, kept.dtype) == (dtype, dtype)
    want, _ = short_conv(u.double(), weight.double(), history.to(dtype).double())
    assert (y - want).abs().max() <= tolerance * want.abs().max()
    w = torch.randn(y.shape).to(dtype)
    for a, b in zip(torch.autograd.grad(y, leaves, w), torch.autograd.grad(want, leaves, w.double())):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_short_conv_at_the_edges(launches) -> None:
    """Huge and zero inputs; an infinite one spoils the tokens that see it and no other; nothing to do."""
    u, weight = torch.randn(1, 8, 5), torch.randn(5, 1, 3)
    u[0, 1], u[0, 2], u[0, 4] = 1e20, 0.0, torch.inf
    got, want = (short_conv(u, weight, backend=b)[0] for b in ("triton", "torch"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert got[:, [0, 1, 2, 3, 7]].isfinite().all()
    assert not got[:, 4:7].isfinite().all()
    launches.clear()
    history = torch.randn(2, 2, 5)
    y, kept = conv_kernel(torch.randn(2, 0, 5), weight, history)
    assert (y.shape, launches) == ((2, 0, 5), {})
    assert torch.equal(kept, history)
    y, kept = short_conv(u[:, :0], weight, cu_seqlens=torch.tensor([0]), backend="triton")
    assert (y.shape, kept.shape) == ((1, 0, 5), (0, 2, 5))
    alone = torch.randn(5, 1, 1, requires_grad=True)  # neither a token nor a history
    short_conv(u[:, :0], alone, backend="triton")[0].sum().backward()
    assert torch.equal(alone.grad, torch.zeros(5, 1, 1))


def test_what_the_kernels_cannot_take_is_refused_by_name() -> None:
    u, weight, x = torch.randn(2, 4, 6), torch.randn(6, 1, 3), torch.randn(3)
    with pytest.raises(ValueError, match="takes no float64"):
        short_conv(u.double(), weight, backend="triton")
    with pytest.raises(ValueError, match="takes no float64"):
        SituGLU(backend="triton")(x.double(), x.double())
    with pytest.raises(ValueError, match="backend must be None"):
        short_conv(u, weight, backend="cuda")
    with pytest.raises(ValueError, match="backend must be None"):
        SituGLU(backend="sdpa")
    with pytest.raises(ValueError, match=r"history must be \[2, 2, 6\], got \[2, 3, 6\]"):
        conv_kernel(u, weight, torch.randn(2, 3, 6))
    with pytest.raises(ValueError, match="weight must be float32, float16 or bfloat16"):
        conv_kernel(u, weight.double())
    with pytest.raises(ValueError, match=r"up must be \[3\], got \[2\]"):
        situ_kernel(x, x[:2])
    with pytest.raises(ValueError, match="linear_beta must be positive and finite, got 0"):
        situ_kernel(x, x, linear_beta=0)
