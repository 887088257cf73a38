"""Every Triton kernel compiled at Kimi K3's shapes, without a GPU: registers, spills, shared memory.

What is compiled is what a call launches: the wrappers run on ``meta`` tensors, and the launches are
recorded with their arguments. Beside each launch stand its bytes and FLOPs and the time below which an H200
cannot get.

    python -m benchmarks.kernels                      sm_90 into results/kernels.json and kernels.md
    python -m benchmarks.kernels sm_80 sm_100 gfx942  these targets, printed only
"""

import argparse
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from benchmarks.kernel_cases import CASES, launches_of
from benchmarks.roofline import Cost, cost
from evolve_kernels.launch import Launch

RESULTS = Path(__file__).parent / "results"

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 166_912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232_448),
    "sm_100": (GPUTarget("cuda", 100, 32), 232_448),
    "sm_120": (GPUTarget("cuda", 120, 32), 101_376),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65_536),
}  # and the shared memory that one program may take there
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
         torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8"}  # fmt: skip
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one launch."""

    registers: int | None  # per thread; None where the target's tools do not come with Triton
    spilled: int | None  # bytes per thread, stores and loads
    shared: int  # bytes per program
    tensor_core: str  # the kind of matrix instruction found, or "none"


def signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple, list]]:
    """Types, constants and alignment, as a real launch would derive them."""
    types, constants, aligned = {}, {}, {}
    for index, (name, parameter) in enumerate(zip(launch.kernel.arg_names, launch.kernel.params)):
        value = launch.arguments[name]
        if parameter.is_constexpr or value is None:
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            types[name] = TYPES[value.dtype]
            aligned[(index,)] = [["tt.divisibility", 16]]  # PyTorch allocates at multiples of 256 bytes
        else:
            types[name] = "fp32" if isinstance(value, float) else "i32"
    return types, constants, aligned


def limit(target: str) -> int:
    """Bytes of shared memory that one program may take."""
    return TARGETS[target][1]


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile one recorded launch to machine code for ``target``."""
    if target.startswith("gfx"):  # as ``evolve_kernels.launch.precision`` has it there
        exact = {"PRECISION": "ieee"} if "PRECISION" in launch.arguments else {}
        launch = replace(launch, arguments=launch.arguments | exact)
    types, constants, aligned = signature(launch)
    source = triton.compiler.ASTSource(fn=launch.kernel, signature=types, constexprs=constants, attrs=aligned)
    gpu, _ = TARGETS[target]
    code = triton.compile(source, target=gpu, options=launch.options)
    if gpu.backend != "cuda":
        kinds = re.findall(r"v_mfma", code.asm["amdgcn"])
        registers = re.search(r"\.vgpr_count:\s+(\d+)", code.asm["amdgcn"])
        spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", code.asm["amdgcn"])
        spilled = 4 * int(spilled[1]) if spilled else None
        registers = int(registers[1]) if registers else None
        return Compiled(registers, spilled, code.metadata.shared, kinds[0] if kinds else "none")
    kinds = re.findall(r"\b(wgmma|tcgen05\.mma|mma\.sync)", code.asm["ptx"])
    registers, spilled = resources(code.asm["ptx"], target)
    return Compiled(registers, spilled, code.metadata.shared, kinds[0] if kinds else "none")


def resources(ptx: str, target: str) -> tuple[int, int]:
    """Registers a thread and bytes spilled (stores and loads), as ``ptxas -v`` reports them."""
    arch = re.search(r"\.target (\w+)", ptx)[1]
    tool = TOOLS / ("ptxas-blackwell" if target in ("sm_100", "sm_120") else "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [tool, "-v", f"--gpu-name={arch}", str(path), "-o", str(Path(folder, "kernel.cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return int(re.search(r"Used (\d+) registers", said)[1]), int(spills[1]) + int(spills[2])


def row(case: str, launch: Launch, target: str) -> dict[str, Any]:
    """One line of the table."""
    compiled, needs = compile_launch(launch, target), cost(launch)
    return {
        "case": case,
        "kernel": launch.name,
        "keeps": bool(launch.arguments.get("KEEP") or launch.arguments.get("KEEP_INVERSE")),
        "programs": launch.programs,
        "warps": launch.options["num_warps"],
        **vars(compiled),
        "megabytes": round(needs.bytes / 1e6, 1),
        "gigaflops": round(needs.flops / 1e9, 1),
        "bound_us": round(needs.bound_us, 1),
        "bound_by": needs.bound_by,
        "target": needs.target,
    }


def rows(target: str, cases: tuple[str, ...] = tuple(CASES)) -> list[dict[str, Any]]:
    return [row(case, launch, target) for case in cases for launch in launches_of(case)]


COLUMNS = {
    "case": "case",
    "kernel": "kernel",
    "programs": "programs",
    "warps": "warps",
    "registers": "registers a thread",
    "spilled": "bytes spilled a thread",
    "shared": "shared memory, bytes",
    "tensor_core": "matrix instruction",
    "megabytes": "MB",
    "gigaflops": "GFLOP",
    "bound_us": "bound, µs",
    "bound_by": "bound by",
    "target": "to reach of it",
}


def table(found: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [" | ".join(COLUMNS.values()), "|".join("---" for _ in COLUMNS)]
    for one in found:
        cells = {name: "–" if one[name] is None else f"{one[name]}" for name in COLUMNS}
        cells["kernel"] = f"`{one['kernel']}`" + (", for backward" if one["keeps"] else "")
        cells["target"] = f"{one['target']:.0%}"
        lines.append(" | ".join(cells.values()))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


HEAD = """# The kernels, compiled

Written by `python -m benchmarks.kernels` ({versions}); nothing here is measured. Registers, spills and shared
memory are the compiler's for sm_90. The bound is the time in which an H200 could move every tensor of the
launch once ({bandwidth:.1f} TB/s) or do its products ({tf32:.0f} TFLOP/s in TF32, which the memory rules
use, {bf16:.0f} in bfloat16, which attention and experts use), whichever is longer; "to
reach of it" is what a measurement has to show. B = 1 row of {tokens} tokens, bfloat16; one token for the
decode step.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], help="default: sm_90, stored")
    targets = parser.parse_args().targets
    for target in targets:
        print(f"{target}\n{table(rows(target))}", flush=True)
    if targets:
        return
    versions = {"triton": triton.__version__, "torch": torch.__version__.split("+")[0]}
    found = rows("sm_90")
    stored = {"command": "python -m benchmarks.kernels", "versions": versions, "target": "sm_90"}
    (RESULTS / "kernels.json").write_text(json.dumps(stored | {"rows": found}, indent=1) + "\n")
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    rates = {"bandwidth": Cost.BANDWIDTH / 1e12, "tf32": Cost.TF32 / 1e12, "bf16": Cost.BF16 / 1e12}
    head = HEAD.format(versions=said, tokens=CASES["KDA, K3"].T, **rates)
    (RESULTS / "kernels.md").write_text(head + table(found))
    print(table(found))


if __name__ == "__main__":
    main()
