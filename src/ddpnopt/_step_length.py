"""The length of a step without a learning rate: chosen after the backward pass, judged after the forward pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ddpnopt._checks import ADVICE, not_finite
from ddpnopt.ddp.step_length import RESOLUTION, Evidence
from ddpnopt.ddp.value import ScaleFree

if TYPE_CHECKING:
    from ddpnopt._step import Step

OVERREACH = 4.0  # |J phi|^2 relative to the loss (2 is all of it): beyond that the memory does not fit the batch
TOLERATED = 1.0  # increase of the batch's loss, relative to it: beyond that a step is undone and made shorter


def watches_slope(step: Step) -> bool:
    """Whether the step needs the slope along the last update: where samples left out, or the loss, say too little."""
    length = step.opt._length
    return not step.certain or length.unseen <= 0 or length.unseen_curvature <= 0


def choose_fraction(step: Step, value: ScaleFree, shorter: float) -> None:
    """Let the model of this batch and the memory of the steps before decide how much to ask for."""
    length, slope = step.opt._length, value.slope
    found = value.evidence()
    if found.own < RESOLUTION or max(found.own_curvature, found.unseen_curvature) > OVERREACH:
        value.forget()
        found = value.evidence()
    # it would stay in the running estimates for ever
    if not math.isfinite(found.loss + found.own + found.own_curvature + found.unseen + found.unseen_curvature):
        raise not_finite("the Gram matrix of the samples' gradients", ADVICE)
    if step.evidence is None:  # not in a repetition
        if slope is not None and found.loss > 0:
            length.feel(slope / found.loss)
            if not step.certain:
                length.learn_from_slope(found, slope / found.loss)
        step.chosen, step.evidence = length.choose(found), found
    # lr is a factor here: a scheduler may shorten all steps
    step.asked = step.chosen * shorter
    step.fraction = step.asked * max(float(group["lr"]) for group in step.opt.param_groups)
    value.ask(step.fraction)


def accept_length(step: Step, found: Evidence, after: float | None) -> bool:
    """Remember how far the model was from the truth; only a step that goes completely wrong is refused."""
    change = None
    if after is not None and step.loss_before is not None and found.loss > 0:
        change = (after - step.loss_before) / found.loss
        if not change <= TOLERATED:
            length = step.opt._length
            length.fraction, length.memory = step.asked, 0.0  # if no attempt succeeds, the next step starts from here
            return False
    if found.loss > 0:
        step.opt._length.learn(found, step.asked, step.fraction, change)
    if step.rest:
        step.opt._parameters.update_by_distance(step.rest, step.opt._distance)
    return True


def take_back_if_wrong(step: Step) -> bool:
    """Undo the last step if its loss was a guess and that of the next batch tells that it has gone wrong."""
    opt = step.opt
    if not opt._length.is_surprised(opt._loss_value) or step.certain:
        return False
    updates = [(layer, opt.state[layer.parameters[0]].pop("update", None)) for layer in opt._capture.layers]
    if all(update is None for _, update in updates):
        return False
    for layer, update in updates:
        for weight, part in zip(layer.parameters, update or (), strict=False):
            weight.data.add_(part)
    opt._length.retreat()
    return True


def keep_update(step: Step) -> None:
    """Turn the copies of the old weights into the update, for the next step."""
    if not step.stages:  # undone
        return
    assert step.recording is not None
    old = [u for stage in step.stages for u in stage.u]
    torch._foreach_sub_(old, [w.detach() for stage in step.stages for w in stage.weights])
    for state in step.opt.state.values():  # a layer that took no part has nothing left to do from this step
        state.pop("update", None)
    for stage, record in zip(step.stages, step.recording.layers, strict=True):
        step.opt.state[record.parameters[0]]["update"] = stage.u
