"""Planted faults: one-line changes of the kernels, each of which must turn the suite red on a numeric assert.

The changed package is a copy in a temporary folder, since Triton reads a kernel's source from its file.
"""

import importlib
import importlib.util
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

SUITES = ("rules", "decode", "depth", "elementwise", "attention", "mla", "moe")
FRESH = ("evolve_kernels", *(f"tests.kernels.test_interpreted_{suite}" for suite in SUITES))


@contextmanager
def planted(folder: Path, module: str, old: str, new: str):
    """Within, ``evolve_kernels`` is a copy with one change, and the suites import it anew."""
    package = Path(importlib.util.find_spec("evolve_kernels").origin).parent
    copy = folder / "evolve_kernels"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / f"{module}.py"
    found = path.read_text().count(old)
    assert found == 1, f"{old!r} must stand once in {module}, found {found} times"
    path.write_text(path.read_text().replace(old, new))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(FRESH)}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
        assert sys.modules["evolve_kernels"].__file__.startswith(str(folder))
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.startswith(FRESH)]:
            del sys.modules[name]
        sys.modules.update(kept)


def rule(name: str, C: int = 16, bound: float | None = None, **sizes) -> Callable[[dict], None]:
    """The suite's comparison of output, state and every gradient for one rule."""

    def run(launches: dict) -> None:
        suite = importlib.import_module("tests.kernels.test_interpreted_rules")
        given = {"T": 19, "B": 1, "H": 1} | sizes
        suite.compare(getattr(suite, name), given, launches, chunk_size=C, lower_bound=bound)

    return run


def decode(launches: dict) -> None:
    suite = importlib.import_module("tests.kernels.test_interpreted_decode")
    suite.test_prefill_and_decode_equal_the_layer("grouped", launches)


def depth(launches: dict) -> None:
    importlib.import_module("tests.kernels.test_interpreted_depth").compare(launches, 3, 2, (2, 20), 0.5)


def situ(launches: dict) -> None:
    suite = importlib.import_module("tests.kernels.test_interpreted_elementwise")
    suite.compare_situ(launches, (3, 20), 4.0)


def conv(launches: dict) -> None:
    suite = importlib.import_module("tests.kernels.test_interpreted_elementwise")
    suite.compare_conv(launches, 1, 38, 18, 4, True, (0, 2, 2, 37, 38))


def attention(launches: dict) -> None:
    suite = importlib.import_module("tests.kernels.test_interpreted_attention")
    suite.compare(T=19, S=70, H=1, HV=2, K=20, V=12, mask="holes", launches=launches)


def mla(launches: dict) -> None:
    suite = importlib.import_module("tests.kernels.test_interpreted_mla")
    suite.compare(B=2, T=2, H=3, R=20, KR=12, S=70, splits=2, mask="holes", launches=launches)


def experts(launches: dict) -> None:
    suite = importlib.import_module("tests.kernels.test_interpreted_moe")
    suite.compare([3, 0, 35], O=70, I=20, launches=launches)


def packed(launches: dict) -> None:
    suite = importlib.import_module("tests.kernels.test_interpreted_moe")
    suite.compare_packed([3, 0, 18], O=20, I=96, launches=launches)


KDA, GROUPED = rule("KDA"), rule("KDA", H=2, HV=4, gate="-1.5")
BOUNDED = rule("KDA", 32, -5.0, T=30, gate="-1.5")
GATED, DELTA = rule("GATED"), rule("DELTA")


@dataclass(frozen=True)
class Fault:
    what: str
    module: str
    old: str
    new: str
    sentinel: Callable[[dict], None]


