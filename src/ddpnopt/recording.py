"""What is kept of one forward and backward pass: the nominal trajectory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddpnopt.layers import Layer
from ddpnopt.units import Unit


@dataclass(eq=False)
class Stage:
    """One layer at work in one forward pass: time step t of the dynamics."""

    unit: Unit
    x: Tensor  # input, (B, …)
    skipped: list[nn.Parameter] = field(default_factory=list)  # whose autograd gradient is not wanted
    h_shape: tuple[int, ...] = ()
    p_h: Tensor | None = None  # gradient of the batch loss at the output
    p_x: Tensor | None = None  # gradient at the input through this layer alone; None where x is constant
    p_h_dot_h: Tensor | None = None  # <p_h, h> of each sample, for the ledger; None if h was overwritten
    arrivals: int = 0  # gradients that have come to p_h
    _h: Tensor | None = None
    _version: int = 0

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def layer(self) -> Layer:
        return self.unit.layer


@dataclass(eq=False)
class Recording:
    """One forward pass of the model and what the backward pass has added to it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool
    rng: tuple[Tensor, dict[int, Tensor]]
    autocast: tuple[bool, torch.dtype, str]
    stages: list[Stage] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    outputs: list[Tensor] = field(default_factory=list)
    q: list[Tensor | None] = field(default_factory=list)  # gradients at the outputs
    backwards: int = 0  # how many backward passes have come through
    replaced: bool = False  # by a later forward pass
    strays: list[int] = field(default_factory=lambda: [0])  # shared: backward passes that no step has used

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be equal for two recordings to have the same graph, as far as hooks can tell."""
        return tuple((s.name, s.x.dim(), s.p_x is None) for s in self.stages)


@dataclass(eq=False)
class Probe:
    """A replay cut open at each layer: inputs[t] as functions of leaves[t-1], output of leaves[T-1]."""

    inputs: list[Tensor]
    leaves: list[Tensor]
    outputs: list[Tensor]

    def sources(self, tensor: Tensor) -> set[int]:
        """The stages that a tensor depends on."""
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

    def off_chain(self) -> int | None:
        """The first stage (T for the output) that does not depend on just the stage before it; None in a chain."""
        for t, x in enumerate([*self.inputs, *self.outputs]):
            if self.sources(x) != ({min(t, len(self.inputs)) - 1} if t else set()):
                return min(t, len(self.inputs))
        return None


def arrived_at_output(recording: Recording, index: int, grad: Tensor) -> None:
    recording.q[index] = grad.detach()


def arrived_at_input(stage: Stage, grad: Tensor) -> None:
    stage.p_x = grad.detach()


def arrived_at_stage(recording: Recording, stage: Stage, grad: Tensor) -> None:
    stage.arrivals += 1
    if stage.arrivals > recording.backwards:
        recording.backwards = stage.arrivals
        recording.strays[0] += recording.replaced
    p_h = grad.detach()
    if stage._h is not None:
        if stage._h._version == stage._version:
            stage.p_h_dot_h = torch.linalg.vecdot(p_h.flatten(1), stage._h.flatten(1))
        stage._h = None
    stage.p_h = p_h


def tensors(value: Any) -> Iterator[Tensor]:
    """All floating tensors in a nest of tuples, lists, dicts and dataclass-like outputs."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def rng_state(model: nn.Module) -> tuple[Tensor, dict[int, Tensor]]:
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    return torch.get_rng_state(), {d: torch.cuda.get_rng_state(d) for d in devices if d is not None}
