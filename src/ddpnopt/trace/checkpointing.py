"""Whether activation checkpointing is active around a layer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils import checkpoint

# Missing in older versions of torch, such as 2.5, which cannot tell which hooks are active.
_top_hooks: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def checkpointed() -> bool:
    """Whether activation checkpointing is active, which runs a block again in the backward pass."""
    if _top_hooks is None:
        return _called_by_checkpoint()
    hooks = _top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__


def saves_as_usual() -> bool:
    """Whether what autograd saves can be read at once: nobody's hooks pack it, or compute it again to unpack it."""
    return _top_hooks is not None and _top_hooks(True) is None


def _called_by_checkpoint() -> bool:
    """The same, found by looking through the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    # the reentrant form, an autograd function, has no hooks
    return frame is not None and frame.f_code.co_name not in ("forward", "backward")
