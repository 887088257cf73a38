"""The four-bit format: explicit bytes and values, ties, extremes."""

import itertools
import math

import pytest
import torch

from evolve import mxfp4


def test_explicit_bytes():
    """Statistics would not notice swapped halves of a byte; these values do."""
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, *[0] * 8]], dtype=torch.uint8)
    scale = torch.tensor([[128]], dtype=torch.uint8)  # 2
    expected = [0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12, *[0] * 16]
    w = mxfp4.unpack(packed, scale)
    assert w.tolist() == [expected]
    assert math.copysign(1, w[0, 8].item()) == -1
    assert [x.tolist() for x in mxfp4.pack(w)] == [packed.tolist(), scale.tolist()]


def test_a_scale_is_of_32_consecutive_inputs():
    packed = torch.full((2, 32), 0x22, dtype=torch.uint8)  # all ones
    scale = torch.tensor([[127, 130], [126, 0]], dtype=torch.uint8)
    w = mxfp4.unpack(packed, scale, dtype=torch.float64)
    assert w[0].tolist() == [1.0] * 32 + [8.0] * 32
    assert w[1].tolist() == [0.5] * 32 + [2.0**-127] * 32
    scale[0, 1] = 255
    assert mxfp4.unpack(packed, scale)[0].isnan().tolist() == [False] * 32 + [True] * 32


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (0.25, 0), (0.26, 1), (0.74, 1), (0.75, 2), (1.25, 2), (1.26, 3), (1.75, 4), (2.5, 4), (2.51, 5),
        (3.49, 5), (3.5, 6), (5.0, 6), (5.01, 7), (7.9, 7), (-0.25, 8), (-0.75, 10), (-5.0, 14), (-5.5, 15),
    ],
)  # fmt: skip
def test_the_nearest_code_and_the_even_one_between_two(x, code):
    w = torch.zeros(32)
    w[0], w[1] = 4.0, x  # the block's scale is 1
    packed, scale = mxfp4.pack(w)
    assert scale.tolist() == [127]
    assert packed[0].item() == code << 4 | 6


def test_no_code_is_nearer_than_the_one_chosen():
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    packed, scale = mxfp4.pack(w)
    error = (mxfp4.unpack(packed, scale, dtype=torch.float64) - w).abs()
    size = 2.0 ** (scale.double() - 127).repeat_interleave(32, dim=1)
    grid = torch.tensor([s * m for s, m in itertools.product((1, -1), mxfp4.MAGNITUDES)]).double()
    nearest = (w[..., None] - size[..., None] * grid).abs().amin(-1)
    torch.testing.assert_close(error, nearest, atol=0, rtol=0)
    largest = (w.abs().unflatten(1, (-1, 32)).amax(-1) / 2.0 ** (scale.double() - 127)).log2()
    assert (largest.floor() == 2).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_unpacked_packs_to_the_same_numbers(dtype):
    rng = torch.Generator().manual_seed(1)
    packed = torch.randint(256, (3, 5, 64), generator=rng, dtype=torch.uint8)
    scale = torch.randint(118, 135, (3, 5, 4), generator=rng, dtype=torch.uint8)
    w = mxfp4.unpack(packed, scale, dtype=dtype)
    assert w.dtype == dtype
    assert torch.equal(w.double(), mxfp4.unpack(packed, scale, dtype=torch.float64))  # exact
    assert torch.equal(mxfp4.unpack(*mxfp4.pack(w), dtype=dtype), w)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("size", [0.0, 2.0**-140, 2.0**-126, 1.0, 3e38])
def test_extreme_blocks(size, flush):
    """Training flushes denormal numbers to zero, for the whole process: the smallest scales are such."""
    w = torch.full((32,), size)
    torch.set_flush_denormal(flush)
    try:
        again = mxfp4.unpack(*mxfp4.pack(w), dtype=torch.float64)
    finally:
        torch.set_flush_denormal(False)
    if size < 2.0**-128:  # half of the smallest code at the smallest scale
        assert not again.any()
    else:
        assert (again / size - 1).abs().max() <= 0.25
    assert mxfp4.pack(torch.zeros(0, 32))[0].shape == (0, 16)
    assert mxfp4.unpack(*mxfp4.pack(torch.zeros(2, 0))).shape == (2, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mxfp4.pack(torch.zeros(33)), "w must be [..., I] with I a multiple of 32, got [33]"),
        (lambda: mxfp4.pack(torch.zeros(32, dtype=torch.int64)), "w must be floating point"),
        (lambda: mxfp4.pack(torch.full((32,), torch.nan)), "w must be finite"),
        (lambda: mxfp4.unpack(torch.zeros(1, 16), torch.zeros(1, 1).byte()), "packed must be uint8"),
        (lambda: mxfp4.unpack(torch.zeros(1, 16).byte(), torch.zeros(1, 2).byte()), "scale must be [1, 1]"),
        (lambda: mxfp4.unpack(torch.zeros(1, 15).byte(), torch.zeros(1, 1).byte()), "scale must be [1, 0]"),
        (
            lambda: mxfp4.unpack(torch.zeros(1, 16).byte(), torch.zeros(1, 1).byte(), dtype=torch.int8),
            "dtype must be floating point",
        ),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)
