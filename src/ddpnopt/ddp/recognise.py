"""Which loss the user has used, recognised from the outputs z and the gradient q = d(batch loss)/dz.

An optimizer sees `loss.backward()` and `step()`, never the loss function. But the gradient at the outputs identifies
the common losses: for cross-entropy softmax(z) - q/w is the target, for the squared error z - q/(2w). The value of the
loss, if it is handed over, gives the scale where the gradient does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ddpnopt.ddp import recognise_binary as binary
from ddpnopt.ddp import recognise_classes as classes
from ddpnopt.ddp.evidence import (
    has_usual_scale,
    is_round,
    says_something,
    shared_magnitude,
    squares_of_samples,
    tolerance,
    within_reach,
)
from ddpnopt.ddp.loss import AnyLoss, LinearLoss, Loss, UnknownLoss
from ddpnopt.ddp.loss_search import Form
from ddpnopt.linear.layer import in_precision

FAR = 2.0  # times what is within reach of the outputs is the most that a loss of unknown form is taken to be


def recognise(
    z: Tensor, q: Tensor, mean: bool, total: float | None = None, precision: torch.dtype | None = None,
    value: float | None = None, *, rare: bool = True, last: Form | None = None,
) -> AnyLoss:  # fmt: skip
    """The loss whose gradient at outputs z is q; a squared error, or one of unknown form, where nothing else fits.

    `mean` says whether the user's loss is an average over the batch (and over places or elements) or a sum, `total`
    is its value, and `precision` the narrowest in which z and q were computed. `value` is what the user's loss says
    where `total` does not: once it has been below zero. Without `rare` only the plain forms with hard labels are tried.
    `last` is the form of the loss in the step before: if it fits again, no other one is tried.
    """
    if z.requires_grad or q.requires_grad:  # the same tensor has its losses computed once
        z, q = z.detach(), q.detach()
    tol = tolerance(z.dtype, q.dtype, precision or q.dtype)
    if last is not None and z.numel() > 0:
        again = _again(last, z, q, mean, tol, total, value)
        if again is not None:
            return again
    incomplete: Loss | None = None  # certain by its gradient, but the loss has other parts
    guess: Loss | None = None
    for found in _candidates(z, q, mean, tol, total, rare):
        if total is None:
            if found.certain:
                return found
            guess = guess or found
            continue
        slack = 10 * tol * abs(total)
        sum_here = _value_of(found, z, total)
        if abs(sum_here - total) <= slack:
            return found if found.certain else replace(found, certain=True)
        if found.certain and incomplete is None:
            incomplete = replace(found, certain=sum_here <= total + slack)  # a penalty on the weights adds to it
    return incomplete or guess or without_form(z, q, mean, tol, total, value, rare=rare)


def without_form(
    z: Tensor, q: Tensor, mean: bool, tol: float, total: float | None, value: float | None = None, *, rare: bool = True
) -> AnyLoss:
    """What a loss is taken for that has none of the forms with targets; the arguments are those of `recognise`."""
    return _linear(z, q, tol, total if value is None else value) or _other(z, q, mean, tol, total, rare)


def _again(
    last: Form, z: Tensor, q: Tensor, mean: bool, tol: float, total: float | None, value: float | None
) -> AnyLoss | None:
    """The loss in the form of the step before, if it has the gradient q and the value `total`."""
    if last.kind == "sum of outputs":
        return _linear(z, q, tol, total if value is None else value)
    if total is None:
        return _again_by_itself(last, z, q, tol)
    if not total > 0:
        return None
    if last.kind == "squared_error":
        squares = _squares(q)
        scale = squares[1] / (4 * total)
        return _squared_error(z, q, mean, tol, scale, squares) if abs(scale - last.scale) <= tol * last.scale else None
    if last.kind == "cross_entropy":
        found = classes.with_scale(z, q, last.dim, last.scale, last.temperature, tol)
    else:
        found = binary.with_scale(z, q, last.scale, tol, of_probabilities=last.of_probabilities)
    if found is None:
        return None
    return found if abs(_value_of(found, z, total) - total) <= 10 * tol * total else None


def _again_by_itself(last: Form, z: Tensor, q: Tensor, tol: float) -> Loss | None:
    """The loss in the form of the step before, at any scale, where the gradient alone says enough: hard targets."""
    if last.kind != "binary_cross_entropy":
        return None
    match = binary.of_one_weight(*binary.on_logits(z, q, of_probabilities=last.of_probabilities), tol)
    if match is None or isinstance(match[1], Tensor):  # elements without gradient may be those of other classes
        return None
    return Loss(last.kind, match[0], match[1], of_probabilities=last.of_probabilities)


def _value_of(loss: Loss, z: Tensor, total: float) -> float:
    """What the user's loss says, with or without the entropy of soft targets (KL divergence): the closer to `total`."""
    above = loss.total(z)
    return min(above + loss.minimum(), above, key=lambda value: abs(value - total))


