"""Find the batch where not all layers have it in dimension 0: sequence-first models, windows, frames, flat tokens.

The forward pass runs again with the inputs of some samples replaced by those of others. A sample's entries are those
that change with its inputs; an arrangement counts as found only if it explains all changes. This is done once for each
path through the model. Layers that no arrangement explains are left to the base optimizer. Layers whose inputs depend
on no sample make values that all samples share: from the next pass on their weights count where these meet the samples.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ddpnopt.linear.convolution import Conv
from ddpnopt.linear.given import Given
from ddpnopt.trace.exchange import (
    Inputs,
    changed,
    differs,
    halves,
    kind_of_layout,
    kind_of_repetition,
    selected,
)
from ddpnopt.trace.groups import Groups
from ddpnopt.trace.intercepting import Intercepting
from ddpnopt.trace.layer_uses import leave, leave_input
from ddpnopt.trace.layout import BLOCKS, INTERLEAVED, SECOND, SINGLE, Layout
from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.ragged_samples import RaggedSamples, with_equal_places
from ddpnopt.trace.recording import LayerRecord, Recording

MOST = 256  # rows of the joint system: up to here its algebra is cheap compared with the passes
SHARED = "shared"  # no layout: the same for all samples
Kinds = dict[tuple[str, int], str | None]
"""Of each use of a layer, and of each output ("", position): the kind of layout, None for dimension 0."""


class Arrangement:
    """What is known of the paths through a model so far."""

    def __init__(self, playback: Intercepting, batch_dim: int | None, *, allowed: bool) -> None:
        self.playback, self.batch_dim, self.allowed = playback, batch_dim, allowed
        self._known: dict[tuple[object, ...], tuple[int, Kinds, bool]] = {}  # as of `_find`
        self.left: set[str] = set()  # layers whose samples could not be found
        self._ragged = RaggedSamples(playback, self.left)
        self.groups = False  # whether a large batch may be taken in groups

    def __call__(self, recordings: list[Recording]) -> None:
        """Write the layouts into recordings, and leave the layers without one to the base optimizer."""
        usual = [self._arrange(recording) for recording in recordings]
        with_equal_places(recordings)
        if self.groups and all(usual):
            _group(recordings)

    def _arrange(self, recording: Recording) -> bool:
        """Whether the samples are in dimension 0 everywhere, so that there is nothing to do."""
        if not self.allowed or not recording.layers:
            return False
        if self._leave_without_batch(recording):
            return False
        if self._ragged.is_known(recording) and self._ragged(recording):
            return False
        records = recording.layers
        sizes = {shape[0] if shape else 0 for r in records for shape in (r.x.shape, r.h_shape)}
        equal = len(sizes) == 1
        usual = equal and all(
            z.dim() == 0 or q is None or z.shape[0] in sizes
            for z, q in zip(recording.outputs, recording.q, strict=True)
        )
        told = self.batch_dim == 0 or (self.batch_dim is None and not _may_be_sequence_first(recording))
        if usual and told:
            return True
        sample = _first_input(recording)
        if not usual and self._ragged.is_likely(recording, sample) and self._ragged(recording):
            return False
        if sample is None:
            if not equal:
                self._leave_minority(recording)
            return False
        key = tuple((r.name, r.x.dim(), len(r.x) == len(sample)) for r in records), sample.dim(), equal
        known = self._known.get(key)
        dim, kinds, whole = known or self._find(recording, sample)
        if known is None and sample.shape[dim] > 1 and recording.is_finite():
            self._known[key] = dim, kinds, whole
        if not (whole or usual) and self._ragged(recording):
            return False
        if dim == 0 and not any(kinds.values()) and equal:
            return usual
        self._apply(recording, dim, kinds, sample.shape[dim])
        return False

    def _find(self, recording: Recording, sample: Tensor) -> tuple[int, Kinds, bool]:
        """The dimension of the inputs, the kinds, and whether they explain all layers and outputs."""
        found: dict[int, tuple[Kinds, int]] = {}
        dims = (0, 1) if self.batch_dim is None else (self.batch_dim,)
        for dim in dims:
            if sample.dim() > dim:
                found[dim] = self._explain(recording, dim, sample.shape[dim])
                if found[dim][1] == 0:
                    return dim, found[dim][0], _explains_outputs(recording, found[dim][0], sample.shape[dim])
        if self.batch_dim is not None and self.batch_dim in found:
            return self.batch_dim, found[self.batch_dim][0], False
        return 0, found[0][0], False

    def _explain(self, recording: Recording, dim: int, batch: int) -> tuple[Kinds, int]:
        """The kinds of all layouts with the batch in this dimension of the inputs, and how many are not explained."""
        changes = self._changes(recording, dim, batch)
        kinds: Kinds = {}
        missing: list[tuple[str, int]] = []
        unchanged: list[tuple[str, int, Tensor]] = []
        explained = 0
        counted: dict[str, int] = {}
        of_rows: dict[int, set[str]] = {}  # the kinds of layers with so many rows in dimension 0
        for index, record in enumerate(recording.layers):
            use = counted[record.name] = counted.get(record.name, -1) + 1
            if isinstance(record.layer, Given):  # its gradients have the rows of the layers that it has met
                continue
            seen = [(half, change) for half, at, _ in changes if (change := at[index]) is not None]
            kind, certain = kind_of_layout(record, record.x, seen, batch)
            still = bool(seen) and not any(bool(change.any()) for _, change in seen)
            explained += certain
            if not certain and still:
                kind, certain = kind_of_repetition(record, batch)
            kinds[record.name, use] = kind
            if certain and kind in (BLOCKS, INTERLEAVED):
                of_rows.setdefault(len(record.x), set()).add(kind)
            if not certain and record.model_layer.required:
                missing.append((record.name, use))
            if not certain and still and not record.model_layer.recurrent:  # whose first state may be zero
                unchanged.append((record.name, use, record.x))
        as_others = [(r.name, 0, r.x) for r in recording.layers if isinstance(r.layer, Given)]
        for name, use, x in [*as_others, *unchanged]:
            found = of_rows.get(len(x), ())
            if len(found) == 1:
                kinds[name, use] = next(iter(found))
        for position, output in zip(recording.positions, recording.outputs, strict=True):
            seen = [(half, out[position]) for half, _, out in changes if position < len(out)]
            kinds["", position], _ = kind_of_layout(None, output, seen, batch)
        alike = len({len(record.x) for record in recording.layers}) == 1  # samples that the inputs do not show
        without = [(name, use) for name, use, _ in unchanged if kinds[name, use] is None]
        missing = [each for each in missing if kinds[each] is None]
        if explained and not alike and set(missing) <= set(without):
            missing = []
            kinds.update((each, SHARED) for each in without)
        return kinds, len(missing)

    def _changes(
        self, recording: Recording, dim: int, batch: int
    ) -> list[tuple[Tensor, list[Tensor | None], list[Tensor]]]:
        """Which entries of dimensions 0 and 1 change, at each layer and output, if some samples change."""
        found = []
        with torch.no_grad():
            base = Inputs(recording)
            self.playback.rerun(recording, base, lambda t: t)
            for half in halves(batch):
                source = torch.arange(batch)
                source[half] = (source[half] + 1) % batch
                inputs = Inputs(recording)
                self.playback.rerun(recording, inputs, partial(selected, source, dim))
                layers = [differs(a, b) for a, b in zip(base.seen, inputs.seen, strict=True)]
                outputs = [changed(a, b) for a, b in zip(base.outputs, inputs.outputs, strict=True)]
                found.append((half, layers, outputs))
        return found

    def _apply(self, recording: Recording, dim: int, kinds: Kinds, batch: int) -> None:
        kept: list[LayerRecord] = []
        gone: list[LayerRecord] = []
        shared: set[ModelLayer] = set()  # with a use that has no samples
        counted: dict[str, int] = {}
        for record in recording.layers:
            use = counted[record.name] = counted.get(record.name, -1) + 1
            kind = kinds.get((record.name, use))
            layout = None if kind is None else Layout(kind, batch)
            if isinstance(record.layer, Given) and dim != 0 and not recording.second:
                continue  # its gradients were computed for dimension 0; autograd has that of the batch
            if isinstance(record.layer, Given) and kind == BLOCKS and layout is not None:
                _fold(record, layout)
                kind = layout = None
            elif isinstance(record.layer, Given) and layout is not None:
                gone.append(record)  # a replay could not tell its rows
                continue
            if layout is not None and layout.fits(record.layer, record.x) and kind != SHARED:
                record.layouts = [layout]
            elif layout is not None or not len(record.x) == record.h_shape[0] == batch:
                if kind == SHARED:
                    shared.add(record.model_layer)
                elif record.model_layer.required:
                    self.left.add(record.name)
                gone.append(record)
                continue
            kept.append(record)
        partly = {record.name for record in gone}  # all uses of a layer are left, or none
        for record in [*gone, *(record for record in kept if record.name in partly)]:
            leave_input(record)
        seconds = [record for record in kept if record.layouts[0] is not None and record.layouts[0].kind == SECOND]
        firsts = [record for record in kept if record.layouts[0] is None and _keeps_second(record)]
        self.playback.have_in_second(dim if len(seconds) > len(firsts) else None)
        known = [layer for layer in shared if layer.part_of is None and layer.name not in self.left]
        self.playback.loosen(known, batch)
        recording.layers = [record for record in kept if record.name not in partly]
        for position, output in zip(recording.positions, recording.outputs, strict=True):
            kind = kinds.get(("", position))
            layout = None if kind is None else Layout(kind, batch)
            if layout is not None and output.dim() and layout.fits(None, output):
                recording.layouts[position] = layout

    def _leave_without_batch(self, recording: Recording) -> bool:
        """Leave layers that run on a single vector, such as a time that all share; True if there is one sample alone.

        Then no layer has a dimension for the batch.
        """
        alone = [record for record in recording.layers if record.x.dim() < record.model_layer.least_dims]
        if not alone:
            return False
        if len(alone) == sum(record.model_layer.required for record in recording.layers):
            single = Layout(SINGLE, 1)
            for record in recording.layers:
                record.layouts = [single]
            recording.layouts.update((k, single) for k in recording.positions)
            return True
        for record in alone:
            assert record.p_h is not None
            self.left.add(record.name)
            record.x, record.p_h = record.x[None], record.p_h[None]
            leave(record)
        recording.layers = [record for record in recording.layers if record not in alone]
        return False

    def _leave_minority(self, recording: Recording) -> None:
        """No inputs to find the batch by: that of the loss, or else that of most layers."""
        sizes = [len(r.x) for r in recording.layers if r.model_layer.required and r.x.dim()]
        batch = max(set(sizes), key=sizes.count) if sizes else 0
        kinds: Kinds = {}
        self._apply(recording, 0, kinds, batch)


def _group(recordings: list[Recording]) -> None:
    """In a large batch, let as few samples as possible that follow each other be places of one, with their losses' sum.

    The joint system then has one row for each group; nothing else changes, and every sample counts in it. The samples
    that are left over are the last group. Micro-batches have groups of the same size; passes of one backward pass may
    have the same samples.
    """
    batches = [recording.layers[0].x.shape[0] for recording in recordings]
    of_pass: dict[int, int] = {}
    for recording, batch in zip(recordings, batches, strict=True):
        of_pass[recording.task] = max(batch, of_pass.get(recording.task, 0))
    size = -(-sum(of_pass.values()) // MOST)
    if size == 1 or any(record.model_layer.recurrent for recording in recordings for record in recording.layers):
        return
    for recording, batch in zip(recordings, batches, strict=True):
        recording.group = groups = Groups(size, (batch,))
        for record in recording.layers:
            if isinstance(record.layer, Given):
                _fold(record, groups.layout)
            else:
                record.layouts = [groups.layout]


def _explains_outputs(recording: Recording, kinds: Kinds, batch: int) -> bool:
    """Whether each sample is somewhere in each output with a gradient."""
    used = zip(recording.positions, recording.outputs, recording.q, strict=True)
    return all(q is None or not z.dim() or kinds.get(("", k)) is not None or len(z) == batch for k, z, q in used)


def _keeps_second(record: LayerRecord) -> bool:
    """Whether a layer would have the samples in dimension 1, in a model that has them there."""
    inside = record.model_layer.part_of is not None  # attention transposes
    own = not inside and not isinstance(record.layer, (Conv, Given))
    return own and record.x.dim() > 1 + record.x.is_floating_point()


def _fold(record: LayerRecord, layout: Layout) -> None:
    """Add up the gradients that each sample has at a parameter in several rows."""
    assert record.p_h is not None
    record.p_h, record.x = layout.sums(record.p_h), record.x[: layout.batch]
    record.h_shape, record.x_version = record.p_h.shape, record.x._version


def _may_be_sequence_first(recording: Recording) -> bool:
    """Whether dimension 1 of the inputs may be the batch; a convolution says that it is not."""
    sample = _first_input(recording)
    if sample is None or sample.dim() < 2 + sample.is_floating_point() or sample.shape[1] < 2:
        return False
    first = next((record for record in recording.layers if not isinstance(record.layer, Given)), None)
    return first is None or not isinstance(first.layer, Conv)


def _first_input(recording: Recording) -> Tensor | None:
    return next((t for t in recording.inputs if t.dim() > 0 and not t.is_nested), None)
