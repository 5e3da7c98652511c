"""Steps without a learning rate that the next batch shows to have gone wrong: they are undone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ddpnopt._losses import change_of_samples
from ddpnopt._step_length import TOLERATED, rounding_of
from ddpnopt.ddp.step_length import NOISE

if TYPE_CHECKING:
    from ddpnopt._step import Step
    from ddpnopt.optimizer import DDPNOpt


def take_back_if_wrong(step: Step) -> bool:
    """Undo the last step if its loss was a guess, or not looked at, and the next one tells that it has gone wrong."""
    opt = step.opt
    loss, peers = opt._loss_value, step.peers
    if not peers.alone:  # all processes have to come to the same conclusion
        total = peers.total(math.nan if loss is None else loss)
        loss = None if math.isnan(total) else total
    if not opt._length.is_surprised(loss):
        return False
    judged = step.certain and opt._rollouts.planned == 0
    opt._rollouts.doubt()
    if judged or _is_cleared(step) or not take_back(opt, 1.0):
        return False
    opt._length.retreat()
    return True


def _is_cleared(step: Step) -> bool:
    """Whether the batch is the surprise, and not the last step: before it the loss of this batch was large as well.

    Outliers, other data, another loss and weights that were set from outside give large losses, too. The step is judged
    on this batch as a roll-out judges one on its own. A guess of the loss has the true value and gradient at the
    outputs of this batch, and those before the step are close to them.
    """
    now, recording = step._batch_loss(), step.recording
    if recording is None or now is None:
        return False
    outputs = _before_last_step(step)
    if not outputs:
        return True  # nothing is known that could be taken back
    before = step._batch_loss(outputs)
    if before is None:
        return False
    raised = step._total(now) > (1 + TOLERATED) * step._total(before) + rounding_of(step)
    return not raised or _rests_on_few(step, outputs)


def _rests_on_few(step: Step, outputs: list[Tensor]) -> bool:
    """Whether a few samples have raised the loss of this batch, and not the batch: a roll-out would have kept the step.

    The batch that made the step is gone, and this one stands for it as any other would: by the mean increase of its
    samples, as far as that is beyond its standard error. A single sample that fits badly is no more than one of those.
    """
    if step.losses is None or step.recording is None or step.inside:
        return False
    change = change_of_samples(step.losses, step.recording, outputs)
    if change is None:
        return False
    n, total, squares = (step.peers.total(float(part)) for part in (len(change), change.sum(), change.square().sum()))
    if n < 2 or not math.isfinite(squares):
        return False
    variance = (squares / n - (total / n) ** 2) / (n - 1)  # of the mean
    return total / n <= NOISE * math.sqrt(max(variance, 0.0))


def take_back_if_not_finite(step: Step) -> bool:
    """Undo the last step if it has brought this batch's outputs, finite before it, out of the range of numbers."""
    opt, recording = step.opt, step.recording
    if recording is None or not opt.form.scale_free or not step.peers.alone or not _are_not_finite(recording.outputs):
        return False
    if any(not bool(b.isfinite().all()) for _, norm in step.passes.batch_norms for b in norm.buffers()):
        return False  # their running statistics are lost
    before = _before_last_step(step)
    if not before or _are_not_finite(before) or not take_back(opt, 1.0):
        return False
    opt._rollouts.doubt()
    opt._length.retreat()
    return True


def _before_last_step(step: Step) -> list[Tensor]:
    """The outputs of this batch with the weights before the last step; none where it is not known."""
    assert step.recording is not None
    parts = [pair for _, parameters, update in _last_updates(step.opt) for pair in zip(parameters, update, strict=True)]
    weights = [p.detach().clone() for p, _ in parts]
    for p, part in parts:
        p.detach().add_(part)
    try:
        return step.passes.replay(step.recording, lambda t, x: None) if parts else []
    finally:
        for (p, _), weight in zip(parts, weights, strict=True):
            p.detach().copy_(weight)


def _are_not_finite(outputs: list[Tensor]) -> bool:
    return any(o.is_floating_point() and not bool(o.isfinite().all()) for o in outputs)


def _last_updates(opt: DDPNOpt) -> Iterator[tuple[dict[str, Any], list[nn.Parameter], list[Tensor]]]:
    """State and parameters of each layer, and old minus new weights of the last step, where they are known."""
    for layer in opt._capture.controls():
        state = opt.state.get(layer.parameters[0], {})
        update = state.get("update")
        if update is not None and len(update) == len(layer.parameters):  # no bias has been frozen or unfrozen since
            yield state, layer.parameters, update


def take_back(opt: DDPNOpt, share: float) -> bool:
    """Undo this share of the last step; False if nothing is known of it.

    Weight decay, which `keep_update` leaves out, stays: it does not follow from the loss that has misled the step.
    """
    known = list(_last_updates(opt))
    for layer in opt._capture.controls():
        for kept in ("update", "combined_update"):
            opt.state.get(layer.parameters[0], {}).pop(kept, None)
    for state, parameters, update in known:
        for p, part in zip(parameters, update, strict=True):
            p.detach().add_(part, alpha=share)
        if share < 1:
            state["update"] = [(1 - share) * part for part in update]
    return bool(known)
