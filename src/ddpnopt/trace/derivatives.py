"""All passes of a step whose loss contains derivatives as one batch.

Each set of points (interior, boundary, …) has its own forward pass and its own samples: they are concatenated. Passes
whose samples meet in one residual, such as the two ends of a periodic boundary, have their samples in common. Layers
with a use that is not noted (`trace.weight_uses`) are left to the base optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddpnopt.linear.linear import Linear
from ddpnopt.linear.uses import LinearUses, Use, places_of, stacked
from ddpnopt.trace.arrivals import Arrivals
from ddpnopt.trace.layer_uses import leave
from ddpnopt.trace.loss_terms import Term, below
from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.recording import LayerRecord, Recording


@dataclass(eq=False)
class Points:
    """Passes with the same samples."""

    passes: list[Recording]
    size: int
    losses: dict[int, Tensor] = field(default_factory=dict)  # (size,), by part of the backward pass
    covered: dict[int, Tensor] = field(default_factory=dict)  # which of them have a residual in that part

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        """The parts, and the samples that have a residual in each."""
        for part, covered in self.covered.items():
            yield part, covered.nonzero()[:, 0]


@dataclass(eq=False)
class JointBatch:
    """All samples of a step: one row for each residual of each sample."""

    recording: Recording
    losses: Tensor  # (rows,)


class UnjoinedError(Exception):
    """Why the passes of a step cannot be one batch: a message for the user."""


def joint_batch(arrivals: Arrivals) -> JointBatch:
    """All passes since the last step as one batch."""
    passes = arrivals.passes()
    if arrivals.not_terms or not arrivals.terms:
        raise UnjoinedError(
            "it is not a sum of squares, or of other losses that are zero at best, one for each sample"
            + (f" ({arrivals.not_terms})" if arrivals.not_terms else "")
        )
    if any(one.repeated for one in passes):
        raise UnjoinedError("several backward passes went through one forward pass")
    if arrivals.incomplete or arrivals.hidden or not passes:
        raise UnjoinedError("")  # which is an error, or has its own message
    sets = _sets(passes, arrivals.terms)
    taking_part = _layers(passes)
    if not taking_part:
        raise UnjoinedError("none of its layers is an nn.Linear that is used as it is")
    first = passes[0]
    joint = Recording(first.args, first.kwargs, first.modes, first.device, first.rng, first.autocast, arrivals)
    joint.serial, joint.task, joint.passes = first.serial, first.task, passes
    for model_layer in taking_part:
        joint.layers.append(_record(model_layer, sets, skipped=all(_skips(one, model_layer) for one in passes)))
    for one in passes:
        for record in one.layers:
            if record.model_layer not in taking_part:
                _leave(record)
    losses = torch.cat([each.losses[part][index] for each in sets for part, index in each.rows()])
    joint.batch_size, joint.signature = len(losses), ("derivatives", *(record.name for record in joint.layers))
    return JointBatch(joint, losses)


def _sets(passes: list[Recording], terms: list[Term]) -> list[Points]:
    """Which passes share their samples, and the losses of these."""
    sets = {id(one): Points([one], one.samples()) for one in passes}

    def merge(a: Recording, b: Recording) -> None:
        first, second = sets[id(a)], sets[id(b)]
        if first is second:
            return
        if first.size != second.size:
            raise UnjoinedError("it compares passes with different numbers of samples")
        first.passes += second.passes
        sets.update({id(one): first for one in second.passes})

    for one in passes:
        for tensor in one.inputs if one.reads_computed else ():
            for other in below(tensor):
                if id(other) in sets:
                    merge(other, one)
    for term in terms:
        for other, offset in term.rows:
            if id(other) not in sets:
                raise UnjoinedError("a pass in it was recorded by another optimizer")
            if offset != term.rows[0][1]:
                raise UnjoinedError("it compares different samples with each other")
            merge(term.rows[0][0], other)
    found = list({id(each): each for each in sets.values()}.values())
    for term in terms:
        points, offset, n = sets[id(term.rows[0][0])], term.rows[0][1], len(term.losses)
        if n != points.size if offset is None else offset + n > points.size:
            raise UnjoinedError("a residual in it does not belong to one sample")
        for part, column in zip(term.parts, term.losses.unbind(1), strict=True):
            if part not in points.losses:
                points.losses[part] = column.new_zeros(points.size, dtype=torch.float64)
                points.covered[part] = column.new_zeros(points.size, dtype=torch.bool)
            points.losses[part][offset or 0 :][:n] += column
            points.covered[part][offset or 0 :][:n] = True
    if any(not each.losses for each in found):
        raise UnjoinedError("a pass takes part in it that no residual belongs to")
    return sorted(found, key=lambda each: each.passes[0].serial)


def _layers(passes: list[Recording]) -> list[ModelLayer]:
    """The layers all of whose uses are known, in the order of first use."""
    known: dict[ModelLayer, bool] = {}
    for one in passes:
        for record in one.layers:
            uses = _uses(one, record)
            if uses != []:
                known[record.model_layer] = known.get(record.model_layer, True) and uses is not None
    for one in passes:
        B = one.samples()
        for record in one.layers:
            for x, p, _ in _uses(one, record) or ():
                if x.dim() < 2 or not len(x) == len(p) == B:
                    known[record.model_layer] = False
    return [model_layer for model_layer, is_known in known.items() if is_known]


def _uses(one: Recording, record: LayerRecord, part: int | None = None) -> list[Use] | None:
    """The uses of a layer in a pass, in one part of the backward pass or in all; None if they are not known."""
    if record.noted is not None:
        pairs = zip(record.noted.parts, record.noted.found, strict=True)
        return [use for k, use in pairs if part is None or k == part]
    if one.reads_variable:
        return None
    if record.p_h is None:
        return []
    unchanged = record.x._version == record.x_version and record.layouts[0] is None and record.span is None
    if not (type(record.layer) is Linear and record.model_layer.part_of is None and unchanged):
        return None
    found = [(0, record.p_h), *record.other_parts]
    return [(record.x, p_h, True) for k, p_h in found if part is None or k == part]


def _skips(one: Recording, model_layer: ModelLayer) -> bool:
    return all(record.skipped for record in one.layers if record.model_layer is model_layer)


def _record(model_layer: ModelLayer, sets: list[Points], *, skipped: bool) -> LayerRecord:
    """One record with the uses of a layer in all passes."""
    layer = LinearUses(model_layer.layer.weight_shape, model_layer.layer.bias)
    dtype = model_layer.weight.dtype
    uses = []
    for points in sets:
        for part, index in points.rows():
            found = [
                use
                for one in points.passes
                for record in one.layers
                if record.model_layer is model_layer
                for use in _uses(one, record, part) or ()
            ]
            if len(index) < points.size:
                found = [(x[index], p[index], biased) for x, p, biased in found]
            uses.append((len(index), [(x.to(dtype), p.to(dtype), biased) for x, p, biased in found]))
    places = max(places_of(each) for _, each in uses)
    O, J = layer.weight_shape
    like = model_layer.weight.detach()
    parts = [
        stacked(each, places) if each else (like.new_zeros(size, places, J + 1), like.new_zeros(size, places, O))
        for size, each in uses
    ]
    x, p = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    record = LayerRecord(model_layer, x, x._version, skipped, p.shape)
    record.layer, record.p_h = layer, p
    return record


def _leave(record: LayerRecord) -> None:
    """Leave a layer to the base optimizer."""
    add_parts(record)
    if record.noted is None and record.p_h is not None and record.layouts[0] is None:
        record.x = record.model_layer.state_of(record.x)
    if record.noted is not None or record.p_h is not None:
        leave(record)


def leave_noted(arrivals: Arrivals) -> None:
    """Give all layers whose uses were noted their gradient: they are left to the base optimizer."""
    for one in arrivals.passes():
        for record in one.layers:
            add_parts(record)
            if record.noted is not None:
                leave(record)


def add_parts(record: LayerRecord) -> None:
    """The gradient of the whole loss, where its backward pass was made in parts."""
    if record.other_parts and record.p_h is not None:
        record.p_h = torch.stack([record.p_h, *(p_h for _, p_h in record.other_parts)]).sum(0)
    record.other_parts = []
