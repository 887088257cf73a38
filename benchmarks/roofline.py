"""What a launch must move and compute, from its own arguments, and the time below which an H200 cannot get.

Bytes: every tensor that a launch is given, once; a kernel takes no tensor that it does not use, and what it
reads twice it finds in the L2 cache. FLOPs: 2·M·N·K of every ``tl.dot``, as the kernels' loops have them, on
padded tiles. Matrices of experts without rows are not read. Tests count both again while the interpreter runs
the kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from benchmarks.layer_costs import LAYER_FLOPS, LAYER_TARGET
from benchmarks.operation_costs import OPERATION_FLOPS, OPERATION_TARGET, UNREAD_BYTES
from evolve_kernels.launch import Launch

# What a measurement has to show of the bound: kernels that only stream get close, the walk waits for itself.
TARGET = {
    "kda_decode_kernel": 0.7,
    "chunk_prepare_kernel": 0.5,
    "chunk_walk_kernel": 0.4,
    "chunk_walk_backward_kernel": 0.4,
    "state_gradients_kernel": 0.6,
    "chunk_prepare_backward_kernel": 0.3,
} | OPERATION_TARGET
TARGET |= LAYER_TARGET


@dataclass(frozen=True)
class Cost:
    """Bytes and FLOPs of one launch, and how many TF32 products take as long as one of them."""

    BANDWIDTH: ClassVar[float] = 4.8e12  # bytes/s, HBM3e of an H200
    TF32: ClassVar[float] = 495e12  # FLOP/s, dense
    BF16: ClassVar[float] = 989e12

    bytes: int
    flops: int
    products: float  # 3 where three stand for one; half a one, nearly, on bfloat16 tiles
    target: float

    @property
    def memory_us(self) -> float:
        return self.bytes / self.BANDWIDTH * 1e6

    @property
    def compute_us(self) -> float:
        return self.flops * self.products / self.TF32 * 1e6

    @property
    def bound_us(self) -> float:
        return max(self.memory_us, self.compute_us)

    @property
    def bound_by(self) -> str:
        return "memory" if self.memory_us >= self.compute_us else "products"


def padded(a: dict[str, Any]) -> tuple[int, int]:
    """K and V rounded up to whole tiles."""
    return -(-a["K"] // a["BK"]) * a["BK"], -(-a["V"] // a["BV"]) * a["BV"]


def products_of_keys(a: dict[str, Any]) -> int:
    """How many [C, K]·[K, C] products each of k·k and q·k takes: one a level, and one for the tiles."""
    return a["LEVELS"] + (a["FIRST"] > 1) if a["GATE"] == "channel" else 1


def prepare_flops(a: dict[str, Any], chunks: int) -> int:
    (K, V), C, erase = padded(a), a["C"], a["ERASE"]
    both = 2 if erase or a["GATE"] == "channel" else 1
    flops = both * products_of_keys(a) * 2 * C * C * K
    if erase:
        inverse = 2 * (a["LOG_C"] - 1) + (2 if a["PRECISION"] == "tf32" else 0)
        flops += inverse * 2 * C**3 + 2 * C * C * (K + V)
    return chunks * a["HV"] * flops


def walk_flops(a: dict[str, Any], chunks: int) -> int:
    (K, V), C = padded(a), a["C"]
    flops = (1 + a["ERASE"]) * 2 * C * K * V
    if not a["KEEP"]:
        flops += 2 * C * V * (K + C)
    return chunks * a["HV"] * flops


def walk_backward_flops(a: dict[str, Any], chunks: int) -> int:
    (K, V), C = padded(a), a["C"]
    return chunks * a["HV"] * 2 * C * V * (C + (2 + a["ERASE"]) * K)


def state_gradients_flops(a: dict[str, Any], chunks: int) -> int:
    K, V = padded(a)
    return chunks * a["HV"] * (2 + a["ERASE"]) * 2 * a["C"] * K * V


def prepare_backward_flops(a: dict[str, Any], chunks: int) -> int:
    (K, V), C, erase = padded(a), a["C"], a["ERASE"]
    flops = (1 + 2 * erase) * 2 * C * C * V + 4 * products_of_keys(a) * 2 * C * C * K
    if erase:
        flops += 2 * 2 * C * C * K + 2 * 2 * C**3
    return chunks * a["HV"] * flops


def decode_flops(a: dict[str, Any], rows: int) -> int:
    """Decay, two reads and a write of the state, multiplied and added one number at a time: no ``tl.dot``."""
    return rows * a["HV"] * 7 * a["K"] * a["V"]


FLOPS: dict[str, Callable[[dict[str, Any], int], int]] = {
    "chunk_prepare_kernel": prepare_flops,
    "chunk_walk_kernel": walk_flops,
    "chunk_walk_backward_kernel": walk_backward_flops,
    "state_gradients_kernel": state_gradients_flops,
    "chunk_prepare_backward_kernel": prepare_backward_flops,
    "kda_decode_kernel": decode_flops,
}


def products_of(a: dict[str, Any]) -> float:
    """How many TF32 products take as long as one of the launch's."""
    if getattr(a.get("OPERAND"), "primitive_bitwidth", 32) == 16:
        return Cost.TF32 / Cost.BF16
    return 3 if a.get("PRECISION") == "tf32x3" else 1


def cost(launch: Launch) -> Cost:
    """Bytes and FLOPs of a recorded launch."""
    a = launch.arguments
    tensors = {name: x for name, x in a.items() if isinstance(x, Tensor)}
    moved = sum(x.numel() * x.element_size() for x in tensors.values())
    if launch.name in LAYER_FLOPS:
        return Cost(moved, LAYER_FLOPS[launch.name](a), products_of(a), TARGET[launch.name])
    if launch.name in UNREAD_BYTES:
        moved -= UNREAD_BYTES[launch.name](a)
    if launch.name in OPERATION_FLOPS:
        return Cost(moved, OPERATION_FLOPS[launch.name](a), products_of(a), TARGET[launch.name])
    # the number of chunks, or of rows in a decode step, is the first axis of what every rule stores per chunk
    per_chunk = next((tensors[n] for n in ("a_q", "states", "inverse", "state") if n in tensors), None)
    units = len(per_chunk) if per_chunk is not None else len(tensors["chunk_rows"])
    return Cost(moved, FLOPS[launch.name](a, units), products_of(a), TARGET[launch.name])
