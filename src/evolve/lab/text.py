"""Real text that is on every machine: the sources of Python's standard library, as bytes.

Nothing is downloaded and nothing is redistributed. The text also suits the question of this series: names
are defined once and used far below, and a function's locals should be forgotten at its end. A byte is a
token (vocabulary 256). The text differs a little between Python versions, so numbers computed from it do.

Training and validation never share a file (or, for a reader's own file, a byte).
"""

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from evolve.checks import check_count, check_shape, require
from evolve.lab.seeds import generator
from evolve.lab.tasks import Batch

VOCAB_SIZE = 256

# One plain file each in Python 3.11, 3.12, 3.13 and 3.14; the order is part of the data set.
TRAINING_MODULES = tuple(
    """
    argparse ast asyncio/base_events asyncio/streams asyncio/tasks bdb calendar cmd codecs
    collections/__init__ configparser contextlib copy csv difflib dis doctest email/header email/message
    enum filecmp fileinput fractions ftplib functools getopt gettext gzip heapq html/parser http/client
    http/cookiejar http/server imaplib inspect ipaddress json/decoder json/encoder linecache locale
    logging/__init__ logging/handlers mailbox mimetypes ntpath numbers optparse os pdb pickle pickletools
    platform plistlib poplib posixpath pprint queue random sched selectors shelve shlex shutil smtplib socket
    socketserver ssl subprocess tarfile tempfile textwrap threading timeit tokenize trace traceback types
    typing unittest/case unittest/mock urllib/parse urllib/request uuid wave xml/dom/minidom
    xml/etree/ElementTree xmlrpc/client _pydecimal
    """.split()
)
VALIDATION_MODULES = tuple("dataclasses hashlib profile pstats statistics unittest/loader weakref".split())


@dataclass(frozen=True)
class Corpus:
    """Two disjoint texts as bytes: training and validation, each [bytes] uint8."""

    name: str
    training: Tensor
    validation: Tensor

    @property
    def nbytes(self) -> int:
        """Size of both texts together, in bytes."""
        return self.training.numel() + self.validation.numel()

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.training.numel():,} bytes to train on, "
            f"{self.validation.numel():,} held out for validation"
        )


def standard_library(folder: str | os.PathLike | None = None) -> Corpus:
    """The fixed modules of the standard library (of ``folder``, if another one is meant), whole files.

    Raises ``ValueError`` naming the folder and the files that are not there.
    """
    folder = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    paths = [folder / f"{name}.py" for name in TRAINING_MODULES + VALIDATION_MODULES]
    missing = [path.relative_to(folder).as_posix() for path in paths if not path.is_file()]
    require(not missing, f"folder must hold Python's standard library, but {folder} lacks {missing}")
    n = len(TRAINING_MODULES)
    return Corpus("Python standard library", _read(paths[:n]), _read(paths[n:]))


def text_file(path: str | os.PathLike, *, validation_share: float = 0.1) -> Corpus:
    """Any file as a corpus; its last ``validation_share`` (0 < share < 1) is held out in one piece.

    Raises ``ValueError`` for a missing file and for one too short to be split.
    """
    in_range = isinstance(validation_share, int | float) and 0 < validation_share < 1
    require(in_range, f"validation_share must lie between 0 and 1, got {validation_share!r}")
    path = Path(path)
    require(path.is_file(), f"path must be a readable file, got {str(path)!r}")
    text = _read([path])
    held_out = round(len(text) * validation_share)
    fits = 0 < held_out < len(text)
    require(fits, f"{str(path)!r} has {len(text)} bytes: too few to hold out a share of {validation_share}")
    return Corpus(path.name, text[:-held_out], text[-held_out:])


def documentation() -> Corpus:
    """The topics that Python's ``help()`` explains: English about Python, with examples. A tenth is held out.

    Another kind of text than ``standard_library``, on the same machines. It changes more between versions.
    """
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    held_out = len(text) // 10
    return Corpus(
        "Python's documentation", *torch.tensor(list(text), dtype=torch.uint8).tensor_split([-held_out])
    )


@dataclass(frozen=True)
class TextBatches:
    """Random blocks of a text: ``batches(n)`` is batch n, a function of the fields and of n alone.

    text [bytes] uint8. Targets are the inputs one byte later, so a block takes block_size + 1 bytes.
    Raises ``ValueError`` if the text is shorter than that.
    """

    text: Tensor
    block_size: int = 256  # T, tokens in a sequence
    batch_size: int = 16  # B
    seed: int = 0

    def __post_init__(self) -> None:
        check_shape("text", self.text, bytes=None)
        require(self.text.dtype == torch.uint8, f"text must be uint8, got {self.text.dtype}")
        for name, least in (("block_size", 1), ("batch_size", 1), ("seed", 0)):
            check_count(name, getattr(self, name), least)
        size, need = self.text.numel(), self.block_size + 1
        require(size >= need, f"text must have at least block_size + 1 = {need} bytes, got {size}")

    def __call__(self, n: int) -> Batch:
        """Batch ``n``: input_ids and targets, [B, T]."""
        check_count("n", n, 0)
        choices = self.text.numel() - self.block_size
        start = torch.randint(choices, (self.batch_size, 1), generator=generator(self.seed, n))
        blocks = self.text[start + torch.arange(self.block_size + 1)].long()  # [B, T + 1]
        return Batch(blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous())


def encode(text: str) -> Tensor:
    """Text to byte tokens, [1, bytes] int64, as models take them."""
    return torch.tensor([list(text.encode())], dtype=torch.int64)


def decode(ids: Tensor) -> str:
    """Byte tokens [bytes] back to text; bytes that are not UTF-8 show as the replacement character."""
    check_shape("ids", ids, bytes=None)
    valid = bool(((ids >= 0) & (ids < VOCAB_SIZE)).all())
    require(valid, f"ids must be bytes in [0, {VOCAB_SIZE}), got others")
    return bytes(ids.tolist()).decode(errors="replace")


def _read(paths: list[Path]) -> Tensor:
    # Line ends are made equal, or a Windows checkout would be another text.
    text = b"".join(path.read_bytes() for path in paths).replace(b"\r\n", b"\n")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
