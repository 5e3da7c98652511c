"""`DDPNOpt`: the optimizer, seen from the user's training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpnopt._averaging import EVERY, Averaging
from ddpnopt._capture_of import capture_of, follow_unfrozen, renew_capture
from ddpnopt._checks import require
from ddpnopt._derivative_step import step_of
from ddpnopt._distributed import OVERFLOW, Group, unwrap
from ddpnopt._held import Held
from ddpnopt._memory import retain_freed
from ddpnopt._options import DEFAULT_LR, DEFAULTS, NOT_GIVEN, refuse, refuse_without_effect
from ddpnopt._parameters import Parameters
from ddpnopt._troubles import Troubles
from ddpnopt._value import ValueForm
from ddpnopt.checkpoint import STATE_KEY, check_state, state_header
from ddpnopt.curvature.base import Curvature
from ddpnopt.curvature.names import curvature_of
from ddpnopt.ddp.distance import Distance
from ddpnopt.ddp.loss_search import Belonging, Search
from ddpnopt.ddp.rollouts import LONGEST, Rollouts
from ddpnopt.ddp.stacked import Stacking
from ddpnopt.ddp.step_length import StepLength
from ddpnopt.ddp.terminal import TerminalOption
from ddpnopt.ddp.trust import Trust
from ddpnopt.errors import ModelError, NonFiniteError, OptionError, StepError
from ddpnopt.report import Report
from ddpnopt.trace.hooked_optimizer import HookedOptimizer, seen_by_torch
from ddpnopt.trace.model_layers import check_devices


class DDPNOpt(HookedOptimizer):
    """Differential dynamic programming for neural networks.

    Use it like any other optimizer, but pass the model instead of its parameters:

        opt = DDPNOpt(model)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()

    Several forward and backward passes before a step() are the micro-batches of one batch (gradient accumulation, with
    the loss of each divided by their number). For evaluation `opt.eval()` puts the average of the weights over the last
    part of training into the model; `opt.train()` restores them. An option without effect in the form is refused.

    Args:
        model: any `nn.Module`. Its `nn.Linear` and `nn.Conv1d/2d/3d` layers get feedback; with value="batch" and
            "outer", and a curvature that treats each parameter alone, so do norms, embeddings, attention, recurrent
            layers and parameters that belong to no layer. The base optimizer updates all others, open loop.
        lr: leave it out: each step then finds its own length, independent of all scales (`ddpnopt.ddp.step_length`);
            a scheduler acts on a factor that starts at 1. Given, it is eta of Q_uu = M / eta: for value="batch" the
            inverse of a fixed damping, for the other forms the learning rate that their base optimizers need.
        params: parameters or parameter groups to train, as for `torch.optim`; all of the model's by default. A group
            may set lr, momentum, weight_decay and open_loop_lr.
        value: form of the value function: "batch" (all samples as one state), "outer" (Proposition 2: V_xx = z z' for
            each sample) or "full" (V_xx of each sample, the paper's form for feedforward networks).
        terminal: terminal curvature, "sqrt", "gn", "cross_entropy", "mse", "sampled" or a callable of the outputs
            (see `ddpnopt.ddp.terminal`); "sqrt" by default for "batch", "gn" for the others.
        curvature: M of Table 2: "identity", "rmsprop", "adam", "kfac", "ekfac", or an object such as
            `KFAC(damping=0.1, refresh=20)`.
        feedback: False sets Q_ux = 0: then it is SGD, RMSprop, Adam, KFAC or EKFAC, step for step.
        closed_loop: True: every step has a second forward pass; False: none, the open-loop part alone is applied. By
            default every step with lr; without it those that show something new (`ddpnopt.ddp.rollouts`).
        relax: with lr, the fraction of each sample's loss that a step of value="batch" asks to remove, 1 by default.
        relax_samples: with lr, that fraction falls as 1 / sqrt(1 + samples / relax_samples) with the samples seen so
            far; 6400 by default, None keeps it constant.
        dof: with lr, degrees of freedom per sample that a step of value="batch" may use, 0.25 by default: the damping
            is raised until they are within this limit; 1 sets no limit.
        guard: for "outer" and "full": keep the stage's own Gauss-Newton term in Q_uu for everything that concerns
            feedback (the recursion and K), so that V_xx stays positive and no sample overcorrects. True by default.
        order: for "full": 2 expands the dynamics to second order.
        vxx_reg: for "full": eps added to V_xx at each layer.
        vxx_power: for "outer" and "full": V_xx starts at the Hessian of a sample's loss over B to this power, by
            default 1 ("gn": 2). More weakens the feedback; with 0 each sample plans as if the step were its own.
        momentum: as in `torch.optim.SGD`, on the step M^-1 (Q_u + Q_ux dx).
        weight_decay: the stage cost lambda |u|^2 / 2, inside Q_u.
        open_loop_lr: with lr, that of the parameters without feedback: by default lr; with value="batch" Adam's 1e-3.
        exclude: names of layers that are left to the base optimizer.
        average: keep the average of the weights, one more copy, for `eval()`; by default for value="batch".
        reduction: whether the loss is a "mean" or a "sum" over the batch.
        on_nonfinite: "raise" an error when loss, gradient or update is not finite, or "skip" the step and count it;
            weights and state stay as they were in both cases.
        weight_grads: let autograd compute `.grad` of the layers with feedback, too. DDPNOpt does not use it (it
            computes its own weighted gradient), so by default it is not computed.
        data_parallel: train one batch in several processes: True (all processes of `torch.distributed`), a process
            group, or False. By default it is detected from `DistributedDataParallel` around the model. Without that
            wrapper the optimizer does all the communication itself, and less of it.
        batch_dim: dimension of the model's inputs that has the samples, 0 or 1 (sequence-first). By default it is found
            out where the inputs leave a choice, by running the first batch once more with some samples exchanged.
        recompute: True stores less between the backward and the forward sweep, for large models: per-sample gradients
            (convolutions, tokens) are computed again, and layers are applied again instead of storing input gradients.
            False stores all of them. By default per-sample gradients are recomputed in layers where they would need
            more memory than the layer's input and output, and small layers are applied again.
        diagnostics: measure everything in `report` at each step.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        # the method
        params: Iterable[Any] | None = None,
        value: str = "batch",
        terminal: TerminalOption | None = None,
        curvature: str | Curvature = "identity",
        feedback: bool = True,
        closed_loop: bool | None = None,
        # value="batch" only
        relax: float | None = None,
        relax_samples: float | None = NOT_GIVEN,
        dof: float | None = None,
        # value="outer" and "full" only, value="full" only
        guard: bool | None = None,
        vxx_power: int | None = None,
        order: int | None = None,
        vxx_reg: float | None = None,
        # the base optimizer
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        open_loop_lr: float | None = None,
        exclude: Iterable[str] = (),
        average: bool | None = None,
        # your training loop
        reduction: str = "mean",
        on_nonfinite: str = "raise",
        weight_grads: bool = False,
        data_parallel: Any = None,
        batch_dim: int | None = None,
        # memory and diagnostics
        recompute: bool | None = None,
        diagnostics: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"model must be an nn.Module, not {type(model).__name__}: DDPNOpt(model, lr=…).")
        model = unwrap(model)
        require(reduction in ("mean", "sum"), "reduction", reduction, "'mean' or 'sum'")
        require(on_nonfinite in ("raise", "skip"), "on_nonfinite", on_nonfinite, "'raise' or 'skip'")
        require(batch_dim in (None, 0, 1), "batch_dim", batch_dim, "0, 1 or None")
        require(open_loop_lr is None or open_loop_lr >= 0, "open_loop_lr", open_loop_lr, "zero or positive")
        coupled = {"relax": relax, "relax_samples": relax_samples, "dof": dof}
        full = {"order": order, "vxx_reg": vxx_reg}
        alone = {"guard": guard, "vxx_power": vxx_power}
        closed = {"terminal": terminal, "closed_loop": closed_loop, "open_loop_lr": open_loop_lr}
        closed |= {"recompute": recompute, "diagnostics": diagnostics or None}
        refuse_without_effect(value, feedback, coupled, full, closed, alone)
        relax = DEFAULTS["relax"] if relax is None else relax
        relax_samples = DEFAULTS["relax_samples"] if relax_samples is NOT_GIVEN else relax_samples
        require(0 < relax <= 1, "relax", relax, "in (0, 1]")
        require(relax_samples is None or relax_samples > 0, "relax_samples", relax_samples, "positive, or None")
        if terminal is None:
            terminal = "sqrt" if value == "batch" else "gn"
        given = {"order": order, "vxx_reg": vxx_reg, "guard": guard, "dof": dof}
        settings: dict[str, Any] = {name: DEFAULTS[name] if it is None else it for name, it in given.items()}
        settings["vxx_power"] = vxx_power
        if lr is None and (value != "batch" or not feedback):
            raise OptionError("lr: only value='batch' with feedback needs no learning rate; give one.")
        scale_free = lr is None and terminal == "sqrt" and curvature == "identity"
        if scale_free:
            given = {**coupled, "momentum": momentum or None, "open_loop_lr": open_loop_lr}
            refuse(given, "steps of automatic length: it needs lr, for example lr=3")
        self.form = ValueForm(value, terminal, mean=reduction == "mean", scale_free=scale_free, **settings)
        self._free_of_scale = scale_free
        lr = lr if lr is not None else 1.0 if scale_free else DEFAULT_LR
        chosen = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
        self._frozen = [p for p in model.parameters() if not p.requires_grad and params is None]
        if not chosen:
            raise ModelError("The model has no trainable parameters.")
        check_devices(model)

        self.model, self.curvature, self.feedback = model, curvature_of(curvature), feedback
        self.closed_loop = DEFAULTS["closed_loop"] if closed_loop is None else closed_loop
        self.relax, self.relax_samples = relax, relax_samples
        self.on_nonfinite, self.diagnostics, self.recompute = on_nonfinite, diagnostics, recompute
        self.data_parallel = data_parallel
        self.report, self._troubles, self._held, self._stacking = Report(), Troubles(), Held(), Stacking()
        self.steps, self.samples = 0, 0  # taken and seen so far
        self._length, self._distance, self._trust = StepLength(), Distance(), Trust()  # without a learning rate
        self._rollouts = Rollouts(1 if closed_loop or diagnostics or not scale_free else LONGEST)
        self._uses_losses = diagnostics or self.form.uses_losses
        self._search, self._pass_search, self._belonging = Search(), Search(), Belonging()  # for losses, also of passes
        self._chains: dict[tuple[Any, ...], bool] = {}  # whether a sequence of layers is a chain, by signature
        self._averaging = Averaging() if (value == "batch" and feedback if average is None else average) else None

        super().__init__(
            chosen, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "open_loop_lr": open_loop_lr}
        )
        self._names = {p: name for name, p in model.named_parameters()}
        self._parameters = Parameters(
            self.param_groups, self.state, self._names, self.curvature, feedback=feedback, coupled=value == "batch"
        )
        self._capturing = frozenset(exclude), weight_grads, batch_dim
        self._capture = capture_of(self, *self._capturing)
        self._group = Group(None if data_parallel is True else data_parallel) if data_parallel else None
        if self._group is not None:
            self._group.broadcast(model)
        if self._device.type == "cpu":
            retain_freed()
        self._watch()

    # -- the training loop -------------------------------------------------------------------------------------------

    @seen_by_torch
    def step(  # type: ignore[override]
        self, closure: Callable[[], float | Tensor] | None = None, *, loss: float | Tensor | None = None
    ) -> float | Tensor | None:
        """Take one step from the passes since the last one, or from that of the closure, called once.

        Args:
            closure: computes the loss, calls backward() and returns the loss.
            loss: the value of the loss that backward() was called on, before a GradScaler; after several micro-batches
                the sum of their losses. It gives the scale of losses that the gradient alone does not identify.
        """
        return super().step(closure, loss=loss)

    def _attempt(self) -> None:
        try:
            self._step()
        except NonFiniteError:
            if self.on_nonfinite == "raise":
                raise
            self.report.skipped += 1

    def _step(self) -> None:
        if self._averaging is not None and self._averaging.in_use:
            raise StepError("step() while the model holds the average of the weights: call opt.train() first.")
        self._held.look(self)
        with self._capture.in_modes_of_passes(), step_of(self) as step:
            # 1. Collect what the passes since the last step have recorded
            step.collect()

            # 2. Agree with the other processes on the whole batch and the scale of its loss
            if not step.agree():
                self.report.skipped += 1
                return

            # 3. Plan and apply an update for each layer, until the loss of the batch does not increase
            if self.feedback and not step.layers:
                step.apply_open_loop()
            elif self.feedback:
                for fraction in step.fractions():
                    step.plan(fraction)
                    step.apply()
                    if step.accept():
                        break
                    step.undo()
                else:
                    self.report.undone += 1
                    self.report.actual = None
            else:
                step.apply_base_optimizer()

            # 4. Check what was written, and count
            step.finish()
        self._held.keep(self)
        self._capture.rolls_out = self._rollouts.is_due
        self.report.step, self.steps = self.report.step + 1, self.steps + 1
        if self._averaging is not None and self.steps % EVERY == 0:
            self._averaging.update(self, self.steps // EVERY, self._capture.batch_norms)
        if self._frozen:
            follow_unfrozen(self)
        if not self.feedback:
            self._watch()

    def _watch(self) -> None:
        """Record the next pass only if the step needs it."""
        # several processes need to know the number of samples
        self._capture.enabled = (
            self.feedback
            or self._group is not None
            or any(self.curvature.watches(self.state.get(layer.weight, {})) for layer in self._capture.layers)
        )

    # -- the average of the weights ----------------------------------------------------------------------------------

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average of the weights into the model: to evaluate it, or to save it for use."""
        if self._averaging is not None and not self._averaging.in_use:
            self._averaging.swap(self, self._capture.batch_norms)

    @torch.no_grad()
    def train(self) -> None:
        """Put the training weights back into the model."""
        if self._averaging is not None and self._averaging.in_use:
            self._averaging.swap(self, self._capture.batch_norms)

    # -- parameter groups and state ----------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "_parameters"):  # not yet while the base class adds the first ones
            self._names.update({p: name for name, p in self.model.named_parameters()})  # it may have new layers
            self._parameters.check(self.param_groups[-1])
            renew_capture(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._parameters.groups, self._parameters.state = self.param_groups, self.state  # load_state_dict replaces them

    def state_dict(self) -> dict[str, Any]:
        in_use = self._averaging is not None and self._averaging.in_use
        counts: dict[str, Any] = {"steps": self.steps, "samples": self.samples, "averages_in_use": in_use}
        if self.form.scale_free:
            counts |= {"step_length": self._length.state(), "distance": self._distance.state()}
            counts |= {"trust": self._trust.state(), "rollouts": self._rollouts.state()}
        return {**super().state_dict(), STATE_KEY: {**state_header(type(self.curvature).__name__), **counts}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_state(state_dict, type(self.curvature).__name__)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != STATE_KEY})
        found = state_dict.get(STATE_KEY, {})
        self.steps, self.samples = found.get("steps", 0), found.get("samples", 0)
        self._length, self._trust = StepLength(**found.get("step_length", {})), Trust(**found.get("trust", {}))
        self._distance = Distance(**found.get("distance", {}))
        self._rollouts.load(found.get("rollouts", {}))
        if self.form.scale_free and "step_length" not in found:  # saved with a learning rate: start again from 1
            for group in self.param_groups:
                group["lr"] = 1.0
        if self._averaging is not None:
            self._averaging.in_use = found.get("averages_in_use", False)
        self._watch()

    # -- several processes -------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self._capture.layers[0].weight.device

    def _find_group(self) -> Group | None:
        wrapper = self._capture.parallel
        if isinstance(wrapper, DistributedDataParallel) and self.data_parallel is not False:
            self._group = self._group or Group(wrapper.process_group)
            self._group.averaged = True
        return self._group

    def _overflowed(self) -> None:
        group = self._find_group()
        if group is not None:
            group.begin(self._device, OVERFLOW)
        self.report.skipped += 1
