"""Triton decides once, when imported, whether it interprets kernels: two kinds of test, two processes.

``TRITON_INTERPRET=1 pytest tests/kernels`` runs the kernels on the CPU; without it they are compiled.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = ["test_compiled*.py"] if INTERPRETED else ["test_interpreted*.py"]


@pytest.fixture
def launches(monkeypatch) -> dict[str, int]:
    """How often each kernel has been started, counted in Triton itself: a silent fall-back counts nothing."""
    executor = pytest.importorskip("triton.runtime.interpreter").GridExecutor
    counts, run = {}, executor.__call__

    def counted(self, *args, **kwargs):
        counts[self.fn.__name__] = counts.get(self.fn.__name__, 0) + 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(executor, "__call__", counted)
    return counts


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiles are too small for threads, which only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
