"""`ddpnopt reproduce` for the items that are sweeps of trainings."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from ddpnopt.lab.cli import app
from ddpnopt.lab.paper import fig_grid as grid
from ddpnopt.lab.paper.fig_grid_published import GRIDS
from ddpnopt.lab.paper.item import Context
from ddpnopt.lab.paper.item_runs import SeedRuns, outcomes
from ddpnopt.lab.paper.registry import ITEMS
from ddpnopt.lab.paper.table3_columns import COLUMNS, SLOW_EPOCHS, Column, columns
from ddpnopt.lab.paper.table3_runs import measure
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Curve, Outcome
from ddpnopt.lab.runs.release_store import REPRODUCE
from ddpnopt.lab.runs.store import STORE, Store

DIGITS = ClassificationTask("digits")


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["reproduce", *arguments])


def outcome(accuracy: float, loss: float, diverged: bool = False) -> Outcome:
    return Outcome(accuracy, 0.1, 1.0, 1.0, 10, diverged, "", Curve([], [], [], []), loss)


def test_an_unknown_item_is_one_line_that_lists_the_items(tmp_path: Path) -> None:
    result = run("table33", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith("ddpnopt: unknown item 'table33'")
    assert result.stderr.count("\n") == 1
    for name in ("table3", "fig-grid", "fig-dynamics", "fig-adam", "tables6-8", "ours"):
        assert name in result.stderr
        assert name in ITEMS


def test_an_item_writes_its_folder_and_a_second_call_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "QUICK_EPOCHS", 1)
    arguments = ("tables6-8", "--quick", "--seeds", "1", "--out", str(tmp_path))
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    for word in ("RMSprop", "95.36", "holds", "--quick"):
        assert word in result.stdout
    content = json.loads((tmp_path / "tables6-8" / "result.json").read_text())
    assert len(content["claims"]) == 6
    assert len(pd.read_csv(tmp_path / "tables6-8" / "table6.csv")) == 2
    store = Store(tmp_path / STORE)
    assert len(store.keys()) == 6

    def never(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("ddpnopt.lab.runs.stacking.StackedRuns.perform", never)
    assert run(*arguments).exit_code == 0
    # a file in the place of the folder: tables cannot be written, the runs stay
    table = tmp_path / "tables6-8" / "table6.md"
    table.unlink()
    table.mkdir()
    result = run(*arguments)
    assert result.exit_code == 2
    assert "cannot write the tables and pictures of tables6-8" in result.stderr
    assert len(store.keys()) == 6


def test_the_grid_compares_runs_that_differ_in_feedback_alone(tmp_path: Path) -> None:
    context = Context(tmp_path, quick=True)
    [base, ours] = [grid.config(context, m, 0.4, 3, eps) for m, eps in (("sgd", 0.0), ("ddpnopt-sgd", 1e-3))]
    assert replace(ours, method="sgd", options={}) == base
    assert sum(len(g.lrs) * (1 + len(g.eps)) * 10 for g in GRIDS) == 600


def test_claims_of_the_grid_follow_the_numbers() -> None:
    def cells(gain: float) -> grid.Cells:
        rows = [
            [
                SeedRuns([outcome(90.0, 0.5)], DIGITS),
                *[SeedRuns([outcome(90.0 + gain * i, 0.5 - gain / 10 * i)], DIGITS)] * 4,
            ]
            for i in range(1, 5)
        ]
        return grid.Cells(GRIDS[0], rows)

    assert grid._consistent(cells(0.2)).holds
    assert grid._grows(cells(0.2)).holds
    assert not grid._consistent(cells(-0.2)).holds
    assert not grid._grows(cells(-0.2)).holds
    assert "16 of 16" in grid._consistent(cells(0.2)).paper


def test_a_run_that_diverged_counts_as_guessing() -> None:
    seeds = SeedRuns([outcome(90.0, 0.1), outcome(math.nan, math.nan, diverged=True)], DIGITS)
    assert seeds.accuracy.mean == 50.0
    assert seeds.losses()[1] == pytest.approx(math.log(10))
    assert seeds.diverged == 1


def test_learning_rates_are_chosen_on_held_out_data_within_the_papers_ranges(tmp_path: Path) -> None:
    context = Context(tmp_path)
    column = Column("wine", "WINE", "wine", "fcn", 5, 8, seeds=1, tuning_seeds=2, rates=3, paper=(), slow_epochs=1)
    methods = ("adam", "sgd-m", "emsa")
    adam, sgd, emsa = measure(context, column, methods)
    keys = [json.loads(key) for key in Store(tmp_path / STORE).keys()]  # noqa: SIM118
    trials = [key for key in keys if key["validation"]]
    assert len(trials) == 3 * 2 + 3 * 3 * 2
    assert len(keys) - len(trials) == 3, "one run of each method sees the test set"
    assert adam.config.lr is not None
    assert 7e-4 <= adam.config.lr <= 1e-2
    assert (adam.tried, sgd.tried, emsa.tried) == (3, 9, 0)
    assert sgd.config.options["momentum"] in (0.0, 0.5, 0.9)
    assert emsa.config == column.config("emsa")
    # the best of its trials, and the same when the search is repeated
    values: dict[float, list[float]] = {}
    for key, found in ((json.loads(k), o) for k, o in Store(tmp_path / STORE).outcomes().items()):
        if key["method"] == "adam" and key["validation"]:
            values.setdefault(key["lr"], []).append(found.accuracy)
    assert set(values) == {0.0007, 0.00265, 0.01}
    assert sum(values[adam.config.lr]) == max(map(sum, values.values()))
    assert measure(context, column, methods)[0] == adam


def test_slow_methods_get_fewer_epochs() -> None:
    by_name = {column.name: column for column in COLUMNS}
    assert all(by_name[name].task(method).epochs == epochs for (method, name), epochs in SLOW_EPOCHS.items())
    assert by_name["digits"].task("sgd-m").epochs > SLOW_EPOCHS["emsa", "digits"]
    assert by_name["mnist-cnn"].task("emsa").epochs == 1
    assert by_name["digits"].config("vanilla-ddp").options == {"damping": 30.0}


def test_without_a_store_the_command_says_where_to_find_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "EPOCHS", 1)
    elsewhere = tmp_path / "there" / "other.sqlite"
    arguments = ("tables6-8", "--seeds", "1", "--out", str(tmp_path / "out"), "--store", str(elsewhere))
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert REPRODUCE.url in result.stderr
    assert REPRODUCE.sha256 in result.stderr
    assert elsewhere.exists()
    assert not (tmp_path / "out" / STORE).exists()
    assert REPRODUCE.url not in run(*arguments).stderr


def test_validation_runs_hold_out_training_data() -> None:
    wine = ClassificationTask("wine")
    whole, held = wine.load(1), wine.load(1, validation=True)
    assert len(held.y_train) + len(held.y_test) == len(whole.y_train)
    test = {tuple(row) for row in whole.x_test.tolist()}
    assert not test & {tuple(row) for row in [*held.x_train.tolist(), *held.x_test.tolist()]}


def test_columns_can_be_chosen_and_an_unknown_one_is_an_error(tmp_path: Path) -> None:
    chosen = columns(Context(tmp_path, datasets=("mnist", "wine")))
    assert [each.name for each in chosen] == ["wine", "mnist-fcn", "mnist-cnn"]
    result = run("table3", "--datasets", "imagenet", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "cifar10-cnn" in result.stderr
    assert [c.seeds for c in COLUMNS] == [10, 10, 5, 5, 3, 3, 3]
    full = columns(Context(tmp_path, full=True))
    assert all(each.n_train is None for each in full)


def test_no_data_folder_and_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDPNOPT_DATA", raising=False)
    monkeypatch.setenv("DDPNOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run("table3", "--quick", "--datasets", "mnist-fcn", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "--data-dir" in result.stderr
    assert result.stderr.count("ddpnopt: ") == 1


def test_progress_counts_what_is_left(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    context = Context(tmp_path, on_progress=lambda *now: seen.append(now))
    configs = [RunConfig("sgd", ClassificationTask("wine", epochs=1), 0.1, seed=seed) for seed in range(3)]
    outcomes(context, configs[:1], "a")
    found = outcomes(context, configs, "b")
    assert len(found) == 3
    assert seen == [("a", 0, 1), ("a", 1, 1), ("b", 1, 3), ("b", 2, 3), ("b", 3, 3)]
    assert found[0] == Store(tmp_path / STORE).outcomes()[configs[0].key]
