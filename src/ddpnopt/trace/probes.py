"""What is found out about the graph of a model by running a recorded pass again, cut behind each layer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.recording import Recording
from ddpnopt.trace.sources import Source
from ddpnopt.trace.visitors import Visitor


class Cut(Visitor):
    """Each layer's output becomes a leaf of the graph."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.inputs: list[Tensor] = []
        self.leaves: list[Tensor] = []

    def before(self, layer: ModelLayer, x: Tensor) -> Tensor | None:
        if self.enter(layer)[1] is not None:
            self.inputs.append(x)
        return None

    def after(self, layer: ModelLayer, h: Tensor | None) -> Tensor | None:
        super().after(layer, h)
        if h is None or self.inside(layer)[1] is None:
            return None
        self.leaves.append(h.detach().requires_grad_())
        return self.leaves[-1].clone()  # so that in-place activations work


class Paths(Visitor):
    """Which layers each layer reads, and whether samples are mixed on the way; keeps nothing of the pass."""

    def __init__(self, recording: Recording, *, mixing: bool) -> None:
        super().__init__(recording)
        self.mixing = mixing  # whether to ask for it
        self.mixed = False  # whether what a layer reads of some samples depends on others (nodes of a graph as samples)
        self.reads: list[set[int]] = []
        self._leaves: list[Tensor] = []  # an empty one behind each layer
        self._last: tuple[GradientEdge, int] | None = None  # where the gradient of the last output is; its samples

    def saving(self) -> AbstractContextManager[Any]:
        """What is saved for a backward pass, if there is one."""
        return nullcontext() if self.mixing else saved_tensors_hooks(_forget, _forget)

    def before(self, layer: ModelLayer, x: Tensor) -> Tensor | None:
        if self.enter(layer)[1] is not None:
            self.reads.append(_sources(x, self._leaves))
            if self._last is not None and self.mixing:
                self.mixed |= _mixes(x, *self._last)
        return None

    def after(self, layer: ModelLayer, h: Tensor | None) -> Tensor | None:
        super().after(layer, h)
        if h is None or self.inside(layer)[1] is None:
            return None
        self._leaves.append(h.new_empty(0, requires_grad=True))
        cut: Tensor = Source.apply(h.detach(), self._leaves[-1])  # type: ignore[no-untyped-call]
        self._last = get_gradient_edge(cut), len(h)
        return cut

    def is_chain(self, recording: Recording) -> bool:
        """Whether each layer, and each output, reads just the layer before it."""
        outputs = [o for o in self.outputs if o.requires_grad]
        used = [_sources(o, self._leaves) for o, q in zip(outputs, recording.q, strict=True) if q is not None]
        return off_chain([*self.reads, *used], len(self.reads)) is None


def _forget(_: Any) -> Any:
    return None


def _sources(tensor: Tensor, leaves: list[Tensor]) -> set[int]:
    """The layers whose leaves a tensor depends on."""
    index = {id(leaf): t for t, leaf in enumerate(leaves)}
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


def _mixes(x: Tensor, source: GradientEdge, samples: int) -> bool:
    """Whether the first half of x depends on the second half of the samples at the source."""
    half = samples // 2
    if not half or not x.requires_grad:
        return False
    # different for each number: a sum of normalised ones would not depend on anything
    cotangent = torch.linspace(1, 2, x.numel()).to(x).view_as(x)
    cotangent[half:] = 0
    try:
        (found,) = torch.autograd.grad([x], [source], [cotangent], retain_graph=True, allow_unused=True)
    except RuntimeError:  # the older form of checkpointing refuses autograd.grad
        return False
    return found is not None and bool(found[half:].any())


def off_chain(reads: list[set[int]], T: int) -> int | None:
    """The first layer (T for an output) that does not read just the layer before it; None in a chain."""
    return next((min(t, T) for t, read in enumerate(reads) if read != ({min(t, T) - 1} if t else set())), None)


@dataclass(eq=False)
class Probe:
    """A replay cut behind each layer: inputs[t] is a function of leaves[t-1], the output of leaves[T-1]."""

    inputs: list[Tensor]
    leaves: list[Tensor]
    outputs: list[Tensor]

    def off_chain(self, recording: Recording) -> int | None:
        """The first layer (T for an output) that does not depend on just the layer before it; None in a chain."""
        used = [o for o, q in zip(self.outputs, recording.q, strict=True) if q is not None]
        return off_chain([_sources(x, self.leaves) for x in [*self.inputs, *used]], len(self.inputs))
