"""Pendulum swing-up with a motor too weak to lift it: box-DDP, and the controller under disturbance.

python examples/control/pendulum.py [--out docs/img]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import plotting
import torch
from matplotlib.ticker import NullFormatter

from ddpnopt.control import solve
from ddpnopt.control.systems import pendulum

LIMIT = 5.0  # holding the rod level would take 9.81


def main(out: Path) -> None:
    torch.set_num_threads(1)
    task = pendulum(T=100, limit=LIMIT)
    runs = {
        name: solve(task.problem, task.x0, task.u0, method=method)
        for name, method in (("DDP", "ddp"), ("iLQR", "ilqr"))
    }
    for name, solution in runs.items():
        plotting.print_tail(name, solution)
    ddp = runs["DDP"]
    held = (ddp.controls.abs() == LIMIT).sum()
    print(f"{int(held)} of {ddp.controls.numel()} controls are at a limit, largest |u| {ddp.controls.abs().max()}")

    generator = torch.Generator().manual_seed(0)
    push = torch.zeros(40, task.problem.T, 2, dtype=torch.float64)
    push[..., 1] = 0.1 * torch.randn(40, task.problem.T, generator=generator, dtype=torch.float64)
    closed = ddp.simulate(task.x0, disturbance=push)
    open_loop = ddp.simulate(task.x0, feedback=False, disturbance=push)
    print(f"mean cost disturbed: feedback {closed.cost.mean():.1f}, open loop {open_loop.cost.mean():.1f}")

    figure, axes = plt.subplots(2, 3, figsize=(12, 6.5))
    states, ax = ddp.states.numpy(), axes[0, 0]
    # a free pendulum follows lines of constant energy; the torque moves it across them
    angle, rate = np.meshgrid(np.linspace(-5, 5, 200), np.linspace(-8, 8, 200))
    ax.contour(angle, rate, 0.5 * rate**2 - 9.81 * np.cos(angle), 12, colors=plotting.GREY, linewidths=0.5, alpha=0.6)
    ax.plot(states[:, 0], states[:, 1], "-", color=plotting.BLUE)
    ax.plot(0, 0, "s", color=plotting.ORANGE, label="hanging")
    for upright in (-np.pi, np.pi):
        ax.plot(upright, 0, "*", ms=12, color=plotting.GREEN, label="upright" if upright > 0 else None)
    ax.set(title="Swing-up over levels of energy", xlabel="angle", ylabel="rate")
    ax.legend(loc="upper right")
    plotting.controls(axes[0, 1], task, ddp, LIMIT)
    plotting.convergence(axes[0, 2], runs)
    plotting.fan(axes[1, 0], task, states, open_loop, 0, plotting.ORANGE, "Open loop under disturbance")
    plotting.fan(axes[1, 1], task, states, closed, 0, plotting.BLUE, "Feedback under disturbance")
    axes[1, 0].sharey(axes[1, 1])
    ax = axes[1, 2]
    ax.loglog(open_loop.cost.numpy(), closed.cost.numpy(), "o", ms=4, alpha=0.7, color=plotting.BLUE)
    ends = [0.8 * closed.cost.min(), 1.25 * open_loop.cost.max()]
    ax.plot(ends, ends, color=plotting.GREY, lw=1, ls="--", label="equal")
    ax.set(title="Cost of 40 disturbed runs", xlabel="open loop", ylabel="feedback", xlim=ends, ylim=ends)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    ax.legend(loc="upper left")
    plotting.save(figure, out / "control_pendulum.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    main(parser.parse_args().out)
