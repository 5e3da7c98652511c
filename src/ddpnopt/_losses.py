"""The losses of the samples, from a recorded pass: at each output that a loss was computed from."""

from __future__ import annotations

import torch
from torch import Tensor

from ddpnopt._checks import warn_user
from ddpnopt.ddp.evidence import is_round, tolerance, within_reach
from ddpnopt.ddp.loss import AnyLoss, Loss, UnknownLoss
from ddpnopt.ddp.loss_search import NO_FORM, Form, Search
from ddpnopt.ddp.recognise import recognise, squares_again, without_form
from ddpnopt.errors import UncertainLossWarning
from ddpnopt.linear.given import Given
from ddpnopt.linear.layer import in_precision
from ddpnopt.trace.recording import Recording
from ddpnopt.trace.scalar_outputs import beside_samples, true_loss

Losses = list[tuple[Tensor, AnyLoss]]
"""The outputs that a loss was computed from, and that loss."""
Outputs = list[tuple[Tensor, Tensor, torch.dtype]]
"""Outputs, their gradients, and the narrowest precision of the two."""


def outputs_with_gradient(recording: Recording) -> list[tuple[int, Tensor, Tensor]]:
    """The outputs that the loss was computed from: (index, z, q), in the precision of the weights."""
    dtype = recording.layers[0].parameters[0].dtype
    found = []
    for k in recording.used_outputs:
        q = recording.gradient(k)
        assert q is not None
        found.append((k, in_precision(recording.output(k), dtype), in_precision(q, dtype)))
    return found


def recognised_losses(
    recording: Recording,
    mean: bool,
    total: float | None = None,
    value: float | None = None,
    search: Search | None = None,
) -> Losses:
    """The losses at the outputs, or at the last layer if the model has computed the loss itself.

    `total` is the value of the batch loss, where the user has handed it over, and `value` that of `recognise`; `search`
    knows of earlier steps.
    """
    dtype = recording.layers[0].parameters[0].dtype
    found = [(z, q, _narrow(recording.outputs[k], recording.q[k])) for k, z, q in outputs_with_gradient(recording)]
    if not found:
        layers = [record for record in recording.layers if not isinstance(record.layer, Given)]
        last = (layers or recording.layers)[-1]
        assert last.p_h is not None
        total = true_loss(recording) if total is None else total
        q = last.p_h.to(dtype)
        if not layers:  # parameters that belong to no layer: nothing is known of what a sample's loss depends on
            z = last.parameters[0].detach().flatten().expand_as(q)
            level = total if total is not None and total > 0 else within_reach(z, q)
            return [(z, UnknownLoss.adding_up_to(level, z, q))]
        z = last.model_layer.output(last.input_in(dtype))
        if recording.group is not None:
            z, q = recording.group.apart(z), recording.group.apart(q)
        found = [(z, q, _narrow(last.p_h))]
    elif total:  # the loss at the outputs of the samples is what the others leave; zero: it has no level
        beside = beside_samples(recording)
        total, value = total - beside, None if value is None else value - beside
    rare = [True] * len(found) if search is None else search.is_due(len(found))
    forms: list[Form | None] = [None] * len(found) if search is None else search.last(len(found))
    if total is None or len(found) == 1:
        losses: Losses = [
            (z, recognise(z, q, mean, total, narrow, value, rare=each, last=form))
            for (z, q, narrow), each, form in zip(found, rare, forms, strict=True)
        ]
    else:
        squares = squares_again(found, mean, total, forms)
        losses = (
            _shared_out(total, found, mean, rare, forms)
            if squares is None
            else [(z, loss) for (z, _, _), loss in zip(found, squares, strict=True)]
        )
    if search is not None:
        search.note([loss for _, loss in losses])
    return losses


