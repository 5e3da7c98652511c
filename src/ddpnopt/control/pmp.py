"""Pontryagin's maximum principle in discrete time (appendix A.1), the open-loop sister of dynamic
programming.

By the lemma there, the costate sweep is back-propagation: p_t = grad_{x_t} J and grad_u H_t = grad_{u_t} J.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import grad

from .errors import ControlError
from .inputs import ControlsLike, batch, state_sizes
from .problem import Problem
from .stages import over_batch


def hamiltonian(problem: Problem, t: int, x: Tensor, p: Tensor, u: Tensor) -> Tensor:
    """H_t(x, p, u) = l_t(x, u) + p' f_t(x, u), Eq. (20), of one problem; p is the costate of stage t + 1."""
    if not 0 <= t < problem.T:
        raise ControlError(f"stage {t} does not exist; the problem has stages 0 to {problem.T - 1}")
    x_next = problem.f(t)(x, u)
    if p.shape != x_next.shape:
        raise ControlError(
            f"p at stage {t} has shape {tuple(p.shape)}, the next state {tuple(x_next.shape)}; pass p_{{t+1}}, not p_t"
        )
    return problem.l(t)(x, u) + torch.dot(p, x_next)


def costate(problem: Problem, x0: Tensor, u: ControlsLike) -> tuple[Tensor, ...]:
    """p_0 .. p_T by the adjoint equation (19b): p_T = grad phi(x_T), p_t = grad_x H_t(x_t, p_{t+1}, u_t).

    x0 and u as in `solve`: one problem, or a batch of B. p_t is (n_t,) or (B, n_t).
    """
    x, us, batched = _states(problem, x0, u)
    p = _sweep(problem, x, us)
    return tuple(p) if batched else tuple(p_t.squeeze(0) for p_t in p)


def hamiltonian_gradient(problem: Problem, x0: Tensor, u: ControlsLike) -> tuple[Tensor, ...]:
    """grad_u H_t(x_t, p_{t+1}, u_t) at every stage, zero where (19c) holds without limits; equals grad_{u_t}
    J.

    One step of gradient descent, Eq. (22), is u_t - eta times this.
    """
    x, us, batched = _states(problem, x0, u)
    p = _sweep(problem, x, us)
    gradients = []
    for t, u_t in enumerate(us):

        def H(u: Tensor, x: Tensor, p: Tensor, t: int = t) -> Tensor:
            return hamiltonian(problem, t, x, p, u)

        gradients.append(over_batch(grad(H), u_t, x[t], p[t + 1]))
    return tuple(gradients) if batched else tuple(g.squeeze(0) for g in gradients)


def _states(problem: Problem, x0: Tensor, u: ControlsLike) -> tuple[list[Tensor], list[Tensor], bool]:
    """Forward, (19a): grad_p H is f."""
    x0, us, batched = batch(problem, x0, u)
    state_sizes(problem, x0[0], [u_t[0] for u_t in us])
    x = [x0]
    with torch.no_grad():
        for t, u_t in enumerate(us):
            x.append(over_batch(problem.f(t), x[-1], u_t))
    return x, us, batched


def _sweep(problem: Problem, x: Sequence[Tensor], us: Sequence[Tensor]) -> list[Tensor]:
    p = [over_batch(grad(problem.terminal_cost), x[-1])]
    for t in reversed(range(problem.T)):

        def H(x: Tensor, p: Tensor, u: Tensor, t: int = t) -> Tensor:
            return hamiltonian(problem, t, x, p, u)

        p.append(over_batch(grad(H), x[t], p[-1], us[t]))
    return p[::-1]