def _candidates(z: Tensor, q: Tensor, mean: bool, tol: float, total: float | None, rare: bool) -> Iterator[Loss]:
    if z.numel() == 0:
        return
    dims = [z.dim() - 1] if z.dim() == 2 else [z.dim() - 1, 1] if z.dim() > 2 else []
    for dim in dims:
        yield from classes.cross_entropy(z, q, dim, mean, tol, total, rare=rare)
    yield from _binary_cross_entropy(z, q, mean, tol, total, rare)


def _binary_cross_entropy(
    z: Tensor, q: Tensor, mean: bool, tol: float, total: float | None, rare: bool
) -> Iterator[Loss]:
    kind, weight = "binary_cross_entropy", 1.0 / z.numel() if mean else 1.0
    hard = binary.usual_targets(z, q, weight, max(tol, 1e-3))
    if hard is not None:
        yield Loss(kind, hard, weight, certain=says_something(q, weight, max(tol, 1e-3)))
        return
    if not rare or not bool((q != 0).any()):
        return
    forms = [(*binary.on_logits(z, q, of_probabilities=False), False)]
    if bool(((z >= 0) & (z <= 1)).all()):
        forms.append((*binary.on_logits(z, q, of_probabilities=True), True))
    for p, not_p, grad, of_probabilities in forms:
        match = binary.hard_targets(p, not_p, grad, tol)
        if match is not None:
            yield Loss(kind, match[0], match[1], of_probabilities=of_probabilities)
    for p, not_p, grad, of_probabilities in forms:
        matches = [binary.two_targets(p, grad, tol), binary.zeros_and_ones(p, not_p, grad, tol)]
        if total is not None:
            logits = torch.log(p) - torch.log(not_p) if of_probabilities else z
            matches.append(binary.any_targets(total, logits, p, grad, tol))
        for match in matches:
            if match is not None:
                t, w, certain = match
                yield Loss(kind, t, w, of_probabilities=of_probabilities, soft=True, certain=certain)


def _linear(z: Tensor, q: Tensor, tol: float, total: float | None) -> LinearLoss | None:
    """Outputs that are the losses of the samples themselves: all with the same gradient, and their sum is the loss."""
    if total is None or z.numel() != len(z) or len(z) < 2:
        return None
    first, least, most = float(q.flatten()[0]), *(float(end) for end in q.aminmax())
    if first == 0 or not max(most - first, first - least) <= tol * abs(first):
        return None
    each = (q * z).double()
    if abs(float(each.sum()) - total) > 10 * tol * float(each.abs().sum()):
        return None
    least = float(each.min())
    if not least > 0:
        return LinearLoss(q, least)
    level = (total - FAR * within_reach(z, q)) / len(z)  # outputs far from zero (a critic's) say nothing of a minimum
    return LinearLoss(q, min(least, max(0.0, level)))


