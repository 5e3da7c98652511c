"""Algorithm 3: one backward Bellman pass, one forward pass in which each layer reacts to those before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ddpnopt.curvature.base import Curvature, Seen, State
from ddpnopt.curvature.diagonal import Identity
from ddpnopt.ddp.stage import REVERSIBLE, Direction, Displacement, Policy, Stage, change
from ddpnopt.ddp.value.base import ValueFunction
from ddpnopt.linear.layer import Layer, Parts, inner, norm
from ddpnopt.linear.metric import IDENTITY, Metric
from ddpnopt.report import LayerReport

Replay = Callable[[Callable[[int, Tensor], None], Callable[[int, Tensor], None] | None], list[Tensor]]
"""Runs the forward pass again, calling control(t, x^) before and observe(t, h^) after each stage; the outputs."""

Log = dict[str, LayerReport]
"""What each layer did, by name, with diagnostics."""

Policies = list[tuple[Policy, Metric]]


def backward_pass(stages: list[Stage], value: ValueFunction, curvature: Curvature, scale: float) -> Policies:
    """Lines 7 to 13 of Algorithm 3, the backward Bellman pass, from the terminal V in `value`."""
    policies: Policies = []
    for t in range(len(stages) - 1, -1, -1):
        stage = stages[t]
        metric = IDENTITY if isinstance(curvature, Identity) else _observe(stage, value, curvature, scale)
        policies.append((value.backward(stage, metric), metric))
        if t and not stage.peers.alone:
            value.prepare(stages[t - 1])
    return policies[::-1]


def _observe(stage: Stage, value: ValueFunction, curvature: Curvature, scale: float) -> Metric:
    seen = Seen(
        lambda: stage.peers.sum(value.gradient(stage)), stage.l_u, stage.layer, stage.x,
        partial(value.v_h, stage), scale, stage.peers,
    )  # fmt: skip
    return curvature.observe(stage.state, seen)


def forward_pass(
    stages: list[Stage],
    policies: Policies,
    curvature: Curvature,
    replay: Replay | None,
    displacement: Displacement,
    log: Log | None = None,
) -> list[Tensor] | None:
    """Lines 14 to 18, the additional forward pass; the new outputs. Without `replay` k alone is applied.

    With `displacement.once` each stage is freed as soon as it is done.
    """
    # nothing to average or to precondition: d need not be materialised
    plain = log is None and isinstance(curvature, Identity)
    ledger = replay is not None and not displacement.chain
    x_hats: dict[int, Tensor] = {}

    def control(t: int, x_hat: Tensor | None) -> None:
        """Line 16: u* = u + du*(dx)."""
        stage, (policy, metric) = stages[t], policies[t]
        d = policy(x_hat)
        if stage.balance is not None:
            _update_balanced(stage, d, policy, log)
        else:
            stage.keep_weights()
            if plain and not stage.momentum:
                d.add_to(stage.weights, -stage.eta)
            else:
                _update(stage, d, policy, metric, curvature, log)
        if ledger:
            assert x_hat is not None
            x_hats[t] = x_hat
        elif displacement.once:
            policies[t] = (_freed, metric)
            stage.free()

    def observe(t: int, h_hat: Tensor) -> None:
        displacement.after(stages[t], x_hats.pop(t), h_hat)
        if displacement.once:
            policies[t] = (_freed, policies[t][1])
            stages[t].free()

    if replay is not None:
        return replay(control, observe if ledger else None)
    if log is None and displacement.once and all(stage.balance is not None for stage in stages):
        _follow_plan(stages, policies)
        return None
    for t in range(len(stages)):
        control(t, None)
    return None


def _follow_plan(stages: list[Stage], policies: Policies) -> None:
    """All stages at once: nothing is between them that would have to see the weights of those before."""
    updates = []
    for t, stage in enumerate(stages):
        policy, metric = policies[t]
        updates.append(_balanced_update(stage, policy(None)))
        policies[t] = (_freed, metric)
        stage.free()
    change(stages, updates)


def _freed(x_hat: Tensor | None) -> Direction:
    raise RuntimeError("this policy has been applied and freed")


def _update(stage: Stage, d: Direction, policy: Policy, metric: Metric, curvature: Curvature, log: Log | None) -> None:
    if metric.T_A is not None:  # nothing is averaged before M^-1
        step = _descend(stage.weights, stage.state, d.solved(stage.layer, metric), stage.eta, stage.momentum)
    else:
        step = descend(stage.weights, stage.state, d.parts(), stage.eta, stage.momentum, curvature, metric, stage.layer)
    if log is not None:
        open_loop = policy(None).parts()
        feedback = [a - b for a, b in zip(d.parts(), open_loop, strict=True)]
        log[stage.name] = LayerReport(
            stage.eta * norm(metric.solve(stage.layer, open_loop)),
            stage.eta * norm(metric.solve(stage.layer, feedback)),
            stage.eta * norm(step),
        )


def _update_balanced(stage: Stage, d: Direction, policy: Policy, log: Log | None) -> None:
    """u <- u - eta M^-1 d with the metric of the balanced variables, which d has, and the prior."""
    if log is not None:
        open_loop = policy(None).parts()
        feedback = [a - b for a, b in zip(d.parts(), open_loop, strict=True)]
        log[stage.name] = LayerReport(*(stage.eta * norm(part) for part in (open_loop, feedback, d.parts())))
    change([stage], [_balanced_update(stage, d)])


def _balanced_update(stage: Stage, d: Direction) -> Parts:
    """eta M^-1 d and the prior: old minus new weights."""
    steps, sketched = [(stage.fraction * share, step) for share, step in stage.prior], stage.sketched
    if sketched is not None and stage.is_precise and d.w is not None and stage.peers.alone:
        stage.combined = sketched.sum_of(d.w, stage.eta, steps)
    if not steps:
        update = d.times(stage.eta)
    elif len(steps) == 1 and stage.prior[0][0] >= REVERSIBLE and d.fits(steps[0][1]):
        [(share, step)] = steps
        stage.put_back, update = d.write_into(step, share, stage.eta), [*step]
    else:
        (share, step), *others = steps
        update = d.plus(step, share, stage.eta)
        for share, step in others:
            torch._foreach_add_(update, step, alpha=share)
    if sketched is not None and stage.combined is not None:
        sketched.know(update, stage.combined)
    return update


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
    """u <- u - eta M^-1 d with the running averages of the base optimizer; returns M^-1 d."""
    return _descend(weights, state, metric.solve(layer, curvature.direction(state, d)), eta, momentum)


def _descend(weights: list[Tensor], state: State, step: Parts, eta: float, momentum: float) -> Parts:
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
        total -= stage.eta * float(inner(Q_u, metric.solve(stage.layer, Q_u)))
    return total
