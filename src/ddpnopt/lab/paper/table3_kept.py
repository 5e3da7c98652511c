"""Table 3 with some of its data sets measured now, and the others as they are in the folder of results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from ddpnopt.lab.paper.item import RESULT, Claim, Result, Table
from ddpnopt.lab.paper.table3_columns import COLUMNS, Column

DATA_SET = "data set"
MEASURED = "measured by"
SAME = 60
"""Notes that begin with as many equal characters are wordings of one."""


def with_earlier(result: Result, chosen: Sequence[Column], folder: Path, command: str) -> Result:
    """`result` of the `chosen` data sets, completed from an earlier result in `folder`, if there is a whole one."""
    path = folder / RESULT
    if len(chosen) == len(COLUMNS) or not path.is_file():
        return result
    earlier = json.loads(path.read_text(encoding="utf-8"))
    known = {claim["text"].partition(": ")[0] for claim in earlier["claims"]}
    again = {column.name for column in chosen}  # by name: with another number of seeds they are no longer equal
    kept = [column for column in COLUMNS if column.name not in again and column.label in known]
    if earlier["quick"] or not kept:
        return result
    labels = {column.label for column in kept}
    claims = [_claim(each) for each in earlier["claims"] if each["text"].partition(": ")[0] in labels]
    return replace(
        result,
        claims=_sorted([*result.claims, *claims], lambda claim: claim.text.partition(": ")[0]),
        tables=[_completed(table, folder, labels) for table in result.tables],
        notes=[*_by_command(chosen, kept, earlier, command), *result.notes, *_still_true(earlier, result, kept)],
    )


def _claim(each: dict[str, Any]) -> Claim:
    return Claim(**{field.name: each[field.name] for field in fields(Claim) if field.name in each})


def _completed(table: Table, folder: Path, labels: Iterable[str]) -> Table:
    path = folder / f"{table.name}.csv"
    if not path.is_file():
        return table
    earlier = pd.read_csv(path, dtype=str, keep_default_na=False)
    both = pd.concat([table.frame, earlier[earlier[DATA_SET].isin(list(labels))]]).fillna("-")
    rows = _sorted(both.to_dict("records"), lambda row: str(row[DATA_SET]))
    return replace(table, frame=pd.DataFrame(rows, columns=table.frame.columns))


def _sorted(each: Iterable[Any], label: Callable[[Any], str]) -> list[Any]:
    """In the order of the paper; rows of one data set stay in theirs."""
    order = [column.label for column in COLUMNS]
    return sorted(each, key=lambda one: order.index(label(one)))


def _by_command(chosen: Sequence[Column], kept: Sequence[Column], earlier: dict[str, Any], command: str) -> list[str]:
    """A note for each data set: which command has measured it."""
    before = earlier["machine"].rpartition("- command: ")[2]
    notes = {column.label: f"{column.label}: {MEASURED} {before}." for column in kept}
    for label in notes:
        found = [note for note in earlier["notes"] if note.startswith(f"{label}: {MEASURED} ")]
        notes[label] = found[0] if found else notes[label]
    notes |= {column.label: f"{column.label}: {MEASURED} `{command}`." for column in chosen}
    return [notes[column.label] for column in COLUMNS if column.label in notes]


def _still_true(earlier: dict[str, Any], result: Result, kept: Sequence[Column]) -> list[str]:
    """The earlier notes that say something of the data sets which are kept, or of all."""
    stays = {start: column in kept for column in COLUMNS for start in (_setup(column), f"{column.label}: ")}
    gone = tuple(start for start, stay in stays.items() if not stay)
    found = [note for note in earlier["notes"] if f": {MEASURED} " not in note and not note.startswith("Runs by the ")]
    now = tuple(note[:SAME] for note in result.notes)
    return [note for note in found if not note.startswith((*now, *gone))]


def _setup(column: Column) -> str:
    """How the note on a data set's set-up begins, see `how_run`."""
    return f"{column.dataset}, {'cnn' if column.convolutional else 'fcn'}"
