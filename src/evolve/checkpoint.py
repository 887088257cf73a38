"""Reading and writing model folders: ``config.json`` beside ``model.safetensors``.

Nothing here executes what it reads. safetensors holds numbers only; the older ``pytorch_model.bin`` is
read with PyTorch's ``weights_only`` unpickler, which refuses everything but tensors. Files are written
to temporary names and renamed, so that a reader never meets half a file, or halves of two models.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from evolve.checks import require

WEIGHTS, PICKLED_WEIGHTS, CONFIG = "model.safetensors", "pytorch_model.bin", "config.json"
INDEX = f"{WEIGHTS}.index.json"
OLD_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def resolve_folder(path_or_name: str | os.PathLike, published: Mapping[str, str]) -> Path:
    """The local folder for a path, or for a published name (``published``: name -> hub repository).

    A name that is no local folder is downloaded from the Hugging Face Hub, and its size printed first;
    this is the only place in the package that uses the network.
    """
    name, folder = os.fspath(path_or_name), Path(path_or_name)
    if name and folder.is_dir():  # Path("") would be the current folder
        return folder
    require(not folder.is_file(), f"path_or_name must be a folder or a published name, got the file {folder}")
    require(
        name in published or name in published.values(),
        f"path_or_name must be an existing folder or one of {sorted(published)}, got {name!r}",
    )
    return _download(published.get(name, name))


def check_target(dtype: torch.dtype | None, device: object) -> None:
    """``dtype`` must be one that a model runs in, ``device`` one that is here; ``None`` leaves it open."""
    usable = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    require(dtype is None or dtype in usable, f"dtype must be one of {usable}, got {dtype!r}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device must be one that is here, got {device!r}: {error}") from error


def read_config(folder: Path) -> dict:
    """The JSON object in ``config.json``."""
    file = folder / CONFIG
    waiting = [part.name for part in _leftovers(folder)]
    stopped = f": a save was stopped there, its files not yet renamed are {some(waiting)}" if waiting else ""
    require(file.is_file(), f"path_or_name must hold {CONFIG}, but {folder} has none{stopped}")
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    require(isinstance(config, dict), f"{file} must hold a JSON object, got {type(config).__name__}")
    return config


def parse_json(text: str | bytes) -> object:
    """JSON in which no object has a name twice: Python would take the last one without a word."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, object]]) -> dict:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"twice in one object: {some(sorted({n for n in names if names.count(n) > 1}))}")
    return unique


def build_config(kind: type, sizes: dict, folder: Path):
    """``kind(**sizes)``; what it refuses is reported with the file's name."""
    with naming(folder / CONFIG):
        return kind(**sizes)


@contextlib.contextmanager
def naming(file: Path):
    """Put the file's name before what is refused in this block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's weight file, on the CPU; safetensors first."""
    file = folder / WEIGHTS
    if file.is_file():
        try:
            return load_file(file)
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a complete safetensors file: {error}") from error
    file = folder / PICKLED_WEIGHTS
    require(
        file.is_file(), f"path_or_name must hold {WEIGHTS} or {PICKLED_WEIGHTS}, but {folder} has neither"
    )
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or unsafe pickle
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file} cannot be read safely: {reason}") from error
    plain = isinstance(tensors, dict) and all(
        isinstance(name, str) and isinstance(t, Tensor) and t.layout == torch.strided and not t.is_meta
        for name, t in tensors.items()
    )
    require(plain, f"{file} must hold a dictionary of names and ordinary tensors")
    return {name: t.clone() for name, t in tensors.items()}  # entries of a pickle may share memory


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], source: Path
) -> None:
    """Names and shapes must be the expected ones; every difference is reported at once."""
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    misfits = [
        f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != tuple(shape)
    ]
    whole = [name for name, t in tensors.items() if name in expected and not t.is_floating_point()]
    problems = [
        ("missing", missing),
        ("unexpected", unexpected),
        ("wrong shape", misfits),
        ("not float", whole),
    ]
    report = "; ".join(f"{what}: {some(names)}" for what, names in problems if names)
    require(not report, f"the weights in {source} do not fit the configuration: {report}")


def load_model(build: Callable[[], nn.Module], tensors: dict[str, Tensor], dtype, device) -> nn.Module:
    """Build the model without allocating its weights, then give it ``tensors`` (already checked)."""
    with torch.device("meta"):
        model = build()
    tensors = {name: t.to(device=device, dtype=dtype).contiguous() for name, t in tensors.items()}
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(True).eval()


