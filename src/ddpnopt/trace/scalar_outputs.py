"""Outputs of the model that are one number: its own loss, or a part of the loss such as a log-determinant."""

from __future__ import annotations

from torch import Tensor

from ddpnopt.trace.recording import Recording


def true_loss(recording: Recording, outputs: list[Tensor] | None = None) -> float | None:
    """The batch loss where the model returns it itself, as one scalar output or several that were added up.

    `outputs` are those of a replay, with the new weights; without them it is the loss of the recorded pass. None if
    the loss was computed from other outputs.
    """
    scalars = _scalars(recording)
    if not scalars or len(scalars) < sum(q is not None for q in recording.q):
        return None
    return _total(recording, scalars, outputs)


def beside_samples(recording: Recording) -> float:
    """What the scalar outputs next to those of the samples, such as an auxiliary loss, are in the batch loss."""
    return _total(recording, _scalars(recording)) if recording.used_outputs else 0.0


def change_of_scalars(recording: Recording, outputs: list[Tensor]) -> float:
    """What the scalar outputs next to those of the samples add to the change of the batch loss, to first order."""
    scalars = _scalars(recording)
    return _total(recording, scalars, outputs) - _total(recording, scalars) if scalars else 0.0


def _scalars(recording: Recording) -> list[int]:
    if recording.scalars is None:
        parts = recording.parts or [recording]
        recording.scalars = [
            k
            for k, q in enumerate(recording.q)
            if q is not None and all(part.outputs[k].dim() == 0 and part.q[k] is not None for part in parts)
        ]
    return recording.scalars


def _total(recording: Recording, scalars: list[int], outputs: list[Tensor] | None = None) -> float:
    """Their sum, each times the derivative of the loss by it."""
    parts = recording.parts or [recording]
    total = 0.0
    for k in scalars:
        values = [part.outputs[k] for part in parts]
        if outputs is not None:
            values = list(outputs[recording.positions[k]].reshape(-1))  # one for each micro-batch
        for part, value in zip(parts, values, strict=True):
            factor = part.q[k]
            assert factor is not None
            total += float(factor) * float(value)
    return total
