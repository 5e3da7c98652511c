"""The pictures of `fig-vanishing`: curves of the loss, and the norms of the updates layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ddpnopt.lab import style
from ddpnopt.lab.paper.captions import finish
from ddpnopt.lab.paper.fig_vanishing_runs import (
    PLATEAUS,
    VANISHING_METHODS,
    VanishingCase,
    VanishingMethod,
    VanishingRun,
)

CEILING = 1.5
"""Of the plateau: what diverges leaves the picture."""

Found = Mapping[VanishingCase, Sequence[VanishingRun]]


@dataclass(frozen=True)
class Panel:
    """The curves of one pair of axes."""

    title: str
    objective: str
    cases: Sequence[VanishingCase]


def curve(runs: Sequence[VanishingRun]) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Steps, and mean and standard deviation of the losses over the seeds that did not diverge."""
    whole = max(len(run.losses) for run in runs)
    # a run that diverged has its moments at other steps: the curve is that of the others
    kept = [run for run in runs if len(run.losses) == whole and not run.diverged] or [max(runs, key=_length)]
    if not len(kept[0].losses):
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    lines = np.array([run.losses for run in kept])
    return np.array(kept[0].steps), lines.mean(0), lines.std(0)


def _length(run: VanishingRun) -> int:
    return len(run.losses)


def typical_norms(runs: Sequence[VanishingRun]) -> NDArray[np.float64]:
    """The mean norm of each layer's update after the first epoch, over the runs that did not diverge."""
    kept = [run.norms for run in runs if len(run.norms) and not run.diverged]
    return np.mean(kept, axis=0) if kept else np.zeros(0)


def draw(title: str, panels: Sequence[Panel], found: Found, words: str) -> Figure:
    """One pair of axes per panel."""
    with style.style():
        columns = min(len(panels), 4)
        made, axes = style.figure(columns, width=13.2 / columns, height=3.5)
        for where, panel in zip(axes, panels, strict=True):
            _curves(where, panel, found)
        return finish(made, title, words)


def draw_norms(panel: Panel, found: Found, words: str) -> Figure:
    """The loss on the left, the norms on the right."""
    with style.style():
        made, (left, right) = style.figure(2, width=5.2, height=3.7)
        _curves(left, panel, found)
        for case in panel.cases:
            norms = typical_norms(found[case])
            layers = np.arange(1, len(norms) + 1)
            right.plot(layers, norms, marker="o", markersize=3.5, label=case.way, **_look(VANISHING_METHODS[case.way]))
        right.set(yscale="log", xlabel="layer", title="Norm of an update")
        return finish(made, "Vanishing gradients: nine sigmoid layers on DIGITS", words)


def _curves(axes: Axes, panel: Panel, found: Found) -> None:
    plateau = PLATEAUS[panel.objective]
    axes.axhline(plateau, color=style.SOFT_INK, linewidth=0.9, linestyle=(0, (4, 3)))
    lowest = plateau
    for case in panel.cases:
        runs = found[case]
        steps, middle, deviation = curve(runs)
        if not len(steps):
            continue
        way = VANISHING_METHODS[case.way]
        lost = " (diverges)" if any(run.diverged or run.final > CEILING * plateau for run in runs) else ""
        label = f"{way.label}, {case.lr:g}{lost}"
        axes.plot(steps, middle, label=label, **_look(way))
        axes.fill_between(steps, middle - deviation, middle + deviation, color=way.colour, alpha=0.15, linewidth=0)
        lowest = min(lowest, float(np.nanmin(middle)))
    # If no method leaves the plateau, the axis zooms in: it would be a line at the top of an empty picture.
    stuck = lowest > 0.9 * plateau
    axes.set_ylim(min(0.97 * plateau, 0.99 * lowest) if stuck else 0.0, (1.06 if stuck else 1.2) * plateau)
    axes.set(xlabel="step", title=panel.title)
    axes.set_ylabel(f"{panel.objective} loss")
    # With a background: in a panel full of curves the names would be hard to read on top of them.
    axes.legend(
        loc="upper right" if stuck else "lower left",
        fontsize=7.5,
        handlelength=1.4,
        frameon=True,
        framealpha=0.55,
        edgecolor="none",
    )


def _look(way: VanishingMethod) -> dict[str, Any]:
    # EKFAC and DDPNOpt lie on top of each other where the feedback is small: the one below is broad.
    broad = {"linewidth": 4.5, "alpha": 0.5} if way.name == "ekfac" else {}
    return {"color": way.colour, "linestyle": "--" if way.order == 2 else "-", **broad}


def series(panels: Sequence[Panel], found: Found) -> list[dict[str, Any]]:
    """The curves, for the page."""
    lines = []
    for panel in panels:
        for case in panel.cases:
            steps, middle, deviation = curve(found[case])
            lines.append(
                {
                    "panel": panel.title,
                    "label": f"{case.way}, {case.lr:g}",
                    "x": steps.tolist(),
                    "y": _rounded(middle),
                    "spread": _rounded(deviation),
                }
            )
    return lines


def norm_series(panel: Panel, found: Found) -> list[dict[str, Any]]:
    """The norms, for the page."""
    lines = []
    for case in panel.cases:
        norms = typical_norms(found[case])
        layers = list(range(1, len(norms) + 1))
        lines.append({"panel": "Norm of an update", "label": case.way, "x": layers, "y": _rounded(norms)})
    return lines


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
