"""Runs read back from the table of runs that a report has written, where the store of them is not at hand."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods.registry import METHODS
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Curve, Outcome

Row = Mapping[Hashable, Any]


def kept_runs(path: Path, tasks: Iterable[ClassificationTask]) -> dict[RunConfig, Outcome]:
    """The runs of these tasks in `<stem>-runs.csv`; none where there is no such file.

    The table has the end of each run and no curve: enough for accuracies and windows, not for the time to a loss.
    """
    if not path.is_file():
        return {}
    by_size = {(task.name, task.n_train, task.epochs): task for task in tasks}
    try:
        rows = pd.read_csv(path, keep_default_na=False, na_values=[""]).to_dict("records")
        sized = [(by_size.get((row["task"], _whole(row["samples"]), row["epochs"])), row) for row in rows]
        return {
            _config(task, row): _outcome(row) for task, row in sized if task is not None and row["method"] in METHODS
        }
    except (KeyError, ValueError) as wrong:
        raise ExperimentError(f"{path} is not a table of runs: {wrong}") from wrong


def _whole(samples: float) -> int | None:
    return None if math.isnan(samples) else int(samples)


def _config(task: ClassificationTask, row: Row) -> RunConfig:
    return RunConfig(row["method"], task, None if row["default"] else float(row["lr"]), seed=int(row["seed"]))


def _outcome(row: Row) -> Outcome:
    seconds, cpu_seconds, steps = float(row["seconds"]), float(row["cpu_seconds"]), int(row["steps"])
    ended = math.isfinite(row["last_loss"])
    end = Curve([steps], [seconds], [cpu_seconds], [float(row["last_loss"])]) if ended else Curve([], [], [], [])
    error = row["error"] if isinstance(row["error"], str) else ""
    return Outcome(
        float(row["accuracy"]), float(row["lr"]), seconds, cpu_seconds, steps, bool(row["diverged"]), error, end
    )
