"""EKFAC's own column at other settings of EKFAC: the paper gives neither damping nor refresh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import pandas as pd

from ddpnopt.lab.paper.digits_runs import digits_task
from ddpnopt.lab.paper.fig_grid_claims import CLOSE
from ddpnopt.lab.paper.fig_grid_published import EKFAC
from ddpnopt.lab.paper.item import Context, Table
from ddpnopt.lab.paper.item_runs import SeedRuns, outcomes
from ddpnopt.lab.paper.readings import KRONECKER
from ddpnopt.lab.runs.config import RunConfig

SETTINGS: Sequence[dict[str, float | int]] = (
    dict(KRONECKER),
    {"damping": 0.03, "refresh": 100},
    {"damping": 0.3, "refresh": 100},
    {"damping": 0.1, "refresh": 10},
)


def ekfac_settings(context: Context, seeds: range) -> Table:
    """Training losses without feedback, and their distance to the paper's column."""
    task = digits_task(context)
    wanted = {
        (i, lr, seed): RunConfig("ekfac", task, lr, setting, seed)
        for i, setting in enumerate(SETTINGS)
        for lr in EKFAC.lrs
        for seed in seeds
    }
    found = dict(zip(wanted, outcomes(context, list(wanted.values()), "EKFAC's settings"), strict=True))
    rows = []
    for i, setting in enumerate(SETTINGS):
        cells = [SeedRuns([found[i, lr, seed] for seed in seeds], task) for lr in EKFAC.lrs]
        away = [abs(math.log(cell.loss.mean / row[0])) for cell, row in zip(cells, EKFAC.loss, strict=True)]
        rows.append(
            {"damping": f"{setting['damping']:g}", "refresh": f"{setting['refresh']:g}"}
            | {f"lr {lr:g}": cell.loss.text(3) for lr, cell in zip(EKFAC.lrs, cells, strict=True)}
            | {"distance": f"{fmean(away):.2f}"}
        )
    rows.append(
        {"damping": "the paper", "refresh": ""}
        | {f"lr {lr:g}": f"{row[0]:.3f}" for lr, row in zip(EKFAC.lrs, EKFAC.loss, strict=True)}
        | {"distance": "0"}
    )
    caption = (
        "EKFAC alone, training loss at other settings, which the paper does not give. The first row, of its public "
        f"code's example, is the one used everywhere. {_whole_column(rows[:-1])}"
    )
    return Table("ekfac-settings", caption, pd.DataFrame(rows))


def _whole_column(rows: Sequence[dict[str, str]]) -> str:
    """Whether any setting has all of the paper's column, as a sentence."""

    def close(row: dict[str, str]) -> int:
        losses = [float(row[f"lr {lr:g}"].split()[0]) for lr in EKFAC.lrs]
        return sum(abs(ours / paper[0] - 1) <= CLOSE for ours, paper in zip(losses, EKFAC.loss, strict=True))

    def growth(row: dict[str, str]) -> float:
        return float(row[f"lr {EKFAC.lrs[-1]:g}"].split()[0]) / float(row[f"lr {EKFAC.lrs[0]:g}"].split()[0])

    most = max(map(close, rows))
    text = f"The best of them has {most} of the {len(EKFAC.lrs)} rates within {100 * CLOSE:.0f} % of the paper's."
    if most == len(EKFAC.lrs):
        return text
    grown = [growth(row) for row in rows]
    return (
        f"{text} From {EKFAC.lrs[0]:g} to {EKFAC.lrs[-1]:g} the paper's loss becomes "
        f"{EKFAC.loss[-1][0] / EKFAC.loss[0][0]:.0f} times as large, at these settings {min(grown):.0f} to "
        f"{max(grown):.0f} times: none of them fits both ends."
    )
