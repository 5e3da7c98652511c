"""What happens at the layers while a recorded forward pass runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ddpnopt.recording import Recording
from ddpnopt.units import Unit


class Replay:
    """What happens at the layers while a recording is replayed: here, the user's control of the forward sweep."""

    def __init__(
        self,
        recording: Recording,
        control: Callable[[int, Tensor], None] | None = None,
        observe: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        self.index = {id(stage.unit): t for t, stage in enumerate(recording.stages)}
        self.control, self.observe = control, observe
        self.outputs: list[Tensor] = []

    def before(self, unit: Unit, args: tuple[Any, ...]) -> Any:
        t = self.index.get(id(unit))
        if t is not None and self.control is not None:
            self.control(t, args[0])
        return None

    def after(self, unit: Unit, h: Tensor | None) -> Any:
        t = self.index.get(id(unit))
        if t is not None and h is not None and self.observe is not None:
            self.observe(t, h)
        return None


class Cut(Replay):
    """Each stage's output becomes a leaf of its own."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.inputs: list[Tensor] = []
        self.leaves: list[Tensor] = []

    def before(self, unit: Unit, args: tuple[Any, ...]) -> Any:
        if id(unit) in self.index:
            self.inputs.append(args[0])
        return None

    def after(self, unit: Unit, h: Tensor | None) -> Any:
        if h is None or id(unit) not in self.index:
            return None
        self.leaves.append(h.detach().requires_grad_())
        return self.leaves[-1].clone()  # so that an activation may work in place


class Tape(Replay):
    """An ordinary graph once more, with a handle at each stage's input and output."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.inputs: list[Tensor] = []
        self.hs: list[Tensor] = []

    def before(self, unit: Unit, args: tuple[Any, ...]) -> Any:
        if id(unit) not in self.index:
            return None
        self.inputs.append(args[0].view_as(args[0]))
        return (self.inputs[-1], *args[1:])

    def after(self, unit: Unit, h: Tensor | None) -> Any:
        if h is None or id(unit) not in self.index:
            return None
        self.hs.append(h)
        return h.clone()  # an activation that works in place leaves the handle alone
