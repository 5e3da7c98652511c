"""Algorithm 1 as a solver: DDP and iLQR for a batch of problems at once.

Each problem has its own regularisation, step size and end; problems that have ended leave the working set, so
that the work of an iteration is that of the problems still running. An iteration is the same fixed work for
all of them: one expansion, one backward sweep, one line search. A problem whose sweep or search fails keeps
its trajectory and tries again in the next iteration with more regularisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as changed

import torch
from torch import Tensor

from .backward import Regularize, Sweep, backward, costate_gradient, gradient_norm
from .derivatives import Expansion, expand
from .errors import ControlError
from .inputs import ControlsLike, Start, prepare
from .options import Method, Options
from .problem import Problem
from .record import Ending, IterationRecorder, solution
from .rollout import simulate, stage_costs
from .search import Current, line_search
from .solution import Solution
from .stages import Blocks, Trajectory, replace, scatter, select


def solve(
    problem: Problem,
    x0: Tensor,
    u0: ControlsLike,
    *,
    method: Method = "ddp",
    max_iterations: int = 200,
    grad_tol: float | None = None,
    cost_tol: float | None = None,
    regularize: Regularize = "uu",
    reg_init: float = 0.0,
    reg_min: float = 1e-6,
    reg_max: float = 1e10,
    reg_factor: float = 2.0,
    backtrack: float = 0.5,
    max_backtracks: int = 10,
    sufficient: float = 1e-4,
) -> Solution:
    """Minimise J of (OCP) from the controls u0 by Algorithm 1.

    Args:
        problem: dynamics, costs, stages and limits.
        x0: initial state (n,), or a batch of problems (B, n).
        u0: start controls (T, m) or (B, T, m), or T tensors (m_t,) or (B, m_t) where sizes change.
        method: "ddp" keeps the tensor terms V_x . f_xx etc. of Eq. (3) and converges quadratically; "ilqr"
            drops them, which is cheaper per iteration and often more robust far from the optimum.
        max_iterations: per problem.
        grad_tol: a problem ends when the largest component of grad_u J (projected, if there are limits) is at
            most grad_tol * max(1, |J|). Default: square root of the machine precision.
        cost_tol: a problem ends when a full step without regularisation reduces J by at most cost_tol * |J|.
            Default: four times the machine precision.
        regularize: "uu" adds mu I to Q_uu, "xx" adds mu I to V_xx, "proximal" adds mu/2 |du|^2 to the stage cost.
        reg_init: mu at the start.
        reg_min: below it mu is zero.
        reg_max: beyond it the problem ends with `Status.NO_STEP`.
        reg_factor: a failure multiplies mu by a factor that itself grows by reg_factor with each failure in a row, a
            success divides it likewise.
        backtrack: step sizes are 1, backtrack, backtrack^2, ...
        max_backtracks: how many of them are tried.
        sufficient: a step is accepted if it reduces J by at least this part of what the model expects.

    Returns:
        The solution; its `status` says whether and how each problem converged. It never contains NaN.

    Raises:
        ControlError: for input that cannot be used.
    """
    options = Options(
        method=method,
        max_iterations=max_iterations,
        grad_tol=grad_tol,
        cost_tol=cost_tol,
        regularize=regularize,
        reg_init=reg_init,
        reg_min=reg_min,
        reg_max=reg_max,
        reg_factor=reg_factor,
        backtrack=backtrack,
        max_backtracks=max_backtracks,
        sufficient=sufficient,
    )
    start = prepare(problem, x0, u0)
    with torch.no_grad():
        return _Solver(problem, start, options).run()


@dataclass(frozen=True)
class _Work:
    """The problems still running: their place in the batch, where they stand, their damping."""

    ids: Tensor  # (A,)
    current: Current
    mu: Tensor  # (A,)
    factor: Tensor  # (A,): what mu was last multiplied by
    expansion: Expansion | None = None  # of the current trajectories, once computed

    def select(self, index: Tensor) -> _Work:
        expansion = None if self.expansion is None else self.expansion.select(index)
        return _Work(self.ids[index], self.current.select(index), self.mu[index], self.factor[index], expansion)


class _Solver:
    def __init__(self, problem: Problem, start: Start, options: Options) -> None:
        self.problem, self.start, self.options = problem, start, options
        self.runs, self.limits = start.runs, start.limits
        eps = torch.finfo(start.x0.dtype).eps
        self.grad_tol = eps**0.5 if options.grad_tol is None else options.grad_tol
        self.cost_tol = 4 * eps if options.cost_tol is None else options.cost_tol
        powers = torch.arange(options.max_backtracks + 1, device=start.x0.device)
        self.steps = (options.backtrack**powers).to(start.x0)

    def run(self) -> Solution:
        work = self._begin()
        self.result = work.current.trajectory  # of the whole batch
        self.recorder = IterationRecorder.start(work.current.cost)
        for iteration in range(self.options.max_iterations):
            expansion = work.expansion or self._expand(work.current.trajectory)
            work = self._check_gradient(changed(work, expansion=expansion), first=iteration == 0)
            if work.ids.numel() == 0:
                break
            work = self._iterate(work)
            if work.ids.numel() == 0:
                break
        self.result = self.result.scatter(work.ids, work.current.trajectory)
        return self._finish()

    def _begin(self) -> _Work:
        trajectory = simulate(self.runs, self.start.x0, self.start.u)
        _require_finite_states(trajectory)
        costs = stage_costs(self.problem, self.runs, trajectory)
        _require_finite_costs(costs)
        cost, scale = costs.sum(0), costs.abs().sum(0)
        ids = torch.arange(cost.shape[0], device=cost.device)
        mu = torch.full_like(cost, self.options.reg_init)
        return _Work(ids, Current(trajectory, cost, scale), mu, torch.ones_like(mu))

    def _check_gradient(self, work: _Work, *, first: bool) -> _Work:
        """Let those leave whose gradient has vanished."""
        assert work.expansion is not None
        trajectory, cost = work.current.trajectory, work.current.cost
        norm = gradient_norm(costate_gradient(work.expansion, self.runs), trajectory, self.limits)
        if first:
            _require_finite_gradient(norm)
        self.recorder.begin(work.ids, norm, work.mu)
        arrived = norm <= self.grad_tol * cost.abs().clamp(min=1)
        # A step has led to a point without derivatives: nothing can be computed from there.
        lost = ~torch.isfinite(norm)
        return self._leave(work, {Ending.GRADIENT: arrived, Ending.NO_STEP: lost})

    def _iterate(self, work: _Work) -> _Work:
        """One backward sweep and one line search for everybody."""
        o = self.options
        assert work.expansion is not None
        sweep = self._sweep(work.expansion, work.current.trajectory, work.mu)
        trial = line_search(
            self.problem,
            self.runs,
            work.current,
            sweep,
            self.steps,
            sufficient=o.sufficient,
            limits=self.limits,
        )
        self.recorder.step(work.ids, trial)
        reduction = work.current.cost - trial.found.cost
        # Only a full, undamped step says something about the problem when it is small.
        small = (trial.step == 1) & (work.mu == 0) & (reduction <= self.cost_tol * trial.found.scale)
        mu, factor = schedule(work.mu, work.factor, trial.accepted, o)
        # Where nobody moved, the derivatives are still good.
        expansion = None if bool(trial.accepted.any()) else work.expansion
        work = _Work(work.ids, trial.found, mu, factor, expansion)
        return self._leave(work, {Ending.COST: small, Ending.NO_STEP: mu > o.reg_max})

    def _leave(self, work: _Work, endings: dict[Ending, Tensor]) -> _Work:
        """Store and remove the problems that have ended; endings are masks (A,)."""
        ended = torch.stack(list(endings.values())).any(0)
        if not bool(ended.any()):
            return work
        for ending, mask in endings.items():
            self.recorder.end(work.ids[mask], ending)
        self.result = self.result.scatter(work.ids, work.current.trajectory)
        return work.select((~ended).nonzero().squeeze(-1))

    def _expand(self, trajectory: Trajectory) -> Expansion:
        return expand(self.problem, self.runs, trajectory, second_order=self.options.method == "ddp")

    def _sweep(self, expansion: Expansion, trajectory: Trajectory, mu: Tensor) -> Sweep:
        return backward(
            expansion,
            self.runs,
            mu,
            regularize=self.options.regularize,
            trajectory=trajectory,
            limits=self.limits,
        )

    def _finish(self) -> Solution:
        """Gains and gradient at the result, damped only where Q_uu is not positive definite without."""
        expansion = self._expand(self.result)
        norm = gradient_norm(costate_gradient(expansion, self.runs), self.result, self.limits)
        self.recorder.finish(norm, self.grad_tol)
        k, K = self._final_gains(expansion, self.result)
        # No step along k was any good: without it the policy at least follows the trajectory.
        lost = self.recorder.is_ending(Ending.NO_STEP)
        k = replace(lost, tuple(torch.zeros_like(block) for block in k), k)
        return solution(self.problem, self.start, self.result, k, K, self.recorder)

    def _final_gains(self, expansion: Expansion, trajectory: Trajectory) -> tuple[Blocks, Blocks]:
        B, like = trajectory.x[0].shape[1], trajectory.x[0]
        todo = torch.arange(B, device=like.device)
        k = tuple(torch.zeros_like(block) for block in trajectory.u)
        K = tuple(block.new_zeros(run.length, B, run.m, run.n) for run, block in zip(self.runs, k, strict=True))
        mu, factor = torch.zeros(B).to(like), torch.ones(B).to(like)
        while todo.numel() > 0:
            sweep = self._sweep(expansion, trajectory, mu)
            good = sweep.ok.nonzero().squeeze(-1)
            k = scatter(k, todo[good], select(sweep.k, good))
            K = scatter(K, todo[good], select(sweep.K, good))
            mu, factor = schedule(mu, factor, sweep.ok, self.options)
            rest = (~sweep.ok & (mu <= self.options.reg_max)).nonzero().squeeze(-1)
            if rest.numel() > 0:
                expansion, trajectory = expansion.select(rest), trajectory.select(rest)
            todo, mu, factor = todo[rest], mu[rest], factor[rest]
        return k, K


def schedule(mu: Tensor, factor: Tensor, success: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Next damping of each problem (Tassa, Erez, Todorov 2012, section II.F): failures and successes in a row
    accelerate its growth and its decay; below reg_min it is zero, so that the last steps are Newton's."""
    d = options.reg_factor
    factor = torch.where(success, (factor / d).clamp(max=1 / d), (factor * d).clamp(min=d))
    mu = torch.where(success, mu * factor, (mu * factor).clamp(min=options.reg_min))
    return torch.where(mu < options.reg_min, 0.0, mu), factor


