"""Cart-pole swing-up with limited force, and feedback under disturbances.

python examples/control/cartpole.py [--out docs/img]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import plotting
import torch
from matplotlib.axes import Axes

from ddpnopt.control import solve
from ddpnopt.control.systems import cartpole

LIMIT, LENGTH = 10.0, 0.5


def stroboscope(ax: Axes, states: np.ndarray, every: int) -> None:
    """Cart and pole every few steps; later ones are darker."""
    for t in range(0, len(states), every):
        x, angle = states[t, :2]
        tip = x + LENGTH * np.sin(angle), -LENGTH * np.cos(angle)
        alpha = 0.15 + 0.85 * t / len(states)
        ax.plot([x, tip[0]], [0, tip[1]], color=plotting.BLUE, alpha=alpha, lw=2)
        ax.plot(*tip, "o", color=plotting.ORANGE, alpha=alpha, ms=5)
        ax.plot(x, 0, "s", color="black", alpha=alpha, ms=6)
    ax.set(title="Swing-up, later is darker", xlabel="position [m]", ylabel="height [m]", aspect="equal")


def main(out: Path) -> None:
    torch.set_num_threads(1)
    task = cartpole(limit=LIMIT)
    runs = {
        name: solve(task.problem, task.x0, task.u0, method=method, max_iterations=250)
        for name, method in (("DDP", "ddp"), ("iLQR", "ilqr"))
    }
    for name, solution in runs.items():
        plotting.print_tail(name, solution)
    ddp = runs["DDP"]

    generator = torch.Generator().manual_seed(0)
    push = torch.zeros(40, task.problem.T, 4, dtype=torch.float64)
    push[..., 2:] = 0.02 * torch.randn(40, task.problem.T, 2, generator=generator, dtype=torch.float64)
    closed = ddp.simulate(task.x0, disturbance=push)
    open_loop = ddp.simulate(task.x0, feedback=False, disturbance=push)
    print(f"mean cost disturbed: feedback {closed.cost.mean():.1f}, open loop {open_loop.cost.mean():.1f}")

    figure, axes = plt.subplots(2, 3, figsize=(12, 6.5))
    states = ddp.states.numpy()
    stroboscope(axes[0, 0], states, 4)
    plotting.controls(axes[0, 1], task, ddp, LIMIT)
    plotting.convergence(axes[0, 2], runs)
    plotting.fan(axes[1, 0], task, states, open_loop, 1, plotting.ORANGE, "Open loop under pushes")
    plotting.fan(axes[1, 1], task, states, closed, 1, plotting.BLUE, "Feedback under pushes")
    axes[1, 0].sharey(axes[1, 1])
    ax = axes[1, 2]
    for rollout, colour, name in (
        (open_loop, plotting.ORANGE, "open loop"),
        (closed, plotting.BLUE, "feedback"),
    ):
        end = rollout.states[:, -1].numpy()
        ax.plot(end[:, 0], end[:, 1], "o", ms=4, alpha=0.7, color=colour, label=name)
    ax.plot(states[-1, 0], states[-1, 1], "*", ms=12, color="black", label="planned")
    ax.set(title="Where 40 disturbed runs end", xlabel="position [m]", ylabel="angle")
    ax.legend()
    plotting.save(figure, out / "control_cartpole.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    main(parser.parse_args().out)
