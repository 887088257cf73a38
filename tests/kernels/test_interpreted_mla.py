"""MLA's decode kernels, and the layer on them, in Triton's interpreter against PyTorch in float64."""

import pytest
import torch

pytest.importorskip("triton")

from evolve.cache import Cache
from evolve.full_attention import attention_by_hand, visible_keys
from evolve.mla import MultiHeadLatentAttention, absorbed_mla, expanded_mla
from evolve_kernels.mla_decode import mla_decode, splits_of
from tests.kernels.memory_guard import Guard, guarded
from tests.kernels.test_interpreted_attention import close, mask_of

DECODE = {"mla_part_kernel": 1, "mla_combine_kernel": 1}


def compare(B, T, H, R, KR, S, launches, splits=None, mask="none", dtype=torch.float32, size=1.0,
            tolerance=1e-5) -> None:  # fmt: skip
    """All memory guarded; what hidden latents hold is nan."""
    torch.manual_seed(S)
    q, latent = (size * torch.randn(s).to(dtype) for s in ((B, T, H, R + KR), (B, S, R + KR)))
    key_mask = mask_of(mask, B, S)
    visible = visible_keys(T, S, True, key_mask, q.device)
    visible = visible if visible is None else visible.repeat_interleave(H, dim=2)
    exact = latent.double()[:, :, None]
    want = attention_by_hand(q.double().flatten(1, 2)[:, :, None], exact, exact[..., :R], 0.3, visible)
    if key_mask is not None:
        latent = latent.masked_fill(~key_mask[:, :, None], float("nan"))
    launches.clear()
    with Guard() as guard:
        o = mla_decode(guarded(q), guarded(latent), R, scale=0.3, key_mask=key_mask, splits=splits)
    guard.check()
    assert len(guard.buffers) >= 3
    assert launches == DECODE
    assert o.dtype == dtype
    close("o", o, want.view(B, T, H, R), tolerance)


@pytest.mark.parametrize("sizes", [
    {"B": 1, "T": 1, "H": 1, "R": 16, "KR": 0, "S": 1},
    {"B": 2, "T": 1, "H": 3, "R": 20, "KR": 12, "S": 70, "mask": "holes"},
    {"B": 1, "T": 3, "H": 5, "R": 33, "KR": 7, "S": 131, "splits": 3},
    {"B": 1, "T": 2, "H": 20, "R": 24, "KR": 16, "S": 65, "splits": 9},  # some splits have no key
    {"B": 1, "T": 5, "H": 1, "R": 16, "KR": 4, "S": 5},
    {"B": 3, "T": 1, "H": 2, "R": 16, "KR": 4, "S": 60, "mask": "left", "splits": 4},
    {"B": 2, "T": 2, "H": 2, "R": 16, "KR": 4, "S": 40, "mask": "nothing", "splits": 2},
    {"B": 1, "T": 1, "H": 2, "R": 512, "KR": 64, "S": 50},
    {"B": 1, "T": 1, "H": 17, "R": 16, "KR": 0, "S": 90, "size": 100.0, "splits": 3},  # scores of 1e4
    {"B": 1, "T": 2, "H": 3, "R": 40, "KR": 8, "S": 100, "dtype": torch.float16, "tolerance": 2e-3},
    {"B": 1, "T": 1, "H": 3, "R": 16, "KR": 8, "S": 40, "dtype": torch.bfloat16, "tolerance": 2e-2},
], ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))  # fmt: skip
def test_decode_equals_the_written_out_form(sizes: dict, launches) -> None:
    compare(**sizes, launches=launches)


@pytest.mark.parametrize("S", [0, 1, 31, 128, 129, 1000, 131072])
def test_splits_cover_the_context_once(S: int) -> None:
    for programs in (1, 6, 500):
        splits, span = splits_of(S, 32, programs)
        assert span % 32 == 0
        assert (splits - 1) * span < max(S, 1) <= splits * span
        assert splits <= 64
    assert splits_of(131072, 32, 6)[0] > 32  # K3's 96 heads are 6 programs a split


@pytest.mark.parametrize("latent_query", [None, 10])
@torch.no_grad()
def test_the_layer_prefills_and_decodes_on_the_kernels(latent_query: int | None, launches) -> None:
    """Prompt expanded, tokens absorbed, with padding on the left: as the PyTorch forms do it."""
    options = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10}
    layer = MultiHeadLatentAttention(18, 3, **options, q_lora_rank=latent_query, output_gate=True)
    x, mask = torch.randn(2, 12, 18), torch.ones(2, 12, dtype=torch.bool)
    mask[1, :4] = False
    found = {}
    for layer.backend in ("triton", "torch"):
        cache, y = Cache(1, 2), []
        for a, b in ((0, 9), (9, 10), (10, 12)):
            y.append(layer(x[:, a:b], cache.layers[0], mask[:, a:b]))
            cache.advance(b - a, mask[:, :b])
        found[layer.backend] = torch.cat(y, 1)
    assert launches == {"attention_kernel": 1, "mla_part_kernel": 2, "mla_combine_kernel": 2}
    torch.testing.assert_close(*found.values(), rtol=1e-5, atol=1e-6)


def test_gradients_go_through_the_prefill_kernels_or_pytorch(launches) -> None:
    """Packed sequences included; the absorbed form has no kernel for them and says nothing false."""
    q, latent, kv_b = torch.randn(1, 9, 2, 14), torch.randn(1, 9, 13), torch.randn(2 * 16, 9)
    packed = torch.tensor([0, 4, 9])
    for form in (expanded_mla, absorbed_mla):
        found = []
        for backend in ("triton", "torch"):
            leaves = [x.clone().requires_grad_() for x in (q, latent, kv_b)]
            o = form(*leaves, cu_seqlens=packed, backend=backend)
            found.append((o, *torch.autograd.grad(o.square().sum(), leaves)))
        for a, b in zip(*found):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert launches == {"attention_kernel": 2, "query_gradient_kernel": 2, "key_gradients_kernel": 2}


def test_what_the_kernels_cannot_take_is_refused_by_name() -> None:
    q, latent, kv_b = torch.randn(1, 1, 2, 14), torch.randn(1, 9, 13), torch.randn(2 * 16, 9)
    with pytest.raises(ValueError, match="takes no float64"):
        absorbed_mla(q.double(), latent.double(), kv_b.double(), backend="triton")
    with pytest.raises(ValueError, match='backend must be None, "torch" or "triton"'):
        absorbed_mla(q, latent, kv_b, backend="sdpa")
    with pytest.raises(ValueError, match="R and Kr must be at most 512"):
        mla_decode(torch.randn(1, 1, 1, 600), torch.randn(1, 2, 600), 600, scale=1.0)
    with pytest.raises(ValueError, match=r"latent must be \[1, 9, 14\], got \[1, 9, 13\]"):
        mla_decode(q, latent, 9, scale=1.0)
    with pytest.raises(ValueError, match="key_mask must be bool"):
        mla_decode(q, torch.randn(1, 9, 14), 9, scale=1.0, key_mask=torch.ones(1, 9))
