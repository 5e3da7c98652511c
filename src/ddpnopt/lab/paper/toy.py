"""`toy`: the feedback update in two dimensions.

First an objective L(x, u) with a valley: the standard update ignores dx, the policy of DDP follows the valley.
Then small networks whose states are points of the plane: how far the outputs are from their target after one step of
gradient descent and after one of DDPNOpt, the layers' steps cascading in both.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.lab import style
from ddpnopt.lab.paper.captions import caption, finish
from ddpnopt.lab.paper.item import Claim, Context, Item, Picture, Result, Table
from ddpnopt.lab.paper.verdicts import Estimate

GD, DDP = style.COLOURS["adam"], style.COLOURS["ddpnopt"]
LAYERS = 4
LRS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
SHOWN_LR = 0.8
NETWORKS, QUICK_NETWORKS = 60, 8
AT = (-1.0, 1.2)
"""Where L is expanded: x_0, u_0."""
WHY = {True: "", None: "Within its margin of error over the networks.", False: "It is the other way round."}
DISPLACEMENTS = [round(0.1 * step, 1) for step in range(-12, 13)]


def objective(x: Tensor, u: Tensor) -> Tensor:
    """A valley across the axes, steep in u, with a gradient along it."""
    return 1.5 * (u + 0.7 * x - 0.2).square() + 0.1 * (x - 1.0).square()


@dataclass(frozen=True)
class PlaneExpansion:
    """L_u, L_uu and L_ux at one point: the standard update, and the policy."""

    l_u: float
    l_uu: float
    l_ux: float

    @property
    def step(self) -> float:
        """-L_u / L_uu: what a second-order method does whatever x does."""
        return -self.l_u / self.l_uu

    def policy(self, dx: float) -> float:
        """k + K dx."""
        return self.step - self.l_ux / self.l_uu * dx


def expand(x: float, u: float) -> PlaneExpansion:
    """By automatic differentiation."""
    z = torch.tensor([x, u], dtype=torch.float64)

    def L(z: Tensor) -> Tensor:
        return objective(z[0], z[1])

    gradient, hessian = torch.func.grad(L)(z), torch.func.hessian(L)(z)
    return PlaneExpansion(float(gradient[1]), float(hessian[1, 1]), float(hessian[1, 0]))


def plane_network(seed: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A chain of maps of the plane, one point to start from and one to reach."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            linear = nn.Linear(2, 2)
            with torch.no_grad():
                linear.weight.add_(torch.eye(2))  # near the identity: the trajectory is a path, not a jump
            layers += [linear, nn.Tanh()]
        return nn.Sequential(*layers), torch.randn(1, 2), torch.rand(1, 2) - 0.5


def trajectory(model: nn.Sequential, x: Tensor) -> NDArray[np.float64]:
    """x_0 to x_T: (T + 1, 2)."""
    states = [x]
    with torch.no_grad():
        for t in range(LAYERS):
            states.append(model[2 * t + 1](model[2 * t](states[-1])))
    return torch.cat(states).double().numpy()


@dataclass(frozen=True, eq=False)
class StepComparison:
    """One step of each method from the same weights."""

    nominal: NDArray[np.float64]
    gd: NDArray[np.float64]
    ddp: NDArray[np.float64]
    target: NDArray[np.float64]
    steering: dict[int, float]
    """By the order of the expansion: the cosine between the feedback Q_ux dx and the change of the gradient that the
    earlier layers' updates have brought about, grad J(x^, u) - grad J(x, u)."""

    def distance(self, path: NDArray[np.float64]) -> float:
        """From the end of a path to the target, in units of the distance before the step."""
        before = np.linalg.norm(self.nominal[-1] - self.target)
        return float(np.linalg.norm(path[-1] - self.target) / before)


