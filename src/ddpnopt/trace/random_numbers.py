"""The random numbers that a forward pass draws: torch's, and those of Python and numpy where it reads these, too.

A model may choose by `random.random()` whether to feed its own words back, or mask a signal by `np.random`. To copy the
state of numpy's generator takes longer than a small layer, so it is kept only where passes were seen to use it.
"""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

FIRST = 3  # passes that are watched, and
EVERY = 32  # every so many after them


class HostState(NamedTuple):
    """Of the global generators of Python and, if it is loaded, numpy."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> HostState:
        numpy = sys.modules.get("numpy")
        return cls(random.getstate(), None if numpy is None else numpy.random.get_state())

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def equals(self, other: HostState) -> bool:
        if self.python != other.python or (self.numpy is None) != (other.numpy is None):
            return False
        return self.numpy is None or all(
            bool((a == b).all() if hasattr(a, "all") else a == b) for a, b in zip(self.numpy, other.numpy, strict=True)
        )


class RandomState(NamedTuple):
    """Of the CPU, of the device that the model is on, and of the host's own generators; None where not needed."""

    cpu: Tensor
    cuda: Tensor | None
    host: HostState | None

    @classmethod
    def now(cls, device: torch.device, host: HostState | None = None) -> RandomState:
        # a device of a GPU always has a number, which is read faster than its kind
        cuda = torch.cuda.get_rng_state(device) if device.index is not None and device.type == "cuda" else None
        return cls(torch.default_generator.get_state(), cuda, host)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)
        if self.host is not None:
            self.host.restore()

    def like_now(self, device: torch.device) -> RandomState:
        """The present state of the generators that this one has."""
        return RandomState.now(device, None if self.host is None else HostState.now())


class HostGenerators:
    """Finds out whether the passes of a model draw from the host's own generators."""

    def __init__(self) -> None:
        self.used = False
        self._passes = 0

    def before(self) -> HostState | None:
        """At the beginning of a pass."""
        self._passes += 1
        return HostState.now() if self.used or self._passes <= FIRST or self._passes % EVERY == 0 else None

    def after(self, before: HostState | None) -> HostState | None:
        """At its end: the state to begin a replay with; None if it has drawn nothing."""
        if before is None or self.used:
            return before
        self.used = not before.equals(HostState.now())
        return before if self.used else None
