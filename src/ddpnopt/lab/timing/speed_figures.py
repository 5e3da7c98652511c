"""The pictures of speed: bars of ratios, and lines of growth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from ddpnopt.lab import style
from ddpnopt.lab.methods.method import UNIT
from ddpnopt.lab.timing import growth
from ddpnopt.lab.timing.growth import Growth
from ddpnopt.lab.timing.speed import Cost
from ddpnopt.lab.timing.speed_report import groups

TIME, MEMORY = style.COLOURS["ddpnopt"], style.COLOURS["adamw"]

LINEAR = 8
"""Ratios up to this one are drawn on a linear scale; beyond, small ones would be invisible next to large ones."""


def draw(costs: Sequence[Cost], stem: Path) -> list[Path]:
    """One panel per network: time and memory of every method in units of SGD's. Saved as `<stem>.svg`."""
    panels = groups(cost for cost in costs if cost.applies and cost.method.name != UNIT)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    tallest = max(len(found) for found in panels.values())
    with style.style():
        made, axes = style.figure(columns, rows, width=4.4, height=1.1 + 0.34 * tallest)
        for where, (title, found) in zip(axes, panels.items(), strict=False):
            _bars(where, found)
            where.set_title(title)
        for spare in axes[len(panels) :]:
            spare.set_visible(False)
        # above the panels: within one it would cover a bar
        made.legend(*axes[0].get_legend_handles_labels(), loc="upper right", ncols=2, handlelength=1.0)
        made.suptitle("Cost of a step, SGD = 1", x=0.012, ha="left", fontsize=12.5, fontweight="bold")
        text = "Time: median of ratios taken round by round, and quartiles. Memory: peak of a step, weights included."
        made.supxlabel(text, x=0.012, ha="left", fontsize=8, color=style.SOFT_INK)
        return style.save(made, stem, ("svg",))


def draw_growth(what: str, found: Sequence[Growth], stem: Path) -> list[Path]:
    """Time and memory against the size, both logarithmic."""
    with style.style():
        made, (left, right) = style.figure(2, width=4.7, height=3.8)
        for position, each in enumerate(found):
            sizes = growth.SIZES[what][: len(each.costs)]
            colour = style.colour(each.method.name, position)
            times = [cost.milliseconds for cost in each.costs]
            left.plot(
                sizes,
                times,
                label=f"{each.method.timing_label}: {each.time:.1f}",
                color=colour,
                marker="o",
                markersize=3.5,
            )
            megabytes = [cost.bytes / 1e6 for cost in each.costs]
            right.plot(
                sizes,
                megabytes,
                label=f"{each.method.timing_label}: {each.memory:.1f}",
                color=colour,
                marker="o",
                markersize=3.5,
            )
        for axes, title in ((left, "Milliseconds per step"), (right, "Peak memory (MB)")):
            axes.set(xscale="log", yscale="log", xlabel=what, title=title)
            axes.set_xticks(growth.SIZES[what], [str(size) for size in growth.SIZES[what]])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_locator(NullLocator())
            axes.legend(loc="upper left", handlelength=1.2, fontsize=8, title="exponent", title_fontsize=8)
        made.suptitle(f"Growth with the {what}", x=0.012, ha="left", fontsize=12.5, fontweight="bold")
        return style.save(made, stem, ("svg",))


def _bars(axes: Axes, found: Sequence[Cost]) -> None:
    rows = range(len(found))[::-1]
    for row, cost in zip(rows, found, strict=True):
        low, high = cost.quartiles
        axes.barh(row + 0.19, cost.ratio, 0.36, color=TIME, label="time" if row == rows[0] else None, zorder=2)
        axes.plot([low, high], [row + 0.19] * 2, color=style.INK, linewidth=1.0, zorder=3)
        axes.barh(
            row - 0.19, cost.memory_ratio, 0.36, color=MEMORY, label="memory" if row == rows[0] else None, zorder=2
        )
        for value, offset, edge in ((cost.ratio, 0.19, high), (cost.memory_ratio, -0.19, cost.memory_ratio)):
            axes.annotate(
                f"{value:.1f}",
                (max(value, edge), row + offset),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
                color=style.SOFT_INK,
            )
    axes.set_yticks(list(rows), [cost.method.timing_label for cost in found], color=style.INK, fontsize=9)
    axes.axvline(1, color=style.SOFT_INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=4)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.1)
    if max(cost.ratio for cost in found) > LINEAR:
        axes.set_xscale("log")
        axes.set_xlim(left=0.5)
        axes.set_xlabel("logarithmic", fontsize=8, color=style.SOFT_INK)  # other panels may be linear
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
