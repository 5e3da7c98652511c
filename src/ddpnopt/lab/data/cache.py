"""The folder of decoded data: written whole or not at all, and checked by SHA-256 whenever it is read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ddpnopt.lab.errors import DataError

CACHE_VARIABLE = "DDPNOPT_CACHE"


def cache_root() -> Path:
    """Where downloads and decoded tensors go: `DDPNOPT_CACHE`, or `~/.cache/ddpnopt`."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "ddpnopt"


def sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class Record:
    """What is known of a decoded set: written next to it, so that later damage is detected."""

    sources: dict[str, str]
    """The SHA-256 of every Parquet file it was decoded from, by path."""
    decoded: str
    """The SHA-256 of the file of tensors."""
    train: int
    test: int
    shape: list[int]
    encodings: list[str]


class DecodedSet:
    """One decoded data set in the cache: `<stem>.pt` with the tensors and `<stem>.json` with the record."""

    def __init__(self, stem: str) -> None:
        self.tensors = cache_root() / "decoded" / f"{stem}.pt"
        self.sidecar = self.tensors.with_suffix(".json")

    def record(self) -> Record | None:
        """The record, or None before the first decoding (the sidecar is written last)."""
        try:
            text = self.sidecar.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            return Record(**json.loads(text))
        except (ValueError, TypeError) as broken:
            raise DataError(f"{self.sidecar} is damaged; delete it to decode the data again") from broken

    def read(self, record: Record) -> dict[str, Tensor]:
        """The tensors, after checking them and every source that still exists against the record."""
        for source, expected in record.sources.items():
            if Path(source).exists() and sha256(Path(source)) != expected:
                raise DataError(
                    f"{source} has changed since it was first decoded (its SHA-256 was {expected[:12]}…); "
                    f"restore it, or delete {self.sidecar} if the change is meant"
                )
        try:
            if sha256(self.tensors) != record.decoded:
                raise DataError(f"{self.tensors} has a wrong SHA-256; delete it to decode the data again")
            loaded: dict[str, Tensor] = torch.load(self.tensors, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as broken:
            raise DataError(f"{self.tensors} cannot be read; delete it to decode the data again") from broken
        return loaded

    def write(self, tensors: dict[str, Tensor], sources: list[Path], shape: list[int], encodings: list[str]) -> Record:
        """Stores the tensors, then the record."""
        # A file object, not a name: torch writes the name into the archive, and the checksum would follow it.
        write_atomically(self.tensors, lambda file: torch.save(tensors, file))
        record = Record(
            sources={str(path): sha256(path) for path in sources},
            decoded=sha256(self.tensors),
            train=len(tensors["y_train"]),
            test=len(tensors["y_test"]),
            shape=shape,
            encodings=encodings,
        )
        text = json.dumps(asdict(record), indent=1)
        write_atomically(self.sidecar, lambda file: file.write(text.encode()))
        return record


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Fills a temporary file in the same folder and moves it into place: readers never see half of it."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        temporary.replace(path)
    # torch turns a failed write into RuntimeError and keeps the cause only in its text.
    except (OSError, RuntimeError) as failed:
        raise cannot_write(path, failed) from failed
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def cannot_write(path: Path, cause: BaseException) -> DataError:
    """The message for a full disk, or a folder without permission to write."""
    full = {errno.ENOSPC, errno.EDQUOT}
    chain: BaseException | None = cause
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno in full:
            return DataError(f"no space left to write {path}; free some, or point {CACHE_VARIABLE} at another disk")
        chain = chain.__cause__ or chain.__context__
    return DataError(f"cannot write {path} ({cause}); point {CACHE_VARIABLE} at a folder that can be written")
