"""Where Triton is not installed: PyTorch runs, and whoever asks for Triton hears what is missing."""

import subprocess
import sys

CODE = """
import sys
sys.modules["triton"] = None  # an import of it fails, as where it is not installed
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else find(name, *a)
import torch
from evolve.kda import chunk_kda
q, g, beta = torch.randn(1, 5, 1, 16), torch.full((1, 5, 1, 16), -0.1), torch.ones(1, 5, 1)
print(chunk_kda(q, q, q, g, beta)[0].shape[1])
try:
    chunk_kda(q, q, q, g, beta, backend="triton")
except ValueError as error:
    print(error)
"""


def test_the_pytorch_form_runs_and_the_message_is_clear() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    length, message = result.stdout.splitlines()
    assert length == "5"
    assert message == (
        'backend "triton" needs Triton, which is not installed (pip install evolve-k3[kernels], Linux only): '
        'backend=None or "torch" runs the PyTorch form'
    )
