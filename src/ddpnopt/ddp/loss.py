"""The user's loss as a function of the outputs, shared out among the samples.

`recognise` finds it from the outputs z and the gradient q = d(batch loss)/dz. With the targets known, each sample's
loss is known, and so is the loss at any other outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpnopt.linear.layer import in_precision


@dataclass(frozen=True)
class Loss:
    """A loss with its targets: sum over places of weight * distance(z, target)."""

    kind: str  # "cross_entropy", "binary_cross_entropy" or "squared_error"
    targets: Tensor | Callable[[], Tensor]  # or how to compute them: most steps do without
    weight: Tensor | float  # broadcasts against the places
    dim: int = -1  # of the classes
    label: Tensor | None = None  # (B, …), where the target is one class at each place
    temperature: float = 1.0  # of the softmax
    of_probabilities: bool = False  # whether the outputs are probabilities, not logits
    soft: bool = False  # of the binary form: whether targets lie between 0 and 1
    certain: bool = True  # False where the form or the scale is a guess
    # outputs, losses and, where it was asked for, their sum
    _last: list[tuple[Tensor, Tensor, float | None]] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def target(self) -> Tensor:
        """The targets: like the outputs."""
        return self.targets if isinstance(self.targets, Tensor) else self.targets()

    def knowing(self, z: Tensor, losses: Tensor, total: float | None = None) -> Loss:
        """The same, with the losses at outputs z where they are known already."""
        self._last[:] = [(z, losses, total)]
        return self

    def per_sample(self, z: Tensor) -> Tensor:
        """The contribution of each sample to the batch loss, above its minimum: (B,); not computed twice in a row."""
        if not self._last or self._last[0][0] is not z:
            self._last[:] = [(z, self._per_sample(z), None)]
        return self._last[0][1]

    def total(self, z: Tensor) -> float:
        """The batch loss, above its minimum."""
        losses = self.per_sample(z)
        known = self._last[0][2]
        if known is None:  # `per_sample` alone works on outputs without a value, too (torch.func.vmap)
            known = _sum(losses)
            self._last[:] = [(z, losses, known)]
        return known

    def _per_sample(self, z: Tensor) -> Tensor:
        if self.temperature != 1.0:
            z = z / self.temperature
        if self.label is not None and not self.of_probabilities:
            if z.dim() > 2 and self.dim == z.dim() - 1:  # which `F.cross_entropy` would have in dimension 1
                flat = F.cross_entropy(z.reshape(-1, z.shape[-1]), self.label.flatten(), reduction="none")
                return flat.view(z.shape[0], -1).sum(1) * self.weight
            at = F.cross_entropy(z, self.label, reduction="none")
            return (at if at.dim() == 1 else at.flatten(1).sum(1)) * self.weight
        if self.kind == "cross_entropy":
            log_p = _log(z) if self.of_probabilities else F.log_softmax(z, self.dim)
            places = self.weight * (-(self.target * log_p).sum(self.dim) - self._entropy)
        elif self.kind == "binary_cross_entropy":
            if self.of_probabilities:
                places = -(self.target * _log(z) + (1 - self.target) * _log(1 - z))
            else:
                places = F.binary_cross_entropy_with_logits(z, self.target, reduction="none")
            places = self.weight * (places - self._entropy if self.soft else places)
        else:
            places = self.weight * (z - self.target).square()
        return places.flatten(1).sum(1) if places.dim() > 1 else places

    def rounding(self, z: Tensor) -> float:
        """How exactly logarithms and exponentials at outputs z give the loss; squares are as exact as the outputs."""
        if self.kind == "squared_error":
            return 0.0
        places = 1 + (z.amax(self.dim) if self.kind == "cross_entropy" else z).abs() / self.temperature
        return torch.finfo(z.dtype).eps * float((self.weight * places).norm())

    def minimum(self) -> float:
        """What the user's loss has at best, where `per_sample` is measured from it: the entropy of soft targets."""
        has_entropy = self.soft if self.kind == "binary_cross_entropy" else self.kind == "cross_entropy"
        return self._least if has_entropy and self.label is None else 0.0

    @cached_property
    def _least(self) -> float:
        return float((self.weight * self._entropy).sum())

    @cached_property
    def _entropy(self) -> Tensor:
        """Of the targets at each place; a step needs it several times."""
        if self.kind == "binary_cross_entropy":
            return -(torch.xlogy(self.target, self.target) + torch.xlogy(1 - self.target, 1 - self.target))
        return -torch.xlogy(self.target, self.target).sum(self.dim)

    def scaled(self, factor: float) -> Loss:
        """`factor` times the loss."""
        return replace(self, weight=self.weight * factor, _last=[])


