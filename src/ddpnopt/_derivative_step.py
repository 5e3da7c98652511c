"""A step whose loss contains derivatives of the model: the samples are coupled, but no layer can react to another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddpnopt._checks import ADVICE, not_finite
from ddpnopt._step import Step
from ddpnopt._taking_back import take_back
from ddpnopt._value import Passes
from ddpnopt.ddp.stage import Displacement, Stage
from ddpnopt.ddp.sweep import Log, backward_pass, forward_pass
from ddpnopt.ddp.trust import KEPT
from ddpnopt.ddp.value.joint import Joint
from ddpnopt.linear.layer import add
from ddpnopt.trace.derivatives import JointBatch, UnjoinedError, joint_batch
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
    elif opt._group is not None or opt._capture.parallel is not None:
        arrivals.unjoined = "it is computed in several processes"
    else:
        try:
            return DerivativeStep(opt, joint_batch(arrivals))
        except UnjoinedError as why:
            arrivals.unjoined = str(why)
    return Step(opt)


class DerivativeStep(Step):
    """One joint step of all layers from all samples (`ddp.value.joint`)."""

    def __init__(self, opt: DDPNOpt, joint: JointBatch) -> None:
        super().__init__(opt)
        self.joint, self.joint_losses = joint, joint.losses
        self._trust_before = replace(opt._trust)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        if kind is not None:
            self.opt._trust = self._trust_before
        return super().__exit__(kind, *rest)

    def _take(self) -> tuple[Recording | None, Passes]:
        return self.joint.recording, self.opt._capture

    def _to_be_finite(self) -> list[Tensor | None]:
        return [record.p_h for record in self.layers]

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

    def agree(self) -> bool:
        if self.opt._trust.step == self.opt.steps - 1 and not math.isfinite(self._gradient_sum):
            self._gradient_sum = 0.0  # the last step went too far, and can be taken back
        return super().agree()

    def fractions(self) -> Iterator[float]:
        yield 1.0  # the loss after the step is known at the next one only

    def plan(self, fraction: float) -> None:
        opt, trust = self.opt, self.opt._trust
        loss, points = float(self.joint_losses.sum()), [_fingerprint(one) for one in self.joint.recording.passes]
        self.stages = []
        if trust.takes_back(loss, points, opt.steps):
            opt.report.shortened += 1
            take_back(opt, 1 - KEPT)
            return
        if not math.isfinite(loss):
            raise not_finite("the loss", ADVICE)
        value = Joint(self.joint_losses)
        for record, settings in zip(self.layers, opt._parameters.of_layers(self.layers), strict=True):
            weights: list[Tensor] = list(record.parameters)
            assert record.p_h is not None
            l_u = settings.l_u if record.extra is None else add(record.extra, settings.l_u)
            wide = torch.float64 if record.x.device.type != "mps" else record.x.dtype  # little damping: large condition
            self.stages.append(
                Stage(
                    record.name, record.layer, record.x.to(wide), [w.detach() for w in weights], settings.lr,
                    [record.p_h.to(wide)], [None], l_u, recompute=opt.recompute, moves=False, state=settings.state,
                    weights=weights,
                )
            )  # fmt: skip
            record.free()
        self.policies = backward_pass(self.stages, value, opt.curvature, 1.0)
        self.fraction = max(float(group["lr"]) for group in opt.param_groups)
        predicted = value.solve(trust.damping, self.fraction)
        if not math.isfinite(predicted):
            raise not_finite("the Gram matrix of the samples' gradients", ADVICE)
        trust.remember(loss, predicted, points, opt.steps)
        opt.report.predicted = predicted - loss if opt.diagnostics else None

    def apply(self) -> None:
        log: Log | None = {} if self.opt.diagnostics else None
        if self.stages:
            forward_pass(self.stages, self.policies, self.opt.curvature, None, Displacement(True), log)
        if log is not None:
            self.opt.report.layers = log

    def accept(self) -> bool:
        if self.rest and self.stages:
            self.opt._parameters.update_by_distance(self.rest, self.opt._distance)
        return True


def _fingerprint(one: Recording) -> float:
    """A number that tells the inputs of a pass from others."""
    return sum((float(t.detach().double().square().sum()) for t in one.inputs if t.is_floating_point()), 0.0)