def write_folder(folder: str | os.PathLike, config: dict, tensors: dict[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors`` into ``folder`` (made if absent), both or neither."""
    write_together(folder, config, {WEIGHTS: tensors})


def write_together(
    folder: str | os.PathLike,
    config: dict,
    weights: Mapping[str, Mapping[str, Tensor]],
    index: dict | None = None,
) -> None:
    """Write a model's files into ``folder`` (made if absent): all of them, or none.

    ``weights`` maps file names to tensors. Everything is first written under temporary names, so that a full
    disk or a kill leaves the model that was there as it was. Then the old ``config.json`` goes, the new files
    take their names, and the configuration comes last: who is stopped in between leaves a folder that nobody
    loads, and not a mixture of two models. Weights under other names, of the model before, are removed.
    From then on nothing that was written is removed again, whatever happens: it is all that there is. What a
    save that was stopped has left, the next one that succeeds removes.
    """
    name, folder = os.fspath(folder), Path(folder)
    require(bool(name), "dir must name a folder, got an empty path")
    require(not folder.exists() or folder.is_dir(), f"dir must be a folder, got the file {folder}")
    for part in (*weights, INDEX, CONFIG):
        require(not (folder / part).is_dir(), f"dir must hold a file {part}, but {folder / part} is a folder")
    empty = any(t.is_meta for tensors in weights.values() for t in tensors.values())
    require(not empty, "the model has no weights to save (meta device)")
    texts = {INDEX: as_json(index)} if index is not None else {}
    texts[CONFIG] = as_json(config)
    folder.mkdir(parents=True, exist_ok=True)
    staged: dict[str, Path] = {}
    swapping = False
    try:
        for part in (*weights, *texts):
            staged[part] = temporary = _temporary(folder / part)
            if part in texts:
                temporary.write_text(texts[part], encoding="utf-8")
            else:
                save_file(_apart(weights[part]), temporary, metadata={"format": "pt"})
            _make_readable(temporary)
        swapping = True
        (folder / CONFIG).unlink(missing_ok=True)
        for old in folder.glob(f"{Path(WEIGHTS).stem}*"):
            if OLD_WEIGHTS.fullmatch(old.name) and old.name not in staged:
                old.unlink()
        for part, temporary in staged.items():  # the configuration is the last of them
            os.replace(temporary, folder / part)
        for leftover in _leftovers(folder):
            leftover.unlink(missing_ok=True)
    finally:
        for temporary in () if swapping else staged.values():
            temporary.unlink(missing_ok=True)


def _leftovers(folder: Path) -> list[Path]:
    """Files under temporary names, of a save that was stopped."""
    return sorted(f for stem in (Path(WEIGHTS).stem, CONFIG) for f in folder.glob(f".{stem}*.tmp"))


def as_json(content: dict) -> str:
    """The text of a JSON file. Raises ``ValueError`` for what JSON cannot say, infinity and nan included."""
    try:
        return json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"the configuration must be plain numbers, strings and lists: {error}") from error


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors takes them: on the CPU, whole, and none sharing memory with another."""
    apart, seen = {}, set()
    for name, t in tensors.items():
        t = t.detach().cpu().contiguous()
        storage = t.untyped_storage().data_ptr()
        apart[name] = t.clone() if storage in seen else t
        seen.add(storage)
    return apart


@contextlib.contextmanager
def replacing(target: Path):
    """A temporary file beside ``target`` that takes its place if the block succeeds, and else vanishes.

    A process that is killed meanwhile leaves it behind, as ``.NAME.*.tmp``; ``target`` stays as it was.
    """
    temporary = _temporary(target)
    try:
        yield temporary
        _make_readable(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(target: Path) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(handle)
    return Path(name)


def _make_readable(file: Path) -> None:
    """On the disk for good, and with the permissions of any new file."""
    with open(file, "rb") as written:
        os.fsync(written.fileno())
    os.chmod(file, 0o666 & ~_umask())


def load_tokenizer(path_or_name: str | os.PathLike, published: Mapping[str, str]):
    """The folder's byte-pair tokenizer (``tokenizer.json``, or ``vocab.json`` with ``merges.txt``).

    Needs the ``tokenizers`` package (``pip install evolve-k3[hub]``).
    """
    tokenizers = _optional("tokenizers")
    folder = resolve_folder(path_or_name, published)
    file, vocab, merges = folder / "tokenizer.json", folder / "vocab.json", folder / "merges.txt"
    found = file.is_file() or (vocab.is_file() and merges.is_file())
    require(
        found, f"path_or_name must hold tokenizer.json, or vocab.json and merges.txt, but {folder} does not"
    )
    try:
        if file.is_file():
            return tokenizers.Tokenizer.from_file(str(file))
        return tokenizers.ByteLevelBPETokenizer(str(vocab), str(merges))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error


def _download(repository: str) -> Path:
    hub = _optional("huggingface_hub")
    size = hub.get_hf_file_metadata(hub.hf_hub_url(repository, WEIGHTS)).size
    print(f"{repository}: downloading {WEIGHTS} ({size / 1e6:,.0f} MB) from the Hugging Face Hub, once")
    files = [CONFIG, WEIGHTS, "tokenizer.json"]
    return Path(hub.snapshot_download(repository, allow_patterns=files))


def _optional(module: str):
    try:
        return __import__(module)
    except ImportError as error:
        raise ImportError(f"this needs {module}: pip install 'evolve-k3[hub]'") from error


def some(names: list[str], limit: int = 40) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
