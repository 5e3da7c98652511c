"""Capture by hooks: from an `nn.Module` in training to the trajectory of a dynamical system.

While the user's forward and backward pass run, each supported layer gets a `LayerRecord` with its input x and the
gradients p_h (at its output) and p_x (at its input, through this layer alone). Afterwards the same forward pass can be
replayed with a callback at each layer (`Playback`).
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ddpnopt._distributed import active_wrapper
from ddpnopt.errors import ModelError
from ddpnopt.linear.convolution import Conv
from ddpnopt.trace.arrangement import Arrangement
from ddpnopt.trace.arrivals import Arrivals
from ddpnopt.trace.checkpointing import checkpointed
from ddpnopt.trace.compiled import let_compiled_code_see_hooks
from ddpnopt.trace.distributions import floating_outputs, replace_tensors
from ddpnopt.trace.gradient_hooks import on_gradient
from ddpnopt.trace.hook import Hook
from ddpnopt.trace.intercepting import Intercepting, transformed
from ddpnopt.trace.layer_uses import skipped_gradients
from ddpnopt.trace.loss_terms import MARK
from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.norms import statistics
from ddpnopt.trace.random_numbers import RandomState
from ddpnopt.trace.recording import (
    RETURNED,
    LayerRecord,
    Recording,
    arrived_at_input,
    arrived_at_layer,
    arrived_at_output,
    is_floating,
)
from ddpnopt.trace.replay import Playback
from ddpnopt.trace.rescaling import watch_overflow
from ddpnopt.trace.sources import Asked, Source, source_of
from ddpnopt.trace.unseen import Unseen
from ddpnopt.trace.untouched import Untouched, warn_of_asking
from ddpnopt.trace.weight_uses import Noted, WeightUses, can_be_noted

COPIED = 2**20  # numbers of an output: of larger ones, such as the logits of many words, the copy would need memory


class Capture(Intercepting):
    """Hooks on a model, the recording that they make, and its replays."""

    _owner: ClassVar[weakref.WeakKeyDictionary[nn.Module, weakref.ref[Capture]]] = weakref.WeakKeyDictionary()

    def __init__(
        self,
        model: nn.Module,
        layers: list[ModelLayer],
        *,
        skip_weight_grads: bool,
        input_gradients_from: float = 0,
        reuse: bool = False,
        batch_dim: int | None = None,
    ) -> None:
        # p_x is recorded in layers with at least this many weights: in smaller linear ones it is cheaper without
        large = {
            model_layer
            for model_layer in layers
            if isinstance(model_layer.layer, Conv)
            or (model_layer.required and model_layer.weight.numel() >= input_gradients_from)
        }
        super().__init__(model, layers, set() if input_gradients_from == inf else large, reuse=reuse)
        self.skip_weight_grads = skip_weight_grads
        self.untouched, self.unseen = Untouched(), Unseen()
        self.enabled = True
        self.keep_outputs = True  # h itself until its gradient arrives: the ledger needs <p_h, h>
        self.rolls_out = True  # whether the next step is to have a forward sweep, which alone needs that and p_x
        self._without_grad: list[nn.Parameter] = []  # whose weight gradient is being skipped at the moment
        self.arrivals = Arrivals()
        self.arrangement = Arrangement(weakref.proxy(self), batch_dim, allowed=reuse)
        self.arrivals.arrange = self.arrangement
        self._serial = 0
        self._device: tuple[torch.device | None, str] = None, ""  # of the model in the last pass, and its kind
        self._anchor = torch.empty(0, requires_grad=True)
        with torch.enable_grad():
            alias = self._anchor.view_as(self._anchor)
        self._anchor_node = alias.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        # what notes all uses of the weight of the layer that is running, and its input
        self._noting: tuple[WeightUses, Tensor] | None = None
        self.wrapper: nn.Module | None = None  # DistributedDataParallel around the model, in the last forward pass
        self.parallel: nn.Module | None = None  # … in any of them: the step is one of several processes
        self.batch_norms: list[tuple[str, nn.Module]] = [
            (n, m) for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
        ]
        self._handles = [
            model.register_forward_pre_hook(Hook(self, "_begin", None), with_kwargs=True),
            model.register_forward_hook(Hook(self, "_end", None), with_kwargs=True, always_call=True),
        ]
        let_compiled_code_see_hooks()
        for model_layer in layers:
            self._take_over(model_layer)
            # last among the pre-hooks and first among the hooks: what other hooks do to x and h is part of the graph
            before, after = Hook(self, "_before", model_layer), Hook(self, "_after", model_layer)
            self._handles.append(model_layer.module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(model_layer.module.register_forward_hook(after, prepend=True, always_call=True))
        for each in {each.part_of: None for each in layers if each.part_of is not None}:
            enter, leave = Hook(self, "_enter", each), Hook(self, "_leave", each)
            self._handles.append(each.module.register_forward_pre_hook(enter))
            self._handles.append(each.module.register_forward_hook(leave, prepend=True, always_call=True))

    def _take_over(self, model_layer: ModelLayer) -> None:
        """The newest optimizer of a layer is the one that records it."""
        last = Capture._owner.get(model_layer.module)
        before = None if last is None else last()
        if before is not None:
            before._lost.update(u for u in before.layers if u.module is model_layer.module)
        Capture._owner[model_layer.module] = weakref.ref(self)

    def remove(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def in_modes_of_passes(self) -> AbstractContextManager[None]:
        """The model in the modes of the last pass that a gradient has arrived at."""
        passes = self.arrivals.recordings
        return self.modes.kept(passes[-1].modes if passes else None)

    # -- the user's forward pass -------------------------------------------------------------------------------------

    def _begin(self, _: None, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if Playback.replays or not self.enabled or not torch.is_grad_enabled():
            return None
        if transformed():
            self.arrivals.transformed = True
            return None
        if self._without_grad:  # an interrupt in the middle of a layer may have left some disabled
            self._want_grads()
        self.wrapper = active_wrapper()
        if self.wrapper is not None:
            self.parallel = self.wrapper
        if self.untouched.steps_left and self.untouched.is_asked_for(self.layers):
            self.skip_weight_grads = False
        device = self.layers[0].weight.device
        if device != self._device[0]:
            self._device = device, device.type  # the name takes longer than the comparison
        kind = self._device[1]
        enabled = torch.is_autocast_enabled(kind)
        autocast = enabled, torch.get_autocast_dtype(kind) if enabled else None, kind
        rng = RandomState.now(device, self.host.before())
        recording = Recording(args, kwargs, self.modes.now(), device, rng, autocast, self.arrivals)
        recording.serial = self._serial = self._serial + 1
        recording.reads_variable |= self.differentiates
        self._running = recording
        if self._suspects:
            self._watch_suspects(recording)
        if not recording.reads_variable:
            if self._loose:
                self._watch_loose(recording)
            return None
        recording.anchor = self._anchor_node
        anchored = tree_map(self._anchored, args), tree_map(self._anchored, kwargs)
        self._watch_loose(recording)
        return anchored

    def _anchored(self, value: Any) -> Any:
        """A tensor whose gradient also goes to the anchor, which tells a loss's backward pass from `autograd.grad`."""
        if not (is_floating(value) and value.requires_grad):
            return value
        return Source.apply(value.clone(), self._anchor)  # type: ignore[no-untyped-call]

    def _end(self, _: None, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        self._leave(self)
        if self._visitor is not None:
            self._visitor.outputs += floating_outputs(output)
            return None
        recording, self._running = self._running, None
        if recording is None or output is None:  # not recorded, or the forward pass raised
            return None
        if recording.rng.host is not None:
            recording.rng = recording.rng._replace(host=self.host.after(recording.rng.host))
        if recording.differentiated and not self.differentiates and self.wrapper is None:
            return self._again(recording, partial(model, *args, **kwargs))
        self.arrivals.seen_forward = True
        watch = partial(self._watch_output, recording)
        return watch(output) if isinstance(output, Tensor) else tree_map(watch, output)

    def _watch_output(self, recording: Recording, output: Any) -> Any:
        if not is_floating(output):
            replace_tensors(output, partial(self._watch_output, recording))
            return output
        position, recording.floating_outputs = recording.floating_outputs, recording.floating_outputs + 1
        if not output.requires_grad:
            return output
        if recording.reads_variable:
            output = self._anchored(output)
        # for the gradient of the loss alone, without that of later layers; changed in place, a view loses its hook
        alias = output.clone() if output.numel() <= COPIED else output.view_as(output)
        assert alias.grad_fn is not None
        inside = alias.grad_fn.next_functions[0][0]
        on_gradient(alias, partial(arrived_at_output, recording, len(recording.q), inside))
        recording.outputs.append(output.detach())
        recording.positions.append(position)
        alias.grad_fn.metadata[MARK] = recording
        recording.returned.append(weakref.ref(alias))
        setattr(alias, RETURNED, True)
        recording.q.append(None)
        return alias

    def _skip_grads(self, model_layer: ModelLayer) -> None:
        """The update computes its own weighted gradient: that of autograd would not be used.

        Layers that may still be left to the base optimizer keep it where DistributedDataParallel is to average it.
        """
        wanted = self._running is not None and self._running.reads_variable
        if self.skip_weight_grads and not wanted and (model_layer.required or self.wrapper is None):
            self._without_grad = model_layer.parameters  # those that are trained
            for p in self._without_grad:
                p.requires_grad = False

    def _want_grads(self) -> None:
        for p in self._without_grad:
            p.requires_grad = True
        self._without_grad = []

    def _before(self, model_layer: ModelLayer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        if Playback.replays:
            if self._visitor is None:
                return None
            x = self._visitor.before(model_layer, x)
            return None if x is None else ((x,), {})
        recording = self._running
        if recording is None and not self._skipped:
            return None
        use = 0
        if recording is not None:
            use = recording.calls.get(model_layer.name, 0)
            recording.calls[model_layer.name] = use + 1
        if not torch.is_grad_enabled() or (self._lost and model_layer in self._lost) or transformed() or x.is_nested:
            return None
        weight = module._parameters["weight"]
        if weight is not model_layer.weight or not weight.requires_grad:
            return None  # frozen, or temporarily replaced (functional_call)
        if recording is None:
            if torch._C._current_graph_task_id() != -1 and model_layer.name in self._skipped:
                self._skip_grads(model_layer)  # checkpointing runs the layer again and expects the same graph
            return None
        if not self._reuse and any(r.model_layer is model_layer for r in recording.layers):
            raise ModelError(
                f"Layer '{model_layer.name}' ran twice in one forward pass, but this form needs one time step per "
                f"layer: use value='batch', give each use its own module, or leave this layer to the base optimizer: "
                f"exclude=['{model_layer.name}']."
            )
        looked_up = model_layer.looks_up and self._without_samples(model_layer, x, recording)
        if looked_up or (recording.loose is not None and self._of_parameters(model_layer, x, recording)):
            return None
        model_layer.refresh()
        record = LayerRecord(model_layer, x.detach(), x._version, False, (), checkpointed(), x.requires_grad, (use,))
        if model_layer.part_of is not None:
            record.span = vars(module).get("span")
        recording.layers.append(record)
        if recording.reads_variable and self._may_be_differentiated(recording, record):
            record.skipped = self.skip_weight_grads
            record.noted = Noted(self.arrivals)
            self._noting = WeightUses.of(recording, record, self._anchor), x
        else:
            self._skip_grads(model_layer)
            record.skipped = bool(self._without_grad)
        if record.skipped:
            self._skipped.add(model_layer.name)
        if not (record.moves and self.rolls_out and model_layer in self.input_gradients):
            return None
        alias = x.view_as(x)  # to separate the gradient through this layer from that of other readers of x
        on_gradient(alias, partial(arrived_at_input, recording, record))
        if record.noted is not None and self._noting is not None:
            self._noting = self._noting[0], alias
        return (alias,), {}

    def _may_be_differentiated(self, recording: Recording, record: LayerRecord) -> bool:
        """Whether to note all uses of the weight: derivatives by the inputs may become part of the loss."""
        seen = not recording.autocast[0] and not self.compiled and not record.recomputed
        return seen and self.arrivals.couples and self.wrapper is None and can_be_noted(record.model_layer)

    def _answer(self, recording: Recording, record: LayerRecord, grad: Tensor) -> list[Tensor | None]:
        """The gradients of a layer's weights, which `autograd.grad` is asked for; autograd computes the next ones."""
        found = skipped_gradients(record, grad)
        if self.skip_weight_grads:
            warn_of_asking()
        self.skip_weight_grads = False
        recording.arrivals.take_back(recording)
        return found

    def _after(self, model_layer: ModelLayer, module: nn.Module, args: tuple[Any, ...], h: Tensor | None) -> Any:
        if Playback.replays:
            return None if self._visitor is None else self._visitor.after(model_layer, h)
        recording = self._running
        recomputed = recording is None and bool(self._without_grad)  # by activation checkpointing
        if self._without_grad:
            self._want_grads()
        if recomputed and h is not None and not h.requires_grad:
            return Source.apply(h, self._anchor)  # type: ignore[no-untyped-call]
        record = recording.layers[-1] if recording is not None and recording.layers else None
        if h is None or recording is None or record is None or record.model_layer is not model_layer:
            return None
        if model_layer.normalises:
            record.statistics = statistics(h)
        if record.noted is not None and self._noting is not None:
            (uses, x), self._noting = self._noting, None
            h = uses.apply(x, model_layer.weight, module._parameters["bias"])
        if self.wrapper is not None and record.skipped:  # it waits for all parameters, including the skipped ones
            h = Source.apply(h.clone() if h._is_view() else h, *model_layer.parameters)  # type: ignore[no-untyped-call]
        elif record.skipped and self.untouched.steps_left and record.noted is None and not self.compiled:
            first = not h.requires_grad
            h = h.detach() if first else h.clone() if h._is_view() else h
            h = Asked.apply(h, partial(self._answer, recording, record), *model_layer.parameters)  # type: ignore[no-untyped-call]
            if first and h.grad_fn is not None:
                recording.source = h.grad_fn.next_functions[-1][0]
        elif not h.requires_grad:  # a first layer on constant input, its weight gradient skipped
            h = Source.apply(h.detach(), self._anchor)  # type: ignore[no-untyped-call]
            recording.source = self._anchor_node
        elif not self.skip_weight_grads and recording.anchor is None and not self.compiled:
            h = Source.apply(h.clone() if h._is_view() else h, self._anchor)  # type: ignore[no-untyped-call]
            recording.anchor = self._anchor_node  # from here on autograd.grad(…) by a weight is told from a loss
        h, source = source_of(h)
        record.h_shape = h.shape
        if self.keep_outputs and self.rolls_out and (not record.moves or model_layer in self.input_gradients):
            record._h, record._version = h.detach(), h._version
        on_gradient(source, partial(arrived_at_layer, recording, record))
        if record.skipped and recording.autocast[0]:
            watch_overflow(record, source)
        if record.skipped and self.untouched.steps_left and self.wrapper is None:
            on_gradient(source, partial(self.untouched.leave, recording, record))
        return h