FAULTS = [
    Fault(
        "a block's gates run into the next block",
        "tiles",
        "tl.where((r % SIZE == SIZE - 1)[:, None], 0.0, g_next)",
        "g_next",
        KDA,
    ),
    Fault("the wrong blocks meet", "tiles", "block % 2 == 1", "block % 2 == 0", KDA),
    Fault("anchored on the last row", "tiles", "(r % SIZE == 0)", "(r % SIZE == SIZE - 1)", BOUNDED),
    Fault("tiles with the future", "tiles", "r[:, None] >= r[None, :])\n\n\n@triton.jit\ndef since_first",
          "r[:, None] + 1 >= r[None, :])\n\n\n@triton.jit\ndef since_first", BOUNDED),
    Fault("half the inverse", "tiles", "static_range(1, LOG_C)", "static_range(1, LOG_C - 1)", DELTA),
    Fault("decay with the own gate", "tiles", "tl.where(r[:, None] > r[None, :], g[:, None]",
          "tl.where(r[:, None] >= r[None, :], g[:, None]", GATED),
    Fault(
        "reads beyond a row",
        "tiles",
        "cols[None, :]), mask=mask, other=0.0)",
        "cols[None, :]))",
        DELTA,
    ),
    Fault(
        "writes beyond a tensor",
        "tiles",
        "tile.to(x.dtype.element_ty), mask=mask)",
        "tile.to(x.dtype.element_ty))",
        DELTA,
    ),
    Fault("key heads tiled", "chunk_prepare", "k += hv // (HV // H) * K", "k += hv % H * K", GROUPED),
    Fault("beta left out", "chunk_prepare", "m = x * strength[None, :]", "m = x", DELTA),
    Fault("query not scaled", "chunk_prepare", "H * K, cols, K) * scale", "H * K, cols, K)", DELTA),
    Fault("old state not erased", "chunk_walk", "u_rows -= tl.dot", "u_rows -= 0 * tl.dot", DELTA),
    Fault("the state never fades", "chunk_walk", "            S *= tl.load(decay + chunk)",
          "            S *= 1.0 + 0 * tl.load(decay + chunk)", GATED),
    Fault("the first chunk's keys again", "chunk_walk",
          "k_rows = load_tile(k_out + hv * K, at, r, count, HV * K, keys, K)\n        u_rows",
          "k_rows = load_tile(k_out + hv * K, first, r, count, HV * K, keys, K)\n        u_rows", DELTA),
    Fault("erasing differentiated with the wrong sign", "chunk_walk", "dS -= tl.dot", "dS += tl.dot", DELTA),
    Fault("decay's gradient without dS", "chunk_walk", "dd += tl.sum(S * dS", "dd += tl.sum(S * S", KDA),
    Fault("gate's gradient from the wrong end", "chunk_prepare_backward",
          "axis=0, reverse=True)\n            sums", "axis=0)\n            sums", KDA),
    Fault("a key fades by its own gate", "chunk_prepare_backward", "tl.cumsum(faded, axis=0) - faded",
          "tl.cumsum(faded, axis=0)", KDA),
    Fault("beta's gradient of the wrong axis", "chunk_prepare_backward", "tl.sum(d_m * x, axis=0)",
          "tl.sum(d_m * x, axis=1)", DELTA),
    Fault("decoding without beta", "kda_decode", "(beta * error)", "(error)", decode),
    Fault("a convolution that forgets", "kda_decode", "(j - 1) * D, x,", "(j - 1) * D, 0 * x,", decode),
    Fault("sources that are normed", "attention_residuals", "store_sources(h, tl.dot(p, v,",
          "store_sources(h, tl.dot(p, v * tl.rsqrt(squares / D + eps)[:, None],", depth),
    Fault("a lse without the largest score", "attention_residuals", "m + tl.log(l)", "tl.log(l)", depth),
    Fault("sources that do not exist", "attention_residuals", "(i < M)[None, :], dots",
          "(i < MP)[None, :], dots", depth),
    Fault("a source's length left out of its gradient", "attention_residuals", "dv - shrink[:, None] * v",
          "dv - 0 * v", depth),
    Fault("scores' gradient without its mean", "attention_residuals", "- tl.sum(p * dp, axis=1)",
          "- 0 * tl.sum(p, axis=1)", depth),
    Fault("sites' gradient of one block of rows", "attention_residuals", "(first + r)[None, :]",
          "r[None, :] + 1", depth),
    Fault("a sum so far that is all", "attention_residuals_add", "a * load_row(h, n, cols, D) + b * v_row",
          "0 * load_row(h, n, cols, D) + v_row", depth),
    Fault("a lse that is not asked", "attention_residuals_add", "tl.store(d_lse + n, -ds)",
          "tl.store(d_lse + n, ds)", depth),
    Fault("a sum's gradient without its length", "attention_residuals_add", "- s * r * r / D * v_row",
          "- 0 * v_row", depth),
    Fault("the sigmoid of g/β", "situ_glu", "tl.sigmoid(g)  # the", "tl.sigmoid(g / beta)  # the", situ),
    Fault("a tanh that forgets the sign", "situ_glu", "tl.where(x < 0, -far, far)", "far", situ),
    Fault("a slope without the sigmoid's", "situ_glu", "+ beta * t * s * tl.sigmoid(-g)", "+ 0 * s", situ),
    Fault("up's gradient of gate's tanh", "situ_glu", "(beta * t * s) * slope_up", "(beta * t * s) * slope",
          situ),
    Fault("a stride that is the width", "situ_glu", "load_part(up, row, up_stride, cols, F)\n    t, _",
          "load_part(up, row, F, cols, F)\n    t, _", situ),
    Fault("taps in the wrong order", "short_conv", "z += load_column(weight + j,",
          "z += load_column(weight + (W - 1 - j),", conv),
    Fault("a history that the next sequence reads", "short_conv", "* D + cols[None, :]\n        x +=",
          "* 0 + cols[None, :]\n        x +=", conv),
    Fault("gradients of the sequence after", "short_conv", "(t >= 0) & (t < length) & (r < count)",
          "(t >= 0) & (r < count)", conv),
    Fault("SiLU's slope without z", "short_conv", "(s + z * s * (1.0 - s))", "(s + s * (1.0 - s))", conv),
    Fault("a weight's gradient of x alone", "short_conv", "tl.sum(x * dz, axis=0)", "tl.sum(x, axis=0)",
          conv),
    Fault("sums that never fade", "online_softmax", "l * faded", "l", attention),
    Fault("hidden keys seen", "online_softmax", "other=0) != 0", "other=0) >= 0", attention),
    Fault("hidden keys loaded", "online_softmax", "real[:, None] & (cols < width)[None, :]",
          "(cols < width)[None, :]", attention),
    Fault("a glance at the next key", "full_attention", "t[:, None] + (S - T)", "t[:, None] + (S - T) + 1",
          attention),
    Fault("the walk ends a tile early", "full_attention", "S + tl.minimum((i + 1) * BT - T, 0)",
          "S + tl.minimum(i * BT - T, 0)", attention),
    Fault("no score weighs down the others", "full_attention_backward", "- shares[:, None])\n        dq_rows",
          ")\n        dq_rows", attention),
    Fault("the first queries left out", "full_attention_backward", "tl.maximum(i * BS - (S - T), 0) // BT",
          "tl.maximum(i * BS, 0) // BT", attention),
    Fault("a split begins with another's keys", "mla_decode", "tl.minimum((j + 1) * span, S), BS)",
          "S, BS)", mla),
    Fault("shared key part left out", "mla_decode", "x += tl.dot(q_k,", "x += 0 * tl.dot(q_k,", mla),
    Fault("every row is the last token's", "mla_decode", "(i * BM + r) // H + (S - T)", "r * 0 + S", mla),
    Fault("splits weigh the same", "mla_decode", "tl.exp(tl.load(lse + row * splits + part) - m)",
          "tl.exp(0 * tl.load(lse + row * splits + part))", mla),
    Fault("every row meets the first matrix", "moe", "return load_tile(w, expert * O,",
          "return load_tile(w, 0 * expert,", experts),
    Fault("the walk ends a tile of columns early", "moe", "tl.where(count > 0, K, 0)",
          "tl.where(count > 0, K - BK, 0)", experts),
    Fault("rows of all experts before learn too", "moe", "tl.load(ends + expert - 1, mask",
          "0 * tl.load(ends + expert - 1, mask", experts),
    Fault("a tile begins with its neighbour's rows", "moe", "- starts + (BM - 1)) // BM",
          "- starts) // BM", experts),
    Fault("halves of a byte swapped", "mxfp4", "interleave(codes & 15, codes >> 4)",
          "interleave(codes >> 4, codes & 15)", packed),
    Fault("the largest codes too small", "mxfp4", "2.0 * m - 8.0", "m - 2.0", packed),
    Fault("one scale for two blocks", "mxfp4", "start // 32 + tl.arange(0, SIZE // 32)",
          "start // 32 + tl.arange(0, SIZE // 32) // 2", packed),
    Fault("gradient of keys not scaled", "full_attention_backward", "scale * dk_rows", "dk_rows", attention),
]  # fmt: skip
SENTINELS = [KDA, GROUPED, BOUNDED, GATED, DELTA, decode, depth, situ, conv, attention, mla, experts, packed]


@pytest.mark.parametrize("sentinel", SENTINELS)
def test_the_unchanged_copy_passes(sentinel, tmp_path, launches) -> None:
    with planted(tmp_path, "tiles", "block % 2 == 1", "block % 2 == 1"):
        sentinel(launches)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_turns_its_sentinel_red(fault: Fault, tmp_path, launches) -> None:
    torch.manual_seed(0)
    with planted(tmp_path, fault.module, fault.old, fault.new), pytest.raises(AssertionError) as failure:
        fault.sentinel(launches)
    message = str(failure.value).splitlines()[0]
    assert not re.search(r"shape|dtype|must stand once|kernel", message), f"not a numeric failure: {message}"
