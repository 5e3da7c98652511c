"""Which loss the user has used, recognised from the outputs z and the gradient q = d(batch loss)/dz.

An optimizer sees `loss.backward()` and `step()`, never the loss function. But the gradient at the outputs identifies
the common losses: for cross-entropy softmax(z) - q/w is the target, for the squared error z - q/(2w). The value of the
loss, if it is handed over, gives the scale where the gradient does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ddpnopt.ddp import recognise_binary as binary
from ddpnopt.ddp import recognise_classes as classes
from ddpnopt.ddp.evidence import has_usual_scale, is_round, says_something, shared_magnitude, tolerance, within_reach
from ddpnopt.ddp.loss import AnyLoss, LinearLoss, Loss, UnknownLoss
from ddpnopt.linear.layer import in_precision

NO_FORM = ("unknown", "squared_error")  # what a loss is taken for where nothing fits
TRIES, AGAIN = 5, 16  # attempts without success after which the rare forms are tried so many steps later
LATEST = 256  # … twice as many after each further one, up to so many
FAR = 2.0  # times what is within reach of the outputs is the most that a loss of unknown form is taken to be


@dataclass(frozen=True)
class Form:
    """What a loss has in common with that of the next step, which has other targets."""

    kind: str
    scale: float
    dim: int
    temperature: float
    of_probabilities: bool

    @classmethod
    def of(cls, loss: Loss) -> Form | None:
        """None where the form has more in it than a scale and a temperature."""
        if loss.kind == "cross_entropy" and (loss.label is not None or loss.of_probabilities):
            return None  # found as fast by itself
        if isinstance(loss.weight, Tensor):
            scale = float(loss.weight.max())  # of a squared error: a mask may change from step to step
            if loss.kind != "squared_error" and not bool((loss.weight == scale).all()):
                return None
        else:
            scale = loss.weight
        if not scale > 0:  # a batch without loss
            return None
        return cls(loss.kind, scale, loss.dim, loss.temperature, loss.of_probabilities)


@dataclass
class Search:
    """Whether to try the rare forms of losses, which takes longer than the step where none of them fits."""

    steps: int = 0
    failures: int = 0  # attempts in a row
    again: int = 0  # the step in which they are tried next
    last: Form | None = None  # what was found in the last step, where it is one that can be tried again
    known: set[int] = field(default_factory=set)  # the outputs whose loss was found in the last step
    apart: bool = False  # whether passes of one backward pass have been found to have losses of their own

    def is_due(self, outputs: int) -> list[bool]:
        """Whether to try them in this step, at each of several outputs."""
        self.steps += 1
        due = self.steps >= self.again
        return [due or k in self.known for k in range(outputs)]

    def note(self, losses: list[AnyLoss]) -> None:
        """What was found in a step."""
        self.known = {k for k, loss in enumerate(losses) if loss.certain or loss.kind not in NO_FORM}
        success = len(self.known) == len(losses)
        if success:  # it may be chance
            self.failures, self.again = max(0, self.failures - 1), 0
        elif self.steps >= self.again:
            later = self.failures - TRIES + 1
            self.failures += 1
            self.again = self.steps + (min(AGAIN * 2**later, LATEST) if later >= 0 else 1)
        only = losses[0] if len(losses) == 1 and success else None
        self.last = Form.of(only) if isinstance(only, Loss) else None


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
    if last is not None and total is not None and total > 0 and z.numel() > 0:
        again = _again(last, z, q, mean, tol, total)
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
    return (
        incomplete or guess or _linear(z, q, tol, total if value is None else value) or _other(z, q, mean, tol, total)
    )


def _again(last: Form, z: Tensor, q: Tensor, mean: bool, tol: float, total: float) -> Loss | None:
    """The loss in the form of the step before, if it has the gradient q and the value `total`."""
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
    p = torch.sigmoid(z)
    t = torch.sub(p, q, alpha=1 / weight)
    hard = t.clamp(0, 1).round_()
    if float(torch.dist(t, hard, math.inf)) < max(tol, 1e-3):
        yield Loss(kind, hard, weight, certain=says_something(q, weight, max(tol, 1e-3)))
        return
    if not rare or not bool((q != 0).any()):
        return
    forms = [(p, torch.sigmoid(-z), q, False)]
    if bool(((z >= 0) & (z <= 1)).all()):
        forms.append((z, 1 - z, q * z * (1 - z), True))
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
    first = q.flatten()[0]
    if first == 0 or not bool(((q - first).abs() <= tol * first.abs()).all()):
        return None
    each = (q * z).double()
    if abs(float(each.sum()) - total) > 10 * tol * float(each.abs().sum()):
        return None
    least = float(each.min())
    level = (total - FAR * within_reach(z, q)) / len(z)  # outputs far from zero (a critic's) say nothing of a minimum
    return LinearLoss(q, min(least, max(0.0, level)))


def _other(z: Tensor, q: Tensor, mean: bool, tol: float, total: float | None) -> AnyLoss:
    """A squared error if the loss says so, or if it is not known and nothing speaks against it."""
    squares, usual = _squares(q), _usual(z, mean)
    size = squares[1]
    if total is not None and total <= 0 < size:  # a loss below zero, such as a likelihood, has its minimum anywhere
        return UnknownLoss.adding_up_to(within_reach(z, q), z, q)
    if total is None or size == 0:
        if shared_magnitude(q, tol):
            return UnknownLoss.adding_up_to(size / (4 * usual), z, q)
        return Loss("squared_error", z - q / (2 * usual), usual, certain=size == 0)
    scale = size / (4 * total)  # of loss = scale * sum (z - t)^2
    if not has_usual_scale(scale, q, tol):  # its minimum may lie far above zero, where the gradient vanishes (Dice)
        return UnknownLoss.adding_up_to(min(total, FAR * within_reach(z, q)), z, q)
    return _squared_error(z, q, mean, tol, scale, squares)


def _squares(q: Tensor) -> tuple[Tensor, float]:
    """|q_i|^2 of each sample, in double precision, (B,), and their sum."""
    of_samples = torch.linalg.vector_norm(q.reshape(len(q), -1), dim=1, dtype=torch.float64).square_()
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
