"""Find the samples where a model's outputs have one row for each, and its layers unequal numbers of rows.

The forward pass runs once more, with a graph, and the gradients of its outputs tell which rows each sample reads. Where
an input says the same (the index of a batch of graphs, bounds of sequences), later batches are arranged by that alone.
Rows of which no input has as many, such as those that are sent to an expert, may be others once the weights have
changed: a layer with such rows is left to the base optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ddpnopt.linear.given import Given
from ddpnopt.trace.layer_uses import leave, leave_input
from ddpnopt.trace.layout import RAGGED, Layout
from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.ragged import Known, Rows, agreeing, factors, filled, samples_of, told
from ddpnopt.trace.recording import LayerRecord, Recording, leaves
from ddpnopt.trace.replay import Playback
from ddpnopt.trace.sources import source_of
from ddpnopt.trace.visitors import Visitor

EACH_ITS_OWN: Known = -1, "each its own"  # row i is sample i
CHOSEN: Known = -1, "chosen"  # by the model
Path = tuple[Any, ...]


class Outputs(Visitor):
    """Where the gradient of each recorded use of each layer is."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.order = {(r.name, use): k for k, r in enumerate(recording.layers) for use in r.uses}
        self.edges: list[tuple[GradientEdge, torch.Size] | None] = [None] * len(recording.layers)
        self.count: dict[str, int] = {}

    def before(self, layer: ModelLayer, x: Tensor) -> Tensor | None:
        self.count[layer.name] = self.count.get(layer.name, -1) + 1
        return None

    def after(self, layer: ModelLayer, h: Tensor | None) -> Tensor | None:
        at = self.order.get((layer.name, self.count.get(layer.name, -1)))
        if at is None or h is None or not h.requires_grad:
            return None
        h, source = source_of(h)
        self.edges[at] = get_gradient_edge(source), h.shape
        return h


