"""Replays of a recorded forward pass: same inputs, random numbers and autocast state; buffers are restored."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils._pytree import tree_map

from ddpnopt.linear.given import Given
from ddpnopt.trace.layer_uses import later, together
from ddpnopt.trace.loose import Touch, Uses, Watch
from ddpnopt.trace.max_pooling import PlainMaxPooling
from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.modes import Switch, norms_in_eval
from ddpnopt.trace.probes import Cut, Paths, Probe
from ddpnopt.trace.random_numbers import HostGenerators, HostState, RandomState
from ddpnopt.trace.recording import Recording
from ddpnopt.trace.visitors import Tape, Visitor

ALIKE = 0.05  # relative difference of gradients up to which they are taken for the same, in any precision

AtLayer = Callable[[int, Tensor], None]
"""Called with the index of a layer and its input or output."""


def _linked(links: dict[int, int], outputs: list[Tensor], leaf: Any) -> Any:
    """The new value of an input that is an output of an earlier pass."""
    position = links.get(id(leaf))
    return leaf if position is None else outputs[position]


def _global_hooks() -> bool:
    """Whether hooks on all modules are registered; torch's own function for it is newer than torch 2.5."""
    return bool(
        module_hooks._global_forward_hooks
        or module_hooks._global_forward_pre_hooks
        or module_hooks._global_backward_hooks
        or module_hooks._global_backward_pre_hooks
    )


