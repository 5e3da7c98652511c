"""Fetching Parquet files from the Hugging Face hub."""

from __future__ import annotations

import errno
import importlib
import re
from dataclasses import dataclass
from pathlib import Path

from ddpnopt.lab.data.cache import cache_root, cannot_write, sha256
from ddpnopt.lab.errors import DataError

FOLDER_VARIABLE = "DDPNOPT_DATA"
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS}


@dataclass(frozen=True)
class HubFiles:
    """A data set on the hub and the folder of its Parquet files there."""

    repository: str
    folder: str

    def file(self, split: str) -> str:
        return f"{self.folder}/{split}-00000-of-00001.parquet"


def local_copy(name: str, files: HubFiles, split: str) -> Path:
    """Where `fetch` puts the file."""
    return cache_root() / "hub" / name / files.file(split)


def fetch(name: str, files: HubFiles, split: str) -> Path:
    """The local path of one split's file, downloaded unless it is there already."""
    target = local_copy(name, files, split)
    if not target.exists():
        _download(name, files, split, target)
    _check(name, files, split, target)
    return target


def _download(name: str, files: HubFiles, split: str, target: Path) -> None:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as missing:
        raise DataError(
            f"{name} is not here, and fetching it needs huggingface_hub: pip install huggingface_hub, "
            f"or {_by_hand(name)}"
        ) from missing
    root = cache_root() / "hub" / name
    try:
        hub.hf_hub_download(files.repository, files.file(split), repo_type="dataset", local_dir=root)
    # Being offline, a timeout, a refused proxy and a renamed file come as unrelated types, some of them from
    # the HTTP library below, which has changed between releases: whatever it was, the file did not arrive.
    except Exception as failed:
        if isinstance(failed, OSError) and failed.errno in DISK_ERRORS:
            raise cannot_write(target, failed) from failed
        reason = (str(failed).strip().splitlines() or [type(failed).__name__])[0]
        raise DataError(
            f"could not fetch {name} from the hub's {files.repository} ({reason.rstrip('.')}); "
            f"connect to the network and run again, or {_by_hand(name)}"
        ) from failed


def _check(name: str, files: HubFiles, split: str, target: Path) -> None:
    """Compares the file with the SHA-256 that the hub has for it, which the download stores next to it."""
    kept = cache_root() / "hub" / name / ".cache" / "huggingface" / "download" / f"{files.file(split)}.metadata"
    try:
        lines = kept.read_text(encoding="utf-8").splitlines()  # the commit, the hub's tag of the file, the time
    except OSError:
        return  # put there by hand: the decoder still finds a file that is not whole
    expected = lines[1].strip() if len(lines) > 1 else ""
    if re.fullmatch(r"[0-9a-f]{64}", expected) and sha256(target) != expected:
        raise DataError(f"{target} does not have the hub's SHA-256 ({expected[:12]}…); delete it to fetch it again")


def _by_hand(name: str) -> str:
    return (
        f"put train.parquet and test.parquet into <folder>/{name} and give the folder by --data-dir "
        f"or {FOLDER_VARIABLE}"
    )
