"""The experts' grouped products, plain and MXFP4, in Triton's interpreter against a loop in float64."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from evolve import mxfp4
from evolve.decoder import swiglu
from evolve.k3_experts import pack_experts
from evolve.moe import LatentMoE, expert_products, grouped_experts
from evolve_kernels.moe import grouped_product, row_tiles
from tests.kernels.memory_guard import Guard, guarded
from tests.kernels.test_interpreted_attention import close

FORWARD = {"grouped_product_kernel": 1}
GRADIENTS = {"grouped_product_kernel": 2, "weight_gradient_kernel": 1}
FROZEN = {"grouped_product_kernel": 2}


def by_hand(x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
    parts = zip(x.split(counts), w.unbind())
    return torch.cat([part @ matrix.mT for part, matrix in parts])


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


def compare(counts, O, I, launches, dtype=torch.float32, size=1.0, tolerance=1e-5) -> None:
    """Output and both gradients, all memory guarded; the matrices of experts without rows hold nan."""
    torch.manual_seed(O + I)
    x, w = (size * torch.randn(sum(counts), I)).to(dtype), torch.randn(len(counts), O, I).to(dtype)
    exact = [x.double().requires_grad_(), w.double().requires_grad_()]
    y_exact = by_hand(*exact, counts)
    d_y = guarded(torch.randn(y_exact.shape).to(dtype))
    want = torch.autograd.grad(y_exact, exact, d_y.double())
    w[torch.tensor(counts) == 0] = float("nan")
    x, w = guarded(x).requires_grad_(), guarded(w).requires_grad_()
    launches.clear()
    with Guard() as guard:
        y = grouped_product(x, w, ends_of(counts))
        got = torch.autograd.grad(y, (x, w), d_y)
    guard.check()
    assert len(guard.buffers) >= 3, "backward allocates under guard too"
    assert launches == GRADIENTS
    assert y.dtype == got[0].dtype == got[1].dtype == dtype
    for name, a, b in zip(("y", "dx", "dw"), (y, *got), (y_exact, *want)):
        close(name, a, b, tolerance)
    assert not got[1][torch.tensor(counts) == 0].any(), "no rows, no gradient"


def compare_packed(counts, O, I, launches, dtype=torch.float32, scales=(120, 131), tolerance=1e-5) -> None:
    torch.manual_seed(O + I)
    packed = torch.randint(256, (len(counts), O, I // 2), dtype=torch.uint8)
    scale = torch.randint(*scales, (len(counts), O, I // 32), dtype=torch.uint8)
    w = mxfp4.unpack(packed, scale, dtype=torch.float64)
    x = torch.randn(sum(counts), I).to(dtype)
    exact = x.double().requires_grad_()
    y_exact = by_hand(exact, w, counts)
    d_y = guarded(torch.randn(y_exact.shape).to(dtype))
    (want,) = torch.autograd.grad(y_exact, exact, d_y.double())
    x, packed, scale = (guarded(t) for t in (x, packed, scale))
    x.requires_grad_()
    launches.clear()
    with Guard() as guard:
        y = grouped_product(x, packed, ends_of(counts), scale=scale)
        (got,) = torch.autograd.grad(y, x, d_y)
    guard.check()
    assert launches == FROZEN
    close("y", y, y_exact, tolerance)
    close("dx", got, want, tolerance)


@pytest.mark.parametrize("sizes", [
    {"counts": [1], "O": 1, "I": 1},
    {"counts": [3, 0, 17, 1, 0], "O": 20, "I": 33},
    {"counts": [0, 0, 37, 0], "O": 7, "I": 70},  # one takes all
    {"counts": [0, 1, 0, 1, 1], "O": 130, "I": 12},  # one row each
    {"counts": [70, 0, 33, 1], "O": 65, "I": 129},  # enough rows for large tiles
    {"counts": [33, 32, 31], "O": 16, "I": 16, "size": 1e15},
    {"counts": [5, 40], "O": 30, "I": 20, "size": 0.0},
    {"counts": [66, 3, 65], "O": 40, "I": 72, "dtype": torch.float16, "tolerance": 2e-3},
    {"counts": [5, 0, 20], "O": 24, "I": 40, "dtype": torch.bfloat16, "tolerance": 2e-2},
], ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))  # fmt: skip
def test_products_and_gradients_equal_a_loop(sizes: dict, launches) -> None:
    compare(**sizes, launches=launches)


@pytest.mark.parametrize("sizes", [
    {"counts": [1], "O": 1, "I": 32},
    {"counts": [3, 0, 17, 1, 0], "O": 33, "I": 96},
    {"counts": [0, 70, 0], "O": 70, "I": 160},
    {"counts": [5, 2], "O": 6, "I": 64, "scales": (0, 40)},  # the smallest, 2^-127 among them
    {"counts": [5, 2], "O": 6, "I": 64, "scales": (220, 245)},
    {"counts": [66, 3], "O": 24, "I": 96, "dtype": torch.float16, "scales": (120, 126), "tolerance": 2e-3},
    {"counts": [5, 0, 20], "O": 24, "I": 64, "dtype": torch.bfloat16, "tolerance": 2e-2},
], ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))  # fmt: skip
def test_packed_weights_are_expanded_inside(sizes: dict, launches) -> None:
    compare_packed(**sizes, launches=launches)


def test_every_code_and_scale_is_expanded_exactly() -> None:
    """Both codes of all 256 bytes; scales of all sizes, the denormal 2^-127 and nan included."""
    packed = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(1, 256, 16)
    for byte in (0, 1, 100, 127, 200, 250, 255):
        scale = torch.full((1, 256, 1), byte, dtype=torch.uint8)
        got = grouped_product(torch.eye(32), packed, ends_of([32]), scale=scale)
        want = mxfp4.unpack(packed[0], scale[0]).T
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)), byte
        assert bool(got.isnan().all()) == (byte == 255)


def test_what_one_token_holds_stays_its_own() -> None:
    x, w = torch.randn(40, 20), torch.randn(3, 12, 20)
    ends = ends_of([10, 0, 30])
    clean = grouped_product(x, w, ends)
    x[4], x[20], x[21] = float("nan"), float("inf"), -float("inf")
    y = grouped_product(x, w, ends)
    others = torch.tensor([i not in (4, 20, 21) for i in range(40)])
    assert torch.equal(y[others], clean[others])
    assert y[4].isnan().all()
    assert not y[20].isfinite().any()


@pytest.mark.parametrize("counts", [[1], [0, 5, 0], [64, 65, 0, 1], [0] * 9 + [200], [16] * 8])
def test_tiles_cover_every_row_once(counts: list[int]) -> None:
    S, BM = sum(counts), 16
    table = row_tiles(ends_of(counts), S, BM)
    assert table.shape == (S // BM + min(len(counts), S), 3)
    covered = []
    for expert, first, count in table.tolist():
        assert 0 <= count <= BM
        covered += [(row, expert) for row in range(first, first + count)]
    assert covered == list(enumerate(e for e, n in enumerate(counts) for _ in range(n)))


def found_with(net: LatentMoE, x: Tensor, backend: str) -> list[Tensor]:
    net.experts.backend = backend
    x = x.clone().requires_grad_()
    y = net(x)
    learned = [x, *(p for p in net.parameters() if p.requires_grad)]
    return [y, *torch.autograd.grad(y.square().sum(), learned, materialize_grads=True)]


@pytest.mark.parametrize(("N", "k"), [(9, 3), (1, 1), (0, 2), (3, 5)])
def test_the_layer_is_the_same_function_on_either(N: int, k: int, launches) -> None:
    """Output and the gradients of tokens, experts and router, whose only way is the routing weights."""
    torch.manual_seed(N)
    net = LatentMoE(24, num_experts=5, top_k=k, expert_size=6, latent_size=10, num_shared_experts=1)
    net.gate.e_score_correction_bias[3] = -10.0 if k < 5 else 0.0  # an expert without tokens
    x = torch.randn(N, 24)
    ours = found_with(net, x, "triton")
    assert launches == ({name: 2 * n for name, n in GRADIENTS.items()} if N else {})
    for a, b in zip(ours, found_with(net, x, "torch"), strict=True):
        close("a result", a, b, 1e-5)


def test_the_packed_layer_is_the_same_function_on_either(launches) -> None:
    net = LatentMoE(20, num_experts=6, top_k=2, expert_size=32, latent_size=64, activation=swiglu)
    net.experts.backend = "triton"
    assert pack_experts(net).experts.backend == "triton"
    x = torch.randn(7, 20)
    ours = found_with(net, x, "triton")
    assert launches == {"grouped_product_kernel": 4}
    for a, b in zip(ours, found_with(net, x, "torch"), strict=True):
        close("a result", a, b, 1e-5)


def test_one_expert_may_take_every_token(launches) -> None:
    net = LatentMoE(16, num_experts=4, top_k=1, expert_size=8)
    net.gate.e_score_correction_bias[2] = 10.0
    x = torch.randn(20, 16)
    assert set(net.gate(x).indices.flatten().tolist()) == {2}
    for a, b in zip(found_with(net, x, "triton"), found_with(net, x, "torch"), strict=True):
        close("a result", a, b, 1e-5)


def test_what_the_kernels_cannot_take_is_refused_by_name() -> None:
    x, w, ends = torch.randn(4, 32), torch.randn(2, 6, 32), ends_of([1, 3])
    packed, scale = mxfp4.pack(w)
    with pytest.raises(ValueError, match="takes no float64"):
        expert_products(x.double(), w.double(), ends, backend="triton")
    with pytest.raises(ValueError, match='backend must be None, "torch" or "triton"'):
        expert_products(x, w, ends, backend="cuda")
    with pytest.raises(ValueError, match="needs a stack of matrices"):
        expert_products(x, list(w), ends, backend="triton")
    with pytest.raises(ValueError, match=r"w must be \[2, 6, 32\], got \[2, 6, 31\]"):
        grouped_product(x, w[..., :31], ends)
    with pytest.raises(ValueError, match="w must have x's dtype"):
        grouped_product(x, w.half(), ends)
    with pytest.raises(ValueError, match=r"ends must be int32 \[E\] = \[2\]"):
        grouped_product(x, w, ends.long())
    with pytest.raises(ValueError, match=r"scale must be uint8 \[2, 6, 1\]"):
        grouped_product(x, packed, ends, scale=scale[:, :5])
    with pytest.raises(ValueError, match="32 dividing I = 30"):
        grouped_product(x[:, :30], packed[..., :15], ends, scale=scale[..., :0])


def test_a_sequence_of_matrices_stays_in_pytorch(launches) -> None:
    net = LatentMoE(16, num_experts=4, top_k=2, expert_size=8, activation=swiglu)
    x = torch.randn(5, 16)
    stacks = net.experts.gate_up_proj, net.experts.down_proj
    with torch.no_grad():
        got = grouped_experts(x, net.gate(x), *(list(stack) for stack in stacks), swiglu)
        want = grouped_experts(x, net.gate(x), *stacks, swiglu, backend="triton")
    assert launches == {"grouped_product_kernel": 2}
    torch.testing.assert_close(got, want)