def one_step(seed: int, lr: float) -> StepComparison:
    """Gradient descent and DDPNOpt (M = I) on the same network: only the feedback differs."""
    model, x, target = plane_network(seed)
    gd, ddp, second = (_stepped(model, x, target, lr, **options) for options in ({"feedback": False}, {}, {"order": 2}))
    steering = {order: _steering(model, new, x, target, lr, order) for order, new in ((1, ddp), (2, second))}
    nominal, by_gd, by_ddp = (trajectory(each, x) for each in (model, gd, ddp))
    return StepComparison(nominal, by_gd, by_ddp, target[0].double().numpy(), steering)


def _stepped(model: nn.Sequential, x: Tensor, target: Tensor, lr: float, **options: Any) -> nn.Sequential:
    trained = copy.deepcopy(model)
    form = options if options.get("feedback") is False else {"terminal": _half_squared, **options}
    optimizer = DDPNOpt(trained, lr, value="full", **form)
    optimizer.zero_grad()
    _loss(trained(x), target).backward()
    optimizer.step()
    return trained


def _loss(z: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (z - target).square().sum(1).mean()


def _half_squared(z: Tensor) -> Tensor:
    return torch.eye(2).expand(len(z), 2, 2)


def _steering(old: nn.Sequential, new: nn.Sequential, x: Tensor, target: Tensor, lr: float, order: int) -> float:
    """The cosine of `StepComparison.steering`, the median over the layers that have one before them."""
    unheeding = _stepped(old, x, target, lr, order=order, closed_loop=False)
    before, after = trajectory(old, x), trajectory(new, x)
    found = []
    for t in range(1, LAYERS):
        # u <- u - lr (Q_u + Q_ux dx): what the closed loop takes off more than the open one is Q_ux dx
        feedback = (_weights(unheeding[2 * t]) - _weights(new[2 * t])) / lr
        change = _gradient(old, t, after[t], target) - _gradient(old, t, before[t], target)
        found.append(float(torch.cosine_similarity(feedback, change, dim=0)))
    return median(found)


def _weights(layer: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in layer.parameters()])


def _gradient(model: nn.Sequential, t: int, state: NDArray[np.float64], target: Tensor) -> Tensor:
    """grad J_t with respect to the weights of layer t, which starts from `state`."""
    x = torch.as_tensor(state[None], dtype=torch.float32)
    parts = torch.autograd.grad(_loss(model[2 * t :](x), target), list(model[2 * t].parameters()))
    return torch.cat([part.flatten() for part in parts])


def run(context: Context) -> Result:
    networks = QUICK_NETWORKS if context.quick else NETWORKS
    steps: dict[float, list[StepComparison]] = {}
    for number, lr in enumerate(LRS):
        context.on_progress(f"one step with learning rate {lr:g}", number, len(LRS))
        steps[lr] = [one_step(seed, lr) for seed in range(networks)]
    context.on_progress("done", len(LRS), len(LRS))
    expansion = expand(*AT)
    claims = judge(expansion, steps)
    text = (
        "Left: the objective L(x, u), expanded at the dot. Middle: one step of both on a network of "
        f"{LAYERS} layers in the plane, at learning rate {SHOWN_LR:g}. Right: distance to the target after one step, "
        f"median of {networks} networks, and quartiles."
    )
    words = caption(text, claims)
    return Result(
        claims,
        [Table("toy", f"One step from the same weights, {networks} networks in the plane.", table(steps))],
        [Picture("toy", words, draw(expansion, steps, words), _series(expansion, steps))],
        [
            "The paper draws the pictures alone and gives no numbers. The objective, the networks (near the identity, "
            "tanh, one sample) and the measures are ours; half the squared distance as loss, M = I, the same rate."
        ],
    )


