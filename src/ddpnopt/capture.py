"""Capture by hooks: from an `nn.Module` in training to the trajectory of a dynamical system, and back.

While the user's forward and backward pass run, each supported layer becomes a `Stage` with its input x and the
gradients p_h (at its output) and p_x (at its input, through this layer alone). Afterwards the same forward pass can be
replayed: same inputs, same random numbers, same autocast state, buffers put back afterwards, with a say at each layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddpnopt.errors import ModelError, StepError
from ddpnopt.recording import (
    Probe,
    Recording,
    Stage,
    arrived_at_input,
    arrived_at_output,
    arrived_at_stage,
    rng_state,
    tensors,
)
from ddpnopt.replay import Cut, Replay, Tape
from ddpnopt.units import Unit


class _Source(torch.autograd.Function):
    """Lets a gradient arrive at h although nothing before it needs one; h is no leaf, so in-place work goes on."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(h)
        return h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class _Hook:
    """A hook that a copied or pickled model does not take along, and that dies with its capture."""

    def __init__(self, capture: Capture, method: str, unit: Unit | None) -> None:
        self.capture, self.method, self.unit = weakref.ref(capture), method, unit

    def __call__(self, *args: Any) -> Any:
        capture = self.capture()
        return None if capture is None else getattr(capture, self.method)(self.unit, *args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return "_nothing"


def _nothing(*args: Any) -> None:
    return None


class Capture:
    """Hooks on a model, the recording that they make, and its replays."""

    def __init__(self, model: nn.Module, units: list[Unit], *, skip_weight_grads: bool) -> None:
        self.model, self.units = model, units
        self.skip_weight_grads = skip_weight_grads
        self.enabled = True
        self.keep_outputs = False  # h itself until its gradient arrives: the ledger wants <p_h, h>
        self.recording: Recording | None = None
        self._strays = [0]
        self._anchor = torch.empty(0, requires_grad=True)
        self._running: Recording | None = None  # between the model's first and last instruction
        self._replay: Replay | None = None
        self._handles = [
            model.register_forward_pre_hook(_Hook(self, "_begin", None), with_kwargs=True),
            model.register_forward_hook(_Hook(self, "_end", None), with_kwargs=True, always_call=True),
        ]
        for unit in units:
            # last among the pre-hooks and first among the hooks: what others do to x and h is part of the graph
            before, after = _Hook(self, "_before", unit), _Hook(self, "_after", unit)
            self._handles.append(unit.module.register_forward_pre_hook(before))
            self._handles.append(unit.module.register_forward_hook(after, prepend=True, always_call=True))

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()

    # -- the user's forward pass -------------------------------------------------------------------------------------

    def _begin(self, _: None, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._replay is not None or not self.enabled or not torch.is_grad_enabled():
            return
        if self.recording is not None:
            self.recording.replaced = True
            self._strays[0] += self.recording.backwards
        kind = next(model.parameters()).device.type
        autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), kind)
        self._running = Recording(args, kwargs, model.training, rng_state(model), autocast, strays=self._strays)

    def _end(self, _: None, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._replay is not None:
            self._replay.outputs = list(tensors(output))
            return
        recording, self._running = self._running, None
        if recording is None or output is None:  # not recorded, or the forward pass raised
            return
        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(arrived_at_output, recording, len(recording.q)))
                recording.outputs.append(tensor.detach())
                recording.q.append(None)
        if recording.stages or recording.outputs:
            self.recording = recording

    def _before(self, unit: Unit, module: nn.Module, args: tuple[Any, ...]) -> Any:
        if self._replay is not None:
            return self._replay.before(unit, args)
        recording = self._running
        if recording is None or not torch.is_grad_enabled() or not unit.parameters[0].requires_grad:
            return None
        if unit.name in recording.names:
            raise ModelError(
                f"Layer '{unit.name}' ran twice in one forward pass. DDPNOpt needs one time step a layer: give each "
                "use a module of its own, or leave this layer to the open loop with exclude=['" + unit.name + "']."
            )
        recording.names.add(unit.name)
        x = args[0]
        stage = Stage(unit, x.detach())
        recording.stages.append(stage)
        if self.skip_weight_grads:
            # our update forms its own weighted gradient: autograd's would be thrown away
            stage.skipped = [p for p in unit.parameters if p.requires_grad]
            for p in stage.skipped:
                p.requires_grad_(False)
        if not x.requires_grad:
            return None
        alias = x.view_as(x)  # so that the gradient through this layer can be told from that of other readers of x
        alias.register_hook(partial(arrived_at_input, stage))
        return (alias, *args[1:])

    def _after(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], h: Tensor | None) -> Any:
        if self._replay is not None:
            return self._replay.after(unit, h)
        recording = self._running
        if recording is None or not recording.stages or recording.stages[-1].unit is not unit:
            return None
        stage = recording.stages[-1]
        for p in stage.skipped:
            p.requires_grad_(True)
        if h is None:  # the layer raised
            return None
        if not h.requires_grad:  # a first layer on constant input, its weight gradient skipped
            h = _Source.apply(h, self._anchor)  # type: ignore[no-untyped-call]
        stage.h_shape = h.shape
        if self.keep_outputs:
            stage._h, stage._version = h.detach(), h._version
        h.register_hook(partial(arrived_at_stage, recording, stage))
        return h

    # -- for the optimizer -------------------------------------------------------------------------------------------

    def take(self) -> Recording:
        """The recording of the pass whose gradients have just arrived; complains if there is not exactly one."""
        recording = self.recording
        if recording is None:
            raise StepError(
                "step() found no forward pass of the model. Call model(inputs) with gradients enabled, then "
                "loss.backward(), before step(); layers called outside model(...) are not seen."
            )
        passes = recording.backwards + self._strays[0]
        if recording.backwards == 0:
            raise StepError(
                "step() without a backward pass: call loss.backward() on a loss of the last model(inputs) first."
            )
        if passes > 1:
            raise StepError(
                f"step() after {passes} backward passes: DDPNOpt replays one forward pass a step. Put the samples "
                "into one batch (or add the losses) and call backward() once, or step() after each; zero_grad() "
                "drops what has arrived so far."
            )
        if not recording.training:
            raise StepError(
                "The model was in eval mode in the forward pass: call model.train() before training steps. (Single "
                "modules, such as frozen batch norms, may stay in eval mode.)"
            )
        recording.stages = [s for s in recording.stages if s.p_h is not None]
        sizes = {s.name: (s.x.shape[0] if s.x.dim() > 1 else 0, s.h_shape[0]) for s in recording.stages}
        if recording.stages:
            first = recording.stages[0]
            for stage in recording.stages:
                if set(sizes[stage.name]) != {first.x.shape[0]} or first.x.dim() < 2:
                    raise ModelError(
                        f"Layer '{stage.name}' ran on an input of shape {tuple(stage.x.shape)}, but layer "
                        f"'{first.name}' on {tuple(first.x.shape)}: the first dimension must be the same batch "
                        "everywhere. Keep samples in dimension 0 (tokens or pixels in later ones)."
                    )
        return recording

    def forget(self) -> None:
        """Drop what has been recorded, unless its backward pass is still to come."""
        self._strays[0] = 0
        if self.recording is not None and self.recording.backwards:
            self.recording = None

    @contextmanager
    def _replaying(self, recording: Recording, replay: Replay) -> Iterator[None]:
        enabled, dtype, kind = recording.autocast
        autocast: Any = torch.autocast(kind, dtype=dtype) if enabled else nullcontext()
        buffers = [(b, b.clone()) for b in self.model.buffers()]
        cpu, devices = recording.rng
        self._replay = replay
        try:
            with torch.random.fork_rng(devices=list(devices)), autocast:
                torch.set_rng_state(cpu)
                for device, state in devices.items():
                    torch.cuda.set_rng_state(state, device)
                yield
        finally:
            self._replay = None
            with torch.no_grad():
                for buffer, old in buffers:
                    buffer.copy_(old)

    def replay(
        self,
        recording: Recording,
        control: Callable[[int, Tensor], None],
        observe: Callable[[int, Tensor], None] | None = None,
    ) -> list[Tensor]:
        """Run the forward pass again: control(t, x) before stage t (it may change the weights), observe(t, h) after."""
        replay = Replay(recording, control, observe)
        with torch.no_grad(), self._replaying(recording, replay):
            self.model(*recording.args, **recording.kwargs)
        return replay.outputs

    def probe(self, recording: Recording) -> Probe:
        """Run the forward pass again with a graph that is cut behind each stage."""
        replay = Cut(recording)
        with torch.enable_grad(), self._replaying(recording, replay):
            self.model(*recording.args, **recording.kwargs)
        outputs = [o for o in replay.outputs if o.requires_grad]
        return Probe(replay.inputs, replay.leaves, outputs)

    def pull_back(
        self, recording: Recording, index: int, columns: Tensor
    ) -> tuple[list[list[Tensor]], list[list[Tensor | None]]]:
        """Back-propagate cotangents (R, B, …) of one output: p_h and p_x of each stage, for each of the R."""
        replay = Tape(recording)
        with torch.enable_grad(), self._replaying(recording, replay):
            self.model(*recording.args, **recording.kwargs)
        output = [o for o in replay.outputs if o.requires_grad][index]
        inputs = [x for x in replay.inputs if x.requires_grad]
        p_h: list[list[Tensor]] = []
        p_x: list[list[Tensor | None]] = []
        for r, column in enumerate(columns):
            keep = r + 1 < len(columns)
            grads = torch.autograd.grad(
                output, [*replay.hs, *inputs], column, retain_graph=keep, materialize_grads=True
            )
            p_h.append(list(grads[: len(replay.hs)]))
            through = iter(grads[len(replay.hs) :])
            p_x.append([next(through) if x.requires_grad else None for x in replay.inputs])
        return p_h, p_x
