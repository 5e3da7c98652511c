"""What happens at the layers while a recorded forward pass runs again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddpnopt.errors import ModelError
from ddpnopt.trace.model_layers import Unit
from ddpnopt.trace.recording import Recording


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
        self.visited: set[int] = set()
        self.device = recording.device.type

    def before(self, unit: Unit, x: Tensor) -> Tensor | None:
        """Called with the input of a layer; returns another one to take its place."""
        t = self.index.get(id(unit))
        if t is not None and self.control is not None:
            self._plain(self.control, t, x)
        return None

    def _plain(self, call: Callable[[int, Tensor], None], t: int, value: Tensor) -> None:
        """Autocast, wherever it was turned on, is for the model's own operations and not for ours."""
        if torch.is_autocast_enabled(self.device):
            with torch.autocast(self.device, enabled=False):
                call(t, value)
        else:
            call(t, value)

    def after(self, unit: Unit, h: Tensor | None) -> Tensor | None:
        """Called with the output of a layer; returns another one to take its place."""
        t = self.index.get(id(unit))
        if t is not None and h is not None:
            self.visited.add(t)
            if self.observe is not None:
                self._plain(self.observe, t, h)
        return None

    def check(self, recording: Recording) -> None:
        """Complain if a layer has not run this time."""
        for t, stage in enumerate(recording.stages):
            if t not in self.visited:
                raise ModelError(
                    f"Layer '{stage.name}' did not run when the forward pass was replayed: the model takes another "
                    "way each time. Draw random choices from torch's generator, which is replayed."
                )


class Cut(Replay):
    """Each stage's output becomes a leaf of its own."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.inputs: list[Tensor] = []
        self.leaves: list[Tensor] = []

    def before(self, unit: Unit, x: Tensor) -> Tensor | None:
        if id(unit) in self.index:
            self.inputs.append(x)
        return None

    def after(self, unit: Unit, h: Tensor | None) -> Tensor | None:
        super().after(unit, h)
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

    def before(self, unit: Unit, x: Tensor) -> Tensor | None:
        if id(unit) not in self.index:
            return None
        self.inputs.append(x.view_as(x))
        return self.inputs[-1]

    def after(self, unit: Unit, h: Tensor | None) -> Tensor | None:
        super().after(unit, h)
        if h is None or id(unit) not in self.index:
            return None
        self.hs.append(h)
        return h.clone()  # an activation that works in place leaves the handle alone

    def at(self, positions: list[int]) -> list[Tensor]:
        """Some of the outputs."""
        return [self.outputs[i] for i in positions]

    def back(
        self, outputs: list[Tensor], cotangents: list[Tensor], *, keep: bool = False
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """p_h and p_x of each stage from cotangents of outputs; None where an input is constant."""
        moving = [x for x in self.inputs if x.requires_grad]
        with torch.autocast(self.device, enabled=False):
            grads = torch.autograd.grad(
                outputs,
                [*self.hs, *moving],
                [c.to(z.dtype) for c, z in zip(cotangents, outputs, strict=True)],
                retain_graph=keep,
                materialize_grads=True,
            )
        through = iter(grads[len(self.hs) :])
        return list(grads[: len(self.hs)]), [next(through) if x.requires_grad else None for x in self.inputs]
