"""The scalar that the user called `backward()` on, seen from a hook inside the backward pass.

An optimizer is never told the loss. But its hooks run while `torch.autograd.backward` is on the stack (of this thread,
or, on a GPU, of the one that waits for the device), and that frame holds the loss as an argument.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_BACKWARD = torch.autograd.backward.__code__


def backward_root() -> Tensor | None:
    """The loss of the backward pass that is running, detached; None if there is no single scalar."""
    found = _outermost(sys._getframe(1))
    if found is None:  # the hook runs in a thread of the device
        frames = [_outermost(frame) for frame in sys._current_frames().values()]
        running = [frame for frame in frames if frame is not None]
        found = running[0] if len(running) == 1 else None
    return None if found is None else _scalar(found.f_locals)


def _outermost(frame: FrameType | None) -> FrameType | None:
    """The first call of `backward` on a stack: activation checkpointing may call it again further down."""
    found = None
    while frame is not None:
        if frame.f_code is _BACKWARD:
            found = frame
        frame = frame.f_back
    return found


def _scalar(arguments: dict[str, Any]) -> Tensor | None:
    roots = arguments.get("tensors")
    roots = [roots] if isinstance(roots, Tensor) else list(roots or ())
    if len(roots) != 1 or not isinstance(roots[0], Tensor) or roots[0].numel() != 1:
        return None
    given: Any = arguments.get("grad_tensors")
    gradient = given[0] if isinstance(given, (tuple, list)) and given else given
    root = roots[0].detach()
    return root * gradient.detach() if isinstance(gradient, Tensor) else root
