"""The tuned methods of Table 3 as `reproduce table3` has left them in the folder of results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.paper.item import RESULT
from ddpnopt.lab.paper.item_runs import setup
from ddpnopt.lab.paper.table3_columns import BASELINES, Column
from ddpnopt.lab.paper.table3_kept import DATA_SET, MEASURED
from ddpnopt.lab.tables import Spread


@dataclass(frozen=True, eq=False)
class TunedColumn:
    """The tuned methods on one data set."""

    accuracies: Mapping[str, Spread]
    """By the name of the method: the baselines and the paper's DDPNOpt."""
    settings: pd.DataFrame
    note: str
    """Which command measured them, over how many seeds."""


def tuned_column(column: Column, folder: Path) -> TunedColumn | None:
    """What `folder`, that of Table 3, has of a data set; None where its set-up was another one, or nothing is there."""
    path = folder / RESULT
    if not path.is_file():
        return None
    result = json.loads(path.read_text(encoding="utf-8"))
    same = [note for note in result["notes"] if note.startswith(f"{setup(column.task(column.size))}, ")]
    row = _row(folder / "accuracy.csv", column.label)
    if result["quick"] or not same or row is None:
        return None
    methods = (*BASELINES, column.paper_method)
    headings = {**{name: method(name).label for name in BASELINES}, column.paper_method: "DDPNOpt"}
    seeds = same[0].rpartition(", ")[2]
    start = f"{column.label}: {MEASURED} "
    commands = [note.removeprefix(start) for note in result["notes"] if note.startswith(start)]
    command = commands[0] if commands else f"{result['machine'].rpartition('- command: ')[2]}."
    return TunedColumn(
        {name: _spread(str(row[headings[name]])) for name in methods},
        _settings(folder / "settings.csv", column, [method(name).label for name in methods]),
        f"{column.label}: the tuned methods are those of Table 3, {seeds.removesuffix('.')}, {MEASURED} {command}",
    )


def _row(path: Path, label: str) -> Mapping[str, str] | None:
    if not path.is_file():
        return None
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    found = frame[frame[DATA_SET] == label].to_dict("records")
    return {str(name): value for name, value in found[0].items()} if found else None


def _spread(cell: str) -> Spread:
    """Read back from `95.19 ± 8.19 (94.35)`, where the brackets hold the paper's."""
    mean, _, std = cell.partition(" (")[0].partition(" ± ")
    return Spread(float(mean), float(std or "nan"))


def _settings(path: Path, column: Column, labels: list[str]) -> pd.DataFrame:
    """One row for each method; DDPNOpt has a second, shorter one for the comparison with E-MSA, which is left out."""
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    mine = frame[(frame[DATA_SET] == column.label) & frame["method"].isin(labels)]
    return mine.drop_duplicates("method")
