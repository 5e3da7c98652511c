"""Visitors of the layers while a recorded forward pass is replayed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ddpnopt.errors import ModelError
from ddpnopt.linear.given import Given
from ddpnopt.trace.fused import widened
from ddpnopt.trace.layer_uses import together
from ddpnopt.trace.loose import Uses
from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.recording import Recording
from ddpnopt.trace.sources import source_of


class Visitor:
    """Calls control(t, x) before and observe(t, h) after layer t: the forward sweep of Algorithm 3."""

    def __init__(
        self,
        recording: Recording,
        control: Callable[[int, Tensor], None] | None = None,
        observe: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        self.index = {id(record.model_layer): t for t, record in enumerate(recording.layers)}
        self.uses = [{use: k for k, use in enumerate(record.uses)} for record in recording.layers]
        self.calls = [0] * len(recording.layers)
        self.records = recording.layers
        self.control, self.observe = control, observe
        self.outputs: list[Tensor] = []
        self.visited: set[int] = set()
        self._state: Tensor | None = None  # of the norm that runs next
        self.device, self.samples = recording.device.type, recording.batch_size

    def before(self, layer: ModelLayer, x: Tensor) -> Tensor | None:
        """Called with the input of a layer; may return a replacement."""
        t, use = self.enter(layer)
        if use == 0 and self.control is not None:
            state = self._outside(self.control, t, x, layer)
            self._state = state if layer.is_faster_from_state(x) else None
        return None

    @contextmanager
    def norms_from_states(self) -> Iterator[None]:
        """Let norms compute their outputs from the states that `control` gets: not normalised a second time.

        A module takes its forward before its hooks run, so that these could not replace it.
        """
        norms = [r.model_layer for r in self.records if r.model_layer.normalises and not r.model_layer.compiled]
        replaced = [norm for norm in norms if norm.has_own_forward]
        for norm in replaced:
            norm.module.forward = partial(self._output, norm)
        try:
            yield
        finally:
            for norm in replaced:
                del norm.module.forward

    def _output(self, norm: ModelLayer, *args: Any, **kwargs: Any) -> Any:
        state, self._state = self._state, None
        return type(norm.module).forward(norm.module, *args, **kwargs) if state is None else norm.output(state)

    def enter(self, layer: ModelLayer) -> tuple[int, int | None]:
        """Count a call of a layer: its index, and which of its recorded uses this is; None for any other call."""
        t = self.index.get(id(layer), -1)
        if t < 0:
            return t, None
        self.calls[t] += 1
        return t, self.uses[t].get(self.calls[t] - 1)

    def inside(self, layer: ModelLayer) -> tuple[int, int | None]:
        """The same for the call that has been counted last."""
        t = self.index.get(id(layer), -1)
        return t, None if t < 0 else self.uses[t].get(self.calls[t] - 1)

    def _outside(
        self, call: Callable[[int, Tensor], None], t: int, value: Tensor, read_by: ModelLayer | None = None
    ) -> Tensor:
        """Autocast, and what watches the model's functions, applies to the model and not to the optimizer.

        Returns the value, or the state for it of the layer that reads it.
        """
        autocast = torch.is_autocast_enabled(self.device)
        with torch._C.DisableTorchFunction(), torch.autocast(self.device, enabled=False) if autocast else nullcontext():
            value = value if read_by is None else read_by.state_of(value)
            call(t, self.records[t].arranged(value))
            return value

    def after(self, layer: ModelLayer, h: Tensor | None) -> Tensor | None:
        """Called with the output of a layer; may return a replacement."""
        t, use = self.inside(layer)
        if use == 0 and h is not None:
            self.visited.add(t)
            if self.observe is not None:
                self._outside(self.observe, t, h)
        return None

    def touch(self, layer: ModelLayer) -> None:
        """Called at the first use of a parameter that belongs to no layer."""
        if id(layer) in self.index:
            one = layer.weight.detach().new_ones(self.samples, 1)
            self.before(layer, one)
            self.after(layer, one)

    def check(self, recording: Recording) -> None:
        """Raise an error if a layer has not run this time."""
        for t, record in enumerate(recording.layers):
            if t not in self.visited:
                raise ModelError(
                    f"Layer '{record.name}' did not run when the forward pass was replayed: the model takes a "
                    "different path each time. Draw random choices from torch's generator, which is replayed."
                )


class _Output(NamedTuple):
    """Where the gradient of a layer's output is, also if it is overwritten; without the output, which would be kept."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def gradient(self, found: Tensor | None) -> Tensor:
        if found is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return found.reshape(self.shape)