def judge(expansion: PlaneExpansion, steps: dict[float, list[StepComparison]]) -> list[Claim]:
    valley = max(abs(_valley(AT[0] + dx) - AT[1] - expansion.policy(dx)) for dx in DISPLACEMENTS)
    large = {lr: found for lr, found in steps.items() if lr >= SHOWN_LR}
    gd, ddp = (median(e.distance(path(e)) for found in large.values() for e in found) for path in (_gd, _ddp))
    # the steps of one network are no independent ones: the errors are those over the networks
    nets = (zip(*found.values(), strict=True) for found in (large, steps))
    nearer = Estimate.of(fmean(e.distance(e.gd) - e.distance(e.ddp) for e in net) for net in next(nets))
    toward = Estimate.of(fmean(e.steering[1] for e in net) for net in next(nets))
    cosines = {order: [each.steering[order] for found in steps.values() for each in found] for order in (1, 2)}
    texts = [
        f"{median(found):.2f} in the median and positive in {100 * fmean(c > 0 for c in found):.0f} % of the steps "
        f"{'as in the paper' if order == 1 else 'with dynamics of second order'}"
        for order, found in cosines.items()
    ]
    return [
        Claim(
            "The DDP policy is a line that lies in the valley of the objective.",
            valley < 1e-9,
            "in the valley",
            f"within {valley:.0e} of it",
        ),
        Claim(
            "Cascading the updates of gradient descent overshoots the target; the feedback compensates.",
            nearer.positive,
            "less overshoot",
            f"with learning rates from {SHOWN_LR:g} on the distance to the target after a step is {ddp:.2f} of the one "
            f"before, {gd:.2f} for gradient descent (medians), less by {nearer.text(2)} on the mean over the networks",
            WHY[nearer.positive],
        ),
        Claim(
            "The feedback steers the update toward the gradient at the new state.",
            toward.positive,
            "toward it",
            f"the cosine between the feedback and that change of the gradient is {toward.text(2)} on the mean over the "
            f"networks; {'; '.join(texts)}",
            WHY[toward.positive],
        ),
    ]


def _gd(each: StepComparison) -> NDArray[np.float64]:
    return each.gd


def _ddp(each: StepComparison) -> NDArray[np.float64]:
    return each.ddp


def _valley(x: float) -> float:
    """argmin over u of L(x, u)."""
    return 0.2 - 0.7 * x


def table(steps: dict[float, list[StepComparison]]) -> pd.DataFrame:
    rows = []
    for lr, found in steps.items():
        row: dict[str, object] = {"learning rate": f"{lr:g}"}
        for label, path in (("gradient descent", _gd), ("DDPNOpt", _ddp)):
            distances = [each.distance(path(each)) for each in found]
            row[f"distance left, {label}"] = f"{median(distances):.2f}"
            row[f"farther than before, {label}"] = f"{100 * sum(d > 1 for d in distances) / len(found):.0f} %"
        row["cosine of the feedback"] = f"{median(e.steering[1] for e in found):.2f}"
        row["the same, second order"] = f"{median(e.steering[2] for e in found):.2f}"
        rows.append(row)
    return pd.DataFrame(rows)


def draw(expansion: PlaneExpansion, steps: dict[float, list[StepComparison]], words: str) -> Figure:
    with style.style():
        made, (left, middle, right) = style.figure(3, width=4.3, height=3.9)
        _valley_panel(left, expansion)
        _path_panel(middle, telling(steps[SHOWN_LR]))
        _distance_panel(right, steps)
        return finish(made, "The feedback update in two dimensions", words)


