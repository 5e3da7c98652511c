"""From the uses of layers in one pass to one record for each layer with feedback.

A layer that runs several times is one control that acts at more places: its per-sample gradient is the sum over the
uses. Norms and embeddings whose input does not have the samples in dimension 0 are left to the base optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddpnopt.errors import ModelError, StepError
from ddpnopt.linear.convolution import Conv
from ddpnopt.linear.given import Given
from ddpnopt.linear.layer import Layer
from ddpnopt.trace.fused import widened

if TYPE_CHECKING:
    from ddpnopt.trace.model_layers import ModelLayer
    from ddpnopt.trace.recording import LayerRecord


def settle(records: list[LayerRecord]) -> list[LayerRecord]:
    """One record for each layer, in the order of first use, with x the state that the layer is linear in."""
    for record in records:
        if record.x._version != record.x_version:
            raise ModelError(
                f"The input of layer '{record.name}' was changed in place after the layer had read it, but DDPNOpt "
                "needs it for the update. Use an out-of-place operation there."
            )
    for record in records:
        if record.span is not None or record.model_layer.recurrent:
            _widen(record)
        if record.layouts[0] is not None:
            _arrange(record)
    required = [record for record in records if record.model_layer.required]
    if len(required) < len(records):
        shape = (required or records)[0].x.shape
        records = [r for r in records if r.model_layer.required or _keep(r, shape[0] if shape else 0)]
    return combine(records)


def combine(records: list[LayerRecord]) -> list[LayerRecord]:
    """The records of each layer as one, in the order of first use."""
    if len({record.name for record in records}) == len(records):
        for record in records:
            if record.model_layer.recurrent and record.later is None:
                record.later = later(record.model_layer, [record.x])
        return records
    uses: dict[str, list[LayerRecord]] = {}
    for record in records:
        uses.setdefault(record.name, []).append(record)
    found = []
    for same in uses.values():
        if len(same) > 1 and not _are_alike(same):
            for record in same:
                leave(record)
        elif len(same) > 1:
            found.append(_merged(same))
        else:
            if same[0].later is None:
                same[0].later = later(same[0].model_layer, [same[0].x])
            found.append(same[0])
    return found


def _arrange(record: LayerRecord) -> None:
    """Bring the batch to dimension 0, with what a sample has several of as further places."""
    assert record.p_h is not None
    state = record.model_layer.state_of(record.x)
    at_state = record.p_x is not None and record.p_x.shape == state.shape
    record.x, record.p_h = record.arranged(state), record.arranged(record.p_h)
    record.p_x = record.arranged(record.p_x) if at_state and record.p_x is not None else None
    record.x_version, record.h_shape = record.x._version, record.p_h.shape
    record.p_h_dot_h = None


def _widen(record: LayerRecord) -> None:
    """For a use of some of the outputs, gradients at all of them."""
    assert record.p_h is not None
    if record.span is not None:
        record.p_h = widened(record.p_h, record.span, record.layer.weight_shape[0])
        record.h_shape, record.span = record.p_h.shape, None
        record.p_x = record.p_h_dot_h = None
    else:  # recurrent: the forward sweep shows the first time alone
        record.p_h_dot_h = None


def later(layer: ModelLayer, uses: list[Tensor]) -> Tensor | None:
    """The inputs of all uses, and times, that come after the first, in which the layer is updated."""
    if layer.recurrent:
        return together(layer.layer, [uses[0][:, 1:], *uses[1:]])
    return together(layer.layer, uses[1:]) if len(uses) > 1 else None


def _keep(record: LayerRecord, batch: int) -> bool:
    """Whether a norm or an embedding takes part; if not, the gradient that autograd has skipped goes to `.grad`."""
    x = record.x
    if record.layouts[0] is None:
        record.x = record.model_layer.state_of(x, record.statistics)
        record.x_version = record.x._version
    if not x.dim() or not len(x) == record.h_shape[0] == batch or positions(x):
        leave(record)
        return False
    return True


def positions(x: Tensor) -> bool:
    """Whether ids count up: these are the positions in a sequence, which all samples share."""
    if x.dim() != 1 or len(x) < 2 or x.is_floating_point():
        return False
    return int(x[0]) + 1 == int(x[1]) and bool((x.diff() == 1).all())  # the first two tell mostly


def shared(ids: Tensor, samples: int) -> bool:
    """Whether the ids of an embedding are the same for all samples: positions, or one row of ids."""
    return positions(ids) or (ids.dim() > 1 and len(ids) == 1 < samples)


def leave(record: LayerRecord) -> None:
    """Leave a layer to the base optimizer, which needs its gradient in `.grad`."""
    if not record.skipped:
        return
    if record.noted is not None and record.noted.arrivals.differentiated:
        own, record.skipped = record.noted.gradient(), False
    else:
        assert record.p_h is not None
        dtype = record.parameters[0].dtype
        p_h = widened(record.p_h, record.span, record.layer.weight_shape[0])
        own = record.layer.grad(record.input_in(dtype), p_h.to(dtype))
    for p, grad in zip(record.parameters, own, strict=False):  # a frozen bias, or one without any use
        p.grad = grad if p.grad is None else p.grad + grad


def leave_input(record: LayerRecord) -> None:
    """The same where x is still the input of the module."""
    record.x, record.layouts = record.model_layer.state_of(record.x), [None]
    record.x_version = record.x._version
    leave(record)


def skipped_gradients(record: LayerRecord, p_h: Tensor) -> list[Tensor | None]:
    """The gradients of a layer's parameters in the middle of a backward pass, without a graph of their own."""
    if torch.is_grad_enabled():
        raise StepError(
            "autograd.grad(…, create_graph=True) by a parameter of the model: DDPNOpt has taken the layers with "
            "feedback out of autograd's graph. Create it with DDPNOpt(model, weight_grads=True)."
        )
    dtype = record.parameters[0].dtype
    x = record.model_layer.state_of(record.x, record.statistics)
    x = x.to(dtype) if x.is_floating_point() else x
    own = record.layer.grad(x, widened(p_h, record.span, record.layer.weight_shape[0]).to(dtype))
    return [*own, *[None] * (len(record.parameters) - len(own))]


