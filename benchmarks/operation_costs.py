"""FLOPs of attention and expert kernels from the arguments of their launches; what to reach of the bounds."""

from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]


def tiles(n: int, side: int) -> int:
    return -(-n // side)


def attention_pairs(a: Arguments) -> int:
    """Pairs of query and key in the tiles that a forward walks over, of all rows and heads."""
    ends = [
        max(a["S"] + min((i + 1) * a["BT"] - a["T"], 0), 0) if a["CAUSAL"] else a["S"]
        for i in range(tiles(a["T"], a["BT"]))
    ]
    return len(a["q"]) * a["HV"] * sum(a["BT"] * a["BS"] * tiles(end, a["BS"]) for end in ends)


def attention_pairs_by_key(a: Arguments) -> int:
    """The same as the tiles of keys see it: their queries begin at a multiple of BT."""
    total = 0
    for i in range(tiles(a["S"], a["BS"])):
        begin = max(i * a["BS"] - (a["S"] - a["T"]), 0) // a["BT"] * a["BT"] if a["CAUSAL"] else 0
        total += a["BT"] * a["BS"] * tiles(max(a["T"] - begin, 0), a["BT"])
    return len(a["q"]) * a["HV"] * total


def latent_tiles(a: Arguments) -> int:
    """Tiles of rows times tiles of latents that all splits walk over."""
    spans = (min((j + 1) * a["span"], a["S"]) - j * a["span"] for j in range(a["splits"]))
    rows = len(a["q"]) * tiles(a["T"] * a["H"], a["BM"])
    return rows * sum(tiles(max(span, 0), a["BS"]) for span in spans)


OPERATION_FLOPS: dict[str, Callable[[Arguments], int]] = {
    "attention_kernel": lambda a: attention_pairs(a) * 2 * (a["BK"] + a["BV"]),
    "query_gradient_kernel": lambda a: attention_pairs(a) * 2 * (2 * a["BK"] + a["BV"]),
    "key_gradients_kernel": lambda a: attention_pairs_by_key(a) * 2 * 2 * (a["BK"] + a["BV"]),
    "mla_part_kernel": lambda a: (
        latent_tiles(a) * 2 * a["BM"] * a["BS"] * (2 * a["BR"] + (a["BKR"] if a["KR"] else 0))
    ),
    "mla_combine_kernel": lambda a: 0,  # no products
}

OPERATION_TARGET = {
    "attention_kernel": 0.4,
    "query_gradient_kernel": 0.3,
    "key_gradients_kernel": 0.3,
    "mla_part_kernel": 0.5,
    "mla_combine_kernel": 0.3,
}
