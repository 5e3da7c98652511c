"""The length of a step without a learning rate: chosen after the backward pass, judged after the forward pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddpnopt._checks import ADVICE, not_finite
from ddpnopt._losses import rounding
from ddpnopt.ddp.part import keep_part
from ddpnopt.ddp.rollouts import REACTED
from ddpnopt.ddp.step_length import REACH, RESOLUTION, SHRINK, Evidence
from ddpnopt.ddp.value import ScaleFree
from ddpnopt.linear.layer import spectral_norm, stacked

if TYPE_CHECKING:
    from ddpnopt._step import Step

OVERREACH = 4.0  # |J phi|^2 relative to the loss (2 is all of it): beyond that the memory does not fit the batch
TOLERATED = 1.0  # increase of the batch's loss, relative to it: beyond that a step is undone and made shorter


def _couples_samples(step: Step) -> bool:
    return any(module.training for _, module in step.passes.batch_norms)


def choose_fraction(step: Step, value: ScaleFree, shorter: float) -> None:
    """Let the model of this batch and the memory of the steps before decide how much to ask for."""
    length, slope = step.opt._length, value.slope
    found = value.evidence()
    if found.own < RESOLUTION or max(found.own_curvature, found.unseen_curvature) > OVERREACH:
        value.forget()
        found = value.evidence()
    # it would stay in the running estimates for ever
    if not math.isfinite(found.loss + found.own + found.own_curvature + found.unseen + found.unseen_curvature):
        raise not_finite("a gradient inside the model, or the Gram matrix of all,", ADVICE)
    if step.evidence is None:  # not in a repetition
        if slope is not None and found.loss > 0:
            length.feel(slope / found.loss)
            if not step.certain:
                length.learn_from_slope(found, slope / found.loss)
        step.chosen, step.evidence = length.choose(found, coupled=_couples_samples(step)), found
    # lr is a factor here: a scheduler may shorten all steps
    step.asked = step.chosen * shorter
    step.fraction = step.asked * max(float(group["lr"]) for group in step.opt.param_groups)
    value.ask(step.fraction)


def is_beyond_precision(step: Step) -> bool:
    """Whether the decrease that a step promises is none that the loss could show: its comparison would be noise."""
    found = step.evidence
    return found is not None and 0 < step.fraction * found.own * found.loss <= rounding_of(step)


def rounding_of(step: Step) -> float:
    """Differences of the batch loss up to here are rounding errors; several processes would have to agree on it."""
    assert step.recording is not None
    return rounding(step.recording, step.losses, step.loss_before or 0.0) if step.peers.alone else 0.0


def accept_length(step: Step, found: Evidence, after: float | None) -> float:
    """By what to shorten the step, which then is made again; 1 if it is kept.

    Only a step that goes completely wrong is refused, or one that changes the network too much where a part of it would
    not be a shorter step. How far the model was from the truth is remembered.
    """
    length, change = step.opt._length, _change(step, found, after)
    if length.shorter:  # this is a longer one, on trial
        back = length.shorter / step.fraction
        if back < 1.0 and not length.is_better(change):
            return back
    if change is not None and not change <= TOLERATED:
        length.refuse(step.asked)
        return SHRINK
    step.updates = _updates(step)
    norms = _norms(step)
    if not step.finite:  # where a step is not judged by its loss: gradients near the smallest numbers
        length.refuse(step.asked)
        return SHRINK
    share = _share_changed(step, norms)
    reaction = 0.0 if step.planned or step.value is None else step.value.reaction()
    if not length.is_within_reach(share, step.fraction):
        kept = REACH / share
        if reaction > REACTED:
            return kept
        norms, change = _keep_part(step, norms, kept), _change(step, found, _loss_after_part(step))
        if change is not None and not change <= 0:  # then the layers have something to react to
            return kept
    elif step.shorter == 1.0 and not length.shorter:
        if length.is_to_be_tested(found, step.fraction, change):
            return SHRINK
        longer = length.longer_to_try(step.fraction, change)
        if longer > 1.0:
            return longer
    _learn(step, found, change, reaction)
    if step.rest:
        share = _mean_share_changed(step, norms)
        step.opt._parameters.update_by_distance(step.rest, step.opt._distance, share)
    return 1.0


def _change(step: Step, found: Evidence, after: float | None) -> float | None:
    """The change of the loss by the step, relative to it; None where it is not known."""
    if after is None or step.loss_before is None or found.loss <= 0:
        return None
    return (after - step.loss_before) / found.loss


def _learn(step: Step, found: Evidence, change: float | None, reaction: float) -> None:
    """Take in what a step has shown that is kept."""
    length, rollouts = step.opt._length, step.opt._rollouts
    if found.loss > 0:
        error = length.error(found, step.fraction, change)
        planned = (step.planned or step.unjudged) and step.loss_before is not None
        length.learn(found, step.asked, step.fraction, change, planned=planned, steps=1 + rollouts.planned)
        if not step.planned and step.value is not None:
            rollouts.observe(step.asked, reaction, error, length.kappa)
    elif not step.planned:  # a batch without loss: nothing can be wrong with the plan
        rollouts.observe(step.asked, 0.0, 0.0, length.kappa)
    if step.planned:
        rollouts.follow(step.asked)


def _keep_part(step: Step, norms: list[float], share: float) -> list[float]:
    """Keep this share of a step that has changed a layer too much; what is left of the norms of its updates.

    A planned step is linear in its length: its share is the step that asks for this share of the fraction. A step whose
    layers have reacted no more than a plan is trusted for is as close to it, so that neither is made again.
    """
    for stage, update in zip(step.stages, step.updates, strict=True):
        keep_part(stage, update, share)
    step.asked *= share
    step.fraction *= share
    return [share * norm for norm in norms]


def _loss_after_part(step: Step) -> float | None:
    """The loss after the part of a step that is kept, by a pass of its own; None where it tells nothing.

    That of the whole step says little of it, and a plan that has gone too far is not to be trusted unseen.
    """
    step.unjudged = step.unjudged or is_beyond_precision(step)  # the whole of it may have been within
    if step.loss_before is None or step.unjudged:
        return None
    assert step.recording is not None
    step.outputs, step.planned = step.passes.replay(step.recording, lambda t, x: None), False
    loss = step._batch_loss(step.outputs)
    return None if loss is None else step._total(loss)


def _share_changed(step: Step, norms: list[float]) -> float:
    """By how much the step has changed a layer as a map, relative to it: the largest share over all layers.

    That is the spectral norm of the update over the one of a matrix of m x n independent weights of the layer's size s,
    s (m^1/2 + n^1/2); the ratio of all weights where each output depends on its own (embeddings, norms, depthwise
    convolutions). `norms` are those of the updates.
    """
    largest, bounds = 0.0, []
    for norm, (change, *_), stage in zip(norms, step.updates, step.stages, strict=True):
        shape, count, layer = change.shape, max(1, change.numel()), stage.layer
        if len(shape) > 1 and layer.mixes_features:
            dim = layer.weight_dims[1]
            size = stage.size * (shape[dim] ** 0.5 + (count / shape[dim]) ** 0.5)
            if norm > REACH * size:
                bounds.append((norm / size, norm, size, change, dim))
                continue
        else:
            size = stage.size * count**0.5
        largest = max(largest, norm / size)
    # the Frobenius norm is a bound, enough in most steps, and for all that are below the largest of the others
    for share, norm, size, change, dim in sorted(bounds, key=lambda each: each[0], reverse=True):
        if share > largest:
            matrix = change if change.dim() == 2 else change.movedim(dim, 0).flatten(1)
            share = spectral_norm(matrix, norm) / size
        largest = max(largest, share)
    return largest


def _mean_share_changed(step: Step, norms: list[float]) -> float:
    """By which share of their size the step has changed the weights: the root mean square over all layers."""
    sizes = [stage.size * max(1, stage.u[0].numel()) ** 0.5 for stage in step.stages]
    shares = [norm / size for norm, size in zip(norms, sizes, strict=True)]
    return (sum(share**2 for share in shares) / max(1, len(shares))) ** 0.5


def _norms(step: Step) -> list[float]:
    """Those of the updates of the weights, without biases; notes whether both are finite."""
    each = zip(step.stages, step.updates, strict=True)
    unknown = [part for stage, update in each if stage.norms is None for part in update]
    norms = iter(stacked(torch._foreach_norm(unknown)).tolist() if unknown else ())
    each = zip(step.stages, step.updates, strict=True)
    found = [stage.norms or [next(norms) for _ in update] for stage, update in each]
    step.finite = math.isfinite(sum(map(sum, found)))
    return [of_parts[0] for of_parts in found]


def _updates(step: Step) -> list[list[Tensor]]:
    """Old minus new weights of each stage."""
    unknown = [stage for stage in step.stages if stage.update is None]
    old, new = [u for stage in unknown for u in stage.u], [w for stage in unknown for w in stage.weights]
    differences = iter(torch._foreach_sub(old, new) if unknown else ())
    return [stage.update or [next(differences) for _ in stage.u] for stage in step.stages]


def keep_update(step: Step) -> None:
    """Keep old minus new weights, for the next step."""
    if not step.stages:  # undone
        return
    assert step.recording is not None
    for state in step.opt.state.values():  # a layer that took no part has nothing left to do from this step
        state.pop("update", None)
        state.pop("combined_update", None)
    for update, stage, record in zip(step.updates or _updates(step), step.stages, step.recording.layers, strict=True):
        if stage.decay is not None:  # it asks for its own part again at the next step
            update = [part.sub(decay, alpha=stage.fraction) for part, decay in zip(update, stage.decay, strict=True)]
        state = step.opt.state[record.parameters[0]]
        state["update"] = update
        if stage.combined is not None and stage.decay is None:
            state["combined_update"] = stage.combined
