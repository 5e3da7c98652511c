"""Algorithm 3: one backward Bellman pass, one forward pass in which each layer reacts to those before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ddpnopt.curvature.base import Curvature, Identity, Seen, State
from ddpnopt.ddp.value.base import Direction, Displacement, Policy, Problem, ValueFunction, inner
from ddpnopt.linear.layer import Layer, Parts
from ddpnopt.linear.metric import Metric
from ddpnopt.report import LayerReport

Replay = Callable[[Callable[[int, Tensor], None], Callable[[int, Tensor], None] | None], list[Tensor]]
"""Runs the forward pass again, calling control(t, x^) before and observe(t, h^) after each stage; the outputs."""


@dataclass(eq=False)
class Stage:
    """Stage t for the sweep: the problem, the state of its curvature and the weights to write to."""

    problem: Problem
    state: State
    weights: list[Tensor]
    momentum: float
    backup: Callable[[], Parts]  # copies the weights away before they are changed


Log = dict[str, LayerReport]
"""What each layer did, by name, where the sweep was asked to measure it."""

Policies = list[tuple[Policy, Metric]]


def backward_pass(stages: list[Stage], value: ValueFunction, curvature: Curvature, scale: float) -> Policies:
    """Lines 7 to 13 of Algorithm 3, the backward Bellman pass, from the terminal V in `value`."""
    policies: Policies = []
    for t, stage in reversed(list(enumerate(stages))):
        problem = stage.problem
        seen = Seen(
            partial(_whole_gradient, value, problem), problem.l_u, problem.layer, problem.x,
            partial(value.v_h, problem), scale, problem.peers,
        )  # fmt: skip
        metric = curvature.observe(stage.state, seen)
        policies.append((value.backward(problem, metric), metric))
        if t and not problem.peers.alone:
            value.prepare(stages[t - 1].problem)
    return policies[::-1]


def _whole_gradient(value: ValueFunction, problem: Problem) -> Parts:
    return problem.peers.sum(value.gradient(problem))


def forward_pass(
    stages: list[Stage],
    policies: Policies,
    curvature: Curvature,
    replay: Replay | None,
    displacement: Displacement,
    log: Log | None = None,
) -> list[Tensor] | None:
    """Lines 14 to 18, the additional forward pass; the new outputs. Without `replay` k alone is applied.

    With `displacement.once` what a stage has kept is let go as soon as it is behind.
    """

    def let_go(t: int) -> None:
        policies[t] = (_used_up, policies[t][1])
        stages[t].problem.let_go()

    if replay is None:
        for t, stage in enumerate(stages):
            _control(stage, *policies[t], curvature, None, log)
            if displacement.once:
                let_go(t)
        return None

    x_hats: dict[int, Tensor] = {}

    def control(t: int, x_hat: Tensor) -> None:
        _control(stages[t], *policies[t], curvature, x_hat, log)
        if not displacement.chain:
            x_hats[t] = x_hat
        elif displacement.once:
            let_go(t)

    def observe(t: int, h_hat: Tensor) -> None:
        displacement.after(stages[t].problem, x_hats.pop(t), h_hat, stages[t].weights)
        if displacement.once:
            let_go(t)

    displacement.reset()
    return replay(control, None if displacement.chain else observe)


def _control(
    stage: Stage, policy: Policy, metric: Metric, curvature: Curvature, x_hat: Tensor | None, log: Log | None
) -> None:
    """Line 16: u* = u + du*(dx)."""
    problem = stage.problem
    d = policy(x_hat)
    problem.u = stage.backup()
    if log is None and not stage.momentum and isinstance(curvature, Identity):
        d.add_to(stage.weights, -problem.eta)  # nothing to average or to precondition: no need to write d out
        return
    if metric.T_A is not None:  # nothing is averaged in front of M^-1
        step = _go(stage.weights, stage.state, d.solved(problem.layer, metric), problem.eta, stage.momentum)
    else:
        step = descend(
            stage.weights, stage.state, d.parts(), problem.eta, stage.momentum, curvature, metric, problem.layer
        )
    if log is not None:
        open_loop = policy(None).parts()
        feedback = [a - b for a, b in zip(d.parts(), open_loop, strict=True)]
        log[problem.name] = LayerReport(
            problem.eta * norm(metric.solve(problem.layer, open_loop)),
            problem.eta * norm(metric.solve(problem.layer, feedback)),
            problem.eta * norm(step),
        )


def _used_up(x_hat: Tensor | None) -> Direction:
    raise RuntimeError("this policy has been applied and let go")


def descend(
    weights: list[Tensor],
    state: State,
    d: Parts,
    eta: float,
    momentum: float,
    curvature: Curvature,
    metric: Metric,
    layer: Layer | None,
) -> Parts:
    """u <- u - eta M^-1 d with the running averages of the base optimizer; returns the step behind -eta."""
    return _go(weights, state, metric.solve(layer, curvature.direction(state, d)), eta, momentum)


def _go(weights: list[Tensor], state: State, step: Parts, eta: float, momentum: float) -> Parts:
    """u <- u - eta step, with momentum."""
    if momentum:
        old = state.get("momentum_buffer")
        if old is not None:
            step = [s + momentum * o for s, o in zip(step, old, strict=True)]
        state["momentum_buffer"] = step if old is not None else [s.clone() for s in step]  # not the user's .grad
    for weight, s in zip(weights, step, strict=True):
        weight.add_(s, alpha=-eta)
    return step


def predicted_change(stages: list[Stage], value: ValueFunction, policies: Policies) -> float:
    """The change of the batch loss: by the joint quadratic model, or Q_u' k, to first order, where Q_uu is M / eta."""
    known = value.predicted()
    if known is not None:
        return known
    total = 0.0
    for stage, (policy, metric) in zip(stages, policies, strict=True):
        Q_u = policy(None).parts()
        total -= stage.problem.eta * float(inner(Q_u, metric.solve(stage.problem.layer, Q_u)))
    return total


def norm(parts: Parts) -> float:
    return float(torch.stack([p.square().sum() for p in parts]).sum().sqrt())