def _require_finite_states(trajectory: Trajectory) -> None:
    t = 0
    for block in trajectory.x:
        bad = ~torch.isfinite(block).all(-1)  # (S, B)
        if bool(bad.any()):
            s, b = bad.nonzero()[0].tolist()
            raise ControlError(
                f"the start trajectory is not finite: state x at stage {t + s} of problem {b} is "
                f"{block[s, b].tolist()}; start from other controls u0, or from a finite x0"
            )
        t += block.shape[0]


def _require_finite_costs(costs: Tensor) -> None:
    bad = ~torch.isfinite(costs)  # (T + 1, B)
    if bool(bad.any()):
        t, b = bad.nonzero()[0].tolist()
        name = "terminal cost" if t == costs.shape[0] - 1 else "stage cost"
        raise ControlError(
            f"the {name} at stage {t} of problem {b} is {costs[t, b].item()} on the start trajectory; "
            "start from other controls u0"
        )


def _require_finite_gradient(norm: Tensor) -> None:
    if not bool(torch.isfinite(norm).all()):
        b = int((~torch.isfinite(norm)).nonzero()[0])
        raise ControlError(
            f"the derivatives of problem {b} are not finite on the start trajectory, though its cost is; "
            "look for square roots or norms at zero, and start elsewhere or smooth them"
        )
