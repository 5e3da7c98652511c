"""Proposition 2: V_xx = z z' for each sample, reduced to a few numbers per sample.

All vectors of the recursion are back-propagated cotangents times a number: with p the ordinary gradient of the sample
and zeta the back-propagated terminal factor,

    V_x = v p + a zeta,      V_xx = L zeta zeta'

at each layer. When the terminal curvature is along the gradient, zeta is p, a is zero and one ordinary backward pass
is all that is needed. With s = eta L zeta_u' M^-1 zeta_u and m = zeta_u' M^-1 l_u the numbers go from t+1 to t as

    L <- (1 - s) L            v, a:  V_x loses  L eta (zeta_u' M^-1 V_u + m / B) zeta

(eq. 5). With the guard the stage's own Gauss-Newton term stays in Q_uu for all that concerns feedback: in the recursion
1 - s becomes 1 / (1 + s), and so K is divided by 1 + s, too. k is unchanged, so that without feedback the base
optimizer remains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddpnopt.ddp.stage import Direction, Displacement, Policy, Stage
from ddpnopt.linear.layer import Parts, per_sample_dot, scale_samples
from ddpnopt.linear.metric import Metric
from ddpnopt.linear.sample_gradients import Explicit


class Outer:
    """Per-sample, factored value function."""

    def __init__(
        self, L: Tensor, *, along_gradient: bool, guard: bool, displacement: Displacement, planned: float = 1.0
    ) -> None:
        self.L = L  # (B,)
        self.v = torch.ones_like(L)
        self.a = None if along_gradient else torch.zeros_like(L)
        self.guard, self.displacement = guard, displacement
        self.planned = planned  # eta of the recursion over that of the update
        self._s: list[Tensor] = []

    def v_h(self, stage: Stage) -> Tensor:
        V = scale_samples(self.v, stage.p_h[0])
        return V if self.a is None else V + scale_samples(self.a, stage.p_h[1])

    def gradient(self, stage: Stage) -> Parts:
        if self.a is None:  # from what s needs anyway
            return stage.gradients(coupled=False).combine(self.v)
        return stage.layer.grad(stage.x, self.v_h(stage))

    def prepare(self, stage: Stage) -> None:
        return

    def backward(self, stage: Stage, metric: Metric) -> Policy:
        L, v, a = self.L, self.v, self.a
        zeta = (
            stage.gradients(coupled=False)
            if a is None
            else stage.layer.sample_gradients(stage.x, stage.p_h[1], recompute=stage.recompute)
        )
        eta = self.planned * stage.eta
        kappa = zeta.dots(metric)  # zeta_u' M^-1 zeta_u
        s = kappa.mul_(L).mul_(eta)
        self._s.append(s)

        other: Tensor | None = None  # what V_x loses in addition to its own part along zeta
        if a is not None:
            other = v * zeta.dots(metric, stage.p_h[0])
        if stage.l_u is not None:
            solved = metric.solve(stage.layer, stage.l_u)
            cost = per_sample_dot(stage.p_h[-1], stage.layer.apply(stage.x, solved)) / stage.batch
            other = cost if other is None else other + cost
        keep = (1 + s).reciprocal_() if self.guard else (1 - s).clamp_min(0)
        along = (v if a is None else a) * keep
        if other is not None:
            along = along - eta * L * other * (keep if self.guard else 1)
        if a is None:
            self.v = along
        else:
            self.a = along
        self.L = L * keep
        gain = self.L if self.guard else L  # of the feedback
        if a is None and isinstance(zeta, Explicit):
            stage.free_recorded(self.displacement)

        def policy(x_hat: Tensor | None) -> Direction:
            c = self.displacement.at(stage, x_hat)
            if a is None:
                w = v if c is None else torch.addcmul(v, gain, c.to(L.dtype))
                return Direction(None, zeta, w, stage.l_u, stage.peers)
            V = scale_samples(v, stage.p_h[0])
            extra = a if c is None else a + gain * c[len(L) :].to(L.dtype)
            d = stage.layer.grad(stage.x, V + scale_samples(extra, stage.p_h[1]))
            return Direction(d, l_u=stage.l_u, peers=stage.peers)

        return policy

    @property
    def guarded_fraction(self) -> float:
        return float((torch.stack(self._s) > 1).float().mean()) if self._s else 0.0

    def predicted(self) -> float | None:
        return None
