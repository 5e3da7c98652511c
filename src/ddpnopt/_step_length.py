"""The length of a step without a learning rate: chosen after the backward pass, judged after the forward pass."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import TYPE_CHECKING

from ddpnopt._checks import ADVICE, not_finite
from ddpnopt.ddp.step_length import Evidence
from ddpnopt.ddp.value import ScaleFree
from ddpnopt.linear.layer import inner

if TYPE_CHECKING:
    from ddpnopt._step import Step

TOLERATED = 1.0  # increase of the batch's loss, relative to it: beyond that a step is undone and made shorter
START_ALONE = 0.003  # relative size of the first update of parameters without feedback if there are no others
FELT_EVERY = 4  # steps from one look at the slope after a step to the next, where the loss after it is known


def slope_of_last_update(step: Step) -> float | None:
    """The change of this batch's loss, to first order, if the last update were made again; None if it was not kept."""
    state, total, found = step.opt.state, 0.0, False
    assert step.recording is not None
    for stage, record in zip(step.stages, step.recording.layers, strict=True):
        update = state[record.parameters[0]].pop("update", None)  # in a repetition, too: it is older than the next step
        if step.evidence is None and update is not None and len(update) == len(stage.u):
            total += float(inner(stage.layer.grad(stage.x, stage.p_h[0]), update))
            found = True
    if not step.peers.alone:
        total = step.peers.total(total)
    return total if found else None


def update_rest(step: Step) -> None:
    """Parameters without feedback, after the sweep: as far as the slope along their last update allows."""
    length, state = step.opt._rest_length, step.opt.state
    last = [(p.grad, state[p].pop("update", None)) for p in step.rest]
    known = [(gradient, update[0]) for gradient, update in last if gradient is not None and update is not None]
    if known:
        length.feel(float(sum((gradient * update).sum() for gradient, update in known)))
    of_layers = START_ALONE if step.evidence is None else step.fraction * step.evidence.relative_update
    size = length.choose(of_layers)
    factor = max(float(group["lr"]) for group in step.opt.param_groups)
    length.decrease = step.opt._parameters.update_relative(step.rest, size * factor)
    for p in step.rest:
        state[p]["update"] = [p.detach() - step.weights_before[p]]


def choose_fraction(step: Step, value: ScaleFree, shorter: float, slope: float | None) -> None:
    """Let the model of this batch and the memory of the steps before decide how much to ask for."""
    length = step.opt._length
    found = value.evidence()
    if not math.isfinite(sum(astuple(found))):  # it would stay in the running estimates for ever
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
            step.opt._length.fraction = step.asked  # if no attempt succeeds, the next step starts from here
            return False
    if found.loss > 0:
        step.opt._length.learn(found, step.asked, step.fraction, change)
    # a single sample says nothing of unseen ones: there the slope alone decides
    if not step.certain or found.unseen_curvature <= 0 or step.opt.steps % FELT_EVERY == FELT_EVERY - 1:
        _keep_update(step)
    if step.rest:
        update_rest(step)
    return True


def _keep_update(step: Step) -> None:
    """For `slope_of_last_update` in the next step."""
    assert step.recording is not None
    for stage, record in zip(step.stages, step.recording.layers, strict=True):
        update = [w.detach() - old for w, old in zip(stage.weights, stage.u, strict=True)]
        step.opt.state[record.parameters[0]]["update"] = update
