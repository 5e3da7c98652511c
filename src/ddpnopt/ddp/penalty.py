"""The value of a penalty on the weights, from its gradient: c1 sum |u| + c2 sum u^2 / 2 for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpnopt.linear.layer import Parts, norm

EXACT = 1e-3  # relative to the gradient: how well it has to fit


@dataclass(frozen=True)
class Penalty:
    """The penalty on the parameters of one layer."""

    absolute: tuple[float, ...]  # c1 of each parameter
    square: tuple[float, ...]  # c2
    exact: bool  # whether the gradient is that of such a penalty

    @classmethod
    def with_gradient(cls, gradient: Parts, u: Sequence[Tensor]) -> Penalty:
        """The penalty whose gradient c1 sign(u) + c2 u is nearest to the given one."""
        factors, rest = [], []
        for g, w in zip(gradient, u, strict=True):
            w = w.detach()
            basis = torch.stack([w.sign().flatten(), w.flatten()], 1).double()
            gram = basis.mT @ basis
            gram += 1e-12 * gram.diagonal().mean() * torch.eye(2, dtype=gram.dtype, device=gram.device)
            found = torch.linalg.lstsq(gram.cpu(), (basis.mT @ g.flatten().double()[:, None]).cpu()).solution[:, 0]
            c1, c2 = (max(0.0, float(c)) for c in found)
            factors.append((c1, c2))
            rest.append(g - c1 * w.sign() - c2 * w)
        absolute, square = zip(*factors, strict=True)
        return cls(absolute, square, exact=norm(rest) <= EXACT * norm(gradient))

    def value(self, u: Parts) -> float:
        """The penalty of these weights."""
        return float(
            sum(
                c1 * w.abs().sum() + 0.5 * c2 * w.square().sum()
                for c1, c2, w in zip(self.absolute, self.square, u, strict=True)
            )
        )


def is_penalty(gradient: Parts, u: Sequence[Tensor]) -> bool:
    """Whether a gradient is that of a penalty on the size of the weights."""
    return Penalty.with_gradient(gradient, u).exact


@dataclass(frozen=True)
class Penalties:
    """Those of all layers, each with the layer's own weights."""

    found: tuple[tuple[Penalty, list[Tensor]], ...] = ()

    @classmethod
    def of(cls, gradients: Sequence[tuple[Parts, Sequence[Tensor]]]) -> Penalties:
        """From the gradient of the penalty in each layer."""
        layers = [(g, [w.detach() for w in weights]) for g, weights in gradients]
        return cls(tuple((Penalty.with_gradient(g, weights), weights) for g, weights in layers))

    def value(self) -> float:
        """With the current weights."""
        return sum(penalty.value(weights) for penalty, weights in self.found)

    def taken_from(self, loss: float | None) -> float | None:
        """The loss without them, where they are known exactly."""
        if loss is None or not all(penalty.exact for penalty, _ in self.found):
            return loss
        return loss - self.value()
