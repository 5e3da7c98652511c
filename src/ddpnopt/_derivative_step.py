"""A step whose loss contains derivatives of the model: the samples are coupled, but no layer can react to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddpnopt._step import Step
from ddpnopt._value import Passes
from ddpnopt.ddp.stage import Displacement, Stage
from ddpnopt.ddp.sweep import Log, backward_pass, forward_pass
from ddpnopt.ddp.value.joint import Joint
from ddpnopt.linear.layer import add
from ddpnopt.trace.derivatives import Unjoined, joint_batch
from ddpnopt.trace.recording import Recording
from ddpnopt.trace.rescaling import follow, penalty

if TYPE_CHECKING:
    from ddpnopt.optimizer import DDPNOpt


def step_of(opt: DDPNOpt) -> Step:
    """The step that the passes since the last one ask for."""
    arrivals, form = opt._capture.arrivals, opt.form
    if not (arrivals.differentiated and opt.feedback and opt._capture.enabled):
        return Step(opt)
    if not form.scale_free:
        arrivals.unjoined = "the form with a learning rate has no feedback there"
    elif opt._group is not None or opt._capture.wrapper is not None:
        arrivals.unjoined = "it is computed in several processes"
    else:
        try:
            return DerivativeStep(opt, *joint_batch(arrivals))
        except Unjoined as why:
            arrivals.unjoined = str(why)
    return Step(opt)


class DerivativeStep(Step):
    """One joint step of all layers from all samples (`ddp.value.joint`)."""

    def __init__(self, opt: DDPNOpt, joint: Recording, losses: Tensor) -> None:
        super().__init__(opt)
        self.joint, self.joint_losses = joint, losses

    def _take(self) -> tuple[Recording | None, Passes]:
        return self.joint, self.opt._capture

    def _rescale(self, recording: Recording) -> None:
        opt = self.opt
        if not opt._capture.skip_weight_grads:
            unscaled = hasattr(opt, "found_inf") and getattr(opt, "grad_scale", None) is None
            clipped = follow(recording, list, unscaled=unscaled)
            self.joint_losses = self.joint_losses * (1.0 if clipped is None else clipped)
        for record in self.layers:
            if any(p.grad is not None for p in record.parameters):
                record.extra = penalty(record)
        opt.report.loss = "residuals"

    def fractions(self) -> Iterator[float]:
        yield 1.0  # the loss after the step is known at the next one only

    def plan(self, fraction: float) -> None:
        opt, trust = self.opt, self.opt._trust
        self.displacement = Displacement(chain=True)
        value = Joint(self.joint_losses, trust.memory)
        self.value = value
        loss = float(self.joint_losses.sum())
        batch = float(sum(t.double().square().sum() for one in self.joint.passes for t in one.inputs if t.is_floating_point()))
        back = trust.judge(loss, None, batch)
        self.stages = []
        if back is not None:
            for record in self.layers:
                update = opt.state[record.parameters[0]].get("update")
                if update is not None:
                    for p, part in zip(record.parameters, update, strict=True):
                        p.detach().add_(part, alpha=1 - back)
                        part.mul_(back)
            return
        for record, settings in zip(self.layers, opt._parameters.of_layers(self.layers), strict=True):
            weights: list[Tensor] = list(record.parameters)
            assert record.p_h is not None
            l_u = settings.l_u if record.extra is None else add(record.extra, settings.l_u)
            x, p = record.x.double(), record.p_h.double()
            self.stages.append(
                Stage(
                    record.name, record.layer, x, [w.detach() for w in weights], settings.lr, [p], [None],
                    l_u, recompute=opt.recompute, moves=False, state=settings.state, weights=weights,
                )
            )  # fmt: skip
            record.free()
        self.policies = backward_pass(self.stages, value, opt.curvature, 1.0)
        planned = value.solve(trust.damping)
        for stage in self.stages:
            stage.state["penalty_rate"] = stage.eta / value._damping
        trust.remember(planned, batch)

    def apply(self) -> None:
        log: Log | None = {} if self.opt.diagnostics else None
        if self.stages:
            forward_pass(self.stages, self.policies, self.opt.curvature, None, self.displacement, log)
        if log is not None:
            self.opt.report.layers = log

    def accept(self) -> bool:
        if self.rest:
            self.opt._parameters.update_by_distance(self.rest, self.opt._distance)
        return True
