"""`DDPNOpt`: the optimizer, seen from the user's training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpnopt._averaging import Averaging
from ddpnopt._checks import ADVICE, check_finite, finite_sum
from ddpnopt._distributed import ALONE, FAILED, OVERFLOWN, READY, Group, Peers, Together, share_gradients, unwrap
from ddpnopt._memory import retain_freed
from ddpnopt.base_optimizer import BaseOptimizer
from ddpnopt.curvature.base import Adam, Curvature, Identity, RMSprop, require
from ddpnopt.curvature.kronecker import EKFAC, KFAC
from ddpnopt.ddp import terminal as forms
from ddpnopt.ddp.loss import total_loss
from ddpnopt.ddp.sweep import Log, Stage, backward_pass, forward_pass, predicted_change
from ddpnopt.ddp.value import Displacement, Problem, ValueFunction
from ddpnopt.errors import ModelError, NonFiniteError, OptionError, StepError
from ddpnopt.groups import Groups, penalty
from ddpnopt.linear.layer import Parts
from ddpnopt.method import Method, losses, shares
from ddpnopt.report import Report
from ddpnopt.saved import KEY, check_header, header
from ddpnopt.settling import Settling, settle
from ddpnopt.trace.hooks import Capture
from ddpnopt.trace.micro_batches import join, probes, replay, retrace
from ddpnopt.trace.model_layers import check_devices, find_units
from ddpnopt.trace.recording import Recording
from ddpnopt.trace.recording import Stage as Captured

DEFAULT_LR = 3.0  # of value="batch": 1 / damping. Found over six tasks, see docs/method.md
DEFAULT_RELAX = 1.0
DEFAULT_RELAX_SAMPLES = 6400.0
DEFAULT_DOF = 0.25
ATTEMPTS = 4  # sweeps that ask for ever less before a step is given up
SHORTER = 0.25  # times what was asked for before
SLOPES_FROM = 2**15  # weights: a smaller layer is applied again in less time than slopes at its input are caught
CURVATURES: dict[str, Callable[[], Curvature]] = {
    "identity": Identity,
    "rmsprop": RMSprop,
    "adam": Adam,
    "kfac": KFAC,
    "ekfac": EKFAC,
}


class DDPNOpt(BaseOptimizer):
    """Differential dynamic programming for neural networks.

    Use it like any other optimizer, but hand it the model instead of its parameters:

        opt = DDPNOpt(model)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()

    Several forward and backward passes before a step() are the micro-batches of one batch: with the loss of each
    divided by their number the step is that of the whole batch (gradient accumulation).

    Around an evaluation, and before the model is saved for use, `opt.eval()` puts the average of the weights over the
    last part of training into the model, `opt.train()` the weights themselves; without them all is as usual.

    Args:
        model: any `nn.Module`. Its `nn.Linear` and `nn.Conv1d/2d/3d` layers get feedback; other parameters are updated
            by the base optimizer, open loop.
        lr: eta of Q_uu = M / eta. For value="batch" it is the inverse of a damping and may be left alone; any value
            from about 0.3 upwards trains. The other forms need it to be chosen, as their base optimizers do.
        params: parameters or parameter groups to train, as for `torch.optim`; all of the model's by default. A group
            may set lr, momentum, weight_decay and open_loop_lr.
        value: form of the value function: "batch" (all samples as one state), "outer" (Proposition 2: V_xx = z z' for
            each sample) or "full" (V_xx of each sample, the paper's form for feedforward networks).
        terminal: terminal curvature, "sqrt", "gn", "cross_entropy", "mse", "sampled" or a callable of the outputs
            (see `ddpnopt.ddp.terminal`); "sqrt" by default for "batch", "gn" for the others.
        curvature: M of Table 2: "identity", "rmsprop", "adam", "kfac", "ekfac", or an object such as
            `KFAC(damping=0.1, refresh=20)`.
        feedback: False sets Q_ux = 0: then it is SGD, RMSprop, Adam, KFAC or EKFAC, step for step.
        closed_loop: False applies the open-loop part k alone and needs no second forward pass.
        order: 2 expands the dynamics to second order (with value="full").
        vxx_reg: eps added to V_xx at each layer (with value="full").
        relax: the share of each sample's loss that a step of value="batch" asks to remove. Less is safer and slower.
        relax_samples: that share falls as 1 / sqrt(1 + samples / relax_samples) with the samples seen so far, as the
            noise of the batches asks for, and without knowing how many there will be; None keeps it constant.
        dof: degrees of freedom that a step of value="batch" may use, for each sample of the batch: the damping is
            raised until they suffice, whatever the learning rate. It keeps a step from fitting its batch at the
            expense of the others; 1 sets no limit.
        guard: keep the stage's own Gauss-Newton term in Q_uu for all that concerns feedback (the recursion and K), so
            that V_xx stays positive and no sample overcorrects.
        average: keep the average of the weights for `eval()`; by default for value="batch". It takes the memory of one
            more copy of the weights.
        momentum: as in `torch.optim.SGD`, on the step M^-1 (Q_u + Q_ux dx).
        weight_decay: the stage cost lambda |u|^2 / 2, inside Q_u.
        reduction: whether the loss is a "mean" or a "sum" over the batch.
        open_loop_lr: learning rate of the parameters without feedback (norms, embeddings, …): by default lr, the base
            optimizer's, and beside value="batch" 1e-3 of Adam.
        exclude: names of layers to be left to the base optimizer.
        on_nonfinite: "raise" an error when loss, gradient or update is not finite, or "skip" the step and count it;
            weights and state stay as they were in both cases.
        weight_grads: let autograd fill `.grad` of the layers with feedback, too. DDPNOpt does not use it (it weights
            each sample anew), so by default it is not computed.
        recompute: True keeps less from the backward to the forward sweep, for large models: gradients of single samples
            (convolutions, tokens) are computed anew, and layers are applied again for want of slopes at their inputs.
            False keeps all of them. By default gradients of samples are computed anew in layers where they would take
            more memory than the layer's input and output, and small layers are applied again.
        diagnostics: measure everything in `report` at each step.
        data_parallel: train one batch in several processes: True (all processes of `torch.distributed`), a process
            group of it, or False. By default it is found out from `DistributedDataParallel` around the model. Without
            it the optimizer does all the communication itself, and less of it.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        params: Iterable[Any] | None = None,
        value: str = "batch",
        terminal: forms.TerminalOption | None = None,
        curvature: str | Curvature = "identity",
        feedback: bool = True,
        closed_loop: bool = True,
        order: int = 1,
        vxx_reg: float = 0.0,
        relax: float = DEFAULT_RELAX,
        relax_samples: float | None = DEFAULT_RELAX_SAMPLES,
        dof: float = DEFAULT_DOF,
        guard: bool = True,
        average: bool | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        reduction: str = "mean",
        open_loop_lr: float | None = None,
        exclude: Iterable[str] = (),
        on_nonfinite: str = "raise",
        weight_grads: bool = False,
        recompute: bool | None = None,
        diagnostics: bool = False,
        data_parallel: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"model must be an nn.Module, not {type(model).__name__}: DDPNOpt(model, lr=…).")
        model = unwrap(model)
        require(reduction in ("mean", "sum"), "reduction", reduction, "'mean' or 'sum'")
        require(on_nonfinite in ("raise", "skip"), "on_nonfinite", on_nonfinite, "'raise' or 'skip'")
        require(0 < relax <= 1, "relax", relax, "in (0, 1]")
        require(relax_samples is None or relax_samples > 0, "relax_samples", relax_samples, "positive, or None")
        require(open_loop_lr is None or open_loop_lr >= 0, "open_loop_lr", open_loop_lr, "zero or positive")
        if terminal is None:
            terminal = "sqrt" if value == "batch" else "gn"
        method = Method(value, terminal, order, vxx_reg, guard, mean=reduction == "mean", dof=dof)
        if isinstance(curvature, str):
            require(curvature in CURVATURES, "curvature", curvature, f"one of {', '.join(CURVATURES)}")
            curvature = CURVATURES[curvature]()
        elif not isinstance(curvature, Curvature):
            raise OptionError(f"curvature={curvature!r} is neither a name nor has it the interface of a Curvature.")
        if lr is None:
            if value != "batch" or not feedback:
                raise OptionError("lr: only value='batch' with feedback does without a learning rate; give one.")
            lr = DEFAULT_LR

        self.model, self.curvature, self.method = model, curvature, method
        self.feedback, self.closed_loop = feedback, closed_loop
        self.on_nonfinite, self.diagnostics, self.recompute = on_nonfinite, diagnostics, recompute
        self.report = Report()
        self._chains: dict[tuple[Any, ...], bool] = {}
        self._told: set[str] = set()

        chosen = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
        if not chosen:
            raise ModelError("The model has no trainable parameters.")
        check_devices(model)
        super().__init__(
            chosen, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "open_loop_lr": open_loop_lr}
        )
        self.relax, self.relax_samples = relax, relax_samples
        self.steps, self.samples = 0, 0  # taken and seen so far
        wanted = value == "batch" and feedback if average is None else average
        self._averaging = Averaging() if wanted else None
        self._names = {p: name for name, p in model.named_parameters()}
        self._groups = Groups(self.param_groups, self._names, curvature)
        mine = {p for group in self.param_groups for p in group["params"]}
        units = find_units(model, mine, frozenset(exclude))
        slopes_from: float = SLOPES_FROM if recompute is None else 0
        if recompute or not feedback:
            slopes_from = math.inf
        self._capture = Capture(model, units, skip_weight_grads=feedback and not weight_grads, slopes_from=slopes_from)
        self.data_parallel = data_parallel
        self._group = Group(None if data_parallel is True else data_parallel) if data_parallel else None
        if self._group is not None:
            self._group.broadcast(model)
        if self._device.type == "cpu":
            retain_freed()
        self._watch()

    # -- setting up --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Let the capture look at the next pass, if anybody wants to know."""
        # a share of the batch is known by its samples
        self._capture.enabled = (
            self.feedback
            or self._group is not None
            or any(self.curvature.watches(self.state.get(unit.weight, {})) for unit in self._capture.units)
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "_groups"):  # not yet while the base class sets up the first ones
            self._groups.check(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._groups.groups = self.param_groups  # load_state_dict puts new ones in their place

    def state_dict(self) -> dict[str, Any]:
        in_use = self._averaging is not None and self._averaging.in_use
        extra = {"steps": self.steps, "samples": self.samples, "averages_in_use": in_use}
        return {**super().state_dict(), KEY: {**header(self.curvature), **extra}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_header(state_dict, self.curvature)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != KEY})
        found = state_dict.get(KEY, {})
        self.steps, self.samples = found.get("steps", 0), found.get("samples", 0)
        if self._averaging is not None:
            self._averaging.in_use = found.get("averages_in_use", False)
        self._watch()

    # -- the average of the weights ----------------------------------------------------------------------------------

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average of the weights into the model: to evaluate it, or to save it for use."""
        if self._averaging is not None and not self._averaging.in_use:
            self._averaging.swap(self)

    @torch.no_grad()
    def train(self) -> None:
        """Put the weights themselves back, to train on."""
        if self._averaging is not None and self._averaging.in_use:
            self._averaging.swap(self)

    # -- the training loop -------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._averaging is not None and self._averaging.in_use:
            raise StepError("step() while the model holds the average of the weights: call opt.train() first.")
        try:
            self._take_step()
            self.report.step += 1
            self.steps += 1
            if self._averaging is not None:
                self._averaging.after_step(self, self.steps)
        except NonFiniteError:
            if self.on_nonfinite == "raise":
                raise
            self.report.skipped += 1

    def _take_step(self) -> None:
        group = self._find_group()
        try:
            recording = join(self._capture.take_all()) if self._capture.enabled else None
            watched = self.feedback or self.curvature.watches({})
            captured = recording.stages if recording is not None and watched else []
            known = self._known_layers() if recording is None and watched else []
            mine = {p for each in (*(stage.unit for stage in captured), *known) for p in each.parameters}
            rest = [p for group in self.param_groups for p in group["params"] if p.grad is not None and p not in mine]
            if not mine and not rest:
                raise StepError("step() without a backward pass: call loss.backward() first.")
            if self.feedback:
                self._tell(rest)
            incoming = (stage.p_h for stage in captured)  # not kept: the stages are to let go of them one by one
            gradients = (p.grad for p in (*rest, *(p for unit in known for p in unit.parameters)))
            total = finite_sum([g for g in (*incoming, *gradients) if g is not None])
        except BaseException:
            if group is not None:
                group.begin(self._device, FAILED)
            raise
        peers = ALONE
        if group is None:
            check_finite(total, "the gradient of the loss", ADVICE)
        else:
            assert recording is not None
            met = group.begin(
                self._device, READY, recording.batch_size, total, ",".join(s.name for s in recording.stages),
                self.feedback and not group.averaged and any(penalty(stage) is not None for stage in captured),
            )  # fmt: skip
            if met is None:
                self.report.skipped += 1
                return
            peers = met
        if recording is not None:
            settle(recording, captured, peers, self._settling())
        if isinstance(peers, Together):
            rest = share_gradients(peers, self._all_but(mine if self.feedback else set()), mean=self.method.mean)
            rest = [p for p in rest if p not in mine]

        now = rest if self.feedback else [*rest, *mine]  # the layers' own as their turn in the sweep comes
        old = {p: p.detach().clone() for p in now}
        states = {p: dict(self.state[p]) for p in (*mine, *rest)}
        try:
            outputs = None
            if recording is not None and self.feedback:
                outputs = self._sweep(recording, old, states, rest, peers)
            else:
                self._open_loop(rest)
                for stage in captured:
                    self._without_feedback(stage, peers)
                for unit in known:
                    self._descend(unit.name, unit.parameters, self.curvature, unit.layer, {"solve_only": True})
            written = peers.total(finite_sum([p.detach() for p in states] + (outputs or [])))
            check_finite(written, "a weight or output after the step", ADVICE)
        except BaseException:
            self._take_back(old, states)
            raise
        if recording is not None:
            self.samples += peers.batch(recording.batch_size)
        if not self.feedback:
            self._watch()

    # -- together with other processes -------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self._capture.units[0].parameters[0].device

    def _find_group(self) -> Group | None:
        wrapper = self._capture.wrapper
        if isinstance(wrapper, DistributedDataParallel) and self.data_parallel is not False:
            if self._group is None:
                self._group = Group(wrapper.process_group)
            self._group.averaged = True
        return self._group

    def _settling(self) -> Settling:
        unscaled = hasattr(self, "found_inf") and getattr(self, "grad_scale", None) is None
        weight_grads = not self._capture.skip_weight_grads
        return Settling(self.method, self.feedback, weight_grads, unscaled, self.diagnostics)

    def _all_but(self, some: set[nn.Parameter]) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p not in some]

    def _overflowed(self) -> None:
        group = self._find_group()
        if group is not None:
            group.begin(self._device, OVERFLOWN)
        self.report.skipped += 1

    def _take_back(self, old: dict[nn.Parameter, Tensor], states: dict[Any, dict[str, Any]]) -> None:
        for p, weight in old.items():
            p.copy_(weight)
        for p, state in states.items():
            self.state[p] = dict(state)

    # -- the parts of a step -----------------------------------------------------------------------------------------

    def _sweep(
        self,
        recording: Recording,
        old: dict[nn.Parameter, Tensor],
        states: dict[Any, dict[str, Any]],
        rest: list[nn.Parameter],
        peers: Peers,
    ) -> list[Tensor] | None:
        """Algorithm 3 on the captured layers; the new outputs, or None where no step is better than none."""
        share = self.relax
        if self.relax_samples is not None:
            share /= math.sqrt(1 + self.samples / self.relax_samples)
        sweep = partial(self._sweep_for, recording, old, rest, peers)
        if self.method.value != "batch" or not self.closed_loop:
            return sweep(share)
        found = losses(recording, self.method.mean)  # now, while the stages are whole
        if not recording.used_outputs():
            return sweep(share)  # the model computes its loss itself: no outputs to judge by
        before = peers.total(float(shares(recording, self.method.mean).sum())) + self._groups.stage_cost()
        for attempt in range(ATTEMPTS):
            if attempt:
                retrace(self._capture, recording)
            outputs = sweep(share * SHORTER**attempt)
            assert outputs is not None
            after = peers.total(total_loss(recording.used(outputs), found))
            if after + self._groups.stage_cost() <= before:
                return outputs
            self._take_back(old, states)
            self.report.shortened += attempt == 0
        self.report.undone += 1
        self.report.actual = None
        return None

    def _sweep_for(
        self,
        recording: Recording,
        old: dict[nn.Parameter, Tensor],
        rest: list[nn.Parameter],
        peers: Peers,
        share: float,
    ) -> list[Tensor] | None:
        """Both passes, asking for this share of each sample's loss; the recording lets go of its stages on the way."""
        displacement = Displacement(self._is_chain(recording), once=not self.diagnostics)
        (p_h, p_x), value = self.method.start(self._capture, recording, displacement, share, peers)
        if self.diagnostics:
            losses(recording, self.method.mean)
        if self.recompute:
            p_x = [[None] * len(column) for column in p_x]
        stages = [
            self._stage(stage, old, [h[t] for h in p_h], [x[t] for x in p_x], peers)
            for t, stage in enumerate(recording.stages)
        ]
        del p_h, p_x  # the stages have them
        own = float(peers.batch(recording.batch_size)) if self.method.mean else 1.0
        policies = backward_pass(stages, value, self.curvature, own)
        log: Log | None = {} if self.diagnostics else None
        if log is not None:
            self.report.predicted = predicted_change(stages, value, policies)
        self._open_loop(rest)  # not before the backward pass, which looks at the old network
        again = partial(replay, self._capture, recording) if self.closed_loop else None
        outputs = forward_pass(stages, policies, self.curvature, again, displacement, log)
        if log is not None:
            self._write_report(recording, value, log, outputs, peers)
        return outputs

    def _is_chain(self, recording: Recording) -> bool:
        """Whether each layer reads just the layer before it; found out once for each sequence of layers."""
        key = recording.signature
        if key not in self._chains:
            self._chains[key] = all(probe.off_chain(recording) is None for probe in probes(self._capture, recording))
            self._capture.keep_outputs = not all(self._chains.values())
        return self._chains[key]

    def _stage(
        self,
        captured: Captured,
        old: dict[nn.Parameter, Tensor],
        p_h: list[Tensor],
        p_x: list[Tensor | None],
        peers: Peers,
    ) -> Stage:
        parameters = captured.unit.parameters
        dtype = parameters[0].dtype  # autocast may have made the rest smaller
        u = [p.detach() for p in parameters]
        group, l_u = self._groups.settings(captured.name, parameters)
        if captured.extra is not None:
            l_u = captured.extra if l_u is None else [a + b for a, b in zip(l_u, captured.extra, strict=True)]
        state = self._layer_state(parameters)
        problem = Problem(
            captured.name, captured.layer, captured.x.to(dtype), u, float(group["lr"]),
            [p.to(dtype) for p in p_h], [None if p is None else p.to(dtype) for p in p_x], l_u,
            captured.p_h_dot_h, peers, self.recompute, captured.moves, state,
        )  # fmt: skip
        captured.let_go()

        def backup() -> Parts:
            if parameters[0] not in old:
                old.update(zip(parameters, [w.clone() for w in u], strict=True))
            return [old[p] for p in parameters]

        return Stage(problem, state, list(parameters), group["momentum"], backup)

    def _write_report(
        self, recording: Recording, value: ValueFunction, log: Log, outputs: list[Tensor] | None, peers: Peers
    ) -> None:
        report = self.report
        report.layers, report.guarded = log, value.guarded_share
        found = losses(recording, self.method.mean)
        report.loss = found[0][1].kind
        report.actual = None
        if outputs is not None and recording.used_outputs():
            change = total_loss(recording.used(outputs), found) - float(shares(recording, self.method.mean).sum())
            report.actual = peers.total(change)
