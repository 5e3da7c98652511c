"""The scale of a step's loss: the recorded gradients brought to that of the whole batch, and the loss recognised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpnopt._collect import not_at_outputs
from ddpnopt._distributed import Together
from ddpnopt._losses import are_certain, kind_of, per_sample, recognised_losses, warn_uncertain
from ddpnopt._penalties import penalties_of
from ddpnopt.ddp.loss import as_flat
from ddpnopt.trace.recording import Recording
from ddpnopt.trace.rescaling import Average, find_penalties, follow, scale
from ddpnopt.trace.scalar_outputs import beside_samples, true_loss

if TYPE_CHECKING:
    from ddpnopt._step import Step


def rescale(step: Step, recording: Recording) -> None:
    """Follow what a GradScaler or clipping has done; find penalties on the weights and the loss of each sample."""
    opt, form = step.opt, step.opt.form
    peers = step.peers if isinstance(step.peers, Together) else None
    average: Average = peers.average if peers is not None and peers.group.averaged else list
    unscaled = hasattr(opt, "found_inf") and getattr(opt, "grad_scale", None) is None
    total = opt._loss_value
    if step.layers and not opt._capture.skip_weight_grads and (opt.feedback or unscaled):
        clipped = follow(recording, average, unscaled=unscaled)
        total = None if clipped is None or total is None else clipped * total
    share = peers.share(recording.batch_size) if peers is not None and form.mean else 1.0
    if opt.feedback:
        if peers is not None or step.has_own_grads:
            find_penalties(step.layers, average, peers, share)
            step.penalties = penalties_of(step.layers, opt._capture) if form.scale_free else step.penalties
            total = step.penalties.taken_from(total)  # what is left is that of the outputs
        if opt._uses_losses:  # on the scale of the user's loss
            value, total = total, opt._length.level(total)
            step.losses = recognised_losses(recording, form.mean, total, value, opt._search)
            if (length := opt._length).below_zero:
                step.losses, length.flatness = as_flat(step.losses, length.flatness, length.softened)
            opt._belonging.check([loss for _, loss in step.losses])
            opt.report.loss = kind_of(step.losses)
            unknown = total is None and true_loss(recording) is None
            if form.uses_losses and opt._troubles.is_new_guess(opt.report.loss, are_certain(step.losses), unknown):
                warn_uncertain(step.losses)
            if share != 1.0:
                step.losses = [(z, loss.scaled(share)) for z, loss in step.losses]
            step.beside = share * max(0.0, beside_samples(recording))
            each = per_sample(step.losses)
            step.own_loss = sum(loss.total(z) for z, loss in step.losses) + step.beside
            if form.scale_free and peers is None and all(record.extra is None for record in step.layers):
                step.inside = not_at_outputs(step.losses, step.own_loss, total, opt._capture, recording)
            if step.beside or step.inside:
                each = each + (step.beside + step.inside) / len(each)
                step.own_loss += step.inside
            step.sample_losses = recording.of_rows(each)
    if share != 1.0:
        scale(recording, share)
