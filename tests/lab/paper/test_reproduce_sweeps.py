"""`ddpnopt reproduce` for the items that are sweeps of trainings."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from paper_runs import DIGITS, outcome, reproduce

from ddpnopt.lab.paper import digits_runs
from ddpnopt.lab.paper.fig_grid_published import GRIDS
from ddpnopt.lab.paper.item import Context
from ddpnopt.lab.paper.item_runs import SeedRuns, outcomes
from ddpnopt.lab.paper.readings import PAPER, READINGS, reading
from ddpnopt.lab.paper.registry import ITEMS
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.store import STORE, Store


def test_an_unknown_item_is_one_line_that_lists_the_items(tmp_path: Path) -> None:
    result = reproduce("table33", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith("ddpnopt: unknown item 'table33'")
    assert result.stderr.count("\n") == 1
    for name in ("table3", "fig-grid", "fig-dynamics", "fig-adam", "tables6-8", "ours"):
        assert name in result.stderr
        assert name in ITEMS


def test_an_item_writes_its_folder_and_a_second_call_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digits_runs, "BATCH_SIZE", 64)
    arguments = ("tables6-8", "--quick", "--seeds", "1", "--out", str(tmp_path))
    result = reproduce(*arguments)
    assert result.exit_code == 0, result.output
    for word in ("RMSprop", "95.36", "open", "--quick"):
        assert word in result.stdout
    content = json.loads((tmp_path / "tables6-8" / "result.json").read_text())
    assert len(content["claims"]) == 6
    assert len(pd.read_csv(tmp_path / "tables6-8" / "table6.csv")) == 2
    store = Store(tmp_path / STORE)
    assert len(store.keys()) == 3 + 3 * len(READINGS)

    def never(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("ddpnopt.lab.runs.stacking.StackedRuns.perform", never)
    assert reproduce(*arguments).exit_code == 0
    # a file in the place of the folder: tables cannot be written, the runs stay
    table = tmp_path / "tables6-8" / "table6.md"
    table.unlink()
    table.mkdir()
    result = reproduce(*arguments)
    assert result.exit_code == 2
    assert "cannot write the tables and pictures of tables6-8" in result.stderr
    assert len(store.keys()) == 3 + 3 * len(READINGS)


def test_the_grid_compares_runs_that_differ_in_feedback_alone(tmp_path: Path) -> None:
    context = Context(tmp_path, quick=True)
    [base, ours] = [digits_runs.config(context, m, 0.4, 3, eps) for m, eps in (("sgd", 0.0), ("ddpnopt-sgd", 1e-3))]
    assert replace(ours, method="sgd", options={}) == base
    assert ours.options == {"vxx_reg": 1e-3, **reading(PAPER).options}
    [ekfac, mine] = [digits_runs.config(context, m, 0.1, 3) for m in ("ekfac", "ddpnopt-ekfac")]
    assert ekfac.options == {"damping": 0.1, "refresh": 100}
    assert ekfac.options.items() <= mine.options.items()
    assert sum(len(g.lrs) * (1 + len(g.eps)) * 10 for g in GRIDS) == 600


def test_the_readings_can_be_chosen_and_an_unknown_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context(tmp_path, readings=("twice", "mean"))
    assert (context.judged.name, [each.name for each in context.compared]) == ("twice", ["twice", "mean"])
    assert Context(tmp_path).judged.name == PAPER
    assert [each.name for each in Context(tmp_path).compared] == list(READINGS)
    monkeypatch.setattr(digits_runs, "BATCH_SIZE", 256)
    arguments = ("tables6-8", "--quick", "--seeds", "1", "--out", str(tmp_path))
    result = reproduce(*arguments, "--readings", "twice")
    assert result.exit_code == 0, result.output
    assert set(pd.read_csv(tmp_path / "tables6-8" / "readings.csv")["V_xx"]) == {"H/B^2, guard"}
    result = reproduce(*arguments, "--readings", "four")
    assert result.exit_code == 2
    assert all(name in result.stderr for name in READINGS)


def test_a_run_that_diverged_counts_as_guessing() -> None:
    seeds = SeedRuns([outcome(90.0, 0.1), outcome(math.nan, math.nan, diverged=True)], DIGITS)
    assert seeds.accuracy.mean == 50.0
    assert seeds.losses()[1] == pytest.approx(math.log(10))
    assert seeds.diverged == 1


def test_without_a_store_the_command_says_that_all_runs_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digits_runs, "EPOCHS", 1)
    monkeypatch.setattr(digits_runs, "BATCH_SIZE", 64)
    elsewhere = tmp_path / "there" / "other.sqlite"
    arguments = ("tables6-8", "--seeds", "1", "--out", str(tmp_path / "out"), "--store", str(elsewhere))
    result = reproduce(*arguments)
    assert result.exit_code == 0, result.output
    assert f"no store of finished runs at {elsewhere}" in result.stderr
    assert elsewhere.exists()
    assert not (tmp_path / "out" / STORE).exists()
    assert "no store of finished runs" not in reproduce(*arguments).stderr


def test_validation_runs_hold_out_training_data() -> None:
    wine = ClassificationTask("wine")
    whole, held = wine.load(1), wine.load(1, validation=True)
    assert len(held.y_train) + len(held.y_test) == len(whole.y_train)
    test = {tuple(row) for row in whole.x_test.tolist()}
    assert not test & {tuple(row) for row in [*held.x_train.tolist(), *held.x_test.tolist()]}


def test_no_data_folder_and_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDPNOPT_DATA", raising=False)
    monkeypatch.setenv("DDPNOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = reproduce("table3", "--quick", "--datasets", "mnist-fcn", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "--data-dir" in result.stderr
    assert result.stderr.count("ddpnopt: ") == 1


def test_an_item_without_its_data_does_not_keep_the_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DDPNOPT_DATA", raising=False)
    monkeypatch.setenv("DDPNOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(digits_runs, "BATCH_SIZE", 256)
    result = reproduce("fig-policy", "tables6-8", "--quick", "--readings", "twice", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert result.stderr.count("ddpnopt: ") == 1
    assert "ddpnopt: fig-policy: " in result.stderr
    summary = result.stdout.partition("Summary")[2]
    assert "no data" in next(line for line in summary.splitlines() if "fig-policy" in line)
    last = next(line for line in summary.splitlines() if "the paper's 6 claims" in line)
    assert [int(cell) for cell in last.split("│")[2:5]] == [0, 0, 6]
    assert "ddpnopt report --results" in summary
    assert (tmp_path / "out" / "tables6-8" / "result.json").exists()
    assert not (tmp_path / "out" / "fig-policy").exists()


def test_progress_counts_what_is_left(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    context = Context(tmp_path, on_progress=lambda *now: seen.append(now))
    configs = [RunConfig("sgd", ClassificationTask("wine", epochs=1), 0.1, seed=seed) for seed in range(3)]
    outcomes(context, configs[:1], "a")
    found = outcomes(context, configs, "b")
    assert len(found) == 3
    assert seen == [("a", 0, 1), ("a", 1, 1), ("b", 1, 3), ("b", 2, 3), ("b", 3, 3)]
    assert found[0] == Store(tmp_path / STORE).outcomes()[configs[0].key]
