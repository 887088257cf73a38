"""evolve: from GPT-2 to Kimi K3, one memory at a time.

One module a rung (``evolve.full_attention`` ... ``evolve.k3``), shared parts beside them, the
instruments in ``evolve.lab``. Importing this package needs PyTorch and nothing else: no Triton, no GPU,
no matplotlib.
"""

from evolve.full_attention import GPT2, GPT2Config
from evolve.generation import generate

__version__ = "0.1.0"
__all__ = ["GPT2", "GPT2Config", "generate"]