def even_out(recordings: list[list[LayerRecord]]) -> None:
    """Let `.grad` have the gradient of a layer from all passes, if autograd has computed that of some of them."""
    skipped: dict[str, set[bool]] = {}
    for records in recordings:
        for record in records:
            skipped.setdefault(record.name, set()).add(record.skipped)
    for records in recordings:
        for record in records:
            if len(skipped[record.name]) > 1:
                leave(record)
                record.skipped = False


def together(layer: Layer, uses: list[Tensor]) -> Tensor:
    """The uses of a layer as places of one."""
    return uses[0] if len(uses) == 1 else layer.together(uses)


def _are_alike(same: list[LayerRecord]) -> bool:
    """Whether the uses of a layer can be places of one."""
    layer, batch = same[0].layer, len(same[0].x)
    if len({type(record.layer) for record in same}) > 1:  # an embedding with ids of samples, and with shared ones
        return False
    if any(not len(record.x) == record.h_shape[0] == batch for record in same):
        return False
    if not isinstance(layer, Conv) or layer.takes_any_size:
        return True
    return len({record.x.shape[-len(layer.weight_shape) :] for record in same}) == 1


def _merged(same: list[LayerRecord]) -> LayerRecord:
    first, layer = same[0], same[0].layer
    if isinstance(layer, Given):  # the gradients of all its uses, in all passes, add up
        first.p_h = torch.stack([record.p_h for record in same if record.p_h is not None]).sum(0)
        return first
    if first.later is None:
        first.later = later(first.model_layer, [record.x for record in same])
    else:  # the first is a pass with several uses, or times, itself
        first.later = together(layer, [first.later, *(record.x for record in same[1:])])
    first.x = layer.together([record.x for record in same])
    first.p_h = layer.together([record.p_h for record in same if record.p_h is not None])
    first.x_version, first.h_shape = first.x._version, first.p_h.shape
    first.p_x = first.p_h_dot_h = None
    first.uses = [use for record in same for use in record.uses]
    first.layouts = [layout for record in same for layout in record.layouts]
    first.moves = any(record.moves for record in same)
    first.recomputed = any(record.recomputed for record in same)
    return first


def are_alike(a: LayerRecord, b: LayerRecord) -> bool:
    """Whether a layer ran alike in two micro-batches, up to the number of places."""
    if a.x.shape[1:] == b.x.shape[1:] and a.h_shape[1:] == b.h_shape[1:]:
        return len(a.uses) == len(b.uses)
    if len(a.uses) > 1 or len(b.uses) > 1 or (isinstance(a.layer, Conv) and not a.layer.takes_any_size):
        return False
    return a.x.dim() == b.x.dim() and len(a.h_shape) == len(b.h_shape)


def of_common_layers(recordings: list[list[LayerRecord]]) -> list[list[LayerRecord]]:
    """The records of micro-batches without norms and embeddings that these do not have in common."""
    others = [{r.name: r for r in records} for records in recordings[1:]]
    common = {r.name for r in recordings[0] if all(r.name in other and are_alike(r, other[r.name]) for other in others)}
    return [[r for r in records if r.model_layer.required or r.name in common] for records in recordings]


def leave_unequal(recordings: list[list[LayerRecord]]) -> list[list[LayerRecord]]:
    """Leave such norms and embeddings to the base optimizer; the records of the other layers."""
    common = of_common_layers(recordings)
    for records, kept in zip(recordings, common, strict=True):
        names = {record.name for record in kept}
        for record in records:
            if record.name not in names:
                leave(record)
    return common
