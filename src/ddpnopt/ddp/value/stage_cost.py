"""The stage cost l(u) in a step without scales: weight decay, and penalties on the weights in the loss.

The step down the cost alone is a part of the prior step. With s = eta / damping of the step before, 1 / s the curvature
that damping adds to each weight, and l_u = lambda u it is

    u s lambda / (1 + s lambda)

which does not overshoot for any lambda. The curvature lambda also holds the weights against the samples: their steps
get 1 / (1 + s lambda) of what they would be, on average over the weights. In balanced variables lambda u is scaled as
the gradients of the samples are, with s M^-1 in the place of s, so that both come to rest where they cancel; where
features are mixed and a penalty is not one on squares, the mean of M^-1 has to do. The first step knows s only after
all layers have been seen, too late for a prior: there, the cost does no more than hold the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddpnopt.ddp.stage import Stage
from ddpnopt.linear.layer import Parts, inner

LEAST_SIZE = 1e-3  # root mean square of a layer's weights: a layer that starts at zero can leave it


def penalty_step(stage: Stage, l_u: Parts, rate: float) -> tuple[Parts, float]:
    """The step down the stage cost alone for s = `rate`, and the part of eta that it leaves to the samples."""
    assert stage.balance is not None
    steps, held, total = [], 0.0, 0.0
    for k, (u, gradient) in enumerate(zip(stage.u, l_u, strict=True)):
        size = u.abs().clamp_min(LEAST_SIZE * max(_root_mean_square(u), LEAST_SIZE))
        step = stage.balance.held_step(gradient, size, k, rate)
        steps.append(step)
        held, total = held + float((step.abs() * size).sum()), total + float(size.square().sum())
    return steps, max(0.0, 1 - held / total)


class CostChange:
    """What a step does to the cost of all stages, to first order."""

    def __init__(self, value: float) -> None:
        self.value = value  # the cost before the step
        self.of_prior = 0.0  # <l_u, m>, the decrease by the prior step
        self._of_samples: Tensor | None = None  # eta P_u' M^-1 l_u, the decrease by a step along each sample's gradient
        self._along: list[tuple[Stage, Tensor]] = []  # … of each stage, without eta

    def add(self, stage: Stage, l_u: Parts, along: Tensor) -> None:
        """A stage with its prior; `along` is P_u' M^-1 l_u of the whole batch."""
        self.of_prior += sum(share * float(inner(l_u, step)) for share, step in stage.prior)
        self._along.append((stage, along))

    def of_step(self, w: Tensor) -> float | None:
        """The decrease by the prior and a step with weights w of the samples; None without a cost."""
        for stage, along in self._along:
            own = stage.eta * along.to(w.dtype)
            self._of_samples = own if self._of_samples is None else self._of_samples + own
        self._along = []
        return None if self._of_samples is None else self.of_prior + float(self._of_samples @ w)


def _root_mean_square(a: Tensor) -> float:
    return float(torch.linalg.vector_norm(a)) / max(1, a.numel()) ** 0.5
