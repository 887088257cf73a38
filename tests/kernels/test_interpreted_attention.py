"""Softmax attention's kernels in Triton's interpreter against the written-out form in float64."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from evolve.full_attention import GPT2, CausalSelfAttention, GPT2Config, softmax_attention
from evolve_kernels.full_attention import softmax_attention as kernel
from tests.kernels.memory_guard import Guard, guarded

FORWARD = {"attention_kernel": 1}
BOTH = FORWARD | {"query_gradient_kernel": 1, "key_gradients_kernel": 1}


def mask_of(kind: str, B: int, S: int) -> Tensor | None:
    if kind == "none":
        return None
    mask = torch.rand(B, S) > 0.4
    if kind == "left":
        mask = torch.arange(S).expand(B, S) >= torch.arange(B)[:, None] + S // 3
    if kind == "nothing":
        mask = torch.zeros(B, S, dtype=torch.bool)
    return mask


def close(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)} is not {list(want.shape)}"
    error = (got.double() - want).abs().max().item() if want.numel() else 0.0
    bound = tolerance * max(1.0, want.abs().max().item() if want.numel() else 0.0)
    assert error <= bound, f"{name}: {error:.1e} > {bound:.1e}"


def compare(T, S, H, HV, K, V, launches, mask="none", B=1, causal=True, scale=None, dtype=torch.float32,
            size=1.0, tolerance=1e-5) -> None:  # fmt: skip
    """Output and every gradient, all memory guarded; hidden keys hold nan, their gradients are zeros."""
    torch.manual_seed(T + S)
    shapes = {"q": (B, T, H, K), "k": (B, S, H, K), "v": (B, S, HV, V)}
    x = {name: (size * torch.randn(shape)).to(dtype) for name, shape in shapes.items()}
    key_mask = mask_of(mask, B, S)
    exact = {name: t.double().requires_grad_() for name, t in x.items()}
    how = {"causal": causal, "key_mask": key_mask, "scale": scale}
    o_exact = softmax_attention(**exact, **how, backend="torch")
    w = guarded(torch.randn(o_exact.shape).to(dtype))
    want = torch.autograd.grad(o_exact, list(exact.values()), w.double())
    if key_mask is not None:
        x |= {n: x[n].masked_fill(~key_mask[:, :, None, None], float("nan")) for n in "kv"}
    x = {name: guarded(t).requires_grad_() for name, t in x.items()}
    launches.clear()
    with Guard() as guard:
        o = kernel(**x, **how)
        got = torch.autograd.grad(o, list(x.values()), w)
    guard.check()
    assert len(guard.buffers) >= 6, "backward allocates under guard too"
    assert launches == BOTH
    assert o.dtype == dtype
    for name, a, b in [("o", o, o_exact), *((f"d{n}", a, b) for n, a, b in zip(x, got, want))]:
        close(name, a, b, tolerance)


@pytest.mark.parametrize("sizes", [
    {"T": 1, "S": 1, "H": 1, "HV": 1, "K": 12, "V": 20},
    {"T": 1, "S": 67, "H": 2, "HV": 2, "K": 16, "V": 16, "B": 2, "mask": "left"},
    {"T": 33, "S": 33, "H": 2, "HV": 4, "K": 60, "V": 24, "B": 2},
    {"T": 35, "S": 101, "H": 1, "HV": 1, "K": 192, "V": 128},
    {"T": 65, "S": 65, "H": 1, "HV": 3, "K": 20, "V": 72, "mask": "holes"},
    {"T": 66, "S": 31, "H": 1, "HV": 1, "K": 16, "V": 16},  # the first queries see nothing
    {"T": 30, "S": 47, "H": 1, "HV": 1, "K": 33, "V": 130, "causal": False, "mask": "holes"},
    {"T": 5, "S": 40, "H": 1, "HV": 1, "K": 16, "V": 16, "mask": "nothing"},
    {"T": 40, "S": 40, "H": 1, "HV": 2, "K": 16, "V": 16, "scale": 0.0},
    {"T": 40, "S": 40, "H": 1, "HV": 1, "K": 16, "V": 16, "scale": -3.0},
    {"T": 70, "S": 130, "H": 1, "HV": 2, "K": 64, "V": 64, "mask": "left", "dtype": torch.float16,
     "tolerance": 2e-3},
    {"T": 30, "S": 50, "H": 1, "HV": 1, "K": 140, "V": 16, "dtype": torch.float16, "tolerance": 2e-3},
    {"T": 20, "S": 40, "H": 1, "HV": 1, "K": 24, "V": 16, "dtype": torch.bfloat16, "tolerance": 2e-2},
    {"T": 2, "S": 0, "H": 1, "HV": 1, "K": 16, "V": 16, "B": 2},
], ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))  # fmt: skip
def test_kernels_equal_the_written_out_form(sizes: dict, launches) -> None:
    if sizes["S"] == 0:  # no key, no program for it
        o = kernel(*(torch.randn(2, n, 1, 16) for n in (2, 0, 0)))
        assert torch.equal(o, torch.zeros(2, 2, 1, 16))
        return
    compare(**sizes, launches=launches)


def test_huge_scores_single_out_the_largest(launches) -> None:
    """Scores of 1e12 overflow an exponential; the weights are 1 and 0, and the gradients finite."""
    q = torch.zeros(1, 40, 1, 16)
    q[..., 0] = 1e6
    k = torch.zeros(1, 40, 1, 16)
    k[..., 0] = torch.linspace(-1e6, 1e6, 40)[:, None][None]
    v = torch.randn(1, 40, 1, 16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = kernel(*leaves, scale=1.0)
    assert torch.equal(o, v)  # the last visible key is the largest
    grads = torch.autograd.grad(o.sum(), leaves)
    assert all(bool(g.isfinite().all()) for g in grads)
    assert torch.equal(grads[2], torch.ones_like(v))
    down = kernel(-q, k, v, scale=1.0)
    assert torch.equal(down, v[:, :1].expand_as(v))


def test_scores_of_minus_infinity_are_hidden_keys() -> None:
    q, k, v = torch.ones(1, 3, 1, 16), torch.zeros(1, 3, 1, 16), torch.randn(1, 3, 1, 16)
    k[0, 1] = -torch.inf
    want = softmax_attention(q.double(), k.double(), v.double(), backend="torch")
    close("o", kernel(q, k, v), want, 1e-6)


def test_the_future_never_changes_the_past() -> None:
    q, k, v = (torch.randn(1, 70, 1, 16) for _ in range(3))
    before = kernel(q, k, v)
    for t in (65, 33, 1):
        k[:, t:], v[:, t:] = 100.0, -100.0
        assert torch.equal(kernel(q, k, v)[:, :t], before[:, :t])


def test_views_and_nothing_to_do() -> None:
    q, k, v = (torch.randn(2, 3, 20, 16).transpose(1, 2) for _ in range(3))
    close("o", kernel(q, k, v), softmax_attention(q.double(), k.double(), v.double()), 1e-5)
    for B, T in ((0, 3), (2, 0)):
        assert kernel(q[:B, :T], k[:B], v[:B]).shape == (B, T, 3, 16)


def test_the_layer_runs_on_the_kernel(launches) -> None:
    """A GPT-2 with padding: prompt, decoded tokens and gradients are the PyTorch form's."""
    model = GPT2(GPT2Config(vocab_size=19, n_positions=32, n_embd=24, n_layer=2, n_head=2))
    ids, mask = torch.randint(19, (2, 9)), torch.ones(2, 9, dtype=torch.bool)
    mask[1, :3] = False
    found = {}
    for backend in ("triton", "torch"):
        for layer in model.modules():
            if isinstance(layer, CausalSelfAttention):
                layer.backend = backend
        logits = model(ids, None, mask)
        grads = torch.autograd.grad(logits[mask].square().sum(), list(model.parameters()))
        with torch.no_grad():
            cache = model.new_cache(2)
            steps = [model(ids[:, :7], cache, mask[:, :7])]
            steps += [model(ids[:, t : t + 1], cache, mask[:, t : t + 1]) for t in (7, 8)]
        found[backend] = (logits[mask], torch.cat(steps, 1)[mask], *grads)
    assert launches == {name: 2 * n for name, n in (BOTH | {"attention_kernel": 4}).items()}
    for a, b in zip(*found.values()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_the_kernel_cannot_take_is_refused_by_name() -> None:
    x = torch.randn(1, 4, 2, 16)
    with pytest.raises(ValueError, match="takes no float64"):
        softmax_attention(x.double(), x.double(), x.double(), backend="triton")
    with pytest.raises(ValueError, match="K and V at most 256"):
        softmax_attention(*3 * [torch.randn(1, 4, 1, 300)], backend="triton")
    with pytest.raises(ValueError, match="q must be float32, float16 or bfloat16"):
        kernel(x.double(), x, x)
    with pytest.raises(ValueError, match=r"k must be \[1, 4, 2, 16\], got \[1, 4, 2, 8\]"):
        kernel(x, x[..., :8], x)
    with pytest.raises(ValueError, match="HV must be a multiple of H"):
        kernel(x, x, x[:, :, :1])
    with pytest.raises(ValueError, match=r"key_mask must be bool \[B, S\] = \[1, 4\]"):
        kernel(x, x, x, key_mask=torch.ones(1, 5, dtype=torch.bool))
