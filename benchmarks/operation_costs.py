"""Attention and expert kernels: FLOPs from the arguments of their launches; what to reach of the bounds."""

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


def expert_counts(a: Arguments) -> list[int]:
    """Rows of each expert; as even as can be where the launch was only recorded."""
    S, E = len(a["x"]), len(a["ends"] if "ends" in a else a["w"])
    known = a.get("ends", a.get("table"))
    if known.is_meta:
        return [S // E + (e < S % E) for e in range(E)]
    if "ends" in a:
        return known.diff(prepend=known.new_zeros(1)).tolist()
    return known.new_zeros(E).index_add(0, known[:, 0], known[:, 2]).tolist()


def grouped_product_flops(a: Arguments) -> int:
    N, K = (a["I"], a["O"]) if a["ACROSS"] else (a["O"], a["I"])
    rows = a["BM"] * sum(tiles(n, a["BM"]) for n in expert_counts(a))
    return 2 * rows * tiles(N, a["BN"]) * a["BN"] * tiles(K, a["BK"]) * a["BK"]


def weight_gradient_flops(a: Arguments) -> int:
    rows = a["BR"] * sum(tiles(n, a["BR"]) for n in expert_counts(a))
    return 2 * rows * tiles(a["O"], a["BO"]) * a["BO"] * tiles(a["I"], a["BI"]) * a["BI"]


def idle_bytes(a: Arguments) -> int:
    """Bytes of the matrices of experts that no row goes to: nobody reads them."""
    counts = expert_counts(a)
    return sum(a[n].nbytes // len(counts) * counts.count(0) for n in ("w", "scale") if a[n] is not None)


UNREAD_BYTES: dict[str, Callable[[Arguments], int]] = {"grouped_product_kernel": idle_bytes}

OPERATION_FLOPS: dict[str, Callable[[Arguments], int]] = {
    "attention_kernel": lambda a: attention_pairs(a) * 2 * (a["BK"] + a["BV"]),
    "query_gradient_kernel": lambda a: attention_pairs(a) * 2 * (2 * a["BK"] + a["BV"]),
    "key_gradients_kernel": lambda a: attention_pairs_by_key(a) * 2 * 2 * (a["BK"] + a["BV"]),
    "mla_part_kernel": lambda a: (
        latent_tiles(a) * 2 * a["BM"] * a["BS"] * (2 * a["BR"] + (a["BKR"] if a["KR"] else 0))
    ),
    "mla_combine_kernel": lambda a: 0,  # no products
    "grouped_product_kernel": grouped_product_flops,
    "weight_gradient_kernel": weight_gradient_flops,
}

OPERATION_TARGET = {
    "attention_kernel": 0.4,
    "query_gradient_kernel": 0.3,
    "key_gradients_kernel": 0.3,
    "mla_part_kernel": 0.5,
    "mla_combine_kernel": 0.3,
    "grouped_product_kernel": 0.5,
    "weight_gradient_kernel": 0.4,
}
