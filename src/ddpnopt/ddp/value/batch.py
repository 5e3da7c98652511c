"""Batch-coupled DDP: the samples share the weights, so the state is the joint one of the whole batch.

With P_t the back-propagated columns (one or more per sample) every value Hessian keeps the form P_t L_t P_t', and with
the true Gauss-Newton term kept, Q_uu = M / eta + P_u L P_u', Woodbury turns eq. 5 into algebra on small matrices,

    K_t = P_u' M^-1 P_u      R_t = (I + eta L_{t+1} K_t)^-1      L_t = R_t L_{t+1}      v_t = R_t v_{t+1}
    du_t = -eta M^-1 P_u R_t (v_{t+1} + L_{t+1} c_t)

The products telescope: with S_t the sum of eta K over the stages t, t+1, … and L the diagonal terminal curvature,

    R_t (v_{t+1} + L_{t+1} c_t) = (I + L S_t)^-1 (v_T + L c_t)

so each stage needs one symmetric positive definite solve, I + L^1/2 S_t L^1/2, whose eigenvalues are at least 1, and
no products accumulate along the layers. A stage cost l_u enters as c_t - sum_{s >= t} eta P_u' M^-1 l_u.

The stages are independent, too: where v_t is not needed on the way, the matrices of a small batch are factorised all
together. Everything is computed in the precision of the layers, as K itself is: damping keeps the smallest eigenvalue
far above the rounding error of the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddpnopt._distributed import ALONE, Peers
from ddpnopt.ddp.stage import Direction, Displacement, Policy, Stage
from ddpnopt.ddp.value.coupling import Coupling
from ddpnopt.ddp.value.damping import damped
from ddpnopt.linear.cholesky import Cholesky
from ddpnopt.linear.layer import Parts, in_precision, per_sample_dot, scale_samples
from ddpnopt.linear.metric import Metric
from ddpnopt.linear.sample_gradients import Sums

Solver = Callable[[Tensor | None], Tensor]
"""From c_t, None for zero, to the weights of the columns."""

TOGETHER = 64  # columns up to which stages are factorised together: for larger ones the cost of a call is negligible


@dataclass(eq=False)
class System:
    """I + L^1/2 S_t L^1/2 of one stage, damped: its factor, or for a small batch the solutions themselves."""

    S: Tensor | None  # freed when it is factorised
    state: dict[str, Any]  # of the damping
    m: Tensor | None
    target: Tensor | None = None  # v_T / L^1/2, for the columns with curvature, less the effect of those without
    cholesky: Cholesky | None = None
    open_loop: Tensor | None = None  # (I + L S)^-1 v_T
    gain: Tensor | None = None  # (I + L S)^-1 L


class Batch:
    """Joint value function of the batch: V_x = P v, V_xx = P L P'."""

    def __init__(
        self,
        L: Tensor,
        v: Tensor,
        displacement: Displacement,
        columns: int = 1,
        peers: Peers = ALONE,
        dof: float = 1.0,
        residuals: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """From L and v_T; `residuals` are L^1/2 and v_T / L^1/2 of one column per sample, all positive, where known."""
        if L.dtype.itemsize < 4:  # half precision has no factorisations
            L, v = L.float(), v.float()
        if not peers.alone:
            both = peers.gather(torch.stack([L, v], 1), columns)
            L, v = both[:, 0].contiguous(), both[:, 1].contiguous()
        self.columns = columns  # R; the first is the gradient
        self.dof = dof  # degrees of freedom that a step may use, per sample
        self.L = L  # (N,), N = R B columns
        if residuals is None:
            root = L.sqrt()
            # v_T / L^1/2 where L > 0; a column without curvature keeps its weight v_T at all stages
            residuals = root, torch.where(L > 0, v / root, 0.0)
        self.root, self.target = residuals
        # with one column per sample, along its gradient, those without curvature have no gradient either
        self.kept = torch.where(L > 0, 0.0, v) if columns > 1 else None
        self.displacement = displacement
        self.S: Tensor | None = None  # zero after the last stage
        self.m: Tensor | None = None  # sum of eta P_u' M^-1 l_u over the stages so far, where there is any
        self._v: Tensor | None = v
        self._system: System | None = None  # of the stage that v is at
        self.peers = peers
        self._coupling: Coupling | None = None  # of the next stage, in progress
        self._waiting: list[System] = []  # to be factorised
        self._roots: Tensor | None = None  # L^1/2 L^1/2', (N, N)

    @property
    def v(self) -> Tensor:
        """v_t, solved for on demand."""
        if self._v is None:
            assert self._system is not None
            self._v = self._weights(self._system, None)
        return self._v

    def v_h(self, stage: Stage) -> Tensor:
        parts = [
            scale_samples(v, p) for v, p in zip(self._own_rows(self.v).chunk(len(stage.p_h)), stage.p_h, strict=True)
        ]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    def gradient(self, stage: Stage) -> Parts:
        if self.columns == 1:  # from what the Gram matrix needs anyway
            return stage.gradients(coupled=True).combine(self._own_rows(self.v))
        return stage.layer.grad(stage.x, self.v_h(stage))

    def _own_rows(self, w: Tensor) -> Tensor:
        return self.peers.mine(w, self.columns)

    def prepare(self, stage: Stage) -> None:
        self._coupling = Coupling(stage)

    def backward(self, stage: Stage, metric: Metric) -> Policy:
        gradients, solve = self.couple(stage, metric)
        stage.free_recorded(self.displacement)
        return self._policy(stage, gradients, solve)

    def _policy(self, stage: Stage, gradients: Sums, solve: Solver) -> Policy:
        alone = self.peers.alone

        def policy(x_hat: Tensor | None) -> Direction:
            c = self.displacement.at(stage, x_hat)
            if c is not None:
                c = in_precision(c, self.L.dtype)
                c = c if alone else self.peers.gather(c, self.columns)
            w = solve(c)
            return Direction(None, gradients, w if alone else self._own_rows(w), stage.l_u, stage.peers)

        return policy

    def couple(self, stage: Stage, metric: Metric) -> tuple[Sums, Solver]:
        """Add this stage to S; the gradients of our own samples, and the solver of their weights in the update."""
        own = stage.gradients(coupled=True)
        coupling = None if self.peers.alone else self._coupling or Coupling(stage)
        self._coupling = None
        dots = None
        if stage.l_u is not None:
            h = stage.layer.apply(stage.x, metric.solve(stage.layer, stage.l_u))
            dots = torch.cat([per_sample_dot(p, h) for p in stage.p_h])
        if coupling is None:
            K = own.gram(metric)
        else:
            K, dots = coupling.gram(metric, dots)
        system = self._extend(stage, K.to(self.L.dtype), dots)
        self._waiting.append(system)
        if len(self.L) > TOGETHER:
            self._factorise()
        return own, partial(self._weights, system)

    def _extend(self, stage: Stage, K: Tensor, dots: Tensor | None) -> System:
        """Add eta K to S, and what the stage cost does to each column to m."""
        S = self.S = K.mul_(stage.eta) if self.S is None else torch.add(self.S, K, alpha=stage.eta)
        if dots is not None:
            dots = stage.eta * dots.to(self.L.dtype)
            self.m = dots if self.m is None else self.m + dots
        system = self._system = System(S, stage.state, self.m)
        self._v = None
        return system

    def _factorise(self) -> None:
        """All waiting systems, in one call."""
        waiting, self._waiting = self._waiting, []
        found = [system.S for system in waiting if system.S is not None]
        S = torch.stack(found) if len(found) > 1 else found[0][None]  # (T, N, N)
        target = self.target if self.kept is None else self.target - self.root * (S @ self.kept)
        if self._roots is None:
            self._roots = torch.outer(self.root, self.root)
        A = S * self._roots
        for system in waiting:
            system.S = None
        factors = damped(A, len(self.L) // self.columns, self.dof, [system.state for system in waiting])
        if len(self.L) > TOGETHER:
            for system, r, factor in zip(waiting, target.expand(len(factors), -1), factors, strict=True):
                system.target, system.cholesky = r, Cholesky(factor)
            return
        inverse = torch.cholesky_inverse(factors)
        open_loop = (inverse @ target[..., None])[..., 0].mul_(self.root)
        if self.kept is not None:
            open_loop += self.kept
        gains = inverse.mul_(self._roots)
        for system, w, gain in zip(waiting, open_loop.unbind(), gains.unbind(), strict=True):
            system.open_loop, system.gain = w, gain

    def _weights(self, system: System, c: Tensor | None) -> Tensor:
        """(I + L S)^-1 (v_T + L (c - m))."""
        if system.cholesky is None and system.gain is None:
            self._factorise()
        m = system.m
        if m is not None:
            c = -m if c is None else c - m
        if system.open_loop is not None and system.gain is not None:
            return system.open_loop if c is None else torch.addmv(system.open_loop, system.gain, c)
        assert system.cholesky is not None
        assert system.target is not None
        r = system.target
        if c is not None:
            r = torch.addcmul(r, self.root, c)
        w = self.root * system.cholesky.solve(r)
        return w if self.kept is None else w.add_(self.kept)

    @property
    def guarded_fraction(self) -> float:
        return 0.0  # nothing is clipped: the gains are bounded for any eta

    def predicted(self) -> float | None:
        assert self.S is not None
        c = -(self.S @ self.v)  # where the linear model takes each column
        gradient = torch.zeros_like(c)
        gradient[: len(c) // self.columns] = 1.0
        return float(gradient @ c + 0.5 * (self.L * c) @ c)
