"""Checkpoints that are whole or not there, and load without running code.

A training loop saves what it needs to go on, at any step::

    save("run.pt", {"model": model.state_dict(), "opt": opt.state_dict(), "rng": torch.get_rng_state(), "step": step})

and a loop that was killed, at whatever moment, finds the last complete one with `load("run.pt")`.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from ddpnopt.errors import CheckpointError


def save(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write `content` to `path`; until the last byte is on the disk the file that was there before stays.

    Tensors, numbers, strings, lists and dicts (`state_dict`s are made of these) can be loaded safely again.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")  # one name: what a killed run has left is overwritten by the next
    try:
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as failed:  # torch turns a failed write into RuntimeError
        raise CheckpointError(f"cannot write the checkpoint {path}: {failed}. The one before is as it was.") from failed


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save` has written: data alone, no code (`weights_only=True`)."""
    try:
        content = torch.load(path, weights_only=True)
    except FileNotFoundError as missing:
        raise CheckpointError(f"there is no checkpoint {path}.") from missing
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as broken:
        reason = str(broken).splitlines()[0] if str(broken) else type(broken).__name__
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {reason}") from broken
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a checkpoint: it holds a {type(content).__name__}, not a dict.")
    return content


def _sync_folder(folder: Path) -> None:
    """The new name, too, is to survive a loss of power."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
