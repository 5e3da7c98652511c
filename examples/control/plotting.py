"""Plotting functions shared by the control examples."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddpnopt.control import Rollout, Solution
from ddpnopt.control.systems import ControlTask

BLUE, ORANGE, GREEN, GREY = "#2f6fb0", "#d9692a", "#3a8f5c", "#8a8f98"

plt.rcParams.update(
    {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e8eb",
        "grid.linewidth": 0.8,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "figure.constrained_layout.use": True,
    }
)


def convergence(ax: Axes, runs: dict[str, Solution]) -> None:
    """Cost above the best one found, per iteration."""
    best = min(solution.cost.item() for solution in runs.values())
    for (name, solution), colour in zip(runs.items(), (BLUE, ORANGE), strict=False):
        gap = (solution.history.cost - best).clamp(min=1e-13).numpy()
        ax.semilogy(gap, color=colour, label=name)
        ax.plot(len(gap) - 1, gap[-1], "o", ms=4, color=colour)
    ax.set(title="Cost above the optimum", xlabel="iteration")
    ax.set_ylim(bottom=3e-14)
    ax.legend()


def controls(ax: Axes, task: ControlTask, solution: Solution, limit: float | None = None) -> None:
    """Piecewise constant controls over time."""
    u = solution.controls.numpy()
    time = task.dt * np.arange(len(u) + 1)
    for i, (name, colour) in enumerate(zip(task.controls, (BLUE, ORANGE), strict=False)):
        ax.stairs(u[:, i], time, baseline=None, color=colour, lw=1.6, label=name)
    if limit is not None:
        for level in (-limit, limit):
            ax.axhline(level, color=GREY, lw=1, ls="--")
    ax.set(title="Controls", xlabel="time [s]")
    ax.legend(loc="lower right")


def fan(ax: Axes, task: ControlTask, nominal: np.ndarray, rollout: Rollout, i: int, colour: str, title: str) -> None:
    """Component i of all disturbed rollouts over the nominal one."""
    states = rollout.states[..., i].numpy()
    time = task.dt * np.arange(states.shape[-1])
    ax.plot(time, states.T, color=colour, lw=0.7, alpha=0.35)
    ax.plot(time, nominal[:, i], color="black", lw=1.3, ls="--", label="planned")
    ax.set(title=title, xlabel="time [s]", ylabel=task.states[i])
    ax.legend(loc="upper left")


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"saved {path}")


def print_tail(name: str, solution: Solution, rows: int = 6) -> None:
    """The last iterations as a table."""
    h = solution.history
    print(f"{name}: {solution.status.value}, {int(solution.iterations)} iterations, cost {solution.cost:.12f}")
    print(f"{'iteration':>11} {'cost':>18} {'|gradient|':>12} {'regularisation':>15} {'step':>6}")
    for i in range(max(0, len(h.cost) - rows), len(h.cost)):
        print(
            f"{i:>11} {h.cost[i].item():>18.12f} {h.gradient_norm[i].item():>12.2e} "
            f"{h.regularization[i].item():>15.1e} {h.step[i].item():>6.3g}"
        )
