"""Checkpoints that are complete or absent, and load without running code.

A training loop saves what it needs to continue, at any step::

    save("run.pt", {"model": model.state_dict(), "opt": opt.state_dict(), "rng": torch.get_rng_state(), "step": step})

and a loop that was killed at any moment finds the last complete one with `load("run.pt")`.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from ddpnopt.errors import CheckpointError

STATE_FORMAT = 1  # of an optimizer's state_dict; raised when an older state could be misread
STATE_KEY = "ddpnopt"  # of the header, next to "state" and "param_groups"


def save(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write `content` to `path`; an existing file is replaced only when the last byte is on the disk.

    Tensors, numbers, strings, lists and dicts (`state_dict`s are made of these) can be loaded safely.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")  # one name: the rest of a killed run is overwritten by the next
    try:
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as failed:  # torch turns a failed write into RuntimeError
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {failed}. The previous one is unchanged."
        ) from failed


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save` has written: data only, no code (`weights_only=True`)."""
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
    """Make the new name survive a loss of power, too."""
    if os.name != "posix":  # a folder cannot be opened on other systems
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def state_header(curvature: str) -> dict[str, Any]:
    """What an optimizer's state_dict says of itself, so that another version or setting can check whether it fits."""
    from ddpnopt import __version__

    return {"format": STATE_FORMAT, "version": __version__, "curvature": curvature}


def check_state(state_dict: dict[str, Any], curvature: str) -> None:
    """Raise an error for a state from which an optimizer with this curvature cannot continue."""
    if "param_groups" not in state_dict or "state" not in state_dict:
        raise CheckpointError("this is not the state_dict of an optimizer: it lacks 'state' and 'param_groups'.")
    found = state_dict.get(STATE_KEY)
    if found is None:  # format 0, the first: the same entries without a header
        return
    if found["format"] > STATE_FORMAT:
        raise CheckpointError(
            f"the optimizer state was saved by ddpnopt {found['version']} in format {found['format']}; this version "
            f"reads formats up to {STATE_FORMAT}: update ddpnopt, or start with a fresh optimizer state."
        )
    if found["curvature"] != curvature:
        raise CheckpointError(
            f"the optimizer state was saved with curvature {found['curvature']}, this optimizer has {curvature}: their "
            f"running averages differ. Choose curvature {found['curvature']}, or start with a fresh optimizer state."
        )
