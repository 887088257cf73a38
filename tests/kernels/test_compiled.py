"""Every kernel compiled to machine code at real models' shapes, as its wrapper launches it. No GPU needed.

Hopper in every run; ``EVOLVE_TARGETS="sm_80 sm_100 gfx942"`` adds others.
"""

import json
import os

import pytest
import torch

pytest.importorskip("triton")

import triton
from benchmarks.kernel_cases import CASES, launches_of
from benchmarks.kernels import HEAD, RESULTS, compile_launch, limit, row, table
from benchmarks.layer_costs import LAYER_FLOPS
from benchmarks.operation_cases import AttentionCase
from benchmarks.roofline import TARGET

from evolve_kernels.chunk_rule import chunk_rule
from evolve_kernels.launch import launch, recorded

MORE_TARGETS = os.environ.get("EVOLVE_TARGETS", "").split()
OPERATION_FORWARD = ("attention_kernel", "mla_part_kernel", "mla_combine_kernel", "grouped_product_kernel")
STORED = json.loads((RESULTS / "kernels.json").read_text())
FORWARD = ("chunk_prepare_kernel", "chunk_walk_kernel", "kda_decode_kernel", *OPERATION_FORWARD)
FORWARD += ("depth_read_kernel", "depth_add_kernel", "situ_glu_kernel", "short_conv_kernel")
# Of the tensor cores, by kernel or by case; wgmma where the table says nothing else.
INSTRUCTION = {"kda_decode_kernel": "none", "mla_combine_kernel": "none", "mla_part_kernel": "mma.sync"}
INSTRUCTION |= {"MXFP4 experts, K3, one token": "mma.sync"}  # tiles of 16 rows
SMALL_TILES = ("depth_read_kernel", "depth_read_backward_kernel", "site_gradients_kernel")  # of < 64 rows
INSTRUCTION |= dict.fromkeys(SMALL_TILES, "mma.sync")
INSTRUCTION |= {name: "none" for name in LAYER_FLOPS if name not in INSTRUCTION}  # they stream


def stored_rows(case: str) -> list[dict]:
    return [one for one in STORED["rows"] if one["case"] == case]


@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_for_hopper_as_the_table_says(case: str) -> None:
    """They fit; at K3's shapes nothing is spilled going forward; the committed table is what they are now."""
    launches = launches_of(case)
    found = [row(case, one, "sm_90") for one in launches]
    for one in found:
        assert one["shared"] <= limit("sm_90"), one["kernel"]
        other = INSTRUCTION.get(case, INSTRUCTION.get(one["kernel"]))
        assert one["tensor_core"] == (other or "wgmma"), one["kernel"]
        if "K3" in case and one["kernel"] in FORWARD and not one["keeps"]:
            assert one["spilled"] == 0, one["kernel"]
    assert [one["kernel"] for one in found] == [one["kernel"] for one in stored_rows(case)]
    if triton.__version__ == STORED["versions"]["triton"]:
        assert found == stored_rows(case), "run python -m benchmarks.kernels"


@pytest.mark.skipif(not MORE_TARGETS, reason="EVOLVE_TARGETS names no target")
@pytest.mark.parametrize("target", MORE_TARGETS or ["none"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_for_other_targets(case: str, target: str) -> None:
    for one in launches_of(case):
        assert compile_launch(one, target).shared <= limit(target), one.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", ["sm_90", *MORE_TARGETS])
def test_the_widest_heads_fit_everywhere(target: str, dtype: torch.dtype) -> None:
    """Attention of 256 channels, gradients included; in float32 its tiles are twice as many bytes."""
    widest = AttentionCase(H=1, K=256, V=256, T=64, S=64, backward=True)
    with recorded() as launches:
        widest.call("meta", dtype)()
    assert len(launches) == 3
    for one in launches:
        assert compile_launch(one, target).shared <= limit(target), one.name


def test_the_table_is_rendered_from_the_stored_rows() -> None:
    page = (RESULTS / "kernels.md").read_text()
    assert page.endswith(table(STORED["rows"]))
    assert page.startswith(HEAD.split("\n")[0])


def test_every_kernel_is_compiled() -> None:
    assert {one["kernel"] for one in STORED["rows"]} == set(TARGET)


def test_a_kernel_that_spills_is_seen() -> None:
    """The check itself: K3's walk with 128 columns a program does not fit the registers."""
    walk = next(one for one in launches_of("KDA, K3") if one.name == "chunk_walk_kernel")
    walk.arguments["BV"] = 128
    assert compile_launch(walk, "sm_90").spilled > 0


def test_meta_tensors_are_only_for_recording() -> None:
    with recorded() as launches:
        launch(None, 3, {"x": torch.empty(2, device="meta")}, num_warps=4)
    assert [(one.programs, one.options) for one in launches] == [(3, {"num_warps": 4})]
    x = torch.empty(1, 4, 1, 16, device="meta")
    with pytest.raises(ValueError, match="needs CUDA tensors"):
        chunk_rule(x, x, x)
