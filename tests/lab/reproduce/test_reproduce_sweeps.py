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
from ddpnopt.lab.paper import grid, search
from ddpnopt.lab.paper.columns import COLUMNS, columns
from ddpnopt.lab.paper.item import Context
from ddpnopt.lab.paper.paper_grid import GRIDS
from ddpnopt.lab.paper.registry import ITEMS
from ddpnopt.lab.paper.search import RANGES, Wish
from ddpnopt.lab.paper.sweeps import STORE, Seeds, outcomes
from ddpnopt.lab.runs.job import Training
from ddpnopt.lab.runs.outcome import Curve, Outcome
from ddpnopt.lab.runs.store import Store
from ddpnopt.lab.runs.training import RunConfig


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

    monkeypatch.setattr("ddpnopt.lab.runs.together.Together.perform", never)
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
            [Seeds([outcome(90.0, 0.5)], 10), *[Seeds([outcome(90.0 + gain * i, 0.5 - gain / 10 * i)], 10)] * 4]
            for i in range(1, 5)
        ]
        return grid.Cells(GRIDS[0], rows)

    assert grid._consistent(cells(0.2)).holds
    assert grid._grows(cells(0.2)).holds
    assert not grid._consistent(cells(-0.2)).holds
    assert not grid._grows(cells(-0.2)).holds
    assert "16 of 16" in grid._consistent(cells(0.2)).paper


def test_a_run_that_diverged_counts_as_guessing() -> None:
    seeds = Seeds([outcome(90.0, 0.1), outcome(math.nan, math.nan, diverged=True)], 10)
    assert seeds.accuracy.mean == 50.0
    assert seeds.losses()[1] == pytest.approx(math.log(10))
    assert seeds.diverged == 1


def test_learning_rates_are_chosen_on_held_out_data_within_the_papers_ranges(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    context = Context(tmp_path)
    base = RunConfig("adam", "wine", epochs=5, batch_size=8)
    wishes = [
        Wish(base, 3, 2, 3),
        Wish(replace(base, method="sgd-m"), 2, 1, 3),
        Wish(replace(base, method="emsa"), 3, 1, 3),
    ]
    adam, sgd, emsa = search.search(context, wishes, "test")
    keys = [json.loads(key) for key in Store(tmp_path / STORE).keys()]  # noqa: SIM118
    assert all(key["validation"] for key in keys), "a trial has seen the test set"
    assert len(keys) == 3 * 2 + 2 * 3
    assert adam.config.lr is not None
    assert RANGES["adam"][0] <= adam.config.lr <= RANGES["adam"][1]
    assert (adam.trials, sgd.trials, emsa.trials) == (3, 6, 0)
    assert sgd.config.options["momentum"] in search.MOMENTA
    assert emsa.config == replace(base, method="emsa")
    # the best of its trials, and the same when the search is repeated
    values = {
        key["lr"]: found.accuracy
        for key, found in ((json.loads(k), o) for k, o in Store(tmp_path / STORE).outcomes().items())
        if key["method"] == "adam" and key["seed"] == 0
    }
    assert set(values) == {0.0007, 0.00265, 0.01}
    assert search.search(context, wishes, "test")[0] == adam


def test_validation_runs_hold_out_training_data() -> None:
    from ddpnopt.lab.runs.data import data_of

    whole = data_of(RunConfig("adam", "wine", seed=1), None)
    held = data_of(RunConfig("adam", "wine", seed=1, validation=True), None)
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
    configs = [RunConfig("sgd", "wine", lr=0.1, epochs=1, seed=seed) for seed in range(3)]
    outcomes(context, configs[:1], "a")
    found = outcomes(context, configs, "b")
    assert len(found) == 3
    assert seen == [("a", 0, 1), ("a", 1, 1), ("b", 1, 3), ("b", 2, 3), ("b", 3, 3)]
    assert found[0] == Store(tmp_path / STORE).outcomes()[Training(configs[0]).key]
