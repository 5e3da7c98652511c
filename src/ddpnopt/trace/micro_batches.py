"""Gradient accumulation: several forward and backward passes as one batch.

The recorded layers are concatenated along the batch. The second forward pass keeps the micro-batches of the first, so
that each has its own dropout, batch norms and inputs; they run in lockstep, because a layer can be updated only once
the displacement of all samples is known.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ddpnopt.errors import ModelError
from ddpnopt.trace.groups import Groups
from ddpnopt.trace.hooks import Capture
from ddpnopt.trace.layer_uses import leave_unequal
from ddpnopt.trace.lockstep import Turn
from ddpnopt.trace.probes import Paths, Probe
from ddpnopt.trace.recording import LayerRecord, Recording
from ddpnopt.trace.replay import AtLayer

Pause = tuple[str, int, Tensor]
"""Where a micro-batch waits for the others: at the input or output, of layer t, with the tensor there."""


def join(recordings: list[Recording]) -> Recording:
    """One recording of all samples; each micro-batch frees its records as they are copied."""
    first = recordings[0]
    for recording, layers in zip(recordings, leave_unequal([r.layers for r in recordings]), strict=True):
        recording.layers = layers
    _check(recordings)
    sizes = [r.sample_count for r in recordings]
    joint = Recording(
        first.args, first.kwargs, first.training, first.device, first.rng, first.autocast, first.arrivals,
    )  # fmt: skip
    joint.floating_outputs, joint.positions, joint.parts = first.floating_outputs, first.positions, recordings
    if first.group is not None:
        joint.group = Groups(first.group.size, tuple(sizes))
    for records in zip(*(r.layers for r in recordings), strict=True):
        joint.layers.append(_join_records(list(records)))
    for k in range(len(first.outputs)):
        z, q = zip(*((r.output(k), r.gradient(k)) for r in recordings), strict=True)
        of_batch = all(o.dim() > 0 and len(o) == size for o, size in zip(z, sizes, strict=True))
        joint.outputs.append(torch.cat(z) if of_batch else z[0])
        used = of_batch and any(g is not None for g in q)
        grads = [torch.zeros_like(o) if g is None else g for o, g in zip(z, q, strict=True)]
        joint.q.append(torch.cat(grads) if used else q[0])
    joint.finish()
    return joint


def _join_records(records: list[LayerRecord]) -> LayerRecord:
    first = records[0]
    x = torch.cat([r.x for r in records])
    shape = (len(x), *first.h_shape[1:])
    joint = LayerRecord(first.model_layer, x, x._version, first.skipped, shape, first.recomputed, first.moves)
    joint.p_h = torch.cat([r.p_h for r in records if r.p_h is not None])
    joint.p_x = _cat([r.p_x for r in records])
    joint.p_h_dot_h = _cat([r.p_h_dot_h for r in records])
    joint.uses, joint.later = first.uses, _cat([r.later for r in records])
    joint.layouts = [None] * len(first.uses)  # each part has arranged its own
    for record in records:
        record.free()
    return joint


def _cat(parts: list[Tensor | None]) -> Tensor | None:
    known = [p for p in parts if p is not None]
    return torch.cat(known) if len(known) == len(parts) else None


def _check(recordings: list[Recording]) -> None:
    """Raise an error for micro-batches that cannot be concatenated."""
    first = recordings[0]
    for other in recordings[1:]:
        if [r.name for r in other.layers] != [r.name for r in first.layers] or len(other.q) != len(first.q):
            raise ModelError(
                "The passes since the last step ran different layers, or gave different numbers of outputs: "
                "micro-batches of one step must take the same path through the model. Call step() after each, or "
                "zero_grad() to drop a pass that was not meant to count."
            )
        for a, b in zip(first.layers, other.layers, strict=True):
            if a.x.shape[1:] != b.x.shape[1:] or a.h_shape[1:] != b.h_shape[1:]:
                raise ModelError(
                    f"Layer '{a.name}' ran on inputs of shape {tuple(a.x.shape)} and {tuple(b.x.shape)} since the last "
                    "step: micro-batches of one step may differ in dimension 0 only. Pad them to the same size."
                )


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
            self.capture.pull_back(part, index, some)
            for part, some in zip(recording.parts, columns.split(sizes, 1), strict=True)
        ]
        R, T = range(len(columns)), range(len(recording.layers))
        p_h = [[torch.cat([h[r][t] for h, _ in pulled]) for t in T] for r in R]
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
        with self.capture.buffers_kept(), self.capture.random_numbers_kept(recording.device):
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
                    together = torch.cat([value for _, _, value in here])
                    if kind == "input":
                        control(t, together)
                    elif observe is not None:
                        observe(t, together)
            finally:
                for turn in turns:
                    turn.close()
        outputs = [turn.result or [] for turn in turns]
        # scalars are losses of the model itself: one for each micro-batch
        return [torch.cat(o) if o[0].dim() > 0 else torch.stack(o) for o in zip(*outputs, strict=True)]

    def _run(self, part: Recording, observed: bool, turn: Turn[Pause, list[Tensor]]) -> list[Tensor]:
        def pause(kind: str, t: int, value: Tensor) -> None:
            with self.capture.suspended(part.device):  # another micro-batch runs meanwhile
                turn.pause((kind, t, value))

        return self.capture.replay(part, partial(pause, "input"), partial(pause, "output") if observed else None)
