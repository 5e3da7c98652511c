"""Draws the figures of docs/explained.md from real runs: `python examples/explained/draw.py --out docs/img`."""

from __future__ import annotations

import argparse
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.lab.data import load
from ddpnopt.lab.style import GRID, INK, SOFT_INK, colour, figure, save, style

OURS, PLAIN, QUIET = colour("ddpnopt"), colour("adam"), colour("sgd")


def three_passes() -> Figure:
    """Diagram of a step: forward, backward, and forward again with every layer reacting."""
    made = Figure(figsize=(8.6, 3.7), layout="none")
    axes = made.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 10), ylim=(0, 4.2))
    axes.axis("off")
    rows = (
        (3.4, "1  forward", "activations x", "layer {0}", "$x$", QUIET, 1),
        (
            2.0,
            "2  backward",
            "the gradient, and a rule: if your input moves by δx, add K δx",
            "$k_{0},\\ K_{0}$",
            "$V_x, V_{xx}$",
            PLAIN,
            -1,
        ),
        (
            0.6,
            "3  forward again",
            "each layer's update is corrected for what the layers before it have just done",
            "$u_{0} + k_{0} + K_{0}\\,δx$",
            "$δx$",
            OURS,
            1,
        ),
    )
    for y, title, words, inside, between, shade, way in rows:
        axes.text(0.15, y + 0.42, title, weight="bold", color=shade, fontsize=11)
        axes.text(2.25, y + 0.42, words, color=SOFT_INK, fontsize=10)
        for t in range(4):
            x = 0.3 + 2.5 * t
            edges = {"boxstyle": "round,pad=0.04", "fc": "white", "ec": shade, "lw": 1.6}
            axes.add_patch(FancyBboxPatch((x, y - 0.42), 1.5, 0.56, **edges))
            nothing_before = inside.startswith("$u") and t == 0
            label = "$u_1 + k_1$" if nothing_before else inside.replace("{0}", str(t + 1))
            axes.text(x + 0.75, y - 0.14, label, ha="center", va="center", fontsize=9, color=INK)
            if t < 3:
                ends = [(x + 1.58, y - 0.14), (x + 2.42, y - 0.14)][::way]
                axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=13, color=shade, lw=1.6))
                axes.text(x + 2.0, y - 0.02, between, ha="center", va="bottom", fontsize=9, color=shade)
    return made


class Product(nn.Module):
    """Two layers of one weight each: the output is u_2 u_1 x."""

    def __init__(self, u1: float, u2: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.first.weight.fill_(u1)
            self.second.weight.fill_(u2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out

    def point(self) -> tuple[float, float]:
        return self.first.weight.item(), self.second.weight.item()


def walk(steps: int, **options: Any) -> list[tuple[float, float]]:
    """The two weights after each step towards the output 1 for the input 1."""
    model = Product(0.3, 1.2)
    opt = DDPNOpt(model, **options)
    path = [model.point()]
    for _ in range(steps):
        opt.zero_grad()
        (0.5 * (model(torch.ones(1, 1)) - 1).square().sum()).backward()
        opt.step()
        path.append(model.point())
    return path


def valley() -> Figure:
    """Two weights whose product should be 1: both layers correct the same error, and together they overshoot."""
    made, axes = figure(2, width=4.5, height=3.9)
    u1, u2 = torch.meshgrid(torch.linspace(0.1, 1.4, 200), torch.linspace(0.6, 1.7, 200), indexing="xy")
    ways: tuple[tuple[Axes, str, str, dict[str, Any]], ...] = (
        (axes[0], "Every layer for itself: overshoots", PLAIN, {"feedback": False}),
        (axes[1], "Layer 2 reacts to layer 1: lands", OURS, {"value": "full", "terminal": "mse"}),
    )
    for place, title, shade, options in ways:
        place.contourf(u1, u2, (u1 * u2 - 1).abs().sqrt(), levels=14, cmap="Greys", alpha=0.32)
        place.contour(u1, u2, u1 * u2 - 1, levels=[0], colors=[INK], linewidths=1.2, linestyles="dashed")
        draw_walk(place, walk(2, lr=1.0, **options), shade)
        place.set(title=title, xlabel="weight of layer 1", ylabel="weight of layer 2", xlim=(0.1, 1.4), ylim=(0.6, 1.7))
        place.grid(False)
    axes[0].text(0.75, 0.66, "dashed: the product\nis 1, no error", fontsize=8.5, color=INK)
    return made


def draw_walk(place: Axes, path: list[tuple[float, float]], shade: str) -> None:
    for (a, b), (c, d) in pairwise(path):
        place.plot([a, c, c], [b, b, d], color=shade, lw=1.1, ls=":", alpha=0.9)  # layer 1 moves, then layer 2
        place.annotate("", (c, d), (a, b), arrowprops={"arrowstyle": "-|>", "color": shade, "lw": 1.8})
    place.plot(*path[0], "o", color=INK, ms=6)
    place.annotate("start", path[0], textcoords="offset points", xytext=(-10, 9), fontsize=8.5)


def one_step() -> Figure:
    """Loss of the same batch after one step on DIGITS, over learning rates."""
    data = load("digits")
    x, y = data.x_train[:64], data.y_train[:64]
    rates = torch.logspace(-2, 2, 41).tolist()
    forms: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("SGD", QUIET, {"feedback": False}),
        ("DDPNOpt without the second forward pass", PLAIN, {"closed_loop": False}),
        ("DDPNOpt", OURS, {}),
    )
    made, (axes,) = figure(width=6.4, height=3.7)
    model, before = half_trained(x, y)
    for label, shade, options in forms:
        losses = []
        for rate in rates:
            copy = deepcopy(model)
            opt = DDPNOpt(copy, lr=rate, **options)
            F.cross_entropy(copy(x), y).backward()
            opt.step()
            with torch.no_grad():
                losses.append(F.cross_entropy(copy(x), y).item())
        axes.plot(rates, losses, color=shade, label=label)
    axes.axhline(before, color=SOFT_INK, lw=1, ls="--")
    axes.text(rates[-1], before * 1.08, "before the step", color=SOFT_INK, fontsize=8.5, ha="right")
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="loss of the same batch")
    axes.set_title("One step on DIGITS, 64 images")
    axes.grid(color=GRID)
    axes.legend(loc="upper left")
    return made


def half_trained(x: Tensor, y: Tensor) -> tuple[nn.Module, float]:
    """A partly trained network, whose layers already depend on each other, and its loss."""
    torch.manual_seed(0)
    sizes = [64, 32, 32, 32]
    hidden = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(32, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return model, F.cross_entropy(model(x), y).item()


PICTURES = {"explained-passes": three_passes, "explained-valley": valley, "explained-one-step": one_step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with style():
        for name, draw in PICTURES.items():
            print(*save(draw(), out / name), sep="\n")


if __name__ == "__main__":
    main()
