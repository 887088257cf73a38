"""Weights in safetensors files: one ``model.safetensors``, or shards with an index that names each tensor's.

A folder is first listed, from the headers alone, so that everything that does not fit is reported before
anything is loaded. Files are memory-mapped and copied from one tensor at a time: the peak is the model and
one tensor, whatever the size of the shards.
"""

import os
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from evolve.checkpoint import INDEX, WEIGHTS, parse_json, some, write_together
from evolve.checks import check_count, require

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its file and its name there; ``dtype`` is ``None`` where PyTorch has none."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the folder by their names, from the files' headers.

    Raises ``ValueError`` that names the file if one is missing or no complete safetensors file, or if the
    index and the shards disagree about what is where.
    """
    index = folder / INDEX
    if not index.is_file():
        require(
            (folder / WEIGHTS).is_file(), f"path_or_name must hold {WEIGHTS} or {INDEX}, {folder} does not"
        )
        return {t.name: t for t in _header(folder / WEIGHTS)}
    both = (folder / WEIGHTS).exists()
    require(not both, f"{folder} holds {WEIGHTS} and {INDEX}: only one of them can be the model")
    promised = _read_index(index)
    found = {}
    for shard in sorted(set(promised.values())):
        file = folder / shard
        require(_is_file(file), f"{index} lists {shard[:200]}, but there is no such file")
        tensors = {t.name: t for t in _header(file)}
        here = {name for name, where in promised.items() if where == shard}
        lacking, extra = sorted(here - tensors.keys()), sorted(tensors.keys() - here)
        require(not lacking, f"{file} lacks what {INDEX} says it holds: {some(lacking)}")
        require(not extra, f"{file} holds what {INDEX} does not list there: {some(extra)}")
        found |= tensors
    return found


def _read_index(index: Path) -> dict[str, str]:
    """The index's map from tensors to shards: plain file names in the same folder, nowhere else."""
    try:
        weight_map = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index with a weight_map: {error}") from error
    plain = isinstance(weight_map, dict) and all(
        isinstance(file, str) and file.endswith(".safetensors") and os.path.basename(file) == file
        for file in weight_map.values()
    )
    require(plain, f"{index}: weight_map must give every tensor a safetensors file beside the index")
    return weight_map


def _is_file(file: Path) -> bool:
    """Links are followed, wherever they lead: the hub's cache consists of them."""
    try:
        return file.is_file()
    except OSError:  # a name that no file can have
        return False


def _header(file: Path) -> list[StoredTensor]:
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, no iterator
            _check_names(file)
            return [
                StoredTensor(file, name, tuple(s.get_shape()), DTYPES.get(s.get_dtype()))
                for name, s in slices.items()
            ]
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a complete safetensors file: {error}") from error


def _check_names(file: Path) -> None:
    """No tensor may have two entries in the header: the library takes the last one without a word."""
    with open(file, "rb") as opened:
        header = opened.read(int.from_bytes(opened.read(8), "little"))  # the library has checked the size
    try:
        parse_json(header)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} has no clear header: {error}") from error


def check_listing(expected: Mapping[str, Tensor], listed: Mapping[str, StoredTensor], source: Path) -> None:
    """Names, shapes and kinds must be those of the model's tensors; every difference is reported at once.

    A kind is floating point of any width, or exactly what the model has.
    """
    shared = [name for name in expected if name in listed]
    shapes = {name: (list(listed[name].shape), list(expected[name].shape)) for name in shared}
    is_float = {name: expected[name].is_floating_point() for name in shared}
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    problems = {
        "missing": [name for name in expected if name not in listed],
        "unexpected": [name for name in listed if name not in expected],
        "wrong shape": [f"{n} is {got}, expected {want}" for n, (got, want) in shapes.items() if got != want],
        "not float": [n for n in shared if is_float[n] and listed[n].dtype not in floats],
        "not whole": [n for n in shared if not is_float[n] and listed[n].dtype != expected[n].dtype],
    }
    report = "; ".join(f"{what}: {some(names)}" for what, names in problems.items() if names)
    require(not report, f"the weights in {source} do not fit the configuration: {report}")


def fill(model: nn.Module, listed: Mapping[str, StoredTensor], device: object) -> nn.Module:
    """Give a model on ``meta`` its weights, shard by shard, each in the dtype that the model has for it.

    ``listed`` maps the model's own names to what was checked before. Its memory is allocated once, and the
    mapped files are copied into it. (Buffers that are not saved would stay empty; no model here has any.)
    """
    model.to_empty(device=device or "cpu")
    by_file: dict[Path, dict[str, dict[str, str]]] = {}
    for name, t in listed.items():
        part, own = _part(name)
        by_file.setdefault(t.file, {}).setdefault(part, {})[own] = t.name
    for file, parts in sorted(by_file.items()):
        with safetensors.safe_open(file, framework="pt") as opened:
            for part, names in parts.items():
                tensors = {own: opened.get_tensor(name) for own, name in names.items()}
                model.get_submodule(part).load_state_dict(tensors, strict=False)
    return model.eval()


def _part(name: str) -> tuple[str, str]:
    """``layers.3`` and the rest of a name, or its first word: a shard need not walk the whole model."""
    steps = name.split(".")
    n = 2 if steps[0] == "layers" else 1
    return ".".join(steps[:n]), ".".join(steps[n:])


@contextmanager
def default_dtype(dtype: torch.dtype):
    """New parameters are in ``dtype``; those that stay in float32 whatever the model's dtype know it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def write_shards(
    folder: str | os.PathLike, config: dict, tensors: Mapping[str, Tensor], max_shard_bytes: int | None
) -> None:
    """Write ``config.json`` and the weights: in one file, or in shards of at most ``max_shard_bytes`` each.

    A tensor that is larger alone gets a shard of its own. The folder gets all files or keeps what it had
    (``checkpoint.write_together``).
    """
    if max_shard_bytes is not None:
        check_count("max_shard_bytes", max_shard_bytes)
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        return write_together(folder, config, {WEIGHTS: tensors})
    weights = dict(zip(_shard_names(len(shards)), shards))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    weight_map = {name: file for file, shard in weights.items() for name in shard}
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_together(folder, config, weights, index)


def _split(tensors: Mapping[str, Tensor], limit: int | None) -> list[dict[str, Tensor]]:
    shards, size = [{}], 0
    for name, t in tensors.items():
        nbytes = t.numel() * t.element_size()
        if limit is not None and shards[-1] and size + nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = t
        size += nbytes
    return shards


def _shard_names(n: int) -> list[str]:
    stem, suffix = WEIGHTS.split(".")
    return [f"{stem}-{i:05d}-of-{n:05d}.{suffix}" for i in range(1, n + 1)]
