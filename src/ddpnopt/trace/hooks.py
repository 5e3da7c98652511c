"""Capture by hooks: from an `nn.Module` in training to the trajectory of a dynamical system, and back.

While the user's forward and backward pass run, each supported layer becomes a `Stage` with its input x and the
gradients p_h (at its output) and p_x (at its input, through this layer alone). Afterwards the same forward pass can be
replayed, with a say at each layer (`Playback`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from ddpnopt._distributed import wrapper_at_work
from ddpnopt.errors import ModelError, StepError
from ddpnopt.linear.layer import Conv
from ddpnopt.trace.model_layers import Unit
from ddpnopt.trace.recording import (
    Recording,
    Stage,
    arrived_at_input,
    arrived_at_output,
    arrived_at_stage,
    is_floating,
    leaves,
    rng_state,
    when_gradient_comes,
)
from ddpnopt.trace.replay import Playback
from ddpnopt.trace.rescaling import scale, watch_overflow


class _Source(torch.autograd.Function):
    """Lets a gradient arrive at h although nothing before it needs one; h is no leaf, so in-place work goes on.

    The anchors, which make it a node of the graph, learn that a gradient has come by, and get none.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, *anchors: Tensor) -> Tensor:
        ctx.mark_dirty(h)
        return h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        return (grad if wanted[0] else None, *[None] * (len(wanted) - 1))


def _source_of(h: Tensor) -> tuple[Tensor, Tensor]:
    """h, and the tensor whose gradient is that of h even if h is overwritten.

    A linear layer on tokens returns a view of its product. Work in place on a view rewrites the history of its
    base, and a hook on the view itself would never be called.
    """
    base = h._base
    if base is None:
        return h, h
    if h.numel() == base.numel() and h.is_contiguous() and base.is_contiguous():
        return h, base
    copy = h.clone()
    return copy, copy


