"""The performance profile: on which share of the tasks a method is at most so far behind the best."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import FuncFormatter, NullLocator

from ddpnopt.lab import style
from ddpnopt.lab.suite.comparison import TaskResult
from ddpnopt.lab.suite.entrants import Entrant

SMALLEST, LARGEST = 0.003, 1.0
TICKS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
NEWER_LINES = {"schedule-free", "prodigy", "soap", "muon"}


def profile(results: Sequence[TaskResult], entrant: Entrant, limits: Sequence[float]) -> list[float]:
    """For each limit, the share of the method's tasks on which its shortfall is at most that."""
    found = [(result, mine) for result in results if (mine := result.results.get(entrant.name))]
    shortfalls = np.array([result.shortfall(mine) for result, mine in found])
    return [float(np.mean(shortfalls <= limit)) for limit in limits]


def draw(results: Sequence[TaskResult], methods: Sequence[Entrant], stem: Path) -> list[Path]:
    """Saves `<stem>.svg`."""
    limits = np.geomspace(SMALLEST, LARGEST, 300).tolist()
    shown = [each for each in methods if any(each.name in result.results for result in results)]
    with style.style():
        made, [axes] = style.figure(width=7.2, height=4.4)
        for position, entrant in enumerate(shown):
            strong = entrant.method.is_ddpnopt
            axes.plot(
                limits,
                [100 * share for share in profile(results, entrant, limits)],
                color=style.colour(entrant.name, position),
                linewidth=2.8 if strong else 1.6,
                linestyle=(0, (4, 1.5)) if entrant.name in NEWER_LINES else "-",  # two share a colour with others
                zorder=4 if strong else 3,
                label=entrant.label,
            )
        axes.set_xscale("log")
        axes.set_xlim(SMALLEST, LARGEST)
        axes.set_xticks(TICKS)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g} %"))
        axes.set_ylim(0, 101)
        axes.set_xlabel("behind the best method of the task, at most, in percent of its way from chance")
        axes.set_ylabel("tasks (%)")
        axes.set_title(f"Test figures on {len(results)} tasks")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return style.save(made, stem, ("svg",))