class RaggedSamples:
    """What is known of the paths on which samples have unequal numbers of rows."""

    def __init__(self, playback: Playback, left: set[str]) -> None:
        self.playback, self.left = playback, left  # names of layers without samples are added there
        self._known: dict[Path, dict[tuple[str, int], Known | None]] = {}  # None: each pass is to be asked
        self._without: set[Path] = set()  # paths that are of another kind

    def is_known(self, recording: Recording) -> bool:
        """Whether an earlier pass on this path had such samples."""
        return bool(self._known) and _path(recording) in self._known

    def is_likely(self, recording: Recording, sample: Tensor | None) -> bool:
        """Whether the outputs have another number of rows than the first input has, if there is one."""
        return sample is None or _samples_of_outputs(recording) not in sample.shape[:2]

    def __call__(self, recording: Recording) -> bool:
        """Write the layouts into a recording, if all of its layers have rows that belong to one sample each."""
        path = _path(recording)
        batch = _samples_of_outputs(recording, single=path in self._known)
        if batch is None or path in self._without:
            return False
        inputs = _tensors(recording)
        found = self._told(recording, path, batch, inputs)
        if found is None:
            found = self._asked(recording, path, batch, inputs)
        if found is None:
            if path not in self._known and recording.is_finite():
                self._without.add(path)
            return False
        self.left |= _apply(recording, found, batch)
        return True

    def _told(self, recording: Recording, path: Path, batch: int, inputs: list[Tensor]) -> list[Tensor | None] | None:
        """The samples of the rows at each layer by the inputs alone; None where they do not tell all."""
        known = self._known.get(path)
        if known is None:
            return None
        found: list[Tensor | None] = []
        read: dict[tuple[Known, int], Tensor | None] = {}  # by source and number of rows
        nodes: Tensor | None = None
        for record in recording.layers:
            if isinstance(record.layer, Given):
                found.append(None)
                continue
            source, rows = known.get((record.name, record.uses[0])), len(record.x)
            if source is None:
                return None
            if source == CHOSEN:
                found.append(None)
                continue
            if (source, rows) not in read:
                read[source, rows] = _read(source, rows, batch, inputs, nodes)
            sample = read[source, rows]
            if sample is None:
                return None
            nodes = sample if nodes is None else nodes
            found.append(sample.to(record.x.device))
        return found

    def _asked(self, recording: Recording, path: Path, batch: int, inputs: list[Tensor]) -> list[Tensor | None] | None:
        """The same by gradients; None if a row belongs to several samples."""
        gradients = self._gradients(recording, batch)
        if gradients is None:
            return None
        read: list[Tensor | None] = []
        of_rows: dict[int, Tensor] = {}
        for record, each in zip(recording.layers, gradients, strict=True):
            read.append(None)
            if isinstance(record.layer, Given):
                continue
            rows = len(record.x) if record.x.dim() else 0
            if not rows or record.h_shape[0] != rows:
                return None
            sample = torch.full((rows,), -1, device=record.x.device) if each is None else samples_of(each, batch)
            if sample is None:
                return None
            read[-1] = sample
            together = agreeing(sample, of_rows.get(rows, sample))
            of_rows[rows] = sample if together is None else together
        if not any(bool((sample >= 0).any()) for sample in of_rows.values()):
            return None
        known, found, nodes = dict(self._known.get(path, {})), list[Tensor | None](), None
        sizes = {batch, *(n for t in inputs for n in t.shape[:2])}
        for record, own in zip(recording.layers, read, strict=True):
            if own is None:
                found.append(None)
                continue
            together = agreeing(own, of_rows[len(own)])
            key, sample = _source(own if together is None else together, inputs, batch, nodes)
            if key is None and len(own) not in sizes:
                known[record.name, record.uses[0]] = CHOSEN
                found.append(None)
                continue
            known[record.name, record.uses[0]] = key
            nodes = sample if nodes is None else nodes
            found.append(sample)
        if all(source in (EACH_ITS_OWN, CHOSEN) for source in known.values()):
            return None
        self._known[path] = known
        return found

    def _gradients(self, recording: Recording, batch: int) -> list[list[Tensor] | None] | None:
        """At the rows of each layer, with each of the factors; None where autograd refuses."""
        visitor = Outputs(recording)
        pulled: list[tuple[Tensor | None, ...]] = []

        def pull() -> None:
            used = [at for at, q in zip(recording.positions, recording.q, strict=True) if q is not None]
            outputs = [z for z in (visitor.outputs[at] for at in used) if z.dim() and z.requires_grad]
            edges = [edge[0] for edge in visitor.edges if edge is not None]
            generator = torch.Generator().manual_seed(0)
            v = [torch.randn(z.shape, generator=generator).to(z) for z in outputs]
            for s in factors(batch):
                scaled = [a * s.to(a).view(-1, *[1] * (a.dim() - 1)) for a in v]
                pulled.append(torch.autograd.grad(outputs, edges, scaled, retain_graph=True, allow_unused=True))

        try:
            self.playback.with_graph(recording, visitor, pull)
        except RuntimeError:  # the older form of checkpointing refuses autograd.grad
            return None
        by_edge = zip(*pulled, strict=True)
        found: list[list[Tensor] | None] = []
        for edge in visitor.edges:
            each = () if edge is None else next(by_edge)
            some = [g.reshape(edge[1]) for g in each if g is not None and edge is not None]
            found.append(some if some and len(some) == len(each) else None)
        return found


def _path(recording: Recording) -> Path:
    return tuple((record.name, record.x.dim()) for record in recording.layers)


def _samples_of_outputs(recording: Recording, *, single: bool = False) -> int | None:
    """How many rows all outputs have that the loss was computed from; None if they differ, or have none.

    A single number is no sample but a loss, unless other passes have had samples.
    """
    outputs = [z for z, q in zip(recording.outputs, recording.q, strict=True) if q is not None and z.dim()]
    sizes = {len(z) for z in outputs}
    return sizes.pop() if len(sizes) == 1 and (single or all(z.numel() > 1 for z in outputs)) else None


