"""What is kept of one forward and backward pass: the nominal trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ddpnopt.errors import ModelError
from ddpnopt.linear.given import Given
from ddpnopt.trace.layout import Layout
from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.modes import Modes
from ddpnopt.trace.norms import Statistics
from ddpnopt.trace.random_numbers import RandomState

if TYPE_CHECKING:
    from ddpnopt.trace.arrivals import Arrivals
    from ddpnopt.trace.groups import Groups
    from ddpnopt.trace.loose import Uses
    from ddpnopt.trace.weight_uses import Noted

EMPTY = torch.empty(0)
RETURNED = "_returned_by_ddpnopt_model"  # mark on the outputs of a recorded pass


class LayerRecord:
    """One layer in one forward and backward pass: time step t of the dynamics.

    Made for each layer in each pass: what only some have is set for these alone.
    """

    span: tuple[int, int] | None = None  # of the outputs that were computed; None: all
    p_h: Tensor | None = None  # gradient of the batch loss at the output
    p_x: Tensor | None = None  # … at the input through this layer alone; None where x is constant or it is not recorded
    p_h_dot_h: Tensor | None = None  # <p_h, h> per sample, for the ledger of `Displacement`; None if h was overwritten
    extra: list[Tensor] | None = None  # gradient of a penalty on the weights, which does not come through the output
    shared: Tensor | None = None  # of a term in a loose parameter alone: the part of each sample's p_h, (1, n)
    later: Tensor | None = None  # the part of x that later uses, or times, read
    layouts: Sequence[Layout | None] = (None,)  # of each use: if not in dimension 0
    other_parts: Sequence[tuple[int, Tensor]] = ()  # p_h in further parts of the backward pass
    folded: Layout | None = None  # of the rows of a parameter's gradients that have been added up
    statistics: Statistics | None = None  # by which a norm has normalised, where they are known
    noted: Noted | None = None  # all uses of the weight, where derivatives may become part of the loss
    _h: Tensor | None = None
    _version = 0

    def __init__(
        self,
        model_layer: ModelLayer,
        x: Tensor,
        x_version: int,
        skipped: bool = False,
        h_shape: tuple[int, ...] = (),
        recomputed: bool = False,
        moves: bool = False,
        uses: Sequence[int] = (0,),
    ) -> None:
        self.model_layer, self.name = model_layer, model_layer.name
        self.layer, self.parameters = model_layer.layer, model_layer.parameters
        self.x = x  # input, (B, …); before a step the state that the layer is linear in, and all uses together
        self.x_version = x_version  # of x when the layer ran
        self.skipped = skipped  # whether autograd skips the gradients of the layer's parameters
        self.h_shape = h_shape
        self.recomputed = recomputed  # whether it ran under activation checkpointing
        self.moves = moves  # whether x depends on the layers before
        self.uses = uses  # which of the module's calls in this pass

    def arranged(self, a: Tensor, use: int = 0) -> Tensor:
        """An input or output of the layer with the batch in dimension 0."""
        layout = self.layouts[use]
        return a if layout is None else layout.places(self.layer, a)

    def free(self) -> None:
        """Drop the tensors of the size of the activations, which the step has taken over."""
        self.x, self.p_h, self.p_x, self.later = EMPTY, None, None, None

    def input_in(self, dtype: torch.dtype) -> Tensor:
        """x in the precision of the weights, unless it has integers; autocast may have recorded a smaller one."""
        return self.x if self.x.dtype == dtype or not self.x.is_floating_point() else self.x.to(dtype)


class Recording:
    """One forward pass of the model and what the backward pass has added to it."""

    floating_outputs = 0  # how many there are, with or without gradient
    differentiated = False  # whether a derivative of it may be part of the loss
    repeated = False  # whether several backward passes have come through since the last step
    parts: Sequence[Recording] = ()  # the micro-batches that this one was joined from
    passes: Sequence[Recording] = ()  # the forward passes that this one consists of, if several
    links: Sequence[dict[int, int]] = ()  # of each of them: which inputs are outputs before it
    serial = 0  # which forward pass it is
    task = -1  # which backward pass has come through
    asked = -1  # which was `autograd.grad(…)` by a weight
    anchor: Any = None  # a node of the graph that the backward pass of a loss runs, and autograd.grad(…) does not
    source: Any = None  # … that does so where a first layer has read constant inputs; another backward pass tells
    loose: Uses | None = None  # the uses of parameters that belong to no layer
    loose_rows = 0  # in how many rows their gradients were computed: one or several for each sample
    second = False  # whether they have met the samples in dimension 1
    group: Groups | None = None  # samples that count as one, in a large batch
    scalars: list[int] | None = None  # the outputs with a gradient that are one number, once that has been asked
    # known after `finish`
    batch_size = 0
    used_outputs: Sequence[int] = ()  # with a gradient and the batch in dimension 0
    signature: tuple[Any, ...] = ()  # equal for recordings with the same graph, as far as hooks can tell

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        modes: Modes,
        device: torch.device,
        rng: RandomState,
        autocast: tuple[bool, torch.dtype | None, str],
        arrivals: Arrivals,
    ) -> None:
        self.args, self.kwargs, self.modes, self.device = args, kwargs, modes, device
        self.rng, self.autocast, self.arrivals = rng, autocast, arrivals
        self.layers: list[LayerRecord] = []
        self.calls: dict[str, int] = {}  # of each layer so far
        self.outputs: list[Tensor] = []
        self.q: list[Tensor | None] = []  # gradients at the outputs
        self.positions: list[int] = []  # of those outputs among all floating ones
        self.layouts: dict[int, Layout | None] = {}  # of outputs that do not begin with the batch
        self.returned: list[ref[Tensor]] = []  # the outputs as the user has them: hooks there hold us
        self.inputs = [t for t in leaves((args, kwargs) if kwargs else args) if isinstance(t, Tensor)]
        self._versions = [t._version for t in self.inputs]
        variable = [t for t in self.inputs if t.requires_grad]
        self.reads_computed = any(not t.is_leaf for t in variable)
        # what the model itself has returned is a recurrent state; derivatives by others may become part of the loss
        self.reads_variable = any(not hasattr(t, RETURNED) for t in variable)

    def used(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs that the loss was computed from, among those of a replay."""
        return [outputs[self.positions[k]] for k in self.used_outputs]

    def arranged(self, tensor: Tensor, position: int) -> Tensor:
        """An output, or its gradient, with the batch in dimension 0."""
        layout = self.layouts.get(position)
        return tensor if layout is None else layout.fold(tensor)

    def output(self, k: int) -> Tensor:
        """Output k with the batch in dimension 0."""
        return self.arranged(self.outputs[k], self.positions[k])

    def gradient(self, k: int) -> Tensor | None:
        """The gradient there."""
        q = self.q[k]
        return None if q is None else self.arranged(q, self.positions[k])

    def samples(self, unknown: int = 1) -> int:
        """The number of samples, as far as it is known in the middle of the forward pass."""
        for record in self.layers:
            if record.x.dim() and record.x.numel():
                single = record.x.dim() == 1 and record.model_layer.required  # without a dimension for the batch
                return unknown if single else len(record.x)
        return next((len(t) for t in self.inputs if t.dim() and len(t)), unknown)

    def samples_of_inputs(self, dim: int) -> int:
        """Their number where this dimension of the inputs has them; zero if it tells nothing."""
        first = next((t for t in self.inputs if t.dim() > dim and not t.is_nested), None)
        if first is None or (first.dim() > 1 and first.shape[0] == first.shape[1]):
            return 0  # as many steps as samples
        return first.shape[dim]

    @property
    def sample_count(self) -> int:
        """How many samples there are, each by itself; known after `finish`."""
        return self.batch_size if self.group is None else self.group.samples

    def of_rows(self, a: Tensor) -> Tensor:
        """What each sample has, or each row already, as sums over the samples that count as one."""
        return a if self.group is None or len(a) == self.batch_size else self.group.add_up(a)

    def is_finite(self) -> bool:
        """Whether all gradients at the outputs are: else nothing that is found out here holds for other batches."""
        return all(q is None or bool(q.isfinite().all()) for q in self.q)

    def add_loose(self) -> None:
        """Give the parameters that belong to no layer the gradients of their uses."""
        if self.loose is None:
            return
        found, B = self.loose.gradients(), max(1, self.loose.samples())
        self.loose_rows = B
        for record in self.layers:
            p = found.get(record.model_layer.weight)
            if isinstance(record.layer, Given) and p is not None:
                record.p_h, record.x = p, p.new_ones(B, 1)
                record.h_shape, record.x_version = p.shape, record.x._version
        self.loose.forget()
        self.loose = None

    def finish(self) -> None:
        """Called before a step: what follows from all layers and outputs together."""
        layers = self.layers
        if layers and layers[0].x.dim():
            self.batch_size = layers[0].x.shape[0]
        linked = {position for links in self.links for position in links.values()}  # their gradient is not the loss's
        self.used_outputs = [
            k
            for k, q in enumerate(self.q)
            if q is not None
            and self.outputs[k].dim() > 0
            and self.output(k).shape[0] == self.sample_count
            and self.positions[k] not in linked
        ]
        self.signature = (
            tuple((r.name, r.x.dim(), r.moves, len(r.uses)) for r in layers),
            tuple(q is not None for q in self.q),
        )

    def forget_gradients(self) -> None:
        """Forget an earlier backward pass, after which `zero_grad` or a step came."""
        self.q, self.repeated, self.scalars = [None] * len(self.q), False, None
        for record in self.layers:
            record.p_h = record.p_x = record.p_h_dot_h = None
        for meeting in self.loose.meetings if self.loose is not None else ():
            meeting.gradient = None

    def check(self) -> None:
        """Raise an error if no step can be taken from this recording."""
        first = self.layers[0] if self.layers else None
        for record in self.layers:
            assert first is not None
            x = record.x
            if x.dim() not in record.model_layer.dims:
                raise ModelError(
                    f"Layer '{record.name}' ran on an input of shape {tuple(x.shape)}, without a batch dimension: "
                    "keep samples in dimension 0, even a single one."
                )
            if not x.shape[0] == record.h_shape[0] == first.x.shape[0]:
                raise ModelError(
                    f"Layer '{record.name}' ran on an input of shape {tuple(x.shape)}, but layer '{first.name}' "
                    f"on {tuple(first.x.shape)}: the first dimension must be the same batch everywhere. Keep samples "
                    "in dimension 0 (tokens or pixels in later ones)."
                )
        for tensor, version in zip(self.inputs, self._versions, strict=True):
            if tensor._version != version:
                raise ModelError(
                    "An input of the model was changed in place between the forward pass and step(), but DDPNOpt runs "
                    "the forward pass again. Pass a copy, or change it after step()."
                )