class Tape(Visitor):
    """An ordinary graph, with a handle at the input and the output of each use of each layer."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.recording = recording
        self.layers = [record.model_layer for record in recording.layers]
        self.inputs: list[list[Tensor]] = [[] for _ in self.layers]
        self.hs: list[list[_Output]] = [[] for _ in self.layers]
        self.spans: list[list[tuple[int, int] | None]] = [[] for _ in self.layers]
        self.loose: Uses | None = None

    def touch(self, layer: ModelLayer) -> None:
        if id(layer) in self.index:
            self.visited.add(self.index[id(layer)])

    def before(self, layer: ModelLayer, x: Tensor) -> Tensor | None:
        t, use = self.enter(layer)
        if use is None:
            return None
        self.inputs[t].append(x.view_as(x))
        return self.inputs[t][-1]

    def after(self, layer: ModelLayer, h: Tensor | None) -> Tensor | None:
        super().after(layer, h)
        t, use = self.inside(layer)
        if h is None or use is None:
            return None
        h, source = source_of(h)
        self.hs[t].append(_Output(get_gradient_edge(source), h.shape, h.dtype, h.device))
        self.spans[t].append(getattr(layer.module, "span", None))
        return h

    def states(self, t: int) -> list[Tensor]:
        """What layer t is linear in, at each use."""
        if isinstance(self.layers[t].layer, Given):
            return [self.layers[t].weight.detach().new_ones(self.samples, 1)]
        return [
            self.records[t].arranged(self.layers[t].state_of(x.detach()), use) for use, x in enumerate(self.inputs[t])
        ]

    def at(self, positions: list[int]) -> list[Tensor]:
        """The outputs at these positions."""
        return [self.outputs[i] for i in positions]

    def back(
        self, outputs: list[Tensor], cotangents: list[Tensor], at_inputs: Container[ModelLayer], *, keep: bool = False
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """p_h of each layer from cotangents of outputs, and p_x of some; None where an input is constant or not x."""
        single = [
            uses[0]
            if layer in at_inputs
            and len(uses) == 1
            and uses[0].requires_grad
            and layer.required
            and record.layouts[0] is None
            else None
            for uses, layer, record in zip(self.inputs, self.layers, self.records, strict=True)
        ]
        hs = [h for uses in self.hs for h in uses]
        others = [x for x in single if x is not None]
        others += [] if self.loose is None else [meeting.out for meeting in self.loose.meetings]
        with torch.autocast(self.device, enabled=False):
            found = torch.autograd.grad(
                outputs,
                [*(h.edge for h in hs), *map(get_gradient_edge, others)],
                [c.to(z.dtype) for c, z in zip(cotangents, outputs, strict=True)],
                retain_graph=keep,
                allow_unused=True,
            )
        at_outputs = (h.gradient(grad) for h, grad in zip(hs, found, strict=False))
        rest = [torch.zeros_like(a) if grad is None else grad for a, grad in zip(others, found[len(hs) :], strict=True)]
        through = iter(rest)
        loose = {} if self.loose is None else self.loose.gradients([*rest[len(rest) - len(self.loose.meetings) :]])
        B, of_rows = self.recording.sample_count, self.recording.of_rows
        folded = {record.model_layer.weight: record.folded for record in self.records if record.folded is not None}
        loose = {  # of groups, or of the rows of each sample
            p: folded[p].sums(gradient) if p in folded else of_rows(gradient.reshape(B, -1, p.numel()).sum(1))
            for p, gradient in loose.items()
        }
        p_h = [
            together(
                layer.layer,
                [
                    record.arranged(widened(next(at_outputs), span, layer.layer.weight_shape[0]), use)
                    for use, span in enumerate(spans)
                ],
            )
            if spans
            else loose.get(layer.weight, layer.weight.detach().new_zeros(self.samples, layer.weight.numel()))
            for spans, layer, record in zip(self.spans, self.layers, self.records, strict=True)
        ]
        return p_h, [None if x is None else next(through) for x in single]
