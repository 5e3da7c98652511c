"""Gradient accumulation: several forward and backward passes as one batch.

The recorded layers are concatenated along the batch; where micro-batches have sequences or images of different sizes,
with places behind the last ones of the smaller at which inputs and gradients are zero. The second forward pass keeps
the micro-batches of the first, so that each has its own dropout, batch norms and inputs; they run in lockstep, because
a layer can be updated only once the displacement of all samples is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ddpnopt.errors import ModelError
from ddpnopt.linear.layer import extended
from ddpnopt.trace.groups import Groups
from ddpnopt.trace.hooks import Capture
from ddpnopt.trace.layer_uses import are_alike, leave_unequal, of_common_layers
from ddpnopt.trace.lockstep import Turn
from ddpnopt.trace.probes import Paths, Probe
from ddpnopt.trace.recording import LayerRecord, Recording
from ddpnopt.trace.replay import AtLayer

Pause = tuple[str, int, Tensor]
"""Where a micro-batch waits for the others: at the input or output, of layer t, with the tensor there."""


def obstacle(recordings: list[Recording]) -> str:
    """Why these micro-batches cannot be one batch; empty where they can."""
    first = recordings[0]
    common = [{r.name for r in layers} for layers in of_common_layers([r.layers for r in recordings])]
    for other, names in zip(recordings[1:], common[1:], strict=True):
        alike = names == common[0] and len(other.q) == len(first.q)
        if not alike or any(a.dim() != b.dim() for a, b in zip(first.outputs, other.outputs, strict=True)):
            return (
                "the passes since the last step ran different layers, or gave different outputs: micro-batches of one "
                "step must take the same path through the model, so call step() after each, or zero_grad() to drop a "
                "pass that was not meant to count"
            )
        here, there = ({r.name: r for r in one.layers if r.name in names} for one in (first, other))
        for name in here:
            a, b = here[name], there[name]
            if not are_alike(a, b):
                return (
                    f"layer '{name}' ran on inputs of shape {tuple(a.x.shape)} and {tuple(b.x.shape)} since the last "
                    "step: such micro-batches of one step may differ in dimension 0 only, so pad them to the same size"
                )
    return ""


def join(recordings: list[Recording]) -> Recording:
    """One recording of all samples; each micro-batch frees its records as they are copied."""
    first = recordings[0]
    for recording, layers in zip(recordings, leave_unequal([r.layers for r in recordings]), strict=True):
        recording.layers = layers
    sizes = [r.sample_count for r in recordings]
    joint = Recording(
        first.args, first.kwargs, first.modes, first.device, first.rng, first.autocast, first.arrivals,
    )  # fmt: skip
    joint.floating_outputs, joint.positions, joint.parts = first.floating_outputs, first.positions, recordings
    if first.group is not None:
        joint.group = Groups(first.group.size, tuple(sizes))
    for records in zip(*(r.layers for r in recordings), strict=True):
        joint.layers.append(_join_records(list(records)))
    for k in range(len(first.outputs)):
        z, q = zip(*((r.output(k), r.gradient(k)) for r in recordings), strict=True)
        of_batch = all(o.dim() > 0 and len(o) == size for o, size in zip(z, sizes, strict=True))
        joint.outputs.append(_samples(z) if of_batch else z[0])
        used = of_batch and any(g is not None for g in q)
        grads = [torch.zeros_like(o) if g is None else g for o, g in zip(z, q, strict=True)]
        joint.q.append(_samples(grads) if used else q[0])
    joint.finish()
    return joint


def _join_records(records: list[LayerRecord]) -> LayerRecord:
    first = records[0]
    x, p_h = _samples([r.x for r in records]), _samples([r.p_h for r in records if r.p_h is not None])
    joint = LayerRecord(first.model_layer, x, x._version, first.skipped, p_h.shape, first.recomputed, first.moves)
    joint.p_h, joint.p_x = p_h, _cat([r.p_x for r in records])
    joint.p_h_dot_h = _cat([r.p_h_dot_h for r in records])
    joint.uses, joint.later = first.uses, _cat([r.later for r in records])
    joint.layouts = [None] * len(first.uses)  # each part has arranged its own
    for record in records:
        record.free()
    return joint


def _samples(parts: Sequence[Tensor]) -> Tensor:
    """Those of all micro-batches."""
    return torch.cat([*extended(parts, 1)])


def _cat(parts: list[Tensor | None]) -> Tensor | None:
    known = [p for p in parts if p is not None]
    return _samples(known) if len(known) == len(parts) else None


def _cropped(columns: Tensor, shape: torch.Size) -> Tensor:
    """Cotangents (R, B, …) at an output of this shape."""
    for d, n in enumerate(shape[1:], 2):
        columns = columns.narrow(d, 0, n)
    return columns


class MicroBatches:
    """The replays of a joint recording: those of `Playback`, for all micro-batches together."""

    def __init__(self, capture: Capture) -> None:
        self.capture, self.batch_norms = capture, capture.batch_norms

    def probes(self, recording: Recording) -> list[Probe]:
        return [probe for part in recording.parts for probe in self.capture.probes(part)]

    def paths(self, recording: Recording, *, mixing: bool) -> list[Paths]:
        return [found for part in recording.parts for found in self.capture.paths(part, mixing=mixing)]

    def pull_back(
        self, recording: Recording, index: int, columns: Tensor
    ) -> tuple[list[list[Tensor]], list[list[Tensor | None]]]:
        sizes = [part.batch_size for part in recording.parts]
        pulled = [
            self.capture.pull_back(part, index, _cropped(some, part.output(index).shape))
            for part, some in zip(recording.parts, columns.split(sizes, 1), strict=True)
        ]
        R, T = range(len(columns)), range(len(recording.layers))
        p_h = [[_samples([h[r][t] for h, _ in pulled]) for t in T] for r in R]
        return p_h, [[_cat([x[r][t] for _, x in pulled]) for t in T] for r in R]

    def retrace(self, recording: Recording) -> None:
        for part in recording.parts:
            self.capture.retrace(part)
        for t, record in enumerate(recording.layers):
            joint = _join_records([part.layers[t] for part in recording.parts])
            record.x, record.p_h, record.p_x, record.p_h_dot_h = joint.x, joint.p_h, joint.p_x, joint.p_h_dot_h
            record.later = joint.later

    def replay(self, recording: Recording, control: AtLayer, observe: AtLayer | None = None) -> list[Tensor]:
        """control and observe get all samples of a layer together."""
        turns = [Turn(partial(self._run, part, observe is not None)) for part in recording.parts]
        kept = self.capture.buffers_kept(), self.capture.random_numbers_kept(recording.device)
        with kept[0], kept[1], self.capture.modes.kept():
            try:
                while True:
                    pauses = [turn.resume() for turn in turns]
                    here = [pause for pause in pauses if pause is not None]
                    if not here:
                        break
                    kind, t, _ = here[0]
                    if len(here) < len(pauses) or any(pause[:2] != (kind, t) for pause in here):
                        raise ModelError(
                            f"Layer '{recording.layers[t].name}' did not run in all micro-batches of this step when "
                            "they were replayed, or not in the same order. Call step() after each micro-batch."
                        )
                    together = _samples([value for _, _, value in here])
                    if kind == "input":
                        control(t, together)
                    elif observe is not None:
                        observe(t, together)
            finally:
                for turn in turns:
                    turn.close()
        outputs = [turn.result or [] for turn in turns]
        # scalars are losses of the model itself: one for each micro-batch
        return [_samples(o) if o[0].dim() > 0 else torch.stack(o) for o in zip(*outputs, strict=True)]

    def _run(self, part: Recording, observed: bool, turn: Turn[Pause, list[Tensor]]) -> list[Tensor]:
        def pause(kind: str, t: int, value: Tensor) -> None:
            with self.capture.suspended(part.device):  # another micro-batch runs meanwhile
                turn.pause((kind, t, value))

        return self.capture.replay(part, partial(pause, "input"), partial(pause, "output") if observed else None)
