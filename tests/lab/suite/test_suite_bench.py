"""`ddpnopt bench suite`: which runs it takes, how it compares, what it writes, and that it goes on where it was."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from ddpnopt.lab.cli import app
from ddpnopt.lab.page.benches import read_bench
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Curve, Outcome
from ddpnopt.lab.runs.store import STORE, Store
from ddpnopt.lab.suite import TASKS, open_tasks, sealed_tasks
from ddpnopt.lab.suite.comparison import TaskResult, Verdict, compare
from ddpnopt.lab.suite.entrants import RATES, SUITE_METHODS, all_runs, all_trials, entrants
from ddpnopt.lab.suite.profile_figure import profile
from ddpnopt.lab.suite.report import explanation, summary_rows, task_tables
from ddpnopt.lab.suite.runs import SuiteRunTask

QUICK = ["bench", "suite", "--tasks", "wine,noisy_table", "--steps", "6", "--seeds", "2", "--jobs", "1"]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", "suite", *arguments], catch_exceptions=False)
    assert result.exit_code == 2
    return result.output


def outcome(metric: float, losses: list[float] | None = None, seconds: float = 1.0, diverged: bool = False) -> Outcome:
    """A made-up run whose loss is sampled at even times."""
    curve = losses or [1.0, 0.5]
    times = [seconds * (i + 1) / len(curve) for i in range(len(curve))]
    return Outcome(
        metric=math.nan if diverged else metric,
        lr=0.1,
        seconds=seconds,
        cpu_seconds=seconds,
        steps=len(curve),
        diverged=diverged,
        error="",
        curve=Curve(list(range(1, len(curve) + 1)), times, times, curve),
        train_loss=math.nan if diverged else curve[-1],
    )


def compared(name: str, figures: dict[str, list[Outcome]]) -> TaskResult:
    """The comparison of made-up runs, one per seed."""
    task, methods = SuiteRunTask(name), entrants(figures)
    trials = {run: outcome(1.0) for run in all_trials([task], methods)}
    runs = all_runs([task], methods, trials, len(next(iter(figures.values()))))
    made = {run: figures[run.method][run.seed] for run in runs}
    [result] = compare([task], methods, trials | made, len(next(iter(figures.values()))))
    return result


def verdict(name: str, adam: list[float], other: list[float]) -> Verdict | None:
    result = compared(name, {"adam": [outcome(m) for m in adam], "soap": [outcome(m) for m in other]})
    return result.verdict(result.results["soap"])


def test_five_rates_are_tried_on_validation_data_and_the_best_runs_with_every_seed() -> None:
    task = SuiteRunTask("digits_tanh")
    [adam] = entrants(["adam"])
    trials = adam.trials(task)
    assert [run.lr for run in trials] == [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
    assert all(run.validation and run.seed == 0 for run in trials)
    found = {run: outcome(90.0 if run.lr == 3e-3 else 80.0) for run in trials}
    runs = adam.runs(task, found, 3)
    assert [(run.lr, run.seed, run.validation) for run in runs] == [(3e-3, seed, False) for seed in range(3)]
    del found[trials[0]]
    assert adam.runs(task, found, 3) == [], "no rate can be chosen before all trials are there"


def test_the_rate_with_the_lowest_loss_wins_where_lower_is_better() -> None:
    task = SuiteRunTask("wine")
    [adam] = entrants(["adam"])
    found = {run: outcome(0.2 if run.lr == 1e-2 else 0.4) for run in adam.trials(task)}
    assert adam.chosen_rate(task, found) == 1e-2


def test_a_small_difference_of_the_metric_weighs_more_than_the_training_loss() -> None:
    task = SuiteRunTask("diffusion_digits")
    [adam] = entrants(["adam"])
    better, worse = outcome(0.1000, [9.0]), outcome(0.1001, [0.0])
    found = {run: better if run.lr == 1e-3 else worse for run in adam.trials(task)}
    assert adam.chosen_rate(task, found) == 1e-3
    equal = {run: replace(better, train_loss=0.5 if run.lr == 3e-2 else 0.6) for run in adam.trials(task)}
    assert adam.chosen_rate(task, equal) == 3e-2


def test_other_methods_have_their_own_defaults() -> None:
    by_name = {each.name: each for each in entrants(SUITE_METHODS)}
    assert {name for name, each in by_name.items() if each.rates} == set(RATES)
    assert by_name["adamw"].lr == 1e-3
    assert all(by_name[name].lr is None for name in ("ddpnopt", "schedule-free", "prodigy", "soap", "muon"))


@pytest.mark.parametrize(
    ("name", "adam", "other", "expected"),
    [
        ("digits_tanh", [90, 90], [90.9, 90.9], Verdict.LEVEL),
        ("digits_tanh", [90, 90], [91.1, 91.1], Verdict.AHEAD),
        ("digits_tanh", [90, 90], [88, 88], Verdict.BEHIND),
        ("digits_tanh", [85, 95], [84, 90], Verdict.LEVEL),  # a deviation of several points
        ("digits_tanh", [90, 90], [30, 30], Verdict.COLLAPSED),
        ("wine", [0.5, 0.5], [0.509, 0.509], Verdict.LEVEL),
        ("wine", [0.5, 0.5], [0.48, 0.48], Verdict.AHEAD),
        ("wine", [0.5, 0.5], [0.7, 0.7], Verdict.BEHIND),
        ("wine", [0.5, 0.5], [1.0, 1.0], Verdict.COLLAPSED),
    ],
)
def test_verdicts_compared_with_adam(name: str, adam: list[float], other: list[float], expected: Verdict) -> None:
    assert verdict(name, adam, other) is expected


def test_a_run_that_diverged_counts_as_chance() -> None:
    result = compared("wine", {"adam": [outcome(0.3)], "soap": [outcome(0.0, diverged=True)]})
    soap = result.results["soap"]
    assert soap.figure.mean == result.chance == TASKS["wine"].build(0).chance
    assert result.verdict(soap) is Verdict.COLLAPSED
    assert result.shortfall(soap) == pytest.approx(1)
    assert soap.to_reference == math.inf


def test_time_to_adams_final_loss_is_that_of_the_same_seed() -> None:
    falling = [1.0 - i / 50 for i in range(50)]
    quick = [max(1.0 - i / 25, 0.0) for i in range(50)]
    result = compared(
        "wine",
        {
            "adam": [outcome(0.3, falling, seconds=4.0)],
            "soap": [outcome(0.3, quick, seconds=4.0)],
            "prodigy": [outcome(0.3, [1.0] * 50, seconds=4.0)],
        },
    )
    adam, soap, prodigy = (result.results[name] for name in ("adam", "soap", "prodigy"))
    assert adam.time_ratio == pytest.approx(1)
    assert adam.to_reference == pytest.approx(4.0)
    assert 0.45 < soap.time_ratio < 0.6
    assert prodigy.to_reference == math.inf
    rows = {row[0]: row for row in summary_rows([result], entrants(["adam", "soap", "prodigy"]))}
    assert rows["Prodigy"][-2:] == ["0/1", "–"]
    assert rows["SOAP"][-2] == "1/1"


def test_steps_that_were_made_again_are_counted_after_the_first_ones() -> None:
    runs = [replace(outcome(0.3), steps=150, repeated=n, undone=1) for n in (2, 5)]
    result = compared("wine", {"adam": [outcome(0.3)] * 2, "ddpnopt": runs})
    ours, adam = result.results["ddpnopt"], result.results["adam"]
    assert (ours.repeated, ours.undone) == (0.05, 2)
    assert math.isnan(adam.repeated)
    assert adam.undone is None
    assert "at most 5.0 % (wine) are made again, shorter; 2 steps of all runs are given up" in explanation([result])
    assert "made again" not in explanation([compared("wine", {"adam": [outcome(0.3)]})])


def test_ranks_best_and_profile() -> None:
    figures = {"adam": 90.0, "soap": 95.0, "prodigy": 90.0, "ddpnopt": 20.0}
    result = compared("digits_tanh", {name: [outcome(value)] for name, value in figures.items()})
    assert result.ranks == {"soap": 1, "adam": 2.5, "prodigy": 2.5, "ddpnopt": 4}
    assert result.best == "soap"
    [soap, ddpnopt] = entrants(["soap", "ddpnopt"])
    assert profile([result], soap, [0.0, 1.0]) == [1.0, 1.0]
    assert profile([result], ddpnopt, [0.5, 1.0]) == [0.0, 1.0]
    [(title, _, [row])] = task_tables([result], entrants(figures), "**{}**")
    assert title == "Open tasks"
    assert row[3:] == ["90.0", "**95.0** ▲", "90.0", "20.0 ✗"]


def test_the_command_writes_tables_and_picture_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One of the two counts as sealed here, so that no sealed task is trained.
    monkeypatch.setitem(TASKS, "wine", replace(TASKS["wine"], sealed=True))
    folder = ["--out", str(tmp_path)]
    invoke(*QUICK, *folder, "--methods", "adam,schedule-free")
    store = Store(tmp_path / STORE)
    first = store.outcomes()
    assert len(first) == 2 * (5 + 2 + 2)
    printed = invoke(*QUICK, *folder, "--methods", "ddpnopt,adam,schedule-free")
    second = store.outcomes()
    assert len(second) == len(first) + 2 * 2
    assert all(second[key] == value for key, value in first.items()), "finished runs are not computed again"
    assert all(text in printed for text in ("wine", "SF-AdamW", "Summary"))
    frame = pd.read_csv(tmp_path / "suite.csv")
    assert list(frame["method"]) == ["ddpnopt", "adam", "schedule-free"] * 2
    assert set(frame["sealed"]) == {True, False}
    run = RunConfig("schedule-free", SuiteRunTask("wine", 6))
    tests = [second[replace(run, seed=seed).key].metric for seed in range(2)]
    shown = frame[(frame["task"] == "wine") & (frame["method"] == "schedule-free")].iloc[0]
    assert shown["mean"] == pytest.approx(sum(tests) / 2)
    assert (tmp_path / "profile.svg").read_text().count("DDPNOpt") == 1
    bars = (tmp_path / "verdicts.svg").read_text()
    assert all(text in bars for text in ("DDPNOpt (2 tasks)", "SF-AdamW (2 tasks)"))
    assert "Adam, best of 5 (" not in bars, "it is the one that the others are compared with"
    bench = read_bench(tmp_path, "Many small tasks")
    assert [part.title for part in bench.parts][:3] == ["Summary", "Open tasks", "Sealed tasks"]
    assert bench.images[0].source is not None


def test_report_only_computes_nothing(tmp_path: Path) -> None:
    folder = ["--out", str(tmp_path)]
    assert "does not exist" in refused("--report-only", *folder)
    invoke(*QUICK, *folder, "--methods", "schedule-free")
    before = Store(tmp_path / STORE).keys()
    printed = invoke(*QUICK, *folder, "--methods", "schedule-free,adam,ddpnopt", "--report-only")
    assert Store(tmp_path / STORE).keys() == before
    assert "SF-AdamW" in printed


def test_rows_of_an_earlier_table_stand_in_for_what_is_not_run(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    invoke(*QUICK, "--methods", "adam,schedule-free,ddpnopt", "--out", str(first))
    old = pd.read_csv(first / "suite.csv")
    old.loc[old["method"] == "ddpnopt", "mean"] = 12345.0
    old.to_csv(first / "suite.csv", index=False)
    keep = ["--keep", str(first / "suite.csv"), "--methods", "ddpnopt", "--out", str(second)]
    invoke(*QUICK, *keep)
    new = pd.read_csv(second / "suite.csv")
    assert list(new["method"]) == ["ddpnopt", "adam", "schedule-free"] * 2
    assert (new.loc[new["method"] == "ddpnopt", "mean"] < 12345.0).all(), "what is run here replaces its row"
    same = ["task", "method", "lr", "mean", "std", "seeds", "cpu_seconds", "time_ratio"]
    others = [frame.loc[frame["method"] != "ddpnopt", same].reset_index(drop=True) for frame in (old, new)]
    pd.testing.assert_frame_equal(*others)
    assert len(Store(second / STORE).keys()) == 2 * 2, "nothing else was run"


def test_an_earlier_table_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert "is not a table of the suite" in refused("--keep", str(tmp_path / "other.csv"), "--report-only")
    assert "is not a table of the suite" in refused("--keep", str(tmp_path / "missing.csv"), "--report-only")


def test_methods_of_ones_own_follow_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_prototype.py").write_text(
        "import torch\ndef make(model):\n    return torch.optim.SGD(model.parameters(), lr=0.25)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    printed = invoke(*QUICK, "--methods", "my_prototype:make", "--out", str(tmp_path / "out"))
    assert "my_prototype:make" in printed
    [found] = {each.lr for each in Store(tmp_path / "out" / STORE).outcomes().values()}
    assert found == 0.25
    run = RunConfig("my_prototype:make", SuiteRunTask("wine"))
    assert '"source"' in run.key
    assert "cannot be imported" in refused("--methods", "my_prototype:other")
    assert "cannot be imported" in refused("--methods", "no_such_module:make")


def test_renewed_runs_are_those_of_another_state_of_the_code(tmp_path: Path) -> None:
    folder = ["--out", str(tmp_path), "--methods", "ddpnopt,schedule-free"]
    invoke(*QUICK, *folder)
    store = Store(tmp_path / STORE)
    ours = [RunConfig("ddpnopt", SuiteRunTask("wine", 6), seed=seed).key for seed in range(2)]
    others = [RunConfig("schedule-free", SuiteRunTask("wine", 6), seed=seed).key for seed in range(2)]
    with store.connection:
        store.connection.execute("UPDATE runs SET code = 'another state' WHERE key IN (?, ?, ?)", [*ours, others[0]])
    invoke(*QUICK, *folder)
    assert store.codes(ours) == {"another state"}
    invoke(*QUICK, *folder, "--renew")
    assert "another state" not in store.codes(ours)
    assert "another state" in store.codes(others), "a baseline does not depend on the optimizer's code"


def test_tasks_are_open_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def none_there(wanted: list[RunConfig], *_: object, **__: object) -> dict[RunConfig, Outcome]:
        seen.append({run.task.name for run in wanted})
        return {}

    monkeypatch.setattr("ddpnopt.lab.cli.bench_suite.collect_showing_progress", none_there)
    for name in ("wine", "spirals"):  # these two count as sealed here
        monkeypatch.setitem(TASKS, name, replace(TASKS[name], sealed=True))
    shared = ["--out", str(tmp_path), "--methods", "soap"]
    for option in ([], ["--open"], ["--sealed"], ["--all"], ["--families", "recurrent"]):
        assert "no results" in refused(*shared, *option)
    chosen = seen[1::2]
    assert chosen[0] == chosen[1] == {task.name for task in open_tasks()}
    assert chosen[2] == {task.name for task in sealed_tasks()} >= {"wine", "spirals"}
    assert chosen[3] == set(TASKS)
    assert chosen[4] == {task.name for task in open_tasks() if task.family == "recurrent"}


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    assert "unknown task 'no_such_task'" in refused("--tasks", "no_such_task")
    assert "unknown family 'no_such_family'" in refused("--families", "no_such_family")
    assert "unknown method 'sgd'" in refused("--methods", "sgd")
    assert "exclude each other" in refused("--open", "--all")
    assert "no task is left" in refused("--tasks", "wine", "--families", "recurrent")


def test_sealed_is_refused_when_all_tasks_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for task in sealed_tasks():
        monkeypatch.setitem(TASKS, task.name, replace(task, sealed=False))
    assert "no task is sealed at present" in refused("--sealed")