def _used(tape: Tape, recording: Recording) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that have a gradient, and their gradients."""
    used = [(z, q) for z, q in zip(tape.at(recording.positions), recording.q, strict=True) if q is not None]
    return [z for z, _ in used], [q for _, q in used]


class Playback:
    """A model and its layers, to replay recorded passes with a callback at each layer."""

    replays = 0  # of all models: while one replays, captures of the others record nothing

    def __init__(self, model: nn.Module, layers: list[ModelLayer], input_gradients: set[ModelLayer]) -> None:
        self.model, self.layers = model, layers
        self.input_gradients = input_gradients  # layers whose gradient at the input, p_x, is recorded
        self._visitor: Visitor | None = None
        self.host = HostGenerators()
        self.from_outputs: bool | None = None  # whether all gradients come from the outputs, once that has been asked
        self._images = any(len(each.layer.weight_shape) == 4 for each in layers)  # whether there may be pooling
        self._modules = {each.module for each in layers}
        # tensors that are plain attributes from the start; later ones may be states of the samples
        self._held = [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor)]
        self._loose = {each.weight: each for each in layers if isinstance(each.layer, Given)}
        self.modes = Switch(model)
        self._with_buffers = [m for m in model.modules() if m._buffers]

    @contextmanager
    def _conditions_of(self, recording: Recording, visitor: Visitor | None) -> Iterator[None]:
        """Modes, autocast and random numbers as in the recorded pass; hooks call the visitor instead of recording."""
        enabled, dtype, kind = recording.autocast
        same = not enabled and not torch.is_autocast_enabled(kind)
        autocast: Any = nullcontext() if same else torch.autocast(kind, dtype=dtype, enabled=enabled)
        buffers: Any = self.buffers_kept() if self._with_buffers else nullcontext()
        current = recording.rng.like_now(recording.device)
        self._visitor = visitor
        Playback.replays += 1
        try:
            with self.modes.kept(recording.modes), buffers, autocast:
                recording.rng.restore(recording.device)
                yield
        finally:
            current.restore(recording.device)
            self._visitor = None
            Playback.replays -= 1

    def _constants(self, recording: Recording) -> list[Tensor]:
        """The tensors of the model that have no samples; without inputs they may be the samples themselves."""
        return [*self.model.buffers(), *self._held] if recording.inputs else []

    def _has_loose(self, recording: Recording) -> bool:
        return bool(self._loose) and any(isinstance(record.layer, Given) for record in recording.layers)

    def _touching(self, visitor: Visitor) -> Touch:
        one = weakref.proxy(visitor)  # which has what calls this
        return lambda p: one.touch(self._loose[p])

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """Undo what the forward pass does to the model's buffers."""
        buffers = [
            (m, name, b, b.clone()) for m in self._with_buffers for name, b in m._buffers.items() if b is not None
        ]
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, old in buffers:
                    if not torch.equal(buffer, old):  # one that a layer reads must not look changed
                        buffer.copy_(old)
                    module._buffers[name] = buffer  # a forward pass may have replaced it

    @contextmanager
    def suspended(self, device: torch.device) -> Iterator[None]:
        """In the middle of a replay: let another one run, then continue with this one's random numbers and modes."""
        visitor, modes = self._visitor, self.modes.now()
        with self.random_numbers_kept(device):
            yield
        self._visitor = visitor
        self.modes.to(modes)

    @contextmanager
    def random_numbers_kept(self, device: torch.device) -> Iterator[None]:
        """Let the random numbers go on as if none had been drawn."""
        before = RandomState.now(device, HostState.now() if self.host.used else None)
        try:
            yield
        finally:
            before.restore(device)

    def replay(self, recording: Recording, control: AtLayer, observe: AtLayer | None = None) -> list[Tensor]:
        """Run the forward pass again: control(t, x) before layer t (it may change the weights), observe(t, h) after."""
        modules = self._in_sequence(recording)
        pooling = PlainMaxPooling() if self._images else nullcontext()
        if modules is None:
            visitor = Visitor(recording, control, observe)
            watch = Watch(self._loose, self._touching(visitor)) if self._has_loose(recording) else nullcontext()
            norms = visitor.norms_from_states()
            with torch.no_grad(), pooling, norms, self._all_passes(recording, visitor, watch, linked=True):
                visitor.check(recording)
            return [recording.arranged(output, k) for k, output in enumerate(visitor.outputs)]
        index = {record.model_layer.module: t for t, record in enumerate(recording.layers)}
        x: Tensor = recording.args[0]
        unwatched: AbstractContextManager[Any] = torch._C.DisableTorchFunction() if self._images else nullcontext()
        with torch.no_grad(), self._conditions_of(recording, None), pooling:
            for module in modules:
                t = index.get(module)
                if t is None:
                    x = module(x)
                    continue
                with unwatched:  # by the mode of the pooling
                    layer = recording.layers[t].model_layer
                    state = layer.state_of(x)
                    control(t, state)
                    quick = layer.has_own_forward and layer.is_faster_from_state(x)
                    x = layer.output(state) if quick else module.forward(x)
                    if observe is not None:
                        observe(t, x)
        return [x]

    @contextmanager
    def _all_passes(
        self, recording: Recording, visitor: Visitor, watch: AbstractContextManager[Any], *, linked: bool = False
    ) -> Iterator[None]:
        """All forward passes of a recording, one after the other; buffers are reset at the end.

        `linked` hands what a pass returns to those that have read it. Without that their inputs are the recorded ones,
        and the recorded gradients at the outputs, which have come through later passes, count once.
        """
        with ExitStack() as stack:
            if not recording.passes:
                stack.enter_context(self._conditions_of(recording, visitor))
                with watch:
                    self.model(*recording.args, **recording.kwargs)
            for one, links in zip(recording.passes, recording.links, strict=True):
                stack.enter_context(self._conditions_of(one, visitor))
                args, kwargs = one.args, one.kwargs
                if links and linked:
                    new = partial(_linked, links, visitor.outputs)
                    args, kwargs = tree_map(new, args), tree_map(new, kwargs)
                with watch:
                    self.model(*args, **kwargs)
            yield

    def rerun(self, recording: Recording, visitor: Visitor, change: Callable[[Any], Any]) -> None:
        """The forward pass with other inputs, and norms that do not couple the samples."""
        with self._conditions_of(recording, visitor), norms_in_eval(self.model):
            self.model(*tree_map(change, recording.args), **tree_map(change, recording.kwargs))

    def with_graph(self, recording: Recording, visitor: Visitor, then: Callable[[], None]) -> None:
        """The forward pass with a graph, and such norms; `then` runs before the buffers are reset."""
        with torch.enable_grad(), self._conditions_of(recording, visitor), norms_in_eval(self.model):
            self.model(*recording.args, **recording.kwargs)
            with torch.autocast(recording.device.type, enabled=False):
                then()

    def _in_sequence(self, recording: Recording) -> list[nn.Module] | None:
        """The modules of a plain `nn.Sequential`, which can run one after the other without hooks; None for any other.

        Layers without autocast and without hooks but ours are called directly, everything else as usual.
        """
        args, model = recording.args, self.model
        if recording.passes or recording.layouts or any(r.layouts[0] is not None for r in recording.layers):
            return None
        if type(model) is not nn.Sequential or len(args) != 1 or recording.kwargs or not isinstance(args[0], Tensor):
            return None
        if recording.autocast[0] or _global_hooks() or any(tuple(r.uses) != (0,) for r in recording.layers):
            return None
        todo: list[nn.Module] = [model]
        found: list[nn.Module] = []
        while todo:
            module = todo.pop()
            if type(module) is nn.Sequential and module not in self._modules:
                hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
                ours = 2 if module is model else 0
                if hooks != ours or "forward" in vars(module) or module._compiled_call_impl is not None:
                    return None
                todo.extend(reversed(module._modules.values()))
            elif module in self._modules and not len(module._forward_hooks) == len(module._forward_pre_hooks) == 1:
                return None
            else:
                found.append(module)
        return found if self._modules.issubset(found) else None

    def probes(self, recording: Recording) -> list[Probe]:
        """The forward pass again with a graph that is cut behind each layer, for each micro-batch."""
        visitor = Cut(recording)
        with torch.enable_grad(), self._all_passes(recording, visitor, nullcontext()):
            visitor.check(recording)
        outputs = [o for o in visitor.outputs if o.requires_grad]
        return [Probe(visitor.inputs, visitor.leaves, outputs)]

    def paths(self, recording: Recording, *, mixing: bool) -> list[Paths]:
        """Which layers each one reads, and with `mixing` whether samples are mixed on the way, for each micro-batch."""
        visitor = Paths(recording, mixing=mixing)
        with torch.enable_grad(), visitor.saving(), self._all_passes(recording, visitor, nullcontext()):
            visitor.check(recording)
        return [visitor]

    @contextmanager
    def _taped(self, recording: Recording) -> Iterator[Tape]:
        """The forward pass with a graph; the backward pass must come before the buffers, which norms use, are reset."""
        tape = Tape(recording)
        if self._has_loose(recording):
            samples = recording.loose_rows or recording.sample_count
            touch, constants = self._touching(tape), self._constants(recording)
            tape.loose = Uses(
                self._loose, touch, lambda: samples, constants=constants, kept=True, second=recording.second
            )
        with torch.enable_grad(), self._all_passes(recording, tape, tape.loose or nullcontext()):
            tape.check(recording)
            yield tape

    def retrace(self, recording: Recording) -> None:
        """Compute the freed states and gradients of a recording again: forward, and backward from its outputs."""
        with self._taped(recording) as tape:
            p_h, p_x = tape.back(*_used(tape, recording), self.input_gradients)
            for t, record in enumerate(recording.layers):
                uses = tape.states(t)
                tape.inputs[t] = []  # of a norm they are no longer needed
                record.x, record.p_h, record.p_h_dot_h = together(record.layer, uses), p_h[t], None
                record.later = later(record.model_layer, uses)
                record.p_x = p_x[t]

    def come_from_outputs(self, recording: Recording) -> bool:
        """Whether the recorded gradients are those of the outputs: no part of the loss begins inside the model."""
        with self._taped(recording) as tape:
            p_h, _ = tape.back(*_used(tape, recording), ())
        return all(
            r.p_h is None or float((p - r.p_h).norm()) <= ALIKE * float(r.p_h.norm())
            for p, r in zip(p_h, recording.layers, strict=True)
        )

    def pull_back(
        self, recording: Recording, index: int, columns: Tensor
    ) -> tuple[list[list[Tensor]], list[list[Tensor | None]]]:
        """Back-propagate cotangents (R, B, …) of one output: p_h and p_x of each layer, for each of the R."""
        with self._taped(recording) as tape:
            output = tape.at(recording.positions)[index]
            last = len(columns) - 1
            pulled = [tape.back([output], [column], tape.layers, keep=r < last) for r, column in enumerate(columns)]
        return [p_h for p_h, _ in pulled], [p_x for _, p_x in pulled]