def is_derivative(recording: Recording) -> bool:
    """Whether the running backward pass is `autograd.grad(…)` by an input, not that of the loss."""
    if recording.asked != -1 and recording.asked == torch._C._current_graph_task_id():
        return True
    if torch.is_grad_enabled():  # create_graph=True: it will be a part of the loss
        recording.arrivals.see_derivative(recording)
        return True
    if recording.anchor is not None:
        return not torch._C._will_engine_execute_node(recording.anchor)
    if recording.source is None or recording.task in (-1, torch._C._current_graph_task_id()):
        return False
    # another one than that of the loss: a hook inside of it may solve an equation by products with a Jacobian
    seen = any(each is recording for each in recording.arrivals.recordings)
    return seen and not torch._C._will_engine_execute_node(recording.source)


def arrived_at_output(recording: Recording, index: int, inside: Any, grad: Tensor | None) -> None:
    if grad is None or not _goes_on(inside) or is_derivative(recording):
        return
    if recording.layers:  # not in a pass of other weights (functional_call)
        note_backward(recording)
    q, more = recording.q[index], grad.detach()
    recording.q[index] = more if q is None else q + more


def _goes_on(node: Any) -> bool:
    """Whether the gradient goes on to a node inside the model: else `autograd.grad` is asked for that at an output."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised for a leaf that autograd.grad(…) is to return
        return True


def note_backward(recording: Recording) -> None:
    """At the first gradient of a backward pass: those of another one through the same pass add up, until a step."""
    task = torch._C._current_graph_task_id()
    if task == recording.task:
        return
    recording.task = task
    known = recording.arrivals.recordings
    if any(each is recording for each in known):
        recording.repeated |= not recording.arrivals.part
    else:
        recording.forget_gradients()
        known.append(recording)
    recording.arrivals.see_root()


def arrived_at_input(recording: Recording, record: LayerRecord, grad: Tensor | None) -> None:
    if grad is not None and not is_derivative(recording):
        note_backward(recording)
        p_x = grad.detach()
        record.p_x = p_x if record.p_x is None else record.p_x + p_x


def arrived_at_layer(recording: Recording, record: LayerRecord, grad: Tensor | None) -> None:
    if grad is None or is_derivative(recording):
        return
    p_h = grad.detach()
    if p_h.shape != record.h_shape:
        p_h = p_h.reshape(record.h_shape)
    if recording.arrivals.part:
        record.other_parts = [*record.other_parts, (recording.arrivals.part, p_h)]
        return
    note_backward(recording)
    if record.p_h is not None:
        record.p_h, record.p_h_dot_h = record.p_h + p_h, None
        return
    if record._h is not None:
        if record._h._version == record._version and p_h.dim() > 1:
            wide = torch.promote_types(p_h.dtype, torch.float32)  # a scaled loss would overflow half precision
            record.p_h_dot_h = torch.linalg.vecdot(p_h.flatten(1).to(wide), record._h.flatten(1).to(wide))
        record._h = None
    record.p_h = p_h


def leaves(tree: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts; faster than torch for plain ones."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (tuple, list):
        return [leaf for part in tree for leaf in leaves(part)]
    return [] if tree is None or (type(tree) is dict and not tree) else tree_leaves(tree)


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
