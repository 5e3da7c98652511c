"""Which loss the user has used, recognised from the outputs z and the gradient q = d(batch loss)/dz.

An optimizer sees `loss.backward()` and `step()`, never the loss function. But the gradient at the outputs identifies
the common losses exactly: for cross-entropy softmax(z) - q/w is the target, for the squared error z - q/(2w). With
the targets known, each sample's loss is known, and so is the loss at any other outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """A loss with its targets: sum over places of weight * distance(z, target)."""

    kind: str  # "cross_entropy", "binary_cross_entropy" or "squared_error"
    target: Tensor
    weight: Tensor | float  # broadcasts against the places
    dim: int = -1  # of the classes
    label: Tensor | None = None  # (B,), where the target is one class per sample

    def per_sample(self, z: Tensor) -> Tensor:
        """The contribution of each sample to the batch loss, above its minimum: (B,)."""
        if self.label is not None:
            return F.cross_entropy(z, self.label, reduction="none") * self.weight
        if self.kind == "cross_entropy":
            at = torch.xlogy(self.target, self.target) - self.target * F.log_softmax(z, self.dim)
            places = self.weight * at.sum(self.dim)
        elif self.kind == "binary_cross_entropy":
            places = self.weight * F.binary_cross_entropy_with_logits(z, self.target, reduction="none")
        else:
            places = self.weight * (z - self.target).square()
        return places.flatten(1).sum(1) if places.dim() > 1 else places


def total_loss(outputs: list[Tensor], found: list[tuple[Tensor, Loss]]) -> float:
    """The batch loss at some outputs, above its minimum; infinite where it is not a number."""
    pairs = zip(outputs, found, strict=True)
    total = sum(float(loss.per_sample(z.to(loss.target.dtype)).sum()) for z, (_, loss) in pairs)
    return total if math.isfinite(total) else math.inf


def sqrt_curvature(losses: Tensor) -> Tensor:
    """lambda_i of terminal="sqrt", Hessian_i = lambda_i q_i q_i', from the samples' losses: (B,)."""
    # a sample without loss has no gradient either: any lambda gives the same, so zero
    tiny = torch.finfo(losses.dtype).tiny
    return torch.where(losses > tiny, 0.5 / losses.clamp_min(tiny), torch.zeros_like(losses))


def recognise(z: Tensor, q: Tensor, mean: bool) -> Loss:
    """The loss whose gradient at outputs z is q; the squared error where nothing else fits.

    `mean` says whether the user's loss is an average over the batch (and over places or elements) or a sum.
    """
    z, q = z.detach(), q.detach()
    dims = [z.dim() - 1] if z.dim() == 2 else [z.dim() - 1, 1] if z.dim() > 2 else []
    for dim in dims:
        found = _cross_entropy(z, q, dim, mean)
        if found is not None:
            return found
    weight = 1.0 / z.numel() if mean else 1.0
    t = torch.sigmoid(z) - q / weight
    if bool((torch.minimum(t.abs(), (t - 1).abs()) < 1e-3).all()):
        return Loss("binary_cross_entropy", t.round(), weight)
    return Loss("squared_error", z - q / (2 * weight), weight)


def _cross_entropy(z: Tensor, q: Tensor, dim: int, mean: bool) -> Loss | None:
    if z.shape[dim] < 2:
        return None
    tolerance = 1e-3 if z.dtype in (torch.float16, torch.bfloat16) else 1e-4
    s = torch.softmax(z, dim)
    uniform = z.shape[dim] / z.numel() if mean else 1.0
    t = s - q / uniform
    label = t.argmax(dim, keepdim=True)
    hard = torch.zeros_like(t).scatter_(dim, label, 1.0)
    if float(torch.linalg.vector_norm(t - hard, math.inf)) <= tolerance:  # the common case first
        return Loss("cross_entropy", hard, uniform, dim, label[:, 0] if z.dim() == 2 else None)
    size = q.abs().amax()
    if not bool((q.sum(dim).abs() <= tolerance * size * z.shape[dim]).all()):
        return None
    soft = Loss("cross_entropy", _sharpen(t, dim), uniform, dim)
    possible = bool((t > -tolerance).all())
    # hard targets, the same weight at each place; with two classes other weights and soft targets look the same
    if possible and (z.shape[dim] == 2 or bool((t.amax(dim) > 0.999).all())):
        return soft
    # places of different weight (class weights, ignored labels, a scaled loss): weight from the label's own entry
    label = q.argmin(dim, keepdim=True)
    w = -q.gather(dim, label) / (1 - s.gather(dim, label)).clamp_min(torch.finfo(s.dtype).eps)
    hard = _one_hot(label, s, dim)
    if bool(((q - w * (s - hard)).abs() <= tolerance * size).all()):
        return Loss("cross_entropy", hard, w.squeeze(dim), dim)
    return soft if possible else None


def _sharpen(t: Tensor, dim: int) -> Tensor:
    """Targets without rounding: those that are one-hot exactly so, the others on the simplex."""
    top, label = t.max(dim, keepdim=True)
    soft = t.clamp_min(0)
    return torch.where(top > 0.999, _one_hot(label, t, dim), soft / soft.sum(dim, keepdim=True))


def _one_hot(label: Tensor, like: Tensor, dim: int) -> Tensor:
    return torch.zeros_like(like).scatter_(dim, label, 1.0)
