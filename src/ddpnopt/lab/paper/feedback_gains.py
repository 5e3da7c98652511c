"""The feedback gains K_t themselves, which training never forms: obtained by evaluating the policies.

A policy is affine in the new state x^, so du(x + dx) - du(x) = K dx determines K, one direction dx at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpnopt.curvature.base import Curvature, Identity
from ddpnopt.ddp.sweep import Stage, backward_pass
from ddpnopt.ddp.value import Displacement, Problem
from ddpnopt.ddp.value.base import Policy
from ddpnopt.linear.layer import Parts
from ddpnopt.linear.metric import Metric
from ddpnopt.method import Method
from ddpnopt.trace.hooks import Capture
from ddpnopt.trace.model_layers import find_units


@dataclass(frozen=True, eq=False)
class Gain:
    """K of one layer, summed over the batch, as a linear map of a displacement that all samples share."""

    problem: Problem
    policy: Policy
    metric: Metric

    @property
    def name(self) -> str:
        return self.problem.name

    @property
    def x(self) -> Tensor:
        """The nominal inputs of the layer: (B, …)."""
        return self.problem.x

    def __call__(self, dx: Tensor) -> Tensor:
        """K dx, flat: the change of all the layer's weights in response to dx, of the shape of one input."""
        d = self.policy(self.x + dx).parts()
        open_loop = self.policy(None).parts()
        answer = [a - b for a, b in zip(d, open_loop, strict=True)]
        return -self.problem.eta * _flat(self.metric.solve(self.problem.layer, answer))

    def matrix(self, directions: Tensor) -> Tensor:
        """K times each row of `directions` (r, …): (m, r)."""
        return torch.stack([self(dx) for dx in directions], 1)

    def dense(self) -> Tensor:
        """All of K: (m, n)."""
        shape = self.x.shape[1:]
        basis = torch.eye(shape.numel(), dtype=self.x.dtype)
        return self.matrix(basis.view(-1, *shape))


def feedback_gains(
    model: nn.Module,
    method: Method,
    eta: float,
    x: Tensor,
    loss: Callable[[Tensor], Tensor],
    curvature: Curvature | None = None,
) -> list[Gain]:
    """The gains of all layers of a chain, first to last, for the inputs `x` and a loss of the outputs."""
    curvature = Identity() if curvature is None else curvature
    twin = copy.deepcopy(model).train()  # hooks on the model itself would take it away from its optimizer
    capture = Capture(twin, find_units(twin, set(twin.parameters()), frozenset()), skip_weight_grads=True)
    with torch.enable_grad():
        loss(twin(x)).backward()
    recording = capture.take()
    (p_h, p_x), value = method.start(capture, recording, Displacement(chain=True), relax=1.0)
    problems = [
        Problem(
            stage.name, stage.layer, stage.x, [p.detach() for p in stage.unit.parameters], eta,
            [h[t] for h in p_h], [x[t] for x in p_x], moves=stage.moves,
        )
        for t, stage in enumerate(recording.stages)
    ]  # fmt: skip
    stages = [Stage(problem, {}, problem.u, 0.0, lambda: []) for problem in problems]
    scale = float(recording.batch_size) if method.mean else 1.0
    with torch.no_grad():
        policies = backward_pass(stages, value, curvature, scale)
    return [Gain(problem, *policy) for problem, policy in zip(problems, policies, strict=True)]


def _flat(parts: Parts) -> Tensor:
    return torch.cat([part.flatten() for part in parts])
