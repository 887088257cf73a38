"""How stored results become tables: what each table and each column is, and in which order columns stand.

A reader on a phone sees two or three columns at first, so a row's name and its result come before all else.
"""

from typing import NamedTuple


class Column(NamedTuple):
    """A column's heading, and its meaning where the heading does not say it all."""

    heading: str
    meaning: str = ""


PEER_TIME = "for the peer's code on the same input, in turns with ours"
COLUMNS = {
    # what the row is about
    "ours": Column("function"),
    "function": Column("function"),
    "name": Column("what is read"),
    "what": Column("what"),
    "case": Column("case", "the operation, at whose sizes"),
    "kernel": Column("kernel"),
    "prompt": Column("prompt", "tokens read before the first is decoded"),
    "context": Column("context", "tokens before the one that is decoded"),
    # the result
    "ratio": Column("ratio", "the peer's time over ours, the median of runs in turns; above 1: faster"),
    "prefill_ratio": Column("ratio, prompt", "the peer's time over ours for the whole prompt"),
    "decode_ratio": Column("ratio, one token", "the same for one decoded token"),
    "us": Column("µs", "microseconds for one token"),
    "MiB": Column("MiB", "a process's highest memory use, less that of one that only makes the inputs"),
    "float64": Column("difference in float64", "the largest |ours − stored| over the largest |stored|"),
    "float32": Column("difference in float32", "the same with inputs and weights in float32"),
    "difference": Column("largest difference", "of any two numbers of the two outputs, in float32"),
    "bound_us": Column("bound, µs", "the least time in which an H200 moves the bytes or does the products"),
    # what it was compared with and where
    "peer": Column("peer"),
    "against": Column("against"),
    "at": Column("at"),
    "expert_size": Column("expert size", "hidden width of an expert"),
    "T": Column("T", "tokens"),
    "K": Column("K", "channels of a key and of a value"),
    "gate": Column("gate", "bounded: log-decays from −5 to 0, as in K3; unbounded: some far below"),
    # details
    "ms": Column("ours, ms", "milliseconds, forward and backward"),
    "peer_ms": Column("peer, ms", PEER_TIME),
    "plain_ms": Column("plain, ms", "every site reads all earlier outputs"),
    "two_phase_ms": Column("two phases, ms", "a block's reads of finished blocks are made at once"),
    "prefill_ms": Column("ours, prompt, ms"),
    "peer_prefill_ms": Column("peer, prompt, ms"),
    "decode_ms": Column("ours, token, ms"),
    "peer_decode_ms": Column("peer, token, ms"),
    "operations": Column("operations", "of PyTorch, counted"),
    "bytes_touched": Column("bytes touched", "read or written by them"),
    "cache_bytes": Column("cache, bytes", "kept for the next token"),
    "bound_by": Column("bound by", "which of the two takes longer"),
    "target": Column("to reach", "the share of the bound that a measurement has to show"),
    "keeps": Column("for backward", "whether it stores what the backward pass needs"),
    "programs": Column("programs", "launched at once"),
    "warps": Column("warps", "in each program"),
    "registers": Column("registers", "of a thread; 255 is all there are"),
    "spilled": Column("spilled", "bytes of a thread that found no register"),
    "shared": Column("shared", "bytes of shared memory of a program"),
    "tensor_core": Column("products by", "the matrix instruction"),
    "megabytes": Column("MB", "every tensor of the launch, moved once"),
    "gigaflops": Column("GFLOP", "of products"),
    "file": Column("file", "under `tests/goldens/`"),
    "tensors": Column("tensors"),
}  # fmt: skip


SECTIONS = {"kimi_linear": "Kimi Linear", "moe": "Mixture of experts"}  # others are called as their file


class About(NamedTuple):
    """A table's title and what it shows."""

    title: str
    text: str


TABLES = {
    ("attention_residuals", "rows"): About(
        "Reading along depth in two phases, beside the plain form",
        "The peer is our own plain form; the ratio is its time over that of the two phases.",
    ),
    ("kernels", "rows"): About(
        "The Triton kernels as compiled for an H200",
        "Registers, spills and shared memory are the compiler's. No ratio, as nobody has run them on "
        "a GPU: the table says what a measurement will be held against.",
    ),
    ("kimi_linear", "rows"): About(
        "Kimi Linear at eight layers, beside transformers",
        "Same weights; a prompt is read at once, then one token is decoded.",
    ),
    ("memory_rules", "forward_backward"): About(
        "Chunked memory rules, forward and backward",
        "Where the peer is ours too, two rules compute different things: their outputs are not compared, and "
        "the ratio says what the simpler rule saves.",
    ),
    ("memory_rules", "peak_memory"): About(
        "Peak memory of forward and backward", "Less is better; each row in a process of its own."
    ),
    ("memory_rules", "decode"): About(
        "One decoded token of a small KDA model, after a longer and longer text",
        "A state of fixed size: everything that is counted is the same in every row.",
    ),
    ("moe", "rows"): About(
        "64 experts of which a token visits 4, beside transformers",
        "Eager is a loop over experts, grouped_mm one grouped product; alone, and in a layer with a router.",
    ),
}  # fmt: skip


def shown(value: object) -> str:
    """A value of a result as a cell of a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value and abs(value) < 1e-3:
            return f"{value:.1e}"
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def heading(key: str) -> str:
    return COLUMNS[key].heading if key in COLUMNS else key.replace("_", " ")


def ordered(rows: list[dict]) -> list[str]:
    """The keys of the rows in the order of ``COLUMNS``; the others, as they come, at the end."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in COLUMNS if key in keys] + [key for key in keys if key not in COLUMNS]


def legend(keys: list[str]) -> str:
    """What the columns mean, in one paragraph."""
    meant = [f"**{heading(k)}**: {COLUMNS[k].meaning}" for k in keys if k in COLUMNS and COLUMNS[k].meaning]
    return "; ".join(meant) + "." if meant else ""


def table(title: str, rows: list[dict]) -> str:
    """Rows as a Markdown table with a caption; a key that a row lacks is an empty cell."""
    keys = ordered(rows)
    numeric = [all(type(r.get(k, 0)) in (int, float) for r in rows) for k in keys]
    lines = ["| " + " | ".join(map(heading, keys)) + " |"]
    lines.append("|" + "|".join("--:" if n else "---" for n in numeric) + "|")
    lines += ["| " + " | ".join(shown(r[k]) if k in r else "" for k in keys) + " |" for r in rows]
    return "\n".join([f":::{{table}} {title}", ":class: measured", "", *lines, ":::"])


def explained(title: str, text: str, rows: list[dict]) -> str:
    """The text, what the columns mean, and the table: all that a reader needs, before it."""
    parts = [text, f"```{{rst-class}} legend\n{legend(ordered(rows))}\n```", table(title, rows)]
    return "\n\n".join(parts) + "\n"
