"""Attention Residuals' kernels in Triton's interpreter against the PyTorch form in float64."""

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from evolve.attention_residuals import AttentionResidual, AttnResDecoder, attention_residual, two_phases
from evolve.deltanet import DeltaNet
from evolve_kernels.attention_residuals import depth_read
from evolve_kernels.attention_residuals_add import depth_add
from tests.kernels.memory_guard import Guard, guarded
from tests.rule_cases import assert_gradients_close

READ, ADD = "depth_read_kernel", "depth_add_kernel"
READ_BACK = {"depth_read_backward_kernel": 1, "site_gradients_kernel": 1}


def assert_rows_close(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Relative to the largest |want| of each row: none hides behind another."""
    error, size = (got.double() - want).abs(), want.abs().amax(-1, keepdim=True)
    assert bool((error <= tolerance * size + 1e-30).all()), f"{name}: {error.max().item():.1e}"


def mixes(x: dict[str, Tensor], backend: str) -> list[Tensor]:
    """Every site of a block: the first without a sum so far, the others with it."""
    first, *others = two_phases(list(x["blocks"].unbind()), x["folded"], 1e-5, backend=backend)
    return [first(None), *(mix(x["p"]) for mix in others)]


def compare(launches: dict, M: int, S: int, shape: tuple[int, ...], size: float = 1.0) -> None:
    """Both phases, mixes and every gradient, all memory guarded."""
    folded = size * torch.randn(S, shape[-1])
    x = {"blocks": torch.randn(M, *shape), "folded": folded, "p": 3 * torch.randn(shape)}
    x["blocks"][0, ..., :1] = 0.0
    exact = {name: t.double().requires_grad_() for name, t in x.items()}
    x = {name: guarded(t).requires_grad_() for name, t in x.items()}
    want = mixes(exact, "torch")
    weights = [guarded(torch.randn(shape)) for _ in want]
    d_want = torch.autograd.grad(want, list(exact.values()), [w.double() for w in weights], allow_unused=True)
    launches.clear()
    with Guard() as guard:
        got = mixes(x, "triton")
        d_got = torch.autograd.grad(got, list(x.values()), weights, allow_unused=True)
    guard.check()
    adds = {ADD: S - 1, "depth_add_backward_kernel": S - 1} if S > 1 else {}
    assert launches == {READ: 1} | READ_BACK | adds
    for j, (a, b) in enumerate(zip(got, want)):
        assert_rows_close(f"mix {j}", a, b, 1e-5)
    names = [n for n, d in zip(x, d_want) if d is not None]
    pairs = [(a, b) for a, b in zip(d_got, d_want) if b is not None]
    assert_gradients_close(names, *map(list, zip(*pairs)), 1e-4)


CASES = [
    (1, 1, (1, 1, 5), 1.0),
    (9, 3, (1, 3, 40), 0.3),
    (3, 2, (2, 2, 130), 0.3),
    (17, 2, (1, 2, 20), 1.0),
    (2, 18, (1, 1, 12), 1.0),
    (4, 2, (3, 16), 300.0),  # one source takes all
    (4, 2, (3, 16), 0.0),  # every source its share
]


@pytest.mark.parametrize(("M", "S", "shape", "size"), CASES)
def test_both_phases_equal_the_pytorch_form(M, S, shape, size, launches) -> None:
    compare(launches, M, S, shape, size)


def test_a_source_of_zeros_or_of_huge_numbers() -> None:
    """Zeros have a key of zeros; so have numbers whose squares overflow, in both forms."""
    blocks, p = torch.randn(3, 2, 24), torch.randn(2, 24)
    blocks[1], blocks[2, 0] = 0.0, 1e20
    folded = torch.randn(2, 24)
    got, want = (mixes({"blocks": blocks, "folded": folded, "p": p}, b) for b in ("triton", "torch"))
    for a, b in zip(got, want):
        assert_rows_close("mix", a, b.double(), 1e-5)
    p.zero_()
    got, want = (mixes({"blocks": 0 * p[None], "folded": folded, "p": p}, b) for b in ("triton", "torch"))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_nan_stays_nan_in_its_own_token() -> None:
    blocks = torch.randn(2, 3, 16)
    blocks[1, 1, 4] = float("nan")
    h, lse = depth_read(blocks, torch.randn(2, 16))
    assert h[:, 1].isnan().all()
    assert h[:, ::2].isfinite().all()
    assert lse[:, ::2].isfinite().all()


@pytest.mark.parametrize("M", [1, 2, 9])
def test_a_plain_mix_is_one_site_with_all_its_sources(M: int, launches) -> None:
    x = [3 * torch.randn(M, 2, 3, 20), torch.randn(20), torch.randn(20)]
    outputs = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in x]
        h = attention_residual(*leaves, eps=1e-3, backend=backend)
        outputs.append((h, *torch.autograd.grad(h.square().sum(), leaves)))
    assert launches == {READ: 1} | READ_BACK
    assert_rows_close("mix", outputs[0][0], outputs[1][0], 1e-5)
    assert_gradients_close(["sources", "query", "gain"], outputs[0][1:], outputs[1][1:], 1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    x = {"blocks": torch.randn(3, 2, 40), "folded": 0.3 * torch.randn(2, 40), "p": torch.randn(2, 40)}
    x = {name: t.to(dtype).requires_grad_() for name, t in x.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in x.items()}
    got, want = mixes(x, "triton"), mixes(exact, "torch")
    assert {y.dtype for y in got} == {dtype}
    w = torch.randn(2, 40).to(dtype)
    d_got = torch.autograd.grad(got, list(x.values()), [w] * 2)
    d_want = torch.autograd.grad(want, list(exact.values()), [w.double()] * 2)
    for a, b in zip([*got, *d_got], [*want, *d_want]):
        assert (a.double() - b).abs().max() < tolerance * b.abs().max()


@pytest.mark.parametrize("two_phase", [False, True])
def test_a_decoder_reads_with_the_kernels(two_phase: bool, launches) -> None:
    """Two layers in blocks of two sub-layers: logits and every gradient are the PyTorch form's."""
    mixers = [DeltaNet(12, 1, 12) for _ in range(2)]
    sizes = {"vocab_size": 17, "hidden_size": 12, "intermediate_size": 16, "block_size": 2}
    model = AttnResDecoder(mixers, two_phase=two_phase, **sizes)
    for name, weight in model.named_parameters():
        if "_res_" in name:
            nn.init.normal_(weight)
    ids, outputs = torch.randint(17, (1, 2)), []
    for model.backend in ("torch", "triton"):
        logits = model(ids)
        used = [p for n, p in model.named_parameters() if not n.startswith("layers.0.self_attention_res")]
        outputs.append((logits, *torch.autograd.grad(logits.square().sum(), used)))
    # the first site has nothing to choose from: three others and the last, or two blocks and the last
    assert launches[READ] == (3 if two_phase else 4)
    assert launches.get(ADD, 0) == (2 if two_phase else 0)
    for a, b in zip(*outputs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_nothing_to_read(launches) -> None:
    blocks, folded, p = torch.randn(2, 0, 4, 8), torch.randn(3, 8), torch.randn(0, 4, 8)
    assert [y.shape for y in mixes({"blocks": blocks, "folded": folded, "p": p}, "triton")] == [p.shape] * 3
    assert launches == {}


def test_what_the_kernels_cannot_take_is_refused_by_name() -> None:
    v, f = torch.randn(2, 3, 8), torch.randn(4, 8)
    with pytest.raises(ValueError, match="takes no float64"):
        attention_residual(v.double(), f[0].double(), f[1].double(), backend="triton")
    with pytest.raises(ValueError, match="backend must be None"):
        AttentionResidual(8, backend="cuda")
    with pytest.raises(ValueError, match="sources must be float32, float16 or bfloat16"):
        depth_read(v.double(), f)
    with pytest.raises(ValueError, match=r"folded must be \[4, 8\], got \[4, 7\]"):
        depth_read(v, f[:, :7])
    with pytest.raises(ValueError, match="none of them empty"):
        depth_read(v[:0], f)
    with pytest.raises(ValueError, match="at most 8192 scores"):
        depth_read(torch.randn(200, 1, 8), torch.randn(90, 8))
    with pytest.raises(ValueError, match=r"lse must be \[3\], got \[4\]"):
        depth_add(v[0], torch.randn(4), v[1], f[0])
