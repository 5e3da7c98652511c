"""What `solve` returns: the trajectory, the controller around it, and how it was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from .errors import ControlError
from .problem import Problem
from .stages import over_batch


class Status(str, Enum):
    """How the iteration for one problem ended."""

    GRADIENT = "converged: gradient"  # the (projected) gradient is below grad_tol
    COST = "converged: cost"  # a full step reduced the cost by less than cost_tol
    MAX_ITERATIONS = "not converged: iterations used up"
    # even with the largest regularisation; the best point is returned
    NO_STEP = "not converged: no acceptable step"

    @property
    def converged(self) -> bool:
        return self in (Status.GRADIENT, Status.COST)


@dataclass(frozen=True)
class History:
    """One row per iteration, and a last one for the result: (I + 1,) for one problem, (I + 1, B) for a batch.

    Row i holds cost and gradient norm before iteration i, the regularisation it used and the step size it
    took (0: no step was accepted, or the problem had ended). Ended problems keep their values.
    """

    cost: Tensor
    gradient_norm: Tensor
    regularization: Tensor
    step: Tensor


@dataclass(frozen=True)
class Rollout:
    """A simulated trajectory: x_t (..., n_t), u_t (..., m_t), cost (...)."""

    x: tuple[Tensor, ...]
    u: tuple[Tensor, ...]
    cost: Tensor

    @property
    def states(self) -> Tensor:
        """(..., T + 1, n)."""
        return _stacked(self.x, "state")

    @property
    def controls(self) -> Tensor:
        """(..., T, m)."""
        return _stacked(self.u, "control")


@dataclass(frozen=True)
class Solution:
    """Trajectory and policy, in the paper's symbols, one tensor per stage; leading B only if a batch was
    solved.

    Attributes:
        x, u: states x_0 .. x_T, (B, n_t), and controls u_0 .. u_{T-1}, (B, m_t).
        k, K: gains of Eq. (4) at this trajectory, (B, m_t) and (B, m_t, n_t). k vanishes as the solver
            converges; it is zero where no acceptable step was found. Rows of K are zero where a limit holds
            the control.
        cost: J, (B,).
        gradient_norm: largest component of grad_u J (with limits: of its projection), (B,).
        iterations: iterations each problem took part in, (B,).
        status: one `Status`, or a tuple of B.
        history: cost, gradient norm, regularisation and step size per iteration.
    """

    x: tuple[Tensor, ...]
    u: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    K: tuple[Tensor, ...]
    cost: Tensor
    gradient_norm: Tensor
    iterations: Tensor
    status: Status | tuple[Status, ...]
    history: History
    problem: Problem = field(repr=False)
    limits: tuple[tuple[Tensor, Tensor], ...] | None = field(repr=False)  # (m_t,) each

    @property
    def converged(self) -> Tensor:
        """Whether each problem converged, (B,) or a scalar."""
        if isinstance(self.status, Status):
            return torch.tensor(self.status.converged)
        return torch.tensor([status.converged for status in self.status])

    @property
    def states(self) -> Tensor:
        """All states stacked, (B, T + 1, n); for problems whose state keeps its size."""
        return _stacked(self.x, "state")

    @property
    def controls(self) -> Tensor:
        """All controls stacked, (B, T, m); for problems whose control keeps its size."""
        return _stacked(self.u, "control")

    def policy(self, t: int, x: Tensor, *, step: float = 1.0) -> Tensor:
        """The controller u_t + step k_t + K_t (x - x_t), clipped to the limits. step = 0 follows the nominal
        exactly.

        x is (..., n_t). The solution of one problem serves any batch of states; that of a batch wants (...,
        B, n_t).
        """
        if not 0 <= t < len(self.u):
            raise ControlError(f"stage {t} does not exist; the policy has stages 0 to {len(self.u) - 1}")
        if x.shape[-1] != self.x[t].shape[-1]:
            raise ControlError(f"at stage {t} the state has {self.x[t].shape[-1]} components, not {x.shape[-1]}")
        feedback = (self.K[t] @ (x - self.x[t]).unsqueeze(-1)).squeeze(-1)
        return self._clip(t, self.u[t] + step * self.k[t] + feedback)

    def simulate(
        self,
        x0: Tensor,
        *,
        feedback: bool = True,
        step: float = 1.0,
        disturbance: Tensor | Sequence[Tensor] | None = None,
    ) -> Rollout:
        """Run the dynamics from another start, with the policy or (feedback=False) with the controls alone.

        `disturbance` is added to the states after each stage: (..., T, n) or T tensors (..., n_{t+1}). Both
        it and x0 (..., n_0) may carry extra leading dimensions.
        """
        T = len(self.u)
        pushes = _pushes(disturbance, T)
        example = x0[..., 0] + self.x[0][..., 0]
        for push in pushes or ():
            example = example + push[..., 0]
        leading = example.shape
        x = [x0.expand(*leading, x0.shape[-1])]
        u: list[Tensor] = []
        costs: list[Tensor] = []
        with torch.no_grad():
            for t in range(T):
                u_t = self.policy(t, x[t], step=step) if feedback else self.u[t].expand(*leading, -1)
                x_next = over_batch(self.problem.f(t), x[t], u_t)
                costs.append(over_batch(self.problem.l(t), x[t], u_t))
                x.append(x_next if pushes is None else x_next + pushes[t])
                u.append(u_t)
            costs.append(over_batch(self.problem.terminal_cost, x[T]))
        return Rollout(tuple(x), tuple(u), torch.stack(costs).sum(0))

    def _clip(self, t: int, u: Tensor) -> Tensor:
        return u if self.limits is None else u.clamp(*self.limits[t])


def _pushes(disturbance: Tensor | Sequence[Tensor] | None, T: int) -> Sequence[Tensor] | None:
    if disturbance is None:
        return None
    pushes = disturbance.unbind(-2) if isinstance(disturbance, Tensor) else disturbance
    if len(pushes) != T:
        raise ControlError(f"disturbance has {len(pushes)} stages, the problem has {T}; give (..., T, n) or T tensors")
    return pushes


def _stacked(stages: tuple[Tensor, ...], name: str) -> Tensor:
    if len({stage.shape[-1] for stage in stages}) > 1:
        sizes = [stage.shape[-1] for stage in stages]
        raise ControlError(f"the {name} changes its size from stage to stage ({sizes}); use the per-stage tensors")
    return torch.stack(stages, dim=-2)
