"""The same forward pass once more: same inputs, random numbers and autocast state, buffers put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ddpnopt.trace.max_pooling import PlainMaxPooling
from ddpnopt.trace.model_layers import Unit
from ddpnopt.trace.recording import Probe, Recording, rng_state, set_rng_state
from ddpnopt.trace.visitors import Cut, Replay, Tape


class Playback:
    """A model and its layers, to run recorded passes again with a say at each layer."""

    replays = 0  # of all models: while one replays, captures of the others look away

    def __init__(self, model: nn.Module, units: list[Unit], caught: set[Unit]) -> None:
        self.model, self.units = model, units
        self.caught = caught  # layers that slopes at the input are wanted of
        self._replay: Replay | None = None
        self._images = any(len(unit.layer.weight_shape) == 4 for unit in units)  # whether there may be pooling
        self._by_module = {unit.module: unit for unit in units}
        self._with_buffers = [m for m in model.modules() if m._buffers]

    @contextmanager
    def _replaying(self, recording: Recording, replay: Replay) -> Iterator[None]:
        enabled, dtype, kind = recording.autocast
        autocast: Any = torch.autocast(kind, dtype=dtype) if enabled else nullcontext()
        mine = rng_state(recording.device)
        self._replay = replay
        Playback.replays += 1
        try:
            with self.buffers_kept(), autocast:
                set_rng_state(recording.rng, recording.device)
                yield
        finally:
            set_rng_state(mine, recording.device)
            self._replay = None
            Playback.replays -= 1

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """What the forward pass does to the model's buffers is undone at the end."""
        buffers = [
            (m, name, b, b.clone()) for m in self._with_buffers for name, b in m._buffers.items() if b is not None
        ]
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, old in buffers:
                    buffer.copy_(old)
                    module._buffers[name] = buffer  # a forward pass may have put another in its place

    @contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        """In the middle of a replay: let another one run, and find one's own random numbers again afterwards."""
        mine, rng = self._replay, rng_state(device)
        yield
        self._replay = mine
        set_rng_state(rng, device)

    def replay(
        self,
        recording: Recording,
        control: Callable[[int, Tensor], None],
        observe: Callable[[int, Tensor], None] | None = None,
    ) -> list[Tensor]:
        """Run the forward pass again: control(t, x) before stage t (it may change the weights), observe(t, h) after."""
        replay = Replay(recording, control, observe)
        pooling = PlainMaxPooling() if self._images else nullcontext()
        with torch.no_grad(), self._replaying(recording, replay), pooling:
            if self._straight(recording):
                replay.outputs = [self._walk(replay, recording.args[0])]
            else:
                self.model(*recording.args, **recording.kwargs)
        replay.check(recording)
        return replay.outputs

    def _straight(self, recording: Recording) -> bool:
        """Whether the model is one module behind the other and nobody else listens: no need to go through hooks."""
        model = self.model
        return (
            type(model) is nn.Sequential
            and "forward" not in vars(model)
            and model._compiled_call_impl is None
            and not _has_any_global_hook()
            and len(recording.args) == 1
            and not recording.kwargs
            and isinstance(recording.args[0], Tensor)
            and all(len(m._forward_hooks) == len(m._forward_pre_hooks) == 1 for m in (model, *self._by_module))
        )

    def _walk(self, replay: Replay, x: Tensor) -> Tensor:
        for module in self.model.children():
            unit = self._by_module.get(module)
            if unit is None:
                x = module(x)
            else:
                replay.before(unit, x)
                x = module.forward(x)
                replay.after(unit, x)
        return x

    def probe(self, recording: Recording) -> Probe:
        """Run the forward pass again with a graph that is cut behind each stage."""
        replay = Cut(recording)
        with torch.enable_grad(), self._replaying(recording, replay):
            self.model(*recording.args, **recording.kwargs)
        replay.check(recording)
        outputs = [o for o in replay.outputs if o.requires_grad]
        return Probe(replay.inputs, replay.leaves, outputs)

    @contextmanager
    def _taped(self, recording: Recording) -> Iterator[Tape]:
        """The forward pass with a graph: to go back through it before the buffers are put back, which norms look at."""
        tape = Tape(recording)
        with torch.enable_grad(), self._replaying(recording, tape):
            self.model(*recording.args, **recording.kwargs)
            tape.check(recording)
            yield tape

    def retrace(self, recording: Recording) -> None:
        """States and slopes of a recording once more, which have been let go: forth, and back from its outputs."""
        with self._taped(recording) as tape:
            used = [(z, q) for z, q in zip(tape.at(recording.positions), recording.q, strict=True) if q is not None]
            p_h, p_x = tape.back([z for z, _ in used], [q for _, q in used])
        for stage, x, at_output, at_input in zip(recording.stages, tape.inputs, p_h, p_x, strict=True):
            stage.x, stage.p_h, stage.p_h_dot_h = x.detach(), at_output, None
            stage.p_x = at_input if stage.unit in self.caught else None

    def pull_back(
        self, recording: Recording, index: int, columns: Tensor
    ) -> tuple[list[list[Tensor]], list[list[Tensor | None]]]:
        """Back-propagate cotangents (R, B, …) of one output: p_h and p_x of each stage, for each of the R."""
        with self._taped(recording) as tape:
            output = tape.at(recording.positions)[index]
            last = len(columns) - 1
            pulled = [tape.back([output], [column], keep=r < last) for r, column in enumerate(columns)]
        return [p_h for p_h, _ in pulled], [p_x for _, p_x in pulled]
