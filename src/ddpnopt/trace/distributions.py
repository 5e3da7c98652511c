"""Outputs that are distributions of torch, as policies have them: the numbers that they are made of are the outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributions import Distribution

from ddpnopt.trace.recording import is_floating, leaves


def floating_outputs(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output of the model, also inside distributions."""
    found: list[Tensor] = []
    for leaf in leaves(output):
        if is_floating(leaf):
            found.append(leaf)
        else:
            replace_tensors(leaf, found.append)
    return found


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor | None]) -> None:
    """In a distribution, replace the floating-point tensors, each once, unless the change is None."""
    if not isinstance(value, Distribution):
        return
    changed: dict[int, Tensor] = {}
    for name, part in list(vars(value).items()):
        if is_floating(part):
            if id(part) not in changed:
                new = change(part)
                changed[id(part)] = part if new is None else new
            vars(value)[name] = changed[id(part)]
        else:
            replace_tensors(part, change)
