"""What a saved optimizer state says of itself, so that another version or another setting can tell whether it fits."""

from __future__ import annotations

from typing import Any

from ddpnopt.curvature.base import Curvature
from ddpnopt.errors import CheckpointError

FORMAT = 1  # raised whenever a state of before could be misread
KEY = "ddpnopt"


def header(curvature: Curvature) -> dict[str, Any]:
    """Beside `state` and `param_groups` in the state_dict."""
    from ddpnopt import __version__

    return {"format": FORMAT, "version": __version__, "curvature": type(curvature).__name__}


def check_header(state_dict: dict[str, Any], curvature: Curvature) -> None:
    """Complain about a state that this optimizer cannot go on from."""
    if "param_groups" not in state_dict or "state" not in state_dict:
        raise CheckpointError("this is not the state_dict of an optimizer: it lacks 'state' and 'param_groups'.")
    found = state_dict.get(KEY)
    if found is None:  # format 0, the first: the same entries without a header
        return
    if found["format"] > FORMAT:
        raise CheckpointError(
            f"the optimizer state was saved by ddpnopt {found['version']} in format {found['format']}; this version "
            f"reads formats up to {FORMAT}: update ddpnopt, or start with a fresh optimizer state."
        )
    mine = type(curvature).__name__
    if found["curvature"] != mine:
        raise CheckpointError(
            f"the optimizer state was saved with curvature {found['curvature']}, this optimizer has {mine}: their "
            f"running averages differ. Choose curvature {found['curvature']}, or start with a fresh optimizer state."
        )
