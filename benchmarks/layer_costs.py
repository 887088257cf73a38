"""FLOPs of the kernels between the large products, and what to reach of their bounds.

FLOPs come from the launches' arguments, and are 0 without a ``tl.dot``: those kernels only stream.
"""

from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]


def depth_product(a: Arguments, rows: int) -> int:
    """One product of sites and ``rows`` sources over the whole width."""
    return 2 * a["SP"] * rows * -(-a["D"] // a["BD"]) * a["BD"]


LAYER_FLOPS: dict[str, Callable[[Arguments], int]] = {
    "depth_read_kernel": lambda a: a["N"] * 2 * depth_product(a, a["MP"]),
    "depth_read_backward_kernel": lambda a: a["N"] * 4 * depth_product(a, a["MP"]),
    "site_gradients_kernel": lambda a: depth_product(a, -(-a["rows"] // a["BR"]) * a["BR"]),
    "depth_add_kernel": lambda a: 0,
    "depth_add_backward_kernel": lambda a: 0,
    "situ_glu_kernel": lambda a: 0,
    "situ_glu_backward_kernel": lambda a: 0,
    "short_conv_kernel": lambda a: 0,
    "short_conv_backward_kernel": lambda a: 0,
}

LAYER_TARGET = {
    "depth_read_kernel": 0.5,
    "depth_read_backward_kernel": 0.4,
    "site_gradients_kernel": 0.4,
    "depth_add_kernel": 0.7,
    "depth_add_backward_kernel": 0.6,
    "situ_glu_kernel": 0.7,
    "situ_glu_backward_kernel": 0.7,
    "short_conv_kernel": 0.7,
    "short_conv_backward_kernel": 0.5,
}
