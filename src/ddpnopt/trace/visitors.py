"""Visitors of the layers while a recorded forward pass is replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpnopt.errors import ModelError
from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.recording import Recording


class Visitor:
    """Calls control(t, x) before and observe(t, h) after layer t: the forward sweep of Algorithm 3."""

    def __init__(
        self,
        recording: Recording,
        control: Callable[[int, Tensor], None] | None = None,
        observe: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        self.index = {id(record.model_layer): t for t, record in enumerate(recording.layers)}
        self.control, self.observe = control, observe
        self.outputs: list[Tensor] = []
        self.visited: set[int] = set()
        self.device = recording.device.type

    def before(self, layer: ModelLayer, x: Tensor) -> Tensor | None:
        """Called with the input of a layer; may return a replacement."""
        t = self.index.get(id(layer))
        if t is not None and self.control is not None:
            self._without_autocast(self.control, t, x)
        return None

    def _without_autocast(self, call: Callable[[int, Tensor], None], t: int, value: Tensor) -> None:
        """Autocast, wherever it was enabled, applies to the model and not to the optimizer."""
        if torch.is_autocast_enabled(self.device):
            with torch.autocast(self.device, enabled=False):
                call(t, value)
        else:
            call(t, value)

    def after(self, layer: ModelLayer, h: Tensor | None) -> Tensor | None:
        """Called with the output of a layer; may return a replacement."""
        t = self.index.get(id(layer))
        if t is not None and h is not None:
            self.visited.add(t)
            if self.observe is not None:
                self._without_autocast(self.observe, t, h)
        return None

    def check(self, recording: Recording) -> None:
        """Raise an error if a layer has not run this time."""
        for t, record in enumerate(recording.layers):
            if t not in self.visited:
                raise ModelError(
                    f"Layer '{record.name}' did not run when the forward pass was replayed: the model takes a "
                    "different path each time. Draw random choices from torch's generator, which is replayed."
                )


class Cut(Visitor):
    """Each layer's output becomes a leaf of the graph."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.inputs: list[Tensor] = []
        self.leaves: list[Tensor] = []

    def before(self, layer: ModelLayer, x: Tensor) -> Tensor | None:
        if id(layer) in self.index:
            self.inputs.append(x)
        return None

    def after(self, layer: ModelLayer, h: Tensor | None) -> Tensor | None:
        super().after(layer, h)
        if h is None or id(layer) not in self.index:
            return None
        self.leaves.append(h.detach().requires_grad_())
        return self.leaves[-1].clone()  # so that in-place activations work


class Tape(Visitor):
    """An ordinary graph, with a handle at each layer's input and output."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.inputs: list[Tensor] = []
        self.hs: list[Tensor] = []

    def before(self, layer: ModelLayer, x: Tensor) -> Tensor | None:
        if id(layer) not in self.index:
            return None
        self.inputs.append(x.view_as(x))
        return self.inputs[-1]

    def after(self, layer: ModelLayer, h: Tensor | None) -> Tensor | None:
        super().after(layer, h)
        if h is None or id(layer) not in self.index:
            return None
        self.hs.append(h)
        return h.clone()  # an in-place activation does not change the handle

    def at(self, positions: list[int]) -> list[Tensor]:
        """The outputs at these positions."""
        return [self.outputs[i] for i in positions]

    def back(
        self, outputs: list[Tensor], cotangents: list[Tensor], *, keep: bool = False
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """p_h and p_x of each layer from cotangents of outputs; None where an input is constant."""
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


@dataclass(eq=False)
class Probe:
    """A replay cut behind each layer: inputs[t] is a function of leaves[t-1], the output of leaves[T-1]."""

    inputs: list[Tensor]
    leaves: list[Tensor]
    outputs: list[Tensor]

    def sources(self, tensor: Tensor) -> set[int]:
        """The layers whose outputs a tensor depends on."""
        index = {id(leaf): t for t, leaf in enumerate(self.leaves)}
        found: set[int] = set()
        seen: set[Any] = set()
        todo = [tensor.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = index.get(id(getattr(node, "variable", None)))
            if leaf is not None:
                found.add(leaf)
            todo.extend(n for n, _ in node.next_functions)
        return found

    def off_chain(self, recording: Recording) -> int | None:
        """The first layer (T for an output) that does not depend on just the layer before it; None in a chain."""
        T = len(self.inputs)
        used = [o for o, q in zip(self.outputs, recording.q, strict=True) if q is not None]
        for t, x in enumerate([*self.inputs, *used]):
            if self.sources(x) != ({min(t, T) - 1} if t else set()):
                return min(t, T)
        return None
