"""Gradients that no recorded pass has left: layers called outside of model(...), or `.grad` set by hand."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

from ddpnopt.trace.compiled import let_compiled_code_see_hooks


class Unseen:
    """Tells gradients that are new since the last step from those that were there."""

    def __init__(self) -> None:
        self._old: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}

    def remember(self, parameters: Iterable[nn.Parameter]) -> None:
        """After a step: these gradients have been used."""
        self._old = {p: (weakref.ref(p.grad), p.grad._version) for p in parameters if p.grad is not None}

    def has_new(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether a gradient is new since the last step; compiled code without hooks will be compiled again."""
        found = any(self._is_new(p) for p in parameters)
        if found:
            let_compiled_code_see_hooks()
        return found

    def _is_new(self, p: nn.Parameter) -> bool:
        if p.grad is None:
            return False
        old = self._old.get(p)
        return old is None or old[0]() is not p.grad or old[1] != p.grad._version
