"""Parking a unicycle: iLQR beside DDP, quadratic convergence, and the controller under disturbance.

python examples/control/unicycle.py [--out docs/img]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import plotting
import torch

from ddpnopt.control import solve
from ddpnopt.control.systems import unicycle


def main(out: Path) -> None:
    torch.set_num_threads(1)
    task = unicycle()
    runs = {
        name: solve(task.problem, task.x0, task.u0, method=method, grad_tol=1e-13, cost_tol=0)
        for name, method in (("DDP", "ddp"), ("iLQR", "ilqr"))
    }
    for name, solution in runs.items():
        plotting.print_tail(name, solution)
    ddp = runs["DDP"]

    generator = torch.Generator().manual_seed(0)
    starts = task.x0 + 0.1 * torch.randn(40, 3, generator=generator, dtype=torch.float64)
    push = 0.02 * torch.randn(40, 20, 3, generator=generator, dtype=torch.float64)
    closed = ddp.simulate(starts, disturbance=push)
    open_loop = ddp.simulate(starts, feedback=False, disturbance=push)
    print(f"mean cost disturbed: feedback {closed.cost.mean():.1f}, open loop {open_loop.cost.mean():.1f}")

    figure, axes = plt.subplots(2, 2, figsize=(9, 8))
    path, ax = ddp.states.numpy(), axes[0, 0]
    time = task.dt * np.arange(len(path))
    for i, colour in enumerate((plotting.BLUE, plotting.ORANGE, plotting.GREEN)):
        ax.plot(time, path[:, i], "-o", ms=3, color=colour, label=task.states[i])
    ax.set(title="Optimal states", xlabel="time [s]")
    ax.legend(loc="lower right")
    plotting.convergence(axes[0, 1], runs)
    for ax, rollout, colour, name in (
        (axes[1, 0], open_loop, plotting.ORANGE, "Open loop"),
        (axes[1, 1], closed, plotting.BLUE, "Feedback"),
    ):
        disturbed = rollout.states.numpy()
        ax.plot(disturbed[..., 0].T, disturbed[..., 1].T, color=colour, lw=0.7, alpha=0.4)
        ax.plot(disturbed[:, -1, 0], disturbed[:, -1, 1], ".", color=colour)
        ax.plot(path[:, 0], path[:, 1], "--", color="black", lw=1.3, label="planned")
        ax.plot(0, 0, "*", ms=13, color=plotting.GREEN)
        title = f"{name}, disturbed: mean cost {rollout.cost.mean():.0f}"
        ax.set(title=title, xlabel="x", ylabel="y", xlim=(-1.45, 0.45), ylim=(-1.35, 0.55), aspect="equal")
        ax.legend(loc="lower right")
    plotting.save(figure, out / "control_unicycle.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    main(parser.parse_args().out)
