"""`ddpnopt bench lr-window`, as a user calls it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from ddpnopt.lab.cli import app
from ddpnopt.lab.methods.method import Method
from ddpnopt.lab.methods.registry import METHODS, WINDOW_METHODS
from ddpnopt.lab.runs import work
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.pool import execute
from ddpnopt.lab.runs.store import STORE
from ddpnopt.lab.runs.training import perform
from ddpnopt.lab.runs.work import SingleRun
from ddpnopt.lab.windows.window_tasks import TASKS

SMALL = replace(TASKS["digits"], epochs=1, n_train=160)
TINY = ("--tasks", "digits", "--epochs-scale", "0.05", "--seeds", "1")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps in place of ninety, where the command runs in this process."""
    monkeypatch.setitem(TASKS, "digits", SMALL)


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(app, ["bench", "lr-window", *arguments])


def stored(folder: Path) -> dict[str, str]:
    """The outcomes as they are written, by key."""
    with sqlite3.connect(folder / STORE) as connection:
        return dict(connection.execute("SELECT key, outcome FROM runs"))


@pytest.mark.usefixtures("small")
def test_it_writes_tables_and_pictures(tmp_path: Path) -> None:
    arguments = (*TINY, "--methods", "ddpnopt,given-lr,adam,sgd-m", "--points", "2", "--out", str(tmp_path))
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    for word in ("DDPNOpt", "Adam", "SGD-m", "window", "time"):
        assert word in result.stdout
    assert (tmp_path / "lr-window-digits.svg").stat().st_size > 10_000
    runs = pd.read_csv(tmp_path / "lr-window-runs.csv")
    assert len(runs[~runs.default]) == 6
    assert list(runs[runs.method == "ddpnopt"].default) == [True]
    summary = pd.read_csv(tmp_path / "lr-window.csv")
    assert set(summary.method) == {"ddpnopt", "given-lr", "adam", "sgd-m"}
    page = (tmp_path / "lr-window.md").read_text()
    for word in ("machine", "torch", "command", "| DDPNOpt |"):
        assert word in page.replace("**", "")
    (tmp_path / STORE).unlink()
    assert run(*arguments, "--report-only").exit_code == 0
    assert not (tmp_path / STORE).exists()
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "lr-window-runs.csv"), runs)
    again = pd.read_csv(tmp_path / "lr-window.csv")
    pd.testing.assert_frame_equal(again.loc[:, :"runs"], summary.loc[:, :"runs"])
    assert again.time_ratio.isna().all()


@pytest.mark.usefixtures("small")
def test_a_second_call_computes_nothing_and_one_more_seed_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*TINY, "--methods", "adam,sgd-m", "--points", "2", "--out", str(tmp_path))
    assert run(*arguments).exit_code == 0
    first = stored(tmp_path)
    performed: list[RunConfig] = []

    def count(wanted: RunConfig, data_dir: Path | None = None) -> Outcome | None:
        performed.append(wanted)
        return perform(wanted, data_dir)

    monkeypatch.setattr(work, "perform", count)
    assert run(*arguments).exit_code == 0
    assert not performed
    assert stored(tmp_path) == first
    assert run(*arguments, "--seeds", "2").exit_code == 0
    assert {each.seed for each in performed} == {1}
    assert len(performed) == 6


def test_after_a_kill_it_goes_on_and_computes_nothing_twice(tmp_path: Path) -> None:
    arguments = (*TINY, "--methods", "sgd-m,adam", "--points", "5", "--out", str(tmp_path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ddpnopt", "bench", "lr-window", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (tmp_path / STORE).exists():
            try:
                if len(stored(tmp_path)) >= 3:
                    break
            except sqlite3.OperationalError:  # the table is not there yet
                pass
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = stored(tmp_path)
    assert 3 <= len(before) < 12
    assert run(*arguments).exit_code == 0
    after = stored(tmp_path)
    assert len(after) == 12
    # An outcome holds its own seconds: one that was computed again would differ.
    assert {key: after[key] for key in before} == before


def test_another_process_gives_what_this_one_gives() -> None:
    wanted = RunConfig("sgd-m", SMALL, 0.0316)
    [(_, [outcome])] = execute([SingleRun(wanted)], 2, None)
    here = perform(wanted)
    assert outcome is not None
    assert here is not None
    assert outcome.accuracy == here.accuracy


def test_a_run_that_fails_is_recorded_as_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = perform(RunConfig("sgd-m", SMALL, 1e38))
    assert outcome is not None
    assert outcome.diverged
    assert Outcome.from_json(outcome.to_json()).diverged

    def broken(model: object, lr: float = 1.0) -> object:
        optimizer = METHODS["adam"].build(model, lr)  # type: ignore[arg-type]
        optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        return optimizer

    monkeypatch.setitem(METHODS, "broken", Method("broken", "Broken", broken))  # type: ignore[arg-type]
    outcome = perform(RunConfig("broken", SMALL, 1.0))
    assert outcome is not None
    assert outcome.diverged
    assert outcome.error.startswith("ZeroDivisionError")
    assert outcome.steps == 0


@pytest.mark.parametrize("name", [name for name in WINDOW_METHODS if name != "ddpnopt"])
def test_every_peer_trains(name: str) -> None:
    package = METHODS[name].package
    if package is not None:
        pytest.importorskip(package)
    outcome = perform(RunConfig(name, SMALL))
    assert outcome is not None
    assert not outcome.diverged
    assert outcome.lr > 0
    assert len(outcome.curve.losses) == outcome.steps == 10
    assert outcome.curve.steps[-1] == outcome.steps


def test_without_a_store_a_report_says_what_is_missing(tmp_path: Path) -> None:
    result = run("--report-only", "--out", str(tmp_path))
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "lr-window-runs.csv" in said
    assert "without --report-only they are computed" in said
    assert not (tmp_path / STORE).exists()


@pytest.mark.usefixtures("small")
def test_a_store_elsewhere_can_be_given(tmp_path: Path) -> None:
    elsewhere = tmp_path / "other.sqlite"
    arguments = (*TINY, "--methods", "adam", "--points", "2", "--store", str(elsewhere), "--out", str(tmp_path / "out"))
    assert run(*arguments).exit_code == 0
    assert elsewhere.exists()
    assert not (tmp_path / "out" / STORE).exists()


@pytest.mark.usefixtures("small")
def test_forms_of_ddpnopt(tmp_path: Path) -> None:
    result = run(*TINY, "--ablations", "--lrs", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    for word in ("open loop", "not coupled", "sampled", "cross_entropy"):
        assert word in result.stdout
    assert (tmp_path / "ablations-digits.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tasks", "imagenet"), ("unknown task 'imagenet'", "mnist-cnn")),
        (("--methods", "lion"), ("unknown method 'lion'", "soap", "prodigy")),
        (("--methods", ","), ("--methods is empty",)),
        (("--lrs", "fast"), ("--lrs must be numbers",)),
        (("--epochs-scale", "0"), ("must be positive",)),
        (("--report-only",), ("no results",)),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    result = run(*arguments, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith("ddpnopt: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
