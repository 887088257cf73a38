"""``benchmarks.gpu`` without a GPU: its message, its cases, and its checks in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

CHECK = """
import dataclasses
from benchmarks import gpu
gpu.CHECKED_TOKENS = 40
small = {"H": 1, "HV": 2, "K": 16, "V": 16}
import torch
for name, case in gpu.CASES.items():
    operation = isinstance(case, gpu.Operation)
    case = case if operation else dataclasses.replace(case, **small)
    errors = gpu.errors_of(case, "cpu", torch.float32)
    assert max(errors.values()) < 1e-5, (name, errors)
    if not operation:
        assert len(errors) == (5 if case.decode else 2 + 6 * case.backward), errors
    else:
        assert (len(errors) > 1) == case.backward, errors
print("right")
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join(str(ROOT / name) for name in ("src", "kernels", "."))
    environment = os.environ | {"PYTHONPATH": path} | environment
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "gpu.json"
    result = run("-m", "benchmarks.gpu", "--out", str(out))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("no CUDA device here: nothing measured, nothing written")
    assert not out.exists()


def test_the_cases_are_listed_and_k3s_shapes_are_among_them() -> None:
    pytest.importorskip("triton")
    result = run("-m", "benchmarks.gpu", "--list")
    assert result.returncode == 0, result.stderr
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    for name in ("KDA, K3", "decode, K3"):
        assert "lower_bound=-5.0, H=96, HV=96, K=128, V=128" in lines[name]


def test_its_checks_pass_in_the_interpreter() -> None:
    """The comparison that a GPU run begins with, on small sizes."""
    pytest.importorskip("triton")
    result = run("-c", CHECK, TRITON_INTERPRET="1")
    assert result.stdout.strip() == "right", result.stderr[-2000:]
