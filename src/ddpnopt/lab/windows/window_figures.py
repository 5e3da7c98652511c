"""The picture of a task: accuracy against the learning rate, as a multiple of each method's default."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from ddpnopt.lab import style
from ddpnopt.lab.methods.registry import ABLATIONS
from ddpnopt.lab.windows.standings import MARGIN, Standing, Standings

CLASSICAL = ("sgd-m", "rmsprop", "adam", "ekfac")


def draw(result: Standings, stem: Path) -> list[Path]:
    """Saves `<stem>.svg`.

    Nine curves in one panel would be hard to read: DDPNOpt is compared with the classical methods on the left, and with
    the newer ones on the right. Ablations share their learning rates and one panel.
    """
    ours = [row for row in result.rows if row.method.is_ddpnopt]
    others = [row for row in result.rows if not row.method.is_ddpnopt]
    classical = [row for row in others if row.method.name in CLASSICAL]
    newer = [row for row in others if row.method.name not in CLASSICAL]
    groups = [("Classical methods", classical), ("Newer methods", newer)]
    panels = [(title, [*rows, *ours]) for title, rows in groups if rows] or [("Forms of DDPNOpt", ours)]
    with style.style():
        made, axes = style.figure(len(panels), width=5.2, height=4.1)
        for position, (where, (title, rows)) in enumerate(zip(axes, panels, strict=True)):
            _panel(where, rows, result, relative=bool(others))
            where.set_title(title)
            if position:
                where.sharey(axes[0])
        axes[0].set_ylabel("test accuracy (%)")
        made.suptitle(result.task.label, x=0.012, ha="left", fontsize=12.5, fontweight="bold")
        over = f"Mean and range over {result.seeds_in_words}" if result.seeds > 1 else "One seed"
        level = "" if all(row.has_rate for row in ours) else " Level line: no learning rate."
        marks = f"Cross: a run diverged. Ring: the default setting.{level} Grey: within {MARGIN:g} points of the best."
        text = f"{over}. {marks}"
        made.supxlabel(fill(text, 75 * len(panels)), x=0.012, ha="left", fontsize=8, color=style.SOFT_INK)
        return style.save(made, stem, ("svg",))


def _panel(axes: Axes, rows: list[Standing], result: Standings, *, relative: bool) -> None:
    axes.axhspan(result.best_accuracy - MARGIN, result.best_accuracy, color="#dfe4e9", linewidth=0, zorder=1)
    if relative:
        axes.axvline(1, color="#c3cad1", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    for position, row in enumerate(rows):
        colour = style.colour(row.method.name, position)
        if not row.has_rate:
            _line(axes, row, colour)
            continue
        strong = not relative and row.method.name == ABLATIONS[0]
        _curve(axes, row, _unit(row) if relative else 1.0, colour, strong=strong)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("learning rate / the method's default" if relative else "learning rate")
    axes.set_ylim(0, min(101.0, 1.08 * result.best_accuracy))
    # A column below the panel: the curves leave no corner free.
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, handlelength=1.4, fontsize=8.5)


def _line(axes: Axes, row: Standing, colour: str) -> None:
    """A method without a learning rate: the same wherever one would be."""
    seeds = row.best.accuracies
    axes.axhspan(min(seeds), max(seeds), color=colour, alpha=0.15, linewidth=0, zorder=4)
    axes.axhline(row.best.accuracy, color=colour, linewidth=2.2, zorder=4, label=f"{row.method.label}, no rate")


def _curve(axes: Axes, row: Standing, unit: float, colour: str, *, strong: bool) -> None:
    order = 4 if strong else 3
    rates = [point.lr / unit for point in row.points]
    low = [min(point.accuracies) for point in row.points]
    high = [max(point.accuracies) for point in row.points]
    axes.fill_between(rates, low, high, color=colour, alpha=0.15, linewidth=0, zorder=order)
    axes.plot(
        rates,
        [point.accuracy for point in row.points],
        color=colour,
        linewidth=2.6 if strong else 1.6,
        marker="o",
        markersize=4.5 if strong else 3,
        zorder=order,
        label=row.method.label,
    )
    lost = [(point.lr / unit, point.accuracy) for point in row.points if point.diverged]
    if lost:
        x, y = zip(*lost, strict=True)
        axes.scatter(x, y, marker="x", s=34, color=colour, linewidths=1.4, zorder=order + 1)
    if row.default is not None:
        axes.scatter(
            [row.default.lr / unit], [row.default.accuracy], s=46, facecolor="white", edgecolor=colour, zorder=6
        )


def _unit(row: Standing) -> float:
    """The method's default learning rate; where it has none the middle of its range."""
    if row.default is not None:
        return row.default.lr
    return row.points[len(row.points) // 2].lr
