"""`ours`: DDPNOpt(model) is trained; the tuned methods come from Table 3 where it has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ddpnopt.lab.paper import defaults_table
from ddpnopt.lab.paper.item import Context, Result, Table, write
from ddpnopt.lab.paper.item_runs import SeedRuns, setup
from ddpnopt.lab.paper.table3 import ITEM as TABLE3
from ddpnopt.lab.paper.table3_columns import COLUMNS, Column
from ddpnopt.lab.paper.table3_runs import TunedMethod
from ddpnopt.lab.paper.table3_tuned import tuned_column
from ddpnopt.lab.runs.outcome import Curve, Outcome

WINE, DIGITS, MNIST = COLUMNS[:3]
LABELS = ("SGD-m", "RMSprop", "Adam", "EKFAC", "DDPNOpt (RMSprop)")


def table3(folder: Path, column: Column = WINE, *, quick: bool = False, length: str | None = None) -> Path:
    """A folder of Table 3 with one data set."""
    cells = ("95.19 ± 8.19 (94.35)", "95.74 ± 8.78 (98.10)", "97.69 ± 2.20 (98.13)", "95.37", "95.65 ± 9.04 (98.18)")
    headings = (*LABELS[:4], "DDPNOpt")
    accuracy = pd.DataFrame([{"data set": column.label, **dict(zip(headings, cells, strict=True))}])
    shown = [(label, "60") for label in LABELS] + [("E-MSA", "10"), (LABELS[-1], "10")]
    settings = [
        {"data set": column.label, "method": label, "learning rate": "0.1", "tried": "6", "samples": "all",
         "epochs": epochs, "diverged": "0 of 30"}
        for label, epochs in shown
    ]  # fmt: skip
    notes = [f"{length or setup(column.task(column.size))}, 30 seeds.", f"{column.label}: measured by `a command`."]
    tables = [Table("accuracy", "", accuracy), Table("settings", "", pd.DataFrame(settings))]
    return write(TABLE3, Result([], tables, notes=notes), Context(folder, quick=quick))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The methods that are trained, with made-up accuracies."""
    calls: list[tuple[str, ...]] = []

    def measure(context: Context, column: Column, methods: Sequence[str], **_: Any) -> list[TunedMethod]:
        calls.append(tuple(methods))
        runs = [Outcome(90.0 + i, 0.1, 1.0, 1.0, 10, False, "", Curve([], [], [], []), 0.1) for i in range(3)]
        made = SeedRuns(runs, column.task(column.size))
        return [TunedMethod(column, name, column.config(name, column.size), 0, made) for name in methods]

    monkeypatch.setattr(defaults_table, "measure", measure)
    return calls


def test_what_table_3_has_is_read_back(tmp_path: Path) -> None:
    found = tuned_column(WINE, table3(tmp_path))
    assert found is not None
    assert list(found.accuracies) == ["sgd-m", "rmsprop", "adam", "ekfac", "ddpnopt-rmsprop"]
    assert found.accuracies["adam"].text(2) == "97.69 ± 2.20"
    assert found.accuracies["ekfac"].text(2) == "95.37"
    assert list(found.settings["method"]) == list(LABELS)
    assert set(found.settings["epochs"]) == {"60"}
    assert found.note == "WINE: the tuned methods are those of Table 3, 30 seeds, measured by `a command`."


def test_another_length_another_data_set_and_a_quick_look_do_not_count(tmp_path: Path) -> None:
    assert tuned_column(WINE, tmp_path / "table3") is None
    assert tuned_column(DIGITS, table3(tmp_path / "a")) is None
    assert tuned_column(WINE, table3(tmp_path / "b", length="wine, fcn: 6 epochs of batches of 8")) is None
    assert tuned_column(WINE, table3(tmp_path / "c", quick=True)) is None


def test_only_ddpnopt_is_trained_where_table_3_has_the_rest(tmp_path: Path, trained: list[tuple[str, ...]]) -> None:
    table3(tmp_path)
    context = Context(tmp_path, datasets=("wine", "digits"))
    result = defaults_table.run(context)
    assert trained == [("ddpnopt",), ("sgd-m", "rmsprop", "adam", "ekfac", "ddpnopt-rmsprop", "ddpnopt")]
    frame = result.tables[0].frame
    assert list(frame.columns) == ["data set", *LABELS[:4], "DDPNOpt, the paper's", "DDPNOpt(model)"]
    assert list(frame["Adam"]) == ["97.69 ± 2.20", "91.00 ± 1.00"]
    assert list(frame["DDPNOpt(model)"]) == ["91.00 ± 1.00"] * 2
    settings = result.tables[1].frame
    assert len(settings) == 12
    assert set(settings[settings["method"] == "DDPNOpt"]["learning rate"]) == {"none"}
    wine, digits = result.claims
    assert (wine.holds, digits.holds) == (False, True)
    assert wine.why == "It is 6.69 below, with deviations of 2.20 and 1.00."
    assert any("those of Table 3" in note for note in result.notes)


def test_a_quick_look_and_whole_image_sets_train_all(tmp_path: Path, trained: list[tuple[str, ...]]) -> None:
    table3(tmp_path)
    defaults_table.run(Context(tmp_path, quick=True, datasets=("wine",)))
    defaults_table.run(Context(tmp_path, full=True, datasets=("wine",)))
    assert all(len(methods) == 6 for methods in trained)


def test_data_sets_that_are_not_measured_again_stay(tmp_path: Path, trained: list[tuple[str, ...]]) -> None:
    write(defaults_table.ITEM, defaults_table.run(Context(tmp_path, datasets=("wine", "digits"))), Context(tmp_path))
    again = defaults_table.run(Context(tmp_path, datasets=("digits",)))
    assert list(again.tables[0].frame["data set"]) == ["WINE", "DIGITS"]
    assert len(again.claims) == 2
    folder = write(defaults_table.ITEM, again, Context(tmp_path))
    assert len(json.loads((folder / "result.json").read_text())["claims"]) == 2
    assert len(trained) == 3