class _Hook:
    """A hook that a copied or pickled model does not take along, and that dies with its capture."""

    def __init__(self, capture: Capture, method: str, unit: Unit | None) -> None:
        self.capture, self.method, self.unit = weakref.ref(capture), method, unit

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._between_graphs(*args)
        capture = self.capture()
        return None if capture is None else getattr(capture, self.method)(self.unit, *args)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _between_graphs(self, *args: Any) -> Any:
        """torch.compile is not to trace what the hook does; this costs some microseconds, so only there."""
        return self(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _nothing(*args: Any) -> None:
    return None


def _no_hook() -> Callable[..., None]:
    return _nothing


def _transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, …) is at work: its passes are none of a training step."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _checkpointed() -> bool:
    """Whether activation checkpointing is at work, which runs a block again in the backward pass."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


class Capture(Playback):
    """Hooks on a model, the recording that they make, and its replays."""

    _owner: ClassVar[weakref.WeakKeyDictionary[nn.Module, weakref.ref[Capture]]] = weakref.WeakKeyDictionary()

    def __init__(self, model: nn.Module, units: list[Unit], *, skip_weight_grads: bool, slopes_from: float = 0) -> None:
        # p_x is caught in layers with so many weights: in smaller linear ones it costs less to do without
        large = {unit for unit in units if isinstance(unit.layer, Conv) or unit.weight.numel() >= slopes_from}
        super().__init__(model, units, caught=set() if slopes_from == inf else large)
        self.skip_weight_grads = skip_weight_grads
        self.enabled = True
        self.keep_outputs = True  # h itself until its gradient arrives: the ledger wants <p_h, h>
        self._without_grad: list[nn.Parameter] = []  # whose weight gradient is being skipped right now
        self._skipped: set[str] = set()  # layers that have run in a recorded pass without their weight gradient
        self._lost: set[Unit] = set()  # to another capture
        self.seen_forward = False
        self._arrived: list[Recording] = []  # one entry for each backward pass since the last step
        self._anchor = torch.empty(0, requires_grad=True)
        self.wrapper: nn.Module | None = None  # DistributedDataParallel around the model, in the last forward pass
        self._running: Recording | None = None  # between the model's first and last instruction
        self.batch_norms = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._handles = [
            model.register_forward_pre_hook(_Hook(self, "_begin", None), with_kwargs=True),
            model.register_forward_hook(_Hook(self, "_end", None), with_kwargs=True, always_call=True),
        ]
        for unit in units:
            self._take_over(unit)
            # last among the pre-hooks and first among the hooks: what others do to x and h is part of the graph
            before, after = _Hook(self, "_before", unit), _Hook(self, "_after", unit)
            self._handles.append(unit.module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(unit.module.register_forward_hook(after, prepend=True, always_call=True))

    def _take_over(self, unit: Unit) -> None:
        """The newest optimizer of a layer is the one that sees it."""
        last = Capture._owner.get(unit.module)
        before = None if last is None else last()
        if before is not None:
            before._lost.update(u for u in before.units if u.module is unit.module)
        Capture._owner[unit.module] = weakref.ref(self)

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()

    # -- the user's forward pass -------------------------------------------------------------------------------------

    def _begin(self, _: None, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if Playback.replays or not self.enabled or not torch.is_grad_enabled() or _transformed():
            return
        self.wrapper = wrapper_at_work()
        self._want_grads()  # an interrupt in the middle of a layer may have left some off
        device = self.units[0].parameters[0].device
        kind = device.type
        autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), kind)
        self._running = Recording(
            args, kwargs, model.training, device, rng_state(device), autocast, arrived=self._arrived
        )

    def _end(self, _: None, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._replay is not None:
            self._replay.outputs = [o for o in leaves(output) if is_floating(o)]
            return None
        recording, self._running = self._running, None
        if recording is None or output is None:  # not recorded, or the forward pass raised
            return None
        self.seen_forward = True
        watch = partial(self._watch_output, recording)
        return watch(output) if isinstance(output, Tensor) else tree_map(watch, output)

    @staticmethod
    def _watch_output(recording: Recording, output: Any) -> Any:
        if not is_floating(output):
            return output
        position, recording.floating_outputs = recording.floating_outputs, recording.floating_outputs + 1
        if not output.requires_grad:
            return output
        alias = output.view_as(output)  # only what the loss itself sends back, not what later layers do
        when_gradient_comes(alias, partial(arrived_at_output, recording, len(recording.q)))
        recording.outputs.append(output.detach())
        recording.positions.append(position)
        recording.q.append(None)
        return alias

    def _skip_grads(self, unit: Unit) -> None:
        """Our update forms its own weighted gradient: autograd's would be thrown away."""
        if self.skip_weight_grads:
            self._without_grad = unit.parameters  # those that are trained
            for p in self._without_grad:
                p.requires_grad = False

    def _want_grads(self) -> None:
        for p in self._without_grad:
            p.requires_grad = True
        self._without_grad = []

    def _before(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs["input"]
        if Playback.replays:
            x = self._replay.before(unit, x) if self._replay is not None else None
            return None if x is None else ((x,), {})
        recording = self._running
        if recording is None and not self._skipped:
            return None
        if not torch.is_grad_enabled() or unit in self._lost or _transformed():
            return None
        weight = module._parameters["weight"]
        if weight is not unit.weight or not weight.requires_grad:
            return None  # frozen, or other weights in its place (functional_call)
        if recording is None:
            if torch._C._current_graph_task_id() != -1 and unit.name in self._skipped:
                self._skip_grads(unit)  # activation checkpointing runs the layer again and expects the same graph
            return None
        if unit.name in recording.names:
            raise ModelError(
                f"Layer '{unit.name}' ran twice in one forward pass. DDPNOpt needs one time step a layer: give each "
                f"use a module of its own, or leave this layer to the open loop with exclude=['{unit.name}']."
            )
        recording.names.add(unit.name)
        unit.refresh()
        stage = Stage(unit, x.detach(), x._version, recomputed=_checkpointed())
        recording.stages.append(stage)
        self._skip_grads(unit)
        stage.skipped = bool(self._without_grad)
        if stage.skipped:
            self._skipped.add(unit.name)
        stage.moves = x.requires_grad
        if not stage.moves or unit not in self.caught:
            return None
        alias = x.view_as(x)  # so that the gradient through this layer can be told from that of other readers of x
        when_gradient_comes(alias, partial(arrived_at_input, stage))
        return (alias,), {}

    def _after(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], h: Tensor | None) -> Any:
        if Playback.replays:
            return None if self._replay is None else self._replay.after(unit, h)
        recording = self._running
        recomputed = recording is None and bool(self._without_grad)  # by activation checkpointing
        self._want_grads()
        if recomputed and h is not None and not h.requires_grad:
            return _Source.apply(h, self._anchor)  # type: ignore[no-untyped-call]
        if h is None or recording is None or not recording.stages or recording.stages[-1].unit is not unit:
            return None
        stage = recording.stages[-1]
        if self.wrapper is not None and stage.skipped:  # it waits for all parameters, also for those left out
            h = _Source.apply(h.clone() if h._is_view() else h, *unit.parameters)  # type: ignore[no-untyped-call]
        elif not h.requires_grad:  # a first layer on constant input, its weight gradient skipped
            h = _Source.apply(h.detach(), self._anchor)  # type: ignore[no-untyped-call]
        h, source = _source_of(h)
        stage.h_shape = h.shape
        if self.keep_outputs and (not stage.moves or unit in self.caught):
            stage._h, stage._version = h.detach(), h._version
        when_gradient_comes(source, partial(arrived_at_stage, recording, stage))
        if stage.skipped and recording.autocast[0]:
            watch_overflow(stage, source)
        return h

    # -- for the optimizer -------------------------------------------------------------------------------------------

    def take(self) -> Recording:
        """The recording of the pass whose gradients have just arrived; complains if there is not exactly one."""
        self._require_arrival()
        if len(self._arrived) > 1:
            raise StepError(
                f"step() after {len(self._arrived)} backward passes: this optimizer takes one a step. Put the samples "
                "into one batch (or add the losses) and call backward() once, or step() after each; zero_grad() drops "
                "what has arrived so far."
            )
        return self.take_all()[0]

    def take_all(self) -> list[Recording]:
        """The recordings of all passes since the last step: the micro-batches of one batch."""
        self._require_arrival()
        if len({id(recording) for recording in self._arrived}) < len(self._arrived):
            raise StepError(
                f"step() after {len(self._arrived)} backward passes of which two went through one forward pass: add "
                "the losses and call backward() once, or run the forward pass again for the second; zero_grad() drops "
                "what has arrived so far."
            )
        for recording in self._arrived:
            self._check(recording)
        return list(self._arrived)

    def _require_arrival(self) -> None:
        if not self._arrived:
            raise StepError(
                "step() without a backward pass since the last step: run a forward pass, model(inputs), and call "
                "loss.backward() first."
                if self.seen_forward
                else "step() found no forward pass of the model. Call model(inputs) with gradients enabled, then "
                "loss.backward(), before step(); layers called outside model(...) are not seen."
            )

    @staticmethod
    def _check(recording: Recording) -> None:
        if not recording.training:
            raise StepError(
                "The model was in eval mode in the forward pass: call model.train() before training steps. (Single "
                "modules, such as frozen batch norms, may stay in eval mode.)"
            )
        recording.stages = [s for s in recording.stages if s.p_h is not None]
        recording.check()

    def scale(self, factor: float) -> None:
        """Multiply all gradients that have arrived so far."""
        for recording in self._arrived:
            scale(recording, factor)

    def forget(self) -> None:
        """Drop the gradients that have arrived so far."""
        self._arrived.clear()
