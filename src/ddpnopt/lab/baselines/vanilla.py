"""Vanilla DDP (Algorithm 1) as a training method: the batch as one trajectory, full second-order derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, jvp, vmap

from ddpnopt._checks import require
from ddpnopt.control import ControlError, Problem
from ddpnopt.control.backward import Sweep, backward
from ddpnopt.control.derivatives import Expansion, joined
from ddpnopt.control.inputs import prepare
from ddpnopt.control.options import Options
from ddpnopt.control.problem import StageFunction
from ddpnopt.control.rollout import simulate, stage_costs
from ddpnopt.control.search import Current, line_search
from ddpnopt.control.solver import schedule
from ddpnopt.control.stages import Run, Trajectory, over_batch, plan, stack
from ddpnopt.ddp.loss import AnyLoss, Loss
from ddpnopt.ddp.recognise import recognise
from ddpnopt.errors import ModelError
from ddpnopt.lab.baselines.base import ChainOptimizer, Pass
from ddpnopt.lab.baselines.chain import ChainStage, require_fully_connected
from ddpnopt.lab.baselines.elementwise import elementwise_tail
from ddpnopt.lab.baselines.layer_sweep import linearise, sweep

LOSSES = ("auto", "half_squared_error")


@dataclass
class DDPReport:
    """What the last step did."""

    tries: int = 0  # sweeps until one was accepted, or until `tries` was used up
    damping: float = 0.0  # mu of the last sweep
    step_size: float = 0.0  # of the line search; 0 where no step was taken
    rejected: int = 0  # steps so far in which nothing was accepted and the weights stayed as they were


class VanillaDDP(ChainOptimizer):
    """Vanilla DDP, row four of Table 2: M = E[Q_uu], direction E[Q_u + Q_ux dx].

    The B samples are stacked into one state x_t of B n_t numbers and each layer is one stage with its m_t weights as
    control; stage cost is the weight decay, terminal cost the batch loss. `step()` is one iteration of
    `ddpnopt.control.solve`: V_xx (B n_t, B n_t), Q_uu (m_t, m_t) and K (m_t, B n_t) are dense and hold the tensor terms
    V_x . f_zz, so the work is cubic in B n_t and m_t (Table 4): the reason for DDPNOpt. Where every stage is a linear
    layer with an elementwise activation, f_z and f_zz themselves are never formed (`layer_sweep`), unless `dense`.

    Every step pays mu/2 |du|^2 ("proximal" damping): Q_uu + mu I must be positive definite and the batch loss must
    fall, else the sweep is repeated with a larger mu. mu shrinks with success, but not below `damping`, without which a
    step would fit its batch at the cost of the others.

    Args:
        model: a chain of `nn.Linear` layers with activations that are twice differentiable by `torch.func`.
        lr: the largest step size of the line search.
        damping: least mu.
        weight_decay: the stage cost lambda |u|^2 / 2.
        tries: sweeps in one step.
        loss: "auto" reads cross-entropy and squared error off the gradient at the outputs (see `ddpnopt.ddp.loss`);
            "half_squared_error" says that it is |z - target|^2 / 2 summed over the outputs, as `MMCLoss`.
        reduction: whether the loss is a "mean" or a "sum" over the batch.
        dense: form f_z of the stacked batch, and V_x . f_zz, also where `layer_sweep` can do without them.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1.0,
        *,
        damping: float = 1.0,
        weight_decay: float = 0.0,
        tries: int = 20,
        loss: str = "auto",
        reduction: str = "mean",
        dense: bool = False,
    ) -> None:
        require(lr > 0, "lr", lr, "positive")
        require(damping > 0, "damping", damping, "positive")
        require(weight_decay >= 0, "weight_decay", weight_decay, "zero or positive")
        require(isinstance(tries, int) and tries >= 1, "tries", tries, "an integer >= 1")
        require(loss in LOSSES, "loss", loss, f"one of {', '.join(LOSSES)}")
        require(reduction in ("mean", "sum"), "reduction", reduction, "'mean' or 'sum'")
        defaults = {"lr": lr, "damping": damping, "weight_decay": weight_decay}
        super().__init__(model, defaults, skip_weight_grads=True)
        require_fully_connected(self.stages, type(self).__name__)
        self.tries, self.loss, self.mean = tries, loss, reduction == "mean"
        self._sigmas = [None if dense else elementwise_tail(stage) for stage in self.stages]
        self._checked = False  # once: the stages stay the same functions
        self.report = DDPReport()

    def problem(self, seen: Pass) -> Problem:
        """(OCP) of this batch. x_0 is a constant of the first stage: no derivatives at the data are needed."""
        decay = float(self.param_groups[0]["weight_decay"])
        dynamics = [
            _stacked(stage, seen.x[t].shape, seen.x[0].double() if t == 0 else None)
            for t, stage in enumerate(self.stages)
        ]
        loss, shape = self._loss_of(seen), seen.x[-1].shape
        phi = lambda x: loss.per_sample(x.reshape(shape)).sum()  # noqa: E731
        return Problem(dynamics, lambda x, u: 0.5 * decay * u.square().sum(), phi)

    def _loss_of(self, seen: Pass) -> AnyLoss:
        z, q = seen.x[-1].double(), seen.grad_x[-1]
        assert q is not None
        if self.loss == "auto":
            return recognise(z, q.double(), self.mean)
        w = 1.0 / len(z) if self.mean else 1.0
        return Loss("squared_error", z - q.double() / w, z.new_tensor(0.5 * w))

    def _propose(self, seen: Pass) -> list[list[Tensor]]:
        # the recursion of V_xx loses digits at each layer: float64, whatever the weights are
        u0 = [torch.cat([p.detach().double().flatten() for p in stage.parameters]) for stage in self.stages]
        u = self._iterate(self.problem(seen), u0, seen)
        return [_unstack(stage, w) for stage, w in zip(self.stages, u, strict=True)]

    def _iterate(self, problem: Problem, u0: list[Tensor], seen: Pass) -> list[Tensor]:
        """One accepted iteration of Algorithm 1 from the controls u0, or u0 itself."""
        group, memory = self.param_groups[0], self.state[self.stages[0].parameters[0]]
        damping = float(group["damping"])
        x0 = u0[0].new_zeros(1)
        if not self._checked:
            try:
                prepare(problem, x0, u0)
            except ControlError as error:  # a stage that torch.func cannot differentiate
                raise ModelError(f"VanillaDDP cannot use this network: {error}.") from error
            self._checked = True
        runs = plan(problem, [1, *(x.numel() for x in seen.x[1:])], [len(u) for u in u0])
        trajectory = simulate(runs, x0.unsqueeze(0), stack(runs, [u.unsqueeze(0) for u in u0]))
        costs = stage_costs(problem, runs, trajectory)
        current = Current(trajectory, costs.sum(0), costs.abs().sum(0))
        backward_sweep = self._backward(problem, runs, trajectory, seen)
        options = _options(self.tries, damping)
        mu = u0[0].new_tensor([max(float(memory.get("mu", damping)), damping)])
        factor = u0[0].new_tensor([float(memory.get("factor", 1.0))])
        steps = float(group["lr"]) * u0[0].new_tensor([options.backtrack**i for i in range(options.max_backtracks + 1)])
        report = self.report
        for attempt in range(self.tries):
            gains = backward_sweep(mu)
            trial = line_search(problem, runs, current, gains, steps, sufficient=options.sufficient, limits=None)
            report.tries, report.damping, report.step_size = attempt + 1, float(mu), float(trial.step)
            mu, factor = schedule(mu, factor, trial.accepted, options)
            if report.step_size:
                break
        else:
            report.rejected += 1
        memory["mu"], memory["factor"] = min(float(mu), options.reg_max), float(factor)
        return [block[0, 0] for block in trial.found.trajectory.u]

    def _backward(
        self, problem: Problem, runs: Sequence[Run], trajectory: Trajectory, seen: Pass
    ) -> Callable[[Tensor], Sweep]:
        """The backward sweep along the trajectory as a function of mu (1,)."""
        decay = float(self.param_groups[0]["weight_decay"])
        if all(sigma is not None for sigma in self._sigmas) and seen.x[0].dim() == 2:
            states = [seen.x[0].double(), *(x[0, 0].view(len(seen.x[0]), -1) for x in trajectory.x[1:-1])]
            layers = [
                linearise(sigma, x, _unstack(stage, u[0, 0]))
                for sigma, stage, x, u in zip(self._sigmas, self.stages, states, trajectory.u, strict=True)
                if sigma is not None
            ]
            z = trajectory.x[-1][0, 0].view(seen.x[-1].shape)
            phi_x, phi_xx = _terminal_derivatives(self._loss_of(seen), z)
            return lambda mu: sweep(layers, phi_x, phi_xx, float(mu), decay)
        expansion = _expand(problem, runs, trajectory, decay)
        return lambda mu: backward(expansion, runs, mu, regularize="proximal", trajectory=trajectory, limits=None)


