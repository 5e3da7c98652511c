"""Before a step: the captured slopes brought to the scale of the whole batch's loss.

Since the backward pass the user may have unscaled or clipped `.grad`, and the batch may be shared with other processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ddpnopt._distributed import Peers, Together
from ddpnopt.errors import StepError
from ddpnopt.groups import penalty
from ddpnopt.method import Method, losses
from ddpnopt.trace.recording import Recording, Stage
from ddpnopt.trace.rescaling import Average, followed, scale


@dataclass(frozen=True)
class Settling:
    """What it depends on."""

    method: Method
    feedback: bool
    weight_grads: bool  # whether .grad of the layers is there
    unscaled: bool  # whether a GradScaler has been told to unscale .grad, which leaves the slopes as they are
    diagnostics: bool


def settle(recording: Recording, captured: list[Stage], peers: Peers, how: Settling) -> None:
    """Scale the slopes, and find what the loss has on the weights beside the layers' outputs."""
    together = peers if isinstance(peers, Together) else None
    average: Average = list
    if together is not None and together.group.averaged:
        average = together.average
    if captured and how.weight_grads and (how.feedback or how.unscaled):
        _follow(recording, how.unscaled, average)
    share = how.method.share(recording, peers)
    if how.feedback:
        for stage in captured:
            stage.extra = penalty(stage, average)
            if together is not None and together.extra:
                extra = stage.extra or [torch.zeros_like(p) for p in stage.unit.parameters]
                stage.extra = together.sum([e * share for e in extra])
    if share != 1.0:
        if how.method.looks_at_losses or how.diagnostics:
            found = losses(recording, how.method.mean)  # as the user's own, before they become shares
            recording.losses = [(z, replace(loss, weight=loss.weight * share)) for z, loss in found]
        scale(recording, share)


def _follow(recording: Recording, unscaled: bool, average: Average) -> None:
    """Where `.grad` was unscaled or clipped since the backward pass, so are the slopes."""
    factor = followed(recording, average)
    if factor is not None and factor != 1.0:
        scale(recording, factor)
    elif factor is None and unscaled:
        raise StepError(
            "scaler.unscale_() was called, but .grad is no longer the gradient of the layers times one number, so "
            "that the loss scale cannot be told: clip by the norm of all gradients (clip_grad_norm_), and set "
            "weight_decay instead of a penalty in the loss."
        )
