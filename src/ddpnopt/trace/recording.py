"""What is kept of one forward and backward pass: the nominal trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ddpnopt.ddp.loss import Loss
from ddpnopt.errors import ModelError
from ddpnopt.linear.layer import Conv, Layer
from ddpnopt.trace.model_layers import Unit


@dataclass(eq=False)
class Stage:
    """One layer at work in one forward pass: time step t of the dynamics."""

    unit: Unit
    x: Tensor  # input, (B, …)
    x_version: int  # of x when the layer ran
    skipped: bool = False  # whether autograd leaves out the gradients of the layer's parameters
    h_shape: tuple[int, ...] = ()
    recomputed: bool = False  # whether it ran under activation checkpointing
    moves: bool = False  # whether x depends on the layers before; a constant input has no slope
    p_h: Tensor | None = None  # gradient of the batch loss at the output
    p_x: Tensor | None = None  # … at the input through this layer alone; None where x is constant or nobody wants it
    p_h_dot_h: Tensor | None = None  # <p_h, h> of each sample, for the ledger; None if h was overwritten
    extra: list[Tensor] | None = None  # gradient of what the loss has on the weights beside the layer's output
    arrivals: int = 0  # gradients that have come to p_h
    _h: Tensor | None = None
    _version: int = 0

    def let_go(self) -> None:
        """Forget the tensors of the size of the activations: somebody else has them now."""
        self.x, self.p_h, self.p_x = self.x.new_empty(0), None, None

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
    device: torch.device
    rng: tuple[Tensor, Tensor | None]
    autocast: tuple[bool, torch.dtype, str]
    stages: list[Stage] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    outputs: list[Tensor] = field(default_factory=list)
    q: list[Tensor | None] = field(default_factory=list)  # gradients at the outputs
    batch_size: int = 0
    floating_outputs: int = 0  # how many there are, with or without gradient
    positions: list[int] = field(default_factory=list)  # of those outputs among all floating ones
    losses: list[tuple[Tensor, Loss]] | None = None  # recognised at the outputs, once somebody has asked
    shares: Tensor | None = None  # of each sample in the loss, likewise
    backwards: int = 0  # how many backward passes have come through
    arrived: list[Recording] = field(default_factory=list)  # shared: all recordings that a gradient has come to
    parts: list[Recording] = field(default_factory=list)  # the micro-batches that this one was joined from

    def used_outputs(self) -> list[int]:
        """Which of `outputs` the loss was computed from: those with a gradient and the batch in dimension 0."""
        B = self.batch_size
        pairs = zip(self.outputs, self.q, strict=True)
        return [k for k, (z, q) in enumerate(pairs) if q is not None and z.dim() > 0 and z.shape[0] == B]

    def used(self, outputs: list[Tensor]) -> list[Tensor]:
        """The same outputs among those of a replay."""
        return [outputs[self.positions[k]] for k in self.used_outputs()]

    def __post_init__(self) -> None:
        self._inputs = [(t, t._version) for t in leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]

    def check(self) -> None:
        """Complain about what a step cannot be taken from."""
        if self.stages and self.stages[0].x.dim():
            self.batch_size = self.stages[0].x.shape[0]
        for stage in self.stages:
            if stage.x._version != stage.x_version:
                raise ModelError(
                    f"The input of layer '{stage.name}' was changed in place after the layer had read it: DDPNOpt "
                    "needs it for the update. Work out of place there."
                )
            dims = stage.x.dim()
            if dims != len(stage.layer.weight_shape) if isinstance(stage.layer, Conv) else dims < 2:
                raise ModelError(
                    f"Layer '{stage.name}' ran on an input of shape {tuple(stage.x.shape)}, without a batch dimension: "
                    "keep samples in dimension 0, also a single one."
                )
            first = self.stages[0]
            if {stage.x.shape[0], stage.h_shape[0]} != {first.x.shape[0]}:
                raise ModelError(
                    f"Layer '{stage.name}' ran on an input of shape {tuple(stage.x.shape)}, but layer '{first.name}' "
                    f"on {tuple(first.x.shape)}: the first dimension must be the same batch everywhere. Keep samples "
                    "in dimension 0 (tokens or pixels in later ones)."
                )
        if any(t._version != version for t, version in self._inputs):
            raise ModelError(
                "An input of the model was changed in place between forward pass and step(): DDPNOpt runs the forward "
                "pass again. Pass a copy, or change it after step()."
            )

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be equal for two recordings to have the same graph, as far as hooks can tell."""
        stages = tuple((s.name, s.x.dim(), s.moves) for s in self.stages)
        return stages, tuple(q is not None for q in self.q)


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

    def off_chain(self, recording: Recording) -> int | None:
        """The first stage (T for an output) that does not depend on just the stage before it; None in a chain."""
        T = len(self.inputs)
        used = [o for o, q in zip(self.outputs, recording.q, strict=True) if q is not None]
        for t, x in enumerate([*self.inputs, *used]):
            if self.sources(x) != ({min(t, T) - 1} if t else set()):
                return min(t, T)
        return None


def when_gradient_comes(tensor: Tensor, call: Callable[[Tensor], None]) -> None:
    """Call with the gradient of a tensor that is no leaf: `register_hook`, for half the time."""
    node = tensor.grad_fn
    assert node is not None
    node.register_prehook(partial(_handed_on, call, tensor.output_nr))


def _handed_on(call: Callable[[Tensor], None], index: int, grads: tuple[Tensor | None, ...]) -> None:
    grad = grads[index]
    if grad is not None:
        call(grad.detach())


def arrived_at_output(recording: Recording, index: int, grad: Tensor) -> None:
    recording.q[index] = grad


def arrived_at_input(stage: Stage, grad: Tensor) -> None:
    stage.p_x = grad


def arrived_at_stage(recording: Recording, stage: Stage, grad: Tensor) -> None:
    stage.arrivals += 1
    if stage.arrivals > recording.backwards:
        recording.backwards = stage.arrivals
        recording.arrived.append(recording)
    p_h = grad if grad.shape == stage.h_shape else grad.reshape(stage.h_shape)
    if stage._h is not None:
        if stage._h._version == stage._version and p_h.dim() > 1:
            wide = torch.promote_types(p_h.dtype, torch.float32)  # a scaled loss would overflow half precision
            stage.p_h_dot_h = torch.linalg.vecdot(p_h.flatten(1).to(wide), stage._h.flatten(1).to(wide))
        stage._h = None
    stage.p_h = p_h


def leaves(tree: Any) -> list[Any]:
    """What a nest of tuples, lists and dicts holds; plain ones at a fraction of torch's time."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (tuple, list):
        return [leaf for part in tree for leaf in leaves(part)]
    return [] if tree is None or (type(tree) is dict and not tree) else tree_leaves(tree)


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Of the CPU and of the device that the model is on."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_rng_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
