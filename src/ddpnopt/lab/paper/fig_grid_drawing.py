"""Heat maps of differences: one row per measure, one column per curvature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from ddpnopt.lab import style

if TYPE_CHECKING:
    from ddpnopt.lab.paper.digits_runs import Cells

# Worse is red, no change white, better blue, as in the paper.
SCALE = LinearSegmentedColormap.from_list("difference", ["#b2382a", "#f3b9a6", "#ffffff", "#a9c9e8", "#1f5fa8"])


def draw(found: Sequence[Cells], measures: Sequence[str]) -> Figure:
    with style.style():
        # a single curvature has its measures side by side
        shape = (len(found), len(measures)) if len(found) > 1 else (len(measures), 1)
        made, axes = style.figure(*shape, width=3.9, height=2.7)
        panels = iter(axes)
        for measure in measures:
            for each in found:
                _panel(next(panels), each, measure)
        return made


def _panel(axes: Axes, each: Cells, measure: str) -> None:
    gains = np.array([[cell.mean for cell in row] for row in each.improvements(measure)])
    most = max(float(np.abs(gains).max()), 1e-12)
    axes.imshow(gains, cmap=SCALE, vmin=-most, vmax=most, aspect="auto")
    loss = measure.startswith("training")
    for (row, column), gain in np.ndenumerate(gains):
        # the change itself: of a loss it is below zero where it is better
        text = f"{-gain:+.3f}" if loss else f"{gain:+.2f}"
        strong = abs(gain) > 0.65 * most
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if strong else style.INK)
    axes.set_xticks(range(gains.shape[1]), [f"{eps:g}" for eps in each.grid.eps])
    axes.set_yticks(range(gains.shape[0]), [f"{lr:g}" for lr in each.grid.lrs])
    axes.set(xlabel="eps on V_xx", ylabel="learning rate", title=f"{each.grid.label}: change of {measure}")
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