@dataclass(frozen=True)
class UnknownLoss:
    """A loss of unknown form, as half the square of one residual per sample, linear in the outputs.

    phi_i(z') = (r_i + <q_i, z' - z> / r_i)^2 / 2 has the gradient q_i at z for any residual r_i. The losses
    phi_i = r_i^2 / 2 are taken in proportion to |q_i|^2, which is exact for squared errors of any scale and mask.
    """

    z: Tensor
    q: Tensor
    residual: Tensor  # r, (B,)
    kind: str = "unknown"
    certain: bool = False

    @classmethod
    def adding_up_to(
        cls, total: float, z: Tensor, q: Tensor, squares: tuple[Tensor, float] | None = None
    ) -> UnknownLoss:
        """Losses of the samples in proportion to |q_i|^2; `squares` are numbers in that proportion, and their sum."""
        tiny = torch.finfo(q.dtype).tiny
        if squares is not None and squares[1] > tiny:
            return cls(z, q, in_precision((squares[0] * (2 * abs(total) / squares[1])).sqrt_(), q.dtype))
        of_samples = q.reshape(len(q), -1).square().sum(1)
        share = of_samples / of_samples.sum().clamp_min(tiny)
        return cls(z, q, (2 * abs(total) * share).sqrt())

    def per_sample(self, z: Tensor) -> Tensor:
        """The contribution of each sample to the batch loss: (B,)."""
        if z is self.z:
            return 0.5 * self.residual.square()
        change = (self.q * (z - self.z)).reshape(len(self.q), -1).sum(1)
        moves = self.residual > 0
        safe = torch.where(moves, self.residual, torch.ones_like(self.residual))
        return torch.where(moves, 0.5 * (self.residual + change / safe).square(), torch.zeros_like(change))

    def total(self, z: Tensor) -> float:
        """The sum over all samples."""
        return _sum(self.per_sample(z))

    def minimum(self) -> float:
        return 0.0

    def scaled(self, factor: float) -> UnknownLoss:
        """`factor` times the loss."""
        return replace(self, q=self.q * factor, residual=self.residual * math.sqrt(factor))


@dataclass(frozen=True)
class LinearLoss:
    """Outputs that are the losses of the samples, or their log-likelihoods: phi_i = q_i z_i, above a level."""

    q: Tensor  # (B, …), with one element per sample
    level: Tensor | float  # at most every q_i z_i, and zero
    kind: str = "sum of outputs"
    certain: bool = True

    def per_sample(self, z: Tensor) -> Tensor:
        """The contribution of each sample to the batch loss, above the level: (B,)."""
        return (self.q * z).reshape(len(self.q)) - self.level

    def total(self, z: Tensor) -> float:
        """The sum over all samples."""
        return _sum(self.per_sample(z))

    def minimum(self) -> float:
        return float(self.level) * len(self.q)

    def scaled(self, factor: float) -> LinearLoss:
        """`factor` times the loss."""
        return replace(self, q=self.q * factor, level=self.level * factor)


AnyLoss = Loss | UnknownLoss | LinearLoss


def total_loss(outputs: list[Tensor], found: list[tuple[Tensor, AnyLoss]]) -> float:
    """The batch loss at some outputs, above its minimum; infinite where it is not a number."""
    total = 0.0
    for z, (recorded, loss) in zip(outputs, found, strict=True):
        total += loss.total(in_precision(z, recorded.dtype))
    return total if math.isfinite(total) else math.inf


def sqrt_curvature(losses: Tensor) -> Tensor:
    """lambda_i of terminal="sqrt", Hessian_i = lambda_i q_i q_i', from the samples' losses: (B,)."""
    # a sample without loss has no gradient either: any lambda gives the same, so zero
    tiny = torch.finfo(losses.dtype).tiny
    return torch.where(losses > tiny, 0.5 / losses.clamp_min(tiny), torch.zeros_like(losses))


def _sum(losses: Tensor) -> float:
    return float(losses.sum(dtype=torch.float32 if losses.dtype.itemsize < 4 else None))


def _log(p: Tensor) -> Tensor:
    """log p, from -100 on as in `F.binary_cross_entropy`."""
    return torch.log(p).clamp_min(-100)


def as_flat(
    found: list[tuple[Tensor, AnyLoss]], flatness: float, softened: float = 1.0
) -> tuple[list[tuple[Tensor, AnyLoss]], float]:
    """Losses without a level, `softened` times as curved as the first at least; squares of gradients over the level.

    Their level would otherwise follow the size of the outputs, and a policy that has nearly decided would be asked to
    move as far for a small gradient as an undecided one for a large one.
    """
    unknown = [loss for _, loss in found if isinstance(loss, UnknownLoss)]
    squares = sum(len(loss.q) * float(loss.q.double().square().sum()) for loss in unknown)
    level = sum(0.5 * float(loss.residual.double().square().sum()) for loss in unknown)
    if not squares or not level:
        return found, flatness
    flatness = flatness or squares / level
    factor = math.sqrt(min(1.0, squares / (softened * flatness) / level))

    def flat(loss: AnyLoss) -> AnyLoss:
        return replace(loss, residual=loss.residual * factor) if isinstance(loss, UnknownLoss) else loss

    return [(z, flat(loss)) for z, loss in found], flatness
