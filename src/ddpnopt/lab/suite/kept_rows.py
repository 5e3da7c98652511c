"""Results read back from `suite.csv`: the methods that have not changed need not be run again."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.suite.comparison import MethodResult
from ddpnopt.lab.suite.entrants import Entrant
from ddpnopt.lab.suite.runs import SuiteRunTask
from ddpnopt.lab.tables import Spread

Row = Mapping[Hashable, Any]


def kept_rows(
    path: Path, tasks: Iterable[SuiteRunTask], methods: Iterable[Entrant]
) -> dict[tuple[str, str], MethodResult]:
    """The results of these methods on these tasks, by the names of both; tasks of another length are left out.

    Their times to the reference's loss are those of the run in which they were measured.
    """
    lengths, by_name = {task.name: task.length for task in tasks}, {each.name: each for each in methods}
    try:
        rows: Sequence[Row] = pd.read_csv(path).to_dict("records")
        return {
            (row["task"], row["method"]): _result(by_name[row["method"]], row)
            for row in rows
            if row["method"] in by_name and lengths.get(row["task"]) == row["steps"]
        }
    except (OSError, KeyError, ValueError) as wrong:
        raise ExperimentError(f"--keep: {path} is not a table of the suite: {wrong}") from wrong


def _result(entrant: Entrant, row: Row) -> MethodResult:
    undone = float(row.get("undone", math.nan))
    return MethodResult(
        entrant,
        Spread(float(row["mean"]), float(row["std"])),
        float(row["lr"]),
        int(row["seeds"]),
        int(row["diverged"]),
        float(row["seconds"]),
        float(row["cpu_seconds"]),
        float(row["cpu_seconds_to_adams_loss"]),
        float(row["time_ratio"]),
        float(row.get("repeated", math.nan)),
        None if math.isnan(undone) else int(undone),
    )
