"""A report from the table of runs of an earlier one, where there is no store."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Curve, Outcome
from ddpnopt.lab.windows.kept_runs import kept_runs
from ddpnopt.lab.windows.standings import Standings, standings
from ddpnopt.lab.windows.window_report import cells, headings, markdown, run_records, write
from ddpnopt.lab.windows.window_tasks import TASKS

TASK = TASKS["mnist-fcn"]


def outcome(accuracy: float, lr: float, loss: float = 0.1) -> Outcome:
    diverged = math.isnan(accuracy)
    curve = Curve([], [], [], []) if diverged else Curve([1, 2, 3], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [2.0, 1.0, loss])
    return Outcome(accuracy, lr, 3.0, 3.0, 3, diverged, "ValueError: x" if diverged else "", curve)


@pytest.fixture
def outcomes() -> dict[RunConfig, Outcome]:
    made = {}
    for seed in (0, 1):
        for lr, accuracy in ((0.001, 92.0 + seed), (0.00316, 93.0 + seed), (0.01, math.nan)):
            made[RunConfig("adam", TASK, lr, seed=seed)] = outcome(accuracy, lr)
        made[RunConfig("adam", TASK, seed=seed)] = outcome(92.5, 0.003)
        made[RunConfig("sgd-m", TASK, 100.0, seed=seed)] = outcome(9.8, 100.0, loss=1e6)
        made[RunConfig("ddpnopt", TASK, seed=seed)] = outcome(93.0 + seed, 1.0)
        made[RunConfig("given-lr", TASK, 10.0, seed=seed)] = outcome(90.0, 10.0)
    return made


def found(outcomes: dict[RunConfig, Outcome]) -> Standings:
    result = standings(TASK, outcomes)
    assert result is not None
    return result


def test_accuracies_and_windows_are_those_of_the_runs(outcomes: dict[RunConfig, Outcome], tmp_path: Path) -> None:
    write([found(outcomes)], outcomes, tmp_path, "lr-window", "")
    kept = kept_runs(tmp_path / "lr-window-runs.csv", [TASK])
    assert set(kept) == set(outcomes)
    before, after = found(outcomes), found(kept)
    count = len(headings(after))
    assert "time to loss" in headings(before)
    assert "time to loss" not in headings(after)
    assert [cells(row)[:count] for row in before.rows] == [cells(row)[:count] for row in after.rows]
    assert [row.errors for row in before.rows] == [row.errors for row in after.rows]
    assert "time to loss" not in markdown(after).lower()


def test_what_was_read_is_written_again_as_it_was(outcomes: dict[RunConfig, Outcome], tmp_path: Path) -> None:
    write([found(outcomes)], outcomes, tmp_path, "lr-window", "")
    path = tmp_path / "lr-window-runs.csv"
    before = path.read_text()
    pd.DataFrame(run_records(kept_runs(path, [TASK]))).to_csv(path, index=False)
    assert path.read_text() == before


def test_a_task_of_another_length_is_another_task(outcomes: dict[RunConfig, Outcome], tmp_path: Path) -> None:
    write([found(outcomes)], outcomes, tmp_path, "lr-window", "")
    assert kept_runs(tmp_path / "lr-window-runs.csv", [replace(TASK, epochs=1), TASKS["digits"]]) == {}


def test_another_file_is_an_error_and_none_is_no_runs(tmp_path: Path) -> None:
    assert kept_runs(tmp_path / "none.csv", [TASK]) == {}
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ExperimentError, match="not a table of runs"):
        kept_runs(tmp_path / "other.csv", [TASK])


def test_a_method_without_a_rate_has_one_setting(outcomes: dict[RunConfig, Outcome]) -> None:
    rows = {row.method.name: row for row in found(outcomes).rows}
    assert list(rows)[:2] == ["ddpnopt", "given-lr"]
    ours = rows["ddpnopt"]
    assert not ours.has_rate
    assert ours.best is ours.default
    assert cells(ours)[:8] == ["DDPNOpt", "all", "–", "93.5 ± 0.7", "no rate", "93.5 ± 0.7", "0/2", "all"]
    behind = {run: each for run, each in outcomes.items() if run.method != "ddpnopt"}
    behind |= {RunConfig("ddpnopt", TASK, seed=seed): outcome(91.0, 1.0) for seed in (0, 1)}
    assert cells(found(behind).rows[0])[1] == "0"
    assert cells(found(behind).rows[0])[7] == "all"
