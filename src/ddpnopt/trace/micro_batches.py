"""Gradient accumulation: several forward and backward passes as one batch.

What the layers have seen is laid end to end along the batch. The second forward pass stays in the micro-batches of the
first, so that dropout, batch norms and the inputs are those of each; they go in step, because a layer must know how far
all samples have been moved before it can be updated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ddpnopt.ddp.segment import Segment
from ddpnopt.errors import ModelError
from ddpnopt.trace.hooks import Capture
from ddpnopt.trace.lockstep import Turn
from ddpnopt.trace.recording import Probe, Recording, Stage

Control = Callable[[int, Tensor], None]
Gate = tuple[str, int, Tensor]


def join(recordings: list[Recording]) -> Recording:
    """One recording of all samples; each micro-batch lets go of its stages as they are copied."""
    first = recordings[0]
    if len(recordings) == 1:
        return first
    _check(recordings)
    sizes = [r.batch_size for r in recordings]
    joint = Recording(
        first.args, first.kwargs, first.training, first.device, first.rng, first.autocast,
        batch_size=sum(sizes), floating_outputs=first.floating_outputs, positions=first.positions, parts=recordings,
    )  # fmt: skip
    for stages in zip(*(r.stages for r in recordings), strict=True):
        joint.stages.append(_join_stages(list(stages)))
    for k in range(len(first.outputs)):
        z, q = zip(*((r.outputs[k], r.q[k]) for r in recordings), strict=True)
        of_batch = all(o.dim() > 0 and len(o) == size for o, size in zip(z, sizes, strict=True))
        joint.outputs.append(torch.cat(z) if of_batch else z[0])
        used = of_batch and any(g is not None for g in q)
        grads = [torch.zeros_like(o) if g is None else g for o, g in zip(z, q, strict=True)]
        joint.q.append(torch.cat(grads) if used else q[0])
    return joint


def _join_stages(stages: list[Stage]) -> Stage:
    first = stages[0]
    x = torch.cat([s.x for s in stages])
    joint = Stage(first.unit, x, x._version, first.skipped, (len(x), *first.h_shape[1:]), first.recomputed, first.moves)
    joint.p_h = torch.cat([s.p_h for s in stages if s.p_h is not None])
    slopes = [s.p_x for s in stages if s.p_x is not None]
    joint.p_x = torch.cat(slopes) if len(slopes) == len(stages) else None
    dots = [s.p_h_dot_h for s in stages if s.p_h_dot_h is not None]
    joint.p_h_dot_h = torch.cat(dots) if len(dots) == len(stages) else None
    for stage in stages:
        stage.let_go()
    return joint


def _check(recordings: list[Recording]) -> None:
    """Complain about micro-batches that cannot be laid end to end."""
    first = recordings[0]
    for other in recordings[1:]:
        if [s.name for s in other.stages] != [s.name for s in first.stages] or len(other.q) != len(first.q):
            raise ModelError(
                "The passes since the last step ran different layers, or gave another number of outputs: micro-batches "
                "of one step must take the same way through the model. Call step() after each, or zero_grad() to drop "
                "a pass that was not meant to count."
            )
        for a, b in zip(first.stages, other.stages, strict=True):
            if a.x.shape[1:] != b.x.shape[1:] or a.h_shape[1:] != b.h_shape[1:]:
                raise ModelError(
                    f"Layer '{a.name}' ran on inputs of shape {tuple(a.x.shape)} and {tuple(b.x.shape)} since the last "
                    "step: micro-batches of one step may differ in dimension 0 only. Pad them to the same size."
                )


def probes(capture: Capture, recording: Recording) -> list[Probe]:
    """The forward pass of each micro-batch once more, cut behind each stage."""
    return [capture.probe(part) for part in recording.parts or [recording]]


def pull_back(
    capture: Capture, recording: Recording, index: int, columns: Tensor
) -> tuple[list[list[Tensor]], list[list[Tensor | None]]]:
    """`Capture.pull_back` for all micro-batches."""
    if not recording.parts:
        return capture.pull_back(recording, index, columns)
    sizes = [part.batch_size for part in recording.parts]
    pulled = [
        capture.pull_back(part, index, some)
        for part, some in zip(recording.parts, columns.split(sizes, 1), strict=True)
    ]
    R, T = range(len(columns)), range(len(recording.stages))
    p_h = [[torch.cat([h[r][t] for h, _ in pulled]) for t in T] for r in R]
    return p_h, [[_cat([x[r][t] for _, x in pulled]) for t in T] for r in R]


def _cat(parts: list[Tensor | None]) -> Tensor | None:
    there = [p for p in parts if p is not None]
    return torch.cat(there) if len(there) == len(parts) else None


def retrace(capture: Capture, recording: Recording) -> None:
    """`Capture.retrace` for all micro-batches."""
    if not recording.parts:
        capture.retrace(recording)
        return
    for part in recording.parts:
        capture.retrace(part)
    for t, stage in enumerate(recording.stages):
        joint = _join_stages([part.stages[t] for part in recording.parts])
        stage.x, stage.p_h, stage.p_x, stage.p_h_dot_h = joint.x, joint.p_h, joint.p_x, joint.p_h_dot_h


class JointSegment:
    """What stands between two layers, for micro-batches that have a graph each."""

    def __init__(self, segments: list[Segment]) -> None:
        self.segments = segments

    def pull(self, V_x: Tensor, V_xx: Tensor, order: int) -> tuple[Tensor, Tensor]:
        sizes = [len(s.leaf) for s in self.segments]
        some = zip(self.segments, V_x.split(sizes), V_xx.split(sizes), strict=True)
        V_h, V_hh = zip(*(segment.pull(v, vv, order) for segment, v, vv in some), strict=True)
        return torch.cat(V_h), torch.cat(V_hh)

    def pull_rows(self, V_x: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
        sizes = [len(s.leaf) for s in self.segments]
        some = zip(self.segments, V_x.split(sizes), Z.split(sizes), strict=True)
        V_h, rows = zip(*(segment.pull_rows(v, z) for segment, v, z in some), strict=True)
        return torch.cat(V_h), torch.cat(rows)


def replay(capture: Capture, recording: Recording, control: Control, observe: Control | None) -> list[Tensor]:
    """`Capture.replay` for all micro-batches: control and observe see all samples of a layer together."""
    parts = recording.parts
    if not parts:
        return capture.replay(recording, control, observe)
    turns = [Turn(partial(_run, capture, part, observe is not None)) for part in parts]
    devices = [recording.device] if recording.device.type == "cuda" else []
    with capture.buffers_kept(), torch.random.fork_rng(devices=devices):
        try:
            while True:
                gates = [turn.resume() for turn in turns]
                here = [gate for gate in gates if gate is not None]
                if not here:
                    break
                kind, t, _ = here[0]
                if len(here) < len(gates) or any(gate[:2] != (kind, t) for gate in here):
                    raise ModelError(
                        f"Layer '{recording.stages[t].name}' did not run in all micro-batches of this step when they "
                        "were replayed, or not in the same order. Call step() after each micro-batch."
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
    return [torch.cat(o) if o[0].dim() > 0 else o[0] for o in zip(*outputs, strict=True)]


def _run(capture: Capture, part: Recording, observed: bool, turn: Turn[Gate, list[Tensor]]) -> list[Tensor]:
    def pause(kind: str, t: int, value: Tensor) -> None:
        with capture.aside(part.device):  # another micro-batch runs meanwhile
            turn.pause((kind, t, value))

    return capture.replay(part, partial(pause, "input"), partial(pause, "output") if observed else None)