def telling(found: Sequence[StepComparison]) -> StepComparison:
    """The network at the median of how much further gradient descent lands: neither the best nor the worst case."""
    gains = [each.distance(each.gd) - each.distance(each.ddp) for each in found]
    return found[int(np.argsort(gains)[len(gains) // 2])]


def _valley_panel(axes: Axes, expansion: PlaneExpansion) -> None:
    x, u = np.meshgrid(np.linspace(-2.6, 0.8, 120), np.linspace(-0.8, 2.6, 120))
    L = objective(torch.as_tensor(x), torch.as_tensor(u)).numpy()
    axes.contourf(x, u, np.sqrt(L), 12, cmap="Greys", alpha=0.5)
    ends = np.array([-1.45, 1.6])
    axes.plot(AT[0] + ends, [AT[1] + expansion.policy(d) for d in ends], color=DDP, linewidth=2.2, label="DDP policy")
    for dx in (-0.9, 0.0, 0.9):
        start = (AT[0] + dx, AT[1])
        for step, colour in ((expansion.step, GD), (expansion.policy(dx), DDP)):
            nudge = 0.035 if colour == DDP else -0.035
            arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (start[0] + nudge, start[1] + step), (start[0] + nudge, start[1]), arrowprops=arrow)
    axes.plot([], [], color=GD, label="standard update")
    axes.plot(*AT, "o", color=style.INK, markersize=5, zorder=5)
    axes.set(xlabel="x", ylabel="u", title="The policy lies in the valley", xlim=(-2.6, 0.8), ylim=(-0.8, 2.6))
    axes.grid(visible=False)
    axes.legend(loc="lower left")


def _path_panel(axes: Axes, shown: StepComparison) -> None:
    for path, colour, label in (
        (shown.nominal, style.COLOURS["sgd"], "before the step"),
        (shown.gd, GD, f"gradient descent: {shown.distance(shown.gd):.2f}"),
        (shown.ddp, DDP, f"DDPNOpt: {shown.distance(shown.ddp):.2f}"),
    ):
        axes.plot(path[:, 0], path[:, 1], color=colour, marker="o", markersize=3.5, label=label)
        axes.plot(*path[-1], marker="o", markersize=7, color=colour)
    axes.plot(*shown.target, marker="*", markersize=14, color=style.INK, linestyle="none", label="target")
    axes.set(xlabel="first unit", ylabel="second unit", title="Path of the state, layer by layer")
    axes.margins(0.1)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.85 * (high - low))  # room for the legend above the paths
    axes.legend(loc="upper right", fontsize=8, title="distance left", title_fontsize=8)


def _distance_panel(axes: Axes, steps: dict[float, list[StepComparison]]) -> None:
    for line, path, colour in (("gradient descent", _gd, GD), ("DDPNOpt", _ddp, DDP)):
        quartiles = np.array(
            [np.quantile([e.distance(path(e)) for e in found], (0.25, 0.5, 0.75)) for found in steps.values()]
        )
        axes.fill_between(LRS, quartiles[:, 0], quartiles[:, 2], color=colour, alpha=0.15, linewidth=0)
        axes.plot(LRS, quartiles[:, 1], color=colour, marker="o", markersize=3.5, label=line)
    axes.axhline(1, color=style.SOFT_INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set(xscale="log", xlabel="learning rate", title="Distance to the target after a step", ylim=(0, None))
    axes.set_xticks(LRS, [f"{lr:g}" for lr in LRS])
    axes.minorticks_off()
    axes.legend(loc="upper left")


def _series(expansion: PlaneExpansion, steps: dict[float, list[StepComparison]]) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    for label, path in (("gradient descent", _gd), ("DDPNOpt", _ddp)):
        y = [[each.distance(path(each)) for each in found] for found in steps.values()]
        lines.append(
            {
                "panel": "Distance to the target after a step",
                "label": label,
                "x": list(LRS),
                "y": [round(median(values), 4) for values in y],
                "spread": [round(float(np.subtract(*np.quantile(values, (0.75, 0.25)))) / 2, 4) for values in y],
            }
        )
    for label, step in (("standard update", lambda _: expansion.step), ("DDP policy", expansion.policy)):
        x = torch.as_tensor([AT[0] + dx for dx in DISPLACEMENTS])
        u = torch.as_tensor([AT[1] + step(dx) for dx in DISPLACEMENTS])
        lines.append(
            {
                "panel": "L after the update, when x is displaced by dx",
                "label": label,
                "x": DISPLACEMENTS,
                "y": [round(float(value), 4) for value in objective(x, u)],
            }
        )
    return lines


ITEM = Item("toy", "The feedback update in two dimensions", "Figure 2, section 4", run)