def _terminal_derivatives(loss: AnyLoss, z: Tensor) -> tuple[Tensor, Tensor]:
    """phi_x (B n,) and phi_xx (B n, B n) at the outputs z (B, n): a block for each sample."""

    def gradient(z: Tensor) -> Tensor:
        return grad(lambda z: loss.per_sample(z).sum())(z)

    directions = torch.eye(z.shape[1]).to(z).unsqueeze(1).expand(-1, *z.shape)
    blocks = vmap(lambda d: jvp(gradient, (z,), (d,))[1])(directions)  # (n, B, n)
    return gradient(z).reshape(-1), torch.block_diag(*blocks.unbind(1))


def _expand(problem: Problem, runs: Sequence[Run], trajectory: Trajectory, decay: float) -> Expansion:
    """All derivatives of the sweep, second order, as `control.derivatives.expand` gives them.

    Two things are known here: the stage cost is decay/2 |u|^2, and f_zz of a stacked batch has B n_{t+1} slices that
    are hardly ever wanted one by one, so V_x . f_zz is left to the sweep.
    """
    f_z, l_z, l_zz, zs = [], [], [], []
    for run, x, u in zip(runs, trajectory.x, trajectory.u, strict=False):
        z = torch.cat([x, u], dim=-1)  # (1, 1, nz)
        weights = torch.cat([torch.zeros_like(x), torch.full_like(u, decay)], dim=-1)
        f_z.append(over_batch(jacrev(joined(run.f, run.n)), z))
        l_z.append(weights * z)
        l_zz.append(torch.diag_embed(weights))
        zs.append(z)
    x_T = trajectory.x[-1][0]
    phi_x, phi_xx = vmap(grad(problem.terminal_cost))(x_T), vmap(hessian(problem.terminal_cost))(x_T)
    none = (None,) * len(zs)
    return Expansion(tuple(f_z), none, tuple(l_z), tuple(l_zz), phi_x, phi_xx, tuple(zs), second_order=True)


def _stacked(stage: ChainStage, shape: torch.Size, constant: Tensor | None) -> StageFunction:
    """f_t of the stacked state (B n_t,) and the flat control (m_t,); with a constant input, of the control alone."""

    def f(x: Tensor, u: Tensor) -> Tensor:
        states = x.reshape(shape) if constant is None else constant
        return stage(states, _unstack(stage, u)).reshape(-1)

    return f


def _unstack(stage: ChainStage, u: Tensor) -> list[Tensor]:
    parts = u.split([p.numel() for p in stage.parameters])
    return [part.view(p.shape) for part, p in zip(parts, stage.parameters, strict=True)]


def _options(tries: int, damping: float) -> Options:
    return Options(
        method="ddp", max_iterations=tries, grad_tol=None, cost_tol=None, regularize="proximal", reg_init=damping,
        reg_min=min(1e-6, damping), reg_max=1e10, reg_factor=2.0, backtrack=0.5, max_backtracks=10, sufficient=1e-4,
    )  # fmt: skip
