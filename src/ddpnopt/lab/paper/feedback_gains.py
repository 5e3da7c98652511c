"""The feedback gains K_t themselves, which training never forms: obtained by evaluating the policies.

A policy is affine in the new state x^, so du(x + dx) - du(x) = K dx determines K, one direction dx at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpnopt._value import ValueForm
from ddpnopt.curvature.base import Curvature
from ddpnopt.curvature.diagonal import Identity
from ddpnopt.ddp.stage import Displacement, Policy, Stage
from ddpnopt.ddp.sweep import backward_pass
from ddpnopt.linear.layer import Parts
from ddpnopt.linear.metric import Metric
from ddpnopt.trace.hooks import Capture
from ddpnopt.trace.model_layers import find_layers


@dataclass(frozen=True, eq=False)
class Gain:
    """K of one layer, summed over the batch, as a linear map of a displacement that all samples share."""

    stage: Stage
    policy: Policy
    metric: Metric

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def x(self) -> Tensor:
        """The nominal inputs of the layer: (B, …)."""
        return self.stage.x

    def __call__(self, dx: Tensor) -> Tensor:
        """K dx, flat: the change of all the layer's weights in response to dx, of the shape of one input."""
        d = self.policy(self.x + dx).parts()
        open_loop = self.policy(None).parts()
        answer = [a - b for a, b in zip(d, open_loop, strict=True)]
        return -self.stage.eta * _flat(self.metric.solve(self.stage.layer, answer))

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
    form: ValueForm,
    eta: float,
    x: Tensor,
    loss: Callable[[Tensor], Tensor],
    curvature: Curvature | None = None,
) -> list[Gain]:
    """The gains of all layers of a chain, first to last, for the inputs `x` and a loss of the outputs."""
    curvature = Identity() if curvature is None else curvature
    twin = copy.deepcopy(model).train()  # hooks on the model itself would take it away from its optimizer
    capture = Capture(twin, find_layers(twin, set(twin.parameters()), frozenset()), skip_weight_grads=True)
    with torch.enable_grad():
        loss(twin(x)).backward()
    recording = capture.arrivals.take()
    (p_h, p_x), value = form.start(capture, recording, Displacement(chain=True))
    stages = [
        Stage(
            record.name, record.layer, record.x, [p.detach() for p in record.parameters], eta,
            [h[t] for h in p_h], [x[t] for x in p_x], moves=record.moves,
        )
        for t, record in enumerate(recording.layers)
    ]  # fmt: skip
    scale = float(recording.batch_size) if form.mean else 1.0
    with torch.no_grad():
        policies = backward_pass(stages, value, curvature, scale)
    return [Gain(stage, *policy) for stage, policy in zip(stages, policies, strict=True)]


def _flat(parts: Parts) -> Tensor:
    return torch.cat([part.flatten() for part in parts])
