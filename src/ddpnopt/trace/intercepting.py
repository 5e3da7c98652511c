"""What runs inside the model while a pass is recorded: fused calls in pieces, and a watch over loose parameters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddpnopt.linear.given import Given
from ddpnopt.trace.direct_uses import DirectUses
from ddpnopt.trace.fused import Fused, Holder, Interception
from ddpnopt.trace.layer_uses import shared
from ddpnopt.trace.loose import LARGEST, Uses
from ddpnopt.trace.loose_values import Made
from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.recording import EMPTY, LayerRecord, Recording, is_derivative, note_backward
from ddpnopt.trace.replay import Playback


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, …) is active: its passes do not belong to a training step."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _has_compiled_parts(model: nn.Module) -> bool:
    """Whether a module in the model is compiled: what happens inside of it is not seen."""
    return any(m._compiled_call_impl is not None or hasattr(m, "_torchdynamo_orig_callable") for m in model.modules())


def _ignores(recording: weakref.ref[Recording]) -> bool:
    """Whether a gradient is not that of the loss, or of a pass that nobody can step from any more.

    One that counts may be the first of its backward pass.
    """
    alive = recording()
    if alive is None or is_derivative(alive):
        return True
    if not alive.arrivals.part:
        note_backward(alive)
    return False


class Intercepting(Playback):
    """A model whose calls of some functions of torch are seen, or replaced, in recorded passes and their replays."""

    def __init__(
        self, model: nn.Module, layers: list[ModelLayer], input_gradients: set[ModelLayer], *, reuse: bool
    ) -> None:
        super().__init__(model, layers, input_gradients)
        self._reuse = reuse  # whether a layer may run several times in one pass
        self.compiled = False  # whether the model is running as a compiled graph
        self._skipped: set[str] = set()  # layers that have run in a recorded pass without their weight gradient
        self._running: Recording | None = None  # between the model's first and last instruction
        self._interceptions = threading.local()  # micro-batches replay in threads of their own
        self._lost: set[ModelLayer] = set()  # to another capture, or to the watch over loose parameters
        self._suspects: list[ModelLayer] = []  # layers whose weights the model may read past their forward
        self._suspected: set[ModelLayer] = set()  # all of them so far
        self._loosened: list[ModelLayer] = []  # those that were found to be, since the last step
        self.second: int | None = None  # the inputs' dimension with samples, in a model that has them in dimension 1
        self.differentiates = False  # whether the model computes derivatives of itself in its forward pass

    def _enter(self, fused: Fused, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Let the module run as pieces with hooks, in a pass that is recorded, recomputed or replayed."""
        if Playback.replays:
            wanted = self._visitor is not None
        else:
            recomputed = bool(self._skipped) and torch._C._current_graph_task_id() != -1
            wanted = torch.is_grad_enabled() and (self._running is not None or recomputed) and not transformed()
        if wanted and fused.applies():
            self._intercept(fused, Interception(fused.replacements(args)))

    def _intercept(self, owner: Any, mode: Interception | Uses | DirectUses) -> None:
        mode.__enter__()
        self._interceptions.__dict__.setdefault("entered", []).append((owner, mode))

    def _watch_loose(self, recording: Recording) -> None:
        """See all uses of parameters that belong to no layer, from now on."""
        if not self._loose or recording.autocast[0] or self.compiled or _has_compiled_parts(self.model):
            return  # compiled parts call functions that are not seen
        pass_ = weakref.proxy(recording)  # which has these uses: no cycle, so that it ends with its last use
        touch, samples = partial(self._touched, pass_), partial(Recording.samples, pass_, unknown=0)
        recording.second = self.second is not None
        if self.second is not None:
            samples = partial(Recording.samples_of_inputs, pass_, self.second)
        constants, ignores = self._constants(recording), partial(_ignores, weakref.ref(recording))
        recording.loose = Uses(
            self._loose, touch, samples, constants=constants, ignores=ignores, second=recording.second
        )
        self._intercept(self, recording.loose)

    def suspect(self, layers: Iterable[ModelLayer]) -> None:
        """Look in the next pass whether the model reads the weights of these layers past their forward."""
        for each in layers:
            if each.part_of is None and each not in self._suspected and each not in self._lost:
                self._suspects.append(each)
                self._suspected.add(each)

    def settled(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Without those that may have feedback in the next step: the next pass tells, or the last one has told."""
        if not (self._suspects or self._loosened):
            return parameters
        open_ = {p for each in (*self._suspects, *self._loosened) for p in each.parameters}
        self._loosened.clear()
        return [p for p in parameters if p not in open_]

    def have_in_second(self, dim: int | None) -> None:
        """From the next pass on loose parameters meet samples in dimension 1, those of this dimension of the inputs."""
        if dim is not None and self.second is None:
            self._loosened += self._loose.values()
        self.second = dim

    def _watch_suspects(self, recording: Recording) -> None:
        if self._suspects and not recording.autocast[0] and not self.compiled and not _has_compiled_parts(self.model):
            self._intercept(self, DirectUses(self._suspects))
            self._suspects = []

    def loosen(self, layers: Iterable[ModelLayer], samples: int) -> None:
        """From the next pass on the weights of these layers belong to no layer, so that all of their uses count."""
        for layer in layers:
            if any(samples * p.numel() > LARGEST for p in layer.parameters):
                continue
            self._lost.add(layer)
            self._loosened.append(layer)
            for own, p in layer.module.named_parameters(recurse=False):
                if any(p is each for each in layer.parameters):
                    given = Given(tuple(p.shape))
                    self._loose[p] = ModelLayer(f"{layer.name}.{own}", Holder(p), given, loosened=True)
                    self._modules.add(self._loose[p].module)

    def controls(self) -> Iterable[ModelLayer]:
        """All layers, and the parameters that belong to none, each parameter once."""
        return {**{each.weight: each for each in self.layers}, **self._loose}.values()

    def _of_parameters(self, layer: ModelLayer, x: Tensor, recording: Recording) -> bool:
        """Whether a layer has one input for all samples, computed from parameters: it makes values that they share."""
        made = None if recording.loose is None else recording.loose.known.get(id(x))
        if made is None or not made.roots or recording.loose is None or recording.calls[layer.name] > 1:
            return False
        samples = recording.samples(unknown=0)
        if layer.part_of is not None or not (x.dim() == 1 or len(x) == 1 < samples):
            return False
        self.loosen([layer], samples)
        if layer not in self._lost:
            return False
        recording.loose.known.update({id(p): Made.of(p) for p in layer.parameters})
        return True

    def _without_samples(self, layer: ModelLayer, ids: Tensor, recording: Recording) -> bool:
        """Whether an embedding has the same ids for all samples: then its rows are values that the samples share."""
        if not self._reuse or recording.calls[layer.name] > 1:
            return False
        if not shared(ids, recording.samples()):
            return False
        p = layer.weight
        if p not in self._loose:
            self._loose[p] = ModelLayer(layer.name, Holder(p), Given(tuple(p.shape)))
        if recording.loose is None:
            self._watch_loose(recording)
        elif id(p) not in recording.loose.known:
            recording.loose.known[id(p)] = Made.of(p)
        return recording.loose is not None

    def _touched(self, recording: Recording, p: nn.Parameter) -> None:
        """The first use of a parameter that belongs to no layer; its gradients follow from all uses."""
        recording.layers.append(LayerRecord(self._loose[p], EMPTY, 0))

    def _again(self, recording: Recording, forward: Callable[[], Any]) -> Any:
        """Make the first pass in which the model has differentiated itself again, with all uses of the weights noted.

        The force of an energy, or the field of a Hamiltonian, is an output that is a derivative by a variable made in
        the forward pass, which the inputs do not tell.
        """
        self.differentiates = True
        recording.arrivals.hidden = recording.arrivals.incomplete = False
        recording.rng.restore(recording.device)
        return forward()

    def _leave(self, fused: Any, *_: Any) -> None:
        entered = self._interceptions.__dict__.get("entered")
        if entered and entered[-1][0] is fused:
            self._close(entered.pop()[1])
            if entered and entered[-1][0] is fused and isinstance(entered[-1][1], DirectUses):
                self._close(entered.pop()[1])

    def _close(self, mode: Interception | Uses | DirectUses) -> None:
        mode.__exit__(None, None, None)
        if isinstance(mode, DirectUses) and self._running is not None:
            self.loosen(mode.found, self._running.samples())
