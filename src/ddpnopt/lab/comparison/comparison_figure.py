"""The picture of a comparison: training loss against the step, and the metric of every seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from ddpnopt.lab import style
from ddpnopt.lab.comparison.comparison import Comparison, Summary

# A curve shows the mean of the losses over this share of the run: single batch losses scatter too much.
SMOOTHING = 0.05
POINTS = 400
SMALLEST_LOSS = 1e-6


def draw(comparison: Comparison, stem: Path) -> list[Path]:
    """Saves the comparison as `<stem>.png` and `<stem>.svg`; returns both paths."""
    with style.style():
        made, (left, right) = style.figure(2, width=4.7, height=3.6)
        colours = _colours(comparison.summaries)
        for summary, colour in zip(comparison.summaries, colours, strict=True):
            _curve(left, summary, colour)
        left.set(xlabel="step", title="Training loss")
        _loss_axis(left, comparison.summaries)
        if left.lines:
            left.legend(loc="best", handlelength=1.4)
        _metrics(right, comparison, colours)
        _caption(made, comparison)
        return style.save(made, stem)


def _colours(summaries: Sequence[Summary]) -> list[str]:
    """A method's own colour once; the same method at a further learning rate takes a spare one."""
    seen: list[str] = []
    colours = []
    for position, summary in enumerate(summaries):
        known = "" if summary.method in seen else summary.method
        colours.append(style.colour(known, position))
        seen.append(summary.method)
    return colours


def _curve(axes: Axes, summary: Summary, colour: str) -> None:
    longest = max(run.outcome.steps for run in summary.runs)
    if longest == 0:
        return
    window = max(1, round(SMOOTHING * longest))
    curves = np.full((len(summary.runs), longest), np.nan)
    for row, run in zip(curves, summary.runs, strict=True):
        row[: run.outcome.steps] = style.smoothed(run.losses, window)
    # The first values average few batches and say more about those batches than about the method.
    chosen = np.unique(np.linspace(min(window, longest) - 1, longest - 1, POINTS).astype(int))
    curves, steps = curves[:, chosen], chosen + 1
    strong = summary.method == "ddpnopt"
    order = 3 if strong else 2
    axes.fill_between(
        steps,
        np.nanmin(curves, axis=0),
        np.nanmax(curves, axis=0),
        color=colour,
        alpha=0.15,
        linewidth=0,
        zorder=order,
    )
    width = 2.3 if strong else 1.6
    mean = np.nanmean(curves, axis=0)
    axes.plot(steps, mean, color=colour, linewidth=width, zorder=order, label=summary.label)


def _loss_axis(axes: Axes, summaries: Sequence[Summary]) -> None:
    """A logarithmic axis that a diverging run leaves at the top, instead of squeezing all others."""
    axes.set_yscale("log")
    starts = [run.losses[0] for summary in summaries for run in summary.runs if run.losses]
    if not starts:
        return
    shown = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    low = max(0.7 * float(shown.min()), SMALLEST_LOSS)
    high = max(min(1.2 * float(shown.max()), 2 * max(starts)), 2 * low)
    axes.set_ylim(low, high)
    wide = high > 8 * low
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)) if wide else MaxNLocator(6))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.01)


def _metrics(axes: Axes, comparison: Comparison, colours: Sequence[str]) -> None:
    summaries = comparison.summaries
    digits = _digits([summary.metric.mean for summary in summaries])
    rows = np.arange(len(summaries))[::-1]
    for row, summary, colour in zip(rows, summaries, colours, strict=True):
        values = [run.outcome.metric for run in summary.runs if not run.outcome.diverged]
        if not values:
            continue
        offsets = np.linspace(-0.12, 0.12, len(values)) if len(values) > 1 else [0.0]
        axes.scatter(values, row + offsets, s=22, color=colour, alpha=0.45, linewidths=0, zorder=3)
        mean = fmean(values)
        axes.plot([mean, mean], [row - 0.27, row + 0.27], color=colour, linewidth=2.6, zorder=4)
        axes.annotate(
            f"{mean:.{digits}f}",
            (mean, row + 0.3),
            xytext=(0, 1),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8.5,
            color=colour,
            fontweight="bold",
        )
    axes.set_yticks(rows, [summary.label for summary in summaries], color=style.INK, fontsize=9.5)
    axes.set_ylim(-0.6, len(summaries) - 0.25)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.12)
    better = "" if comparison.task.higher_is_better else ", lower is better"
    axes.set_title(f"{comparison.metric[:1].upper()}{comparison.metric[1:]}{better}")


def _caption(made: Figure, comparison: Comparison) -> None:
    seeds = len(comparison.summaries[0].runs)
    made.suptitle(
        comparison.title,
        x=0.012,
        ha="left",
        fontsize=12.5,
        fontweight="bold",
    )
    over = f"mean and range over {seeds} seeds" if seeds > 1 else "one seed"
    text = f"Losses: moving mean over {SMOOTHING:.0%} of the steps, {over}."
    if comparison.note:
        text += f" {comparison.note}."
    made.supxlabel(text, x=0.012, ha="left", fontsize=8, color=style.SOFT_INK)


def _digits(values: Sequence[float]) -> int:
    """Decimals that tell the values apart: one for percentages, three significant digits for small numbers."""
    largest = max((abs(value) for value in values if np.isfinite(value)), default=1.0)
    return 1 if largest >= 10 else min(2 - math.floor(math.log10(largest)), 6) if largest > 0 else 1
