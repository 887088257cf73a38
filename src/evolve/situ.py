"""Kimi K3's activation as a module: its two bounds, and the backend that it runs on.

``evolve.moe.situ_glu`` is the function; networks and experts take either.
"""

from torch import Tensor, nn

from evolve.checks import check_float, check_positive, check_shape
from evolve.memory_rule import check_backend, runs_on_triton
from evolve.moe import situ_glu


class SituGLU(nn.Module):
    """(gate, up) -> β tanh(g/β) sigmoid(g) · β' tanh(u/β'), all [..., F]; no parameters.

    Args: beta, linear_beta: β and β', see ``evolve.moe.situ_glu``. backend: ``"torch"``, ``"triton"``, or
        ``None``: one kernel on a GPU where Triton is installed.
    Raises: ValueError on a beta that is not positive, and, when it is called, on shapes that differ.
    """

    def __init__(self, beta: float = 4.0, linear_beta: float = 25.0, *, backend: str | None = None) -> None:
        super().__init__()
        check_positive("beta", beta)
        check_positive("linear_beta", linear_beta)
        check_backend(backend)
        self.beta, self.linear_beta, self.backend = beta, linear_beta, backend

    def extra_repr(self) -> str:
        return f"beta={self.beta}, linear_beta={self.linear_beta}"

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        betas = {"beta": self.beta, "linear_beta": self.linear_beta}
        check_float("gate", gate)
        check_shape("up", up, **{f"axis {i}": n for i, n in enumerate(gate.shape)})
        if runs_on_triton(self.backend, (gate, up)):
            from evolve_kernels.situ_glu import situ_glu as kernel

            return kernel(gate, up, **betas)
        return situ_glu(gate, up, **betas)
