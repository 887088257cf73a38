"""Bytes and FLOPs of the roofline table, counted again while the interpreter runs the kernels."""

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernel_cases import Case, call
from benchmarks.layer_cases import LAYERS
from benchmarks.operation_cases import AttentionCase, ExpertsCase, MlaDecodeCase
from benchmarks.roofline import cost
from triton.runtime.interpreter import InterpreterBuilder

from evolve_kernels import launch as launching
from evolve_kernels.launch import recorded

SMALL = Case(T=32, H=1, HV=1, K=32, V=32)
CASES = {
    "KDA, bounded": dataclasses.replace(SMALL, lower_bound=-5.0),
    "KDA": SMALL,
    "gated": dataclasses.replace(SMALL, gate="head"),
    "delta": dataclasses.replace(SMALL, gate="none"),
    "linear": dataclasses.replace(SMALL, gate="none", erase=False),
}


TABLES = ("starts", "chunk_starts", "chunk_rows")
LAUNCHED = {
    "AttnRes reads, K3": ["depth_read_kernel", "depth_read_backward_kernel", "site_gradients_kernel"],
    "AttnRes sum so far, K3": ["depth_add_kernel", "depth_add_backward_kernel"],
    "SiTU-GLU, K3": ["situ_glu_kernel", "situ_glu_backward_kernel"],
    "short convolution, K3": ["short_conv_kernel", "short_conv_backward_kernel"],
}
OPERATIONS = {name: (LAYERS[name].checked(), kernels) for name, kernels in LAUNCHED.items()}
OPERATIONS |= {
    "attention": (AttentionCase(H=2, K=32, V=16, T=70, S=100, backward=True), ["attention_kernel",
                  "query_gradient_kernel", "key_gradients_kernel"]),
    "MLA decode": (MlaDecodeCase(H=3, R=32, Kr=16, S=150, T=2, B=2), ["mla_part_kernel",
                   "mla_combine_kernel"]),
    "experts": (ExpertsCase(E=7, k=2, O=20, I=70, tokens=11, backward=True), ["grouped_product_kernel",
                "grouped_product_kernel", "weight_gradient_kernel"]),
    "MXFP4 experts": (ExpertsCase(E=9, k=1, O=20, I=96, tokens=5, packed=True), ["grouped_product_kernel"]),
}  # fmt: skip


class Counter:
    """Which bytes were touched, and the FLOPs of every ``tl.dot``."""

    def __init__(self, monkeypatch) -> None:
        self.reset()
        builder = InterpreterBuilder
        load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot

        def counted_load(this, ptrs, mask, *rest):
            self.touch(ptrs, mask)
            return load(this, ptrs, mask, *rest)

        def counted_store(this, ptrs, value, mask, *rest):
            self.touch(ptrs, mask)
            return store(this, ptrs, value, mask, *rest)

        def counted_dot(this, a, b, *rest):
            self.flops += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
            return dot(this, a, b, *rest)

        monkeypatch.setattr(builder, "create_masked_load", counted_load)
        monkeypatch.setattr(builder, "create_masked_store", counted_store)
        monkeypatch.setattr(builder, "create_dot", counted_dot)

    def reset(self) -> None:
        self.touched, self.flops = {}, 0

    def touch(self, ptrs, mask) -> None:
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        addresses = np.broadcast_to(ptrs.data, mask.data.shape)[mask.data]
        self.touched.update(dict.fromkeys(np.unique(addresses).tolist(), size))


MODULES = ("chunk_rule", "kda_decode", "full_attention", "full_attention_backward", "mla_decode", "moe")
MODULES += ("attention_residuals", "attention_residuals_add", "situ_glu", "short_conv")


@pytest.fixture
def seen(monkeypatch) -> list[tuple]:
    """Every launch with the bytes it touched and the FLOPs it did."""
    counter, run, seen = Counter(monkeypatch), launching.launch, []

    def observed(kernel, programs, arguments, **options) -> None:
        counter.reset()
        with recorded() as launches:
            run(kernel, programs, arguments, **options)
        seen.append((launches[0], sum(counter.touched.values()), counter.flops))

    for module in MODULES:
        monkeypatch.setattr(f"evolve_kernels.{module}.launch", observed)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_every_byte_and_product_is_counted(name: str, seen) -> None:
    """Nothing is given to a kernel that it leaves alone, but the numbers that say where sequences start."""
    call(CASES[name], "cpu", torch.float16)()
    assert len(seen) == 7
    for launch, touched, flops in seen:
        assert flops == cost(launch).flops, launch.name
        tables = sum(launch.arguments[t].nbytes for t in TABLES if t in launch.arguments)
        assert abs(touched - cost(launch).bytes) <= tables, launch.name


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_byte_and_product_of_an_operation_is_counted(name: str, seen) -> None:
    case, kernels = OPERATIONS[name]
    case.call("cpu", torch.float16)()
    assert [launch.name for launch, _, _ in seen] == kernels
    for launch, touched, flops in seen:
        assert flops == cost(launch).flops, launch.name
        tables = sum(launch.arguments[t].nbytes for t in TABLES if t in launch.arguments)
        assert abs(touched - cost(launch).bytes) <= tables, launch.name