def squares_again(
    found: list[tuple[Tensor, Tensor, torch.dtype]], mean: bool, total: float, last: list[Form | None]
) -> list[Loss] | None:
    """Squared errors at several outputs (z, q, precision), if those of the step before have the value `total`."""
    scales = [form.scale for form in last if form is not None and form.kind == "squared_error"]
    if len(scales) < len(found) or not total > 0:
        return None
    squares = [_squares(q) for _, q, _ in found]
    tols = [tolerance(z.dtype, q.dtype, narrow) for z, q, narrow in found]
    apart = sum(size / (4 * scale) for (_, size), scale in zip(squares, scales, strict=True)) / total
    if not abs(apart - 1) <= min(tols):
        return None
    each = zip(found, tols, scales, squares, strict=True)
    return [_squared_error(z, q, mean, tol, apart * scale, sizes) for (z, q, _), tol, scale, sizes in each]


def _other(z: Tensor, q: Tensor, mean: bool, tol: float, total: float | None, rare: bool) -> AnyLoss:
    """A squared error if the loss says so, or if it is not known and nothing speaks against it.

    Of any hundred batches about one has by chance a scale that people write: where no form has fitted so far, without
    `rare`, only the usual scale counts.
    """
    squares, usual = _squares(q), _usual(z, mean)
    size = squares[1]
    if total is not None and total <= 0 < size:  # a loss below zero, such as a likelihood, has its minimum anywhere
        return UnknownLoss.adding_up_to(within_reach(z, q, squares[0]), z, q, squares)
    if total is None or size == 0:
        if shared_magnitude(q, tol):
            return UnknownLoss.adding_up_to(size / (4 * usual), z, q, squares)
        guess = Loss("squared_error", lambda: torch.sub(z, q, alpha=1 / (2 * usual)), usual, certain=size == 0)
        return guess.knowing(z, in_precision(squares[0] / (4 * usual), q.dtype), size / (4 * usual))
    scale = size / (4 * total)  # of loss = scale * sum (z - t)^2
    expected = abs(scale - usual) <= tol * usual or (rare and has_usual_scale(scale, q, tol))
    if not expected:  # its minimum may lie far above zero, where the gradient vanishes (Dice)
        return UnknownLoss.adding_up_to(min(total, FAR * within_reach(z, q, squares[0])), z, q, squares)
    return _squared_error(z, q, mean, tol, scale, squares)


def _squares(q: Tensor) -> tuple[Tensor, float]:
    """|q_i|^2 of each sample, in double precision, (B,), and their sum."""
    of_samples = squares_of_samples(q)
    return of_samples, float(of_samples.sum())


def _usual(z: Tensor, mean: bool) -> float:
    """The scale of a mean squared error over all elements, or of their sum."""
    return 1.0 / max(z.numel(), 1) if mean else 1.0


def _squared_error(z: Tensor, q: Tensor, mean: bool, tol: float, scale: float, squares: tuple[Tensor, float]) -> Loss:
    """scale * sum (z - t)^2 over all elements, or those with a gradient; `squares` are those of q in each sample."""
    usual = _usual(z, mean)
    weight: Tensor | float = scale
    if abs(scale - usual) <= tol * usual:
        weight = scale = usual
    elif _is_masked(scale, q, tol):
        weight = scale * (q != 0).to(q.dtype)
    found = Loss("squared_error", lambda: torch.sub(z, q, alpha=1 / (2 * scale)), weight)
    of_samples, size = squares
    return found.knowing(z, in_precision(of_samples / (4 * scale), q.dtype), size / (4 * scale))


def _is_masked(scale: float, q: Tensor, tol: float) -> bool:
    """Whether elements without gradient do not count: the loss is a mean over the others."""
    live = int((q != 0).sum())
    over_all = any(is_round(scale * count, tol, (1.0, 5.0)) for count in (q.numel(), len(q)))
    return live < q.numel() and is_round(scale * live, tol) and not over_all