def _shared_out(total: float, found: Outputs, mean: bool, rare: list[bool], last: list[Form | None]) -> Losses:
    """The losses at several outputs, which add up to `total`: those that are not recognised get what is left."""
    losses: Losses = [
        (z, recognise(z, q, mean, None, narrow, rare=each, last=form))
        for (z, q, narrow), each, form in zip(found, rare, last, strict=True)
    ]
    sums = [loss.total(z) + loss.minimum() for z, loss in losses]
    open_ = [k for k, (_, loss) in enumerate(losses) if not loss.certain]
    rest = total - sum(value for k, value in enumerate(sums) if k not in open_)
    guessed = sum(sums[k] for k in open_)
    squares = all(losses[k][1].kind == "squared_error" for k in open_)
    for k in open_:
        z, q, narrow = found[k]
        tol = tolerance(z.dtype, q.dtype, narrow)
        if rest <= 0 or len(open_) == 1:  # with nothing left they have no level
            level = max(rest, 0.0)
        elif squares and is_round(guessed / rest, tol):  # all of the usual scale
            level = rest * sums[k] / guessed
        else:
            if guessed > 0:
                of_samples = losses[k][1].per_sample(z), sums[k]  # of a guess without a form, in proportion to |q_i|^2
                known = of_samples if losses[k][1].kind in NO_FORM else None
                losses[k] = (z, UnknownLoss.adding_up_to(rest * sums[k] / guessed, z, q, known))
            continue
        if rare[k] or losses[k][1].kind not in NO_FORM:
            losses[k] = (z, recognise(z, q, mean, level, narrow, rare=rare[k], last=last[k]))
        else:  # none of the plain forms fits, with or without a level
            losses[k] = (z, without_form(z, q, mean, tol, level, rare=False))
    return losses


def _narrow(*tensors: Tensor | None) -> torch.dtype:
    """The narrowest precision among tensors."""
    found = {t.dtype for t in tensors if t is not None}
    return found.pop() if len(found) == 1 else min(found, key=lambda dtype: -torch.finfo(dtype).eps)


def per_sample(losses: Losses) -> Tensor:
    """The contribution of each sample to the batch loss, above its minimum: (B,)."""
    found = [loss.per_sample(z) for z, loss in losses]
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def change_of_samples(losses: Losses, recording: Recording, outputs: list[Tensor]) -> Tensor | None:
    """By how much each sample's recorded loss is above that at other outputs, (B,); None where it is not known."""
    if not recording.used_outputs or recording.scalars:
        return None
    each = zip(recording.used(outputs), losses, strict=True)
    others = per_sample([(in_precision(z, recorded.dtype), loss) for z, (recorded, loss) in each])
    return recording.of_rows(per_sample(losses) - others).double()


def rounding(recording: Recording, losses: Losses | None, loss: float) -> float:
    """How well a batch loss is known: by its own precision, and by that of the outputs it was computed from."""
    used = [(recording.outputs[k], recording.q[k]) for k in recording.used_outputs]
    precise = [z.dtype for z, _ in losses or ()] or [z.dtype for z in recording.outputs if z.is_floating_point()]
    own = max((torch.finfo(dtype).eps for dtype in precise), default=0.0)
    of_outputs = [torch.finfo(z.dtype).eps * float((z * q).norm()) for z, q in used if q is not None]
    of_losses = [found.rounding(z) for z, found in losses or () if isinstance(found, Loss)]
    return own * abs(loss) + sum(of_outputs) + sum(of_losses)


def kind_of(losses: Losses) -> str:
    """The kinds of the losses, each once: "cross_entropy", "squared_error", "unknown", …"""
    return " + ".join(dict.fromkeys(loss.kind for _, loss in losses))


def are_certain(losses: Losses) -> bool:
    """Whether neither the form nor the scale of any loss is a guess."""
    return all(loss.certain for _, loss in losses)


def warn_uncertain(losses: Losses) -> None:
    """Warn that the loss is guessed, and say how to hand it over."""
    kind = kind_of([(z, loss) for z, loss in losses if not loss.certain])
    assumed = "a mean squared error over all elements" if kind == "squared_error" else f"the form '{kind}'"
    warn_user(
        f"The loss was not recognised for certain from its gradient at the outputs: {assumed} is assumed. Hand its "
        "value over with opt.step(loss=loss), or use opt.step(closure).",
        UncertainLossWarning,
    )
