"""One step, phase by phase: collect, agree, plan, apply, accept or undo."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ddpnopt._checks import ADVICE, finite_sum, not_finite
from ddpnopt._collect import OUTSIDE, dead_layers, is_chain, one_recording, ran_unseen, why_open_loop
from ddpnopt._common_sizes import CommonSizes, described
from ddpnopt._distributed import ALONE, FAILED, READY, Peers, Together, combine_gradients
from ddpnopt._losses import Losses, are_certain
from ddpnopt._rescale import rescale
from ddpnopt._step_length import accept_length, choose_fraction, is_beyond_precision, keep_update
from ddpnopt._taking_back import take_back_if_not_finite, take_back_if_wrong
from ddpnopt._troubles import DEAD_EVERY
from ddpnopt._value import Passes
from ddpnopt.ddp.loss import total_loss
from ddpnopt.ddp.penalty import Penalties
from ddpnopt.ddp.stage import Displacement, Stage
from ddpnopt.ddp.step_length import Evidence
from ddpnopt.ddp.sweep import Log, Policies, backward_pass, forward_pass, predicted_change
from ddpnopt.ddp.value import ScaleFree, ValueFunction
from ddpnopt.errors import NonFiniteError, StepError
from ddpnopt.linear.layer import add, in_precision
from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.recording import LayerRecord, Recording
from ddpnopt.trace.rescaling import add_shared, penalty
from ddpnopt.trace.scalar_outputs import change_of_scalars, true_loss

if TYPE_CHECKING:
    from ddpnopt.optimizer import DDPNOpt

ATTEMPTS = 4  # sweeps with a smaller and smaller fraction before a step is given up
SHORTER = 0.25  # times the fraction of the sweep before


class Step:
    """One step of an optimizer. As a context it restores weights and state if the step fails."""

    def __init__(self, opt: DDPNOpt) -> None:
        self.opt = opt
        self.group = opt._group if opt._capture.parallel is None else opt._find_group()
        self.peers: Peers = ALONE
        self.passes: Passes = opt._capture
        self.recording: Recording | None = None
        self.layers: list[LayerRecord] = []  # recorded layers that get feedback, or whose curvature needs the record
        self.known: list[ModelLayer] = []  # layers without a record, whose curvature is known from an earlier step
        self.own: list[nn.Parameter] = []  # of all these layers
        self.rest: list[nn.Parameter] = []  # all others with a gradient
        self.has_own_grads = False  # whether any of the former have one in `.grad`
        self.losses: Losses | None = None
        self.sample_losses: Tensor | None = None  # (B,)
        self.own_loss = 0.0  # their sum
        self.penalties = Penalties()  # on the weights, of steps without a learning rate
        self.beside = 0.0  # what scalar outputs beside those of the samples are in the loss
        self.inside = 0.0  # a part of the loss that is computed from activations inside the model, not from its outputs
        self.stages: list[Stage] = []
        self.policies: Policies = []
        self.value: ScaleFree | None = None  # of a step without a learning rate
        self.planned = False  # whether the step follows its plan, without a forward sweep
        self.unjudged = False  # whether it does so in a forward sweep, after which the loss would show no difference
        self.displacement: Displacement
        self.outputs: list[Tensor] | None = None  # of the network with the new weights
        self.fraction = 1.0  # of each sample's loss that the sweep asks to remove
        self.evidence: Evidence | None = None  # of a step without a learning rate
        self.chosen = self.asked = 1.0  # the fraction of the first attempt, of the current one; without lr
        self.shorter = 1.0  # the current attempt, relative to the first
        self.updates: list[list[Tensor]] = []  # old minus new weights of the stages, where they have been judged
        self.finite = False  # whether these are known to be finite
        self._gradient_sum = 0.0
        self.certain = True  # whether the loss after the step is that of the user, and not of a guess
        self.loss_before: float | None = None  # None: nothing to judge the step by
        self.weights_before: dict[nn.Parameter, Tensor] = {}  # before the step, of parameters updated without feedback
        self._states: list[tuple[nn.Parameter, dict[str, Any]]] = []  # before the step, of all parameters
        lengths = opt._length, opt._distance, opt._rollouts
        self._lengths = [(kept, vars(kept).copy()) for kept in lengths]  # before the step

    def __enter__(self) -> Step:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None:
            return False
        self.undo()
        for kept, before in self._lengths:
            vars(kept).update(before)
        taken_back = issubclass(kind, NonFiniteError) and take_back_if_not_finite(self)
        self.opt.report.undone += taken_back
        return taken_back

    # -- collect -----------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Find what the passes since the last step have recorded, and which parameters have a gradient."""
        try:
            self._collect()
        except BaseException:
            if self.group is not None:
                self.group.begin(self.opt._device, FAILED)
            raise

    def _collect(self) -> None:
        opt, capture = self.opt, self.opt._capture
        recorded = opt.feedback or opt.curvature.watches({})
        unseen = self.group is None and ran_unseen(opt)
        if capture.enabled and not unseen:
            self.recording, self.passes = self._take()
            self.layers = self.recording.layers if recorded and self.recording is not None else []
        elif recorded:
            self.known = opt._parameters.known_layers(capture.layers)
        self.own = [p for each in (self.layers, self.known) for layer in each for p in layer.parameters]
        with_grad = [p for p in opt._parameters if p.grad is not None]
        own = set(self.own) if with_grad else ()
        self.rest = [p for p in with_grad if p not in own]
        self.has_own_grads = len(self.rest) < len(with_grad)
        if not self.own and not self.rest:
            raise StepError("step() without a backward pass: call loss.backward() first.")
        if opt.feedback:
            opt.report.open_loop = [opt._names[p] for p in self.rest]
            known = [opt._names[p] for p in capture.settled(self.rest)]
            if known:
                opt._parameters.warn_open_loop(known, OUTSIDE if unseen else why_open_loop(capture))
        if opt.feedback and opt.steps % DEAD_EVERY == DEAD_EVERY - 1 and (dead := dead_layers(self.layers)):
            opt._troubles.without_gradient(dead)
        others = *self.rest, *(p for layer in self.known for p in layer.parameters)
        gradients = (*self._to_be_finite(), *(p.grad for p in others))
        self._gradient_sum = finite_sum([g for g in gradients if g is not None])

    def _take(self) -> tuple[Recording | None, Passes]:
        return one_recording(self.opt, alone=self.group is None)

    def _to_be_finite(self) -> list[Tensor | None]:
        """The recorded gradients to look at; of a step without scales the Gram matrices show those inside the model."""
        recording = self.recording
        if self.opt.form.scale_free and self.group is None and recording is not None and recording.used_outputs:
            return recording.q
        return [record.p_h for record in self.layers]

    # -- agree -------------------------------------------------------------------------------------------------------

    def agree(self) -> bool:
        """Agree with the other processes on the whole batch and the scale of its loss; False if one has overflowed."""
        opt, group, recording = self.opt, self.group, self.recording
        if group is None:
            if not math.isfinite(self._gradient_sum):
                raise not_finite("the gradient of the loss", ADVICE)
        else:
            assert recording is not None
            path, sizes = described(recording.layers, coupled=opt.form.value == "batch")
            penalised = opt.feedback and not group.averaged and any(penalty(r) is not None for r in self.layers)
            peers = group.begin(opt._device, READY, recording.batch_size, self._gradient_sum, path, penalised, sizes)
            if peers is None:
                return False
            self.peers = peers
        if recording is not None and (self.layers or not opt.feedback):
            self._rescale(recording)
        if isinstance(self.peers, Together):
            self.passes = CommonSizes.of(self.passes, recording, self.peers)
            mine = set(self.own)
            others = [p for g in opt.param_groups for p in g["params"] if not opt.feedback or p not in mine]
            combined = combine_gradients(self.peers, others, mean=opt.form.mean)
            self.rest = [p for p in combined if p not in mine]
        changed = self.rest if opt.feedback else [*self.rest, *self.own]  # the sweep keeps its own weights
        self.weights_before = {p: p.detach().clone() for p in changed}
        firsts = [layer.parameters[0] for each in (self.layers, self.known) for layer in each]  # with the layer's state
        self._states = [(p, dict(opt.state[p])) for p in (*firsts, *self.rest)]
        return True

    def _rescale(self, recording: Recording) -> None:
        rescale(self, recording)

    # -- plan, apply, accept or undo ---------------------------------------------------------------------------------

    def fractions(self) -> Iterator[float]:
        """The fraction of each sample's loss that a sweep asks to remove, smaller after each attempt that failed."""
        opt, recording = self.opt, self.recording
        assert recording is not None
        fraction = 1.0 if opt.form.scale_free else opt.relax
        if opt.relax_samples is not None and not opt.form.scale_free:
            fraction /= math.sqrt(1 + opt.samples / opt.relax_samples)
        judged = opt.form.value == "batch" and opt.closed_loop
        loss = self._batch_loss() if judged else None
        known = true_loss(recording) is not None or (self.losses is not None and are_certain(self.losses))
        # alike in all processes, whose lengths have to stay equal
        self.certain = self.peers.total(float(loss is None or not known)) == 0
        if opt.form.scale_free and take_back_if_wrong(self):
            return
        if loss is not None:
            self.loss_before = self._total(loss)
        elif not opt.form.scale_free:
            yield fraction
            return
        for attempt in range(ATTEMPTS):
            if attempt:
                opt.report.shortened += attempt == 1
                if not self.inside:
                    self.passes.retrace(recording)  # the last sweep has freed what was recorded
                    add_shared(recording.layers)
            yield fraction * self.shorter

    def plan(self, fraction: float) -> None:
        """Lines 6 to 13 of Algorithm 3: the backward pass, and with it a policy for each layer."""
        opt, recording, peers = self.opt, self.recording, self.peers
        assert recording is not None
        self.displacement = Displacement(is_chain(opt, self.passes, recording), once=not opt.diagnostics)
        self.planned = not opt.closed_loop or (self.shorter == 1.0 and not opt._rollouts.is_due)
        inside = self.penalties.value()
        memory = opt._length.memory, opt._parameters.stage_cost() + inside, inside, self.own_loss
        given = recording, self.displacement, fraction, self.sample_losses, peers, memory
        (p_h, p_x), value = opt.form.start(self.passes, *given)  # an attempt that fails leaves nothing of it
        self.stages, recompute, scale_free = [], opt.recompute, opt.form.scale_free
        settings = opt._parameters.of_layers(recording.layers)
        each = zip(recording.layers, settings, zip(*p_h, strict=True), zip(*p_x, strict=True), strict=True)
        for record, (lr, momentum, decay, state), own_p_h, own_p_x in each:
            weights: list[Tensor] = list(record.parameters)
            dtype = weights[0].dtype  # autocast may have recorded smaller ones
            l_u = decay if record.extra is None else add(record.extra, decay)
            x = record.input_in(dtype)
            self.stages.append(
                Stage(
                    record.name, record.layer, x, weights if scale_free else [w.detach() for w in weights], lr,
                    [in_precision(p, dtype) for p in own_p_h],
                    [None if recompute else in_precision(p, dtype) for p in own_p_x],
                    l_u,
                    record.p_h_dot_h, peers, recompute, record.moves, state, weights, momentum,
                    in_precision(record.later, x.dtype),
                )
            )  # fmt: skip
            if not self.inside:  # else the outputs would not give the gradients again
                record.free()
        del p_h, p_x, each, own_p_h, own_p_x, x  # the stages have them, and free them on the way
        scale = float(peers.batch(recording.batch_size)) if opt.form.mean else 1.0
        if isinstance(value, ScaleFree):
            self.value, value.planned = value, self.planned
        if not self._stack(value):
            self.policies = backward_pass(self.stages, value, opt.curvature, scale)
        if not self.displacement.chain:  # the ledger of combinations needs no gradient at the input
            combined = (r.model_layer for r, s in zip(recording.layers, self.stages, strict=True) if s.sketched)
            opt._capture.input_gradients.difference_update(combined)
        if isinstance(value, ScaleFree):
            choose_fraction(self, value, fraction)
        if opt.diagnostics:
            opt.report.predicted = predicted_change(self.stages, value, self.policies)
            opt.report.guarded = value.guarded_fraction

    def _stack(self, value: ValueFunction) -> bool:
        """The backward pass of all layers at once, if all are small and linear."""
        if not isinstance(value, ScaleFree) or self.opt.diagnostics:
            return False
        stages = self.stages[::-1]
        stacked = self.opt._stacking.of(stages)
        if stacked is None or not stacked.knows_all(stages, value.L.dtype):
            return False
        value.backward_together(stages, stacked)
        return True

    def apply(self) -> None:
        """Lines 14 to 18: the forward pass, in which each layer is updated when its new input is known."""
        opt, recording = self.opt, self.recording
        assert recording is not None
        if self.rest and not opt.form.scale_free:  # there they follow after the sweep
            opt._parameters.update_open_loop(self.rest)  # not before the backward pass, which uses the old network
        replay = None if self.planned else partial(self.passes.replay, recording)
        if self.value is not None and not self.policies:  # all layers are one
            self.outputs = self.value.update_together(replay)
            return
        log: Log | None = {} if opt.diagnostics else None
        self.outputs = forward_pass(self.stages, self.policies, opt.curvature, replay, self.displacement, log)
        if log is not None:
            self._write_report(log)

    def apply_open_loop(self) -> None:
        """No layer takes part in this step: all parameters without feedback."""
        if self.opt.form.scale_free:
            self.opt._parameters.update_by_distance(self.rest, self.opt._distance)
        else:
            self.opt._parameters.update_open_loop(self.rest)

    def apply_base_optimizer(self) -> None:
        """Without feedback: the base optimizer for all parameters."""
        self.opt._parameters.update_all(self.rest, self.layers, self.known, self.peers, mean=self.opt.form.mean)

    def accept(self) -> bool:
        """Whether the loss of the same batch has not increased, where that can be judged."""
        self.unjudged = not self.planned and is_beyond_precision(self)
        judged = self.loss_before is not None and not self.planned and not self.unjudged
        loss = self._batch_loss(self.outputs) if judged else None
        after = None if loss is None else self._total(loss)
        if self.evidence is not None:
            shorter = accept_length(self, self.evidence, after)
        else:
            shorter = 1.0 if after is None or self.loss_before is None or after <= self.loss_before else SHORTER
        self.shorter *= shorter
        return shorter == 1.0

    def _batch_loss(self, outputs: list[Tensor] | None = None) -> float | None:
        """The loss of this process's samples, by the recorded outputs or by new ones; None where it is not known."""
        recording, losses = self.recording, self.losses
        assert recording is not None
        returned = true_loss(recording, outputs)
        if returned is not None:
            return returned
        if losses is None or not recording.used_outputs or self.inside:
            return None
        if outputs is not None:
            return total_loss(recording.used(outputs), losses) + change_of_scalars(recording, outputs) + self.beside
        return self.own_loss

    def _total(self, loss: float) -> float:
        """The loss of the whole batch, the weight decay, and a penalty on the weights in the loss."""
        if not self.peers.alone:
            loss = self.peers.total(loss)
        return loss + self.opt._parameters.stage_cost() + self.penalties.value()

    def undo(self) -> None:
        """Restore weights and state."""
        for stage in reversed(self.stages):
            stage.restore()
        for p, old in self.weights_before.items():
            p.detach().copy_(old)
        for p, state in self._states:
            self.opt.state[p] = dict(state)
        self.stages, self.policies, self.outputs, self.updates, self.finite = [], [], None, [], False

    def finish(self) -> None:
        """Check what was written, and count the samples."""
        opt = self.opt
        total = self.peers.total(finite_sum([*([] if self.finite else self.own), *self.rest, *(self.outputs or [])]))
        if not math.isfinite(total):
            raise not_finite("a weight or output after the step", ADVICE)
        if opt.form.scale_free:
            opt.report.fraction, opt.report.kappa = self.fraction, opt._length.kappa
            keep_update(self)  # from here on the step cannot be undone
        opt.report.planned += self.planned
        opt._troubles.after_step(opt.report, seen=opt._loss_value is not None)
        if self.recording is not None:
            mine = self.recording.batch_size
            opt.samples += mine if self.peers.alone else self.peers.batch(mine)

    def _write_report(self, log: Log) -> None:
        report, before = self.opt.report, self._batch_loss()
        report.layers, report.actual = log, None
        after = None if self.outputs is None else self._batch_loss(self.outputs)
        if before is not None and after is not None:
            report.actual = self.peers.total(after - before)