def _tensors(recording: Recording) -> list[Tensor]:
    """The inputs, and those in objects, as batches of graphs are."""
    found = list(recording.inputs)
    for each in leaves((recording.args, recording.kwargs)):
        if isinstance(each, (Tensor, type)):
            continue
        as_dict = getattr(each, "to_dict", None)
        inside = as_dict() if callable(as_dict) else dict(getattr(each, "__dict__", {}))
        found += [t for t in leaves(inside) if isinstance(t, Tensor)]
    return found


def _read(source: Known, rows: int, batch: int, inputs: list[Tensor], nodes: Tensor | None) -> Tensor | None:
    """The samples of so many rows by what has told them before; None where it does not."""
    at, how = source
    if source == EACH_ITS_OWN:
        return torch.arange(batch) if rows == batch else None
    return dict(told(inputs[at], rows, batch, nodes)).get(how) if at < len(inputs) else None


def _source(sample: Tensor, inputs: list[Tensor], batch: int, nodes: Tensor | None) -> tuple[Known | None, Tensor]:
    """Which input tells the samples of these rows, and the samples, of those that tell nothing, too."""
    rows, known = len(sample), sample >= 0
    if not bool(known.any()):  # no gradient anywhere: any samples do
        return None, torch.arange(rows, device=sample.device) * batch // rows
    own = torch.arange(batch, device=sample.device)
    if rows == batch and torch.equal(own[known], sample[known]):
        return EACH_ITS_OWN, own
    for k, t in enumerate(inputs):
        for how, candidate in told(t, rows, batch, nodes):
            candidate = candidate.to(sample.device)
            if torch.equal(candidate[known], sample[known]):
                return (k, how), candidate
    return None, filled(sample)


def _apply(recording: Recording, found: list[Tensor | None], batch: int) -> set[str]:
    """Write the layouts; returns the layers that are left because one of their uses has no samples."""
    layouts: dict[int, Layout | None] = {}  # by number of rows
    samples: dict[int, Tensor] = {}
    several: set[int] = set()  # numbers of rows that belong to other samples at other layers
    both = list(zip(recording.layers, found, strict=True))
    without = {record.name for record, sample in both if sample is None and not isinstance(record.layer, Given)}
    for record, sample in both:
        if sample is None or record.name in without:
            continue
        rows = len(sample)
        if rows not in samples or not torch.equal(samples[rows], sample):
            own = rows == batch and torch.equal(sample, torch.arange(batch, device=sample.device))
            several |= {rows} & samples.keys()
            samples[rows] = sample
            layouts[rows] = None if own else Layout(RAGGED, batch, rows=Rows(sample, batch))
        record.layouts = [layouts[rows]]
    layouts = {rows: layout for rows, layout in layouts.items() if rows not in several}
    recording.layers = []
    for record, _ in both:
        if record.name in without:
            leave_input(record)
        elif isinstance(record.layer, Given) and not _fold(record, layouts, batch):
            leave(record)
        else:
            recording.layers.append(record)
    return without & {record.name for record, _ in both if record.model_layer.required}


def _fold(record: LayerRecord, layouts: dict[int, Layout | None], batch: int) -> bool:
    """Add up the gradients of a parameter over the rows of each sample, if a layer has as many."""
    assert record.p_h is not None
    layout = layouts.get(len(record.p_h))
    if layout is None:
        return len(record.p_h) == batch
    record.folded = layout
    record.p_h, record.x = layout.sums(record.p_h), record.x[:1].expand(batch, -1)
    record.h_shape, record.x_version = record.p_h.shape, record.x._version
    return True


def with_equal_places(recordings: list[Recording]) -> None:
    """Let each layer have as many places in all of them, so that they can be joined."""
    if len(recordings) < 2:
        return
    most: dict[tuple[str, int], int] = {}
    found = [
        ((record.name, record.uses[0]), layout.rows)
        for recording in recordings
        for record in recording.layers
        if (layout := record.layouts[0]) is not None and layout.rows is not None
    ]
    for key, rows in found:
        most[key] = max(rows.places, most.get(key, 0))
    for key, rows in found:
        rows.places = max(rows.places, most[key])
