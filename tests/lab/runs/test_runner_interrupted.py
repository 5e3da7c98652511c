"""A sweep that is killed at any moment and started again loses no finished run and repeats none."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Curve, Outcome
from ddpnopt.lab.runs.store import Store

SCRIPT = Path(__file__).with_name("logged_sweep.py")
OUTCOME = Outcome(90.0, 0.1, 1.0, 1.0, 10, False, "", Curve([10], [1.0], [1.0], [0.5]), 0.4)


def rows(path: Path) -> dict[str, str]:
    """What the store holds, read by another program."""
    if not path.exists():
        return {}
    with sqlite3.connect(path, timeout=30) as connection:
        try:
            return dict(connection.execute("SELECT key, outcome FROM runs"))
        except sqlite3.OperationalError:  # the table is not there yet
            return {}


def begun(log: Path) -> Counter[str]:
    """How often each computation was begun."""
    return Counter(log.read_text().splitlines()) if log.exists() else Counter()


def test_a_killed_sweep_loses_no_finished_run_and_repeats_none(tmp_path: Path) -> None:
    store, log = tmp_path / "runs.sqlite", tmp_path / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    chance = random.Random()
    processes = iter(("2", "1", "1"))
    kills, middle = 0, 0
    while True:
        before, counted = rows(store), begun(log)
        command = [sys.executable, str(SCRIPT), str(store), str(log), next(processes)]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
        if kills < 2:
            # a moment after some more runs than there were: any moment, on a slow machine as on a fast one
            target, deadline = len(before) + chance.randint(1, 6), time.monotonic() + 120
            while len(rows(store)) < target and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.03))
            process.send_signal(signal.SIGKILL)
            kills += 1
        _, errors = process.communicate()
        after = rows(store)
        # what was finished is there, unchanged: an outcome holds its own seconds, one computed again would differ
        assert {key: after.get(key) for key in before} == before
        assert not set(begun(log) - counted) & set(before), "a finished run was computed again"
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
        middle += 0 < len(after) < 20
    assert middle, "no kill came in the middle"
    assert len(rows(store)) == 20


def test_the_store_says_where_a_run_was_computed(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.sqlite")
    store.add({"a": OUTCOME})
    [(origin, code)] = store.connection.execute("SELECT origin, code FROM runs").fetchall()
    assert "cores" in origin
    assert "torch" in origin
    assert len(code) == 12
    assert store.outcomes() == {"a": OUTCOME}


def test_what_is_there_stays(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.sqlite")
    store.add({"a": OUTCOME})
    other = Outcome(10.0, 0.1, 1.0, 1.0, 10, False, "", Curve([], [], [], []))
    store.add({"a": other, "b": OUTCOME})
    assert store.outcomes() == {"a": OUTCOME, "b": OUTCOME}


def test_a_full_disk_is_a_clear_error_and_finished_runs_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    store = Store(path)
    store.add({"a": OUTCOME})
    # SQLite's own limit of the file's size fails as a full disk does
    pages = store.connection.execute("PRAGMA page_count").fetchone()[0]
    store.connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(ExperimentError, match=r"full.*kept.*same command again"):
        store.add({f"b{i}": OUTCOME for i in range(1000)})
    store.close()
    again = Store(path)
    assert again.outcomes() == {"a": OUTCOME}
    again.add({"b": OUTCOME})
    assert again.keys() == {"a", "b"}


def test_a_store_that_cannot_be_written_or_read_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    Store(path).close()
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"this is no database" * 100)
    with pytest.raises(ExperimentError, match=r"broken\.sqlite cannot be used as a store"):
        Store(broken)
    store = Store(path)
    store.connection.execute("PRAGMA query_only = ON")  # root may write into any file, so permissions do not serve
    with pytest.raises(ExperimentError, match=r"cannot write to .*readonly"):
        store.add({"a": OUTCOME})


def test_a_store_from_before_the_origin_was_kept_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    with sqlite3.connect(path) as old:
        old.execute("CREATE TABLE runs (key TEXT PRIMARY KEY, outcome TEXT NOT NULL, code TEXT NOT NULL)")
        old.execute("INSERT INTO runs VALUES ('a', ?, 'x')", (OUTCOME.to_json(),))
    store = Store(path)
    store.add({"b": OUTCOME})
    assert store.keys() == {"a", "b"}


def test_the_key_tells_configurations_apart_and_follows_the_defaults() -> None:
    wine = ClassificationTask("wine")
    base = RunConfig("adam", wine, lr=0.01)
    keys = {
        config.key
        for config in (
            base,
            RunConfig("adam", wine),
            RunConfig("adam", wine, lr=0.01, validation=True),
            RunConfig("adam", wine, lr=0.01, options={"eps": 1e-6}),
            RunConfig("ddpnopt", wine, lr=0.01),
        )
    }
    assert len(keys) == 5
    assert RunConfig("adam", ClassificationTask("wine", name="another name"), lr=0.01).key in keys
    assert '"relax": 1.0' in RunConfig("ddpnopt", wine).key


def test_runs_that_version_0_1_0_stored_for_the_windows_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    task = ClassificationTask("digits", epochs=15)
    old = {"batch_size": 16, "dataset": "digits", "epochs": 15, "n_train": None, "network": "fcn", "seed": 0}
    runs = {
        RunConfig("adam", task, 0.01): {"method": "adam", "lr": 0.01},
        RunConfig("sgd-m", task): {"method": "sgd-m", "lr": None},
        RunConfig("soap", task): {"method": "soap", "lr": None},
        RunConfig("ddpnopt", task): {"method": "ddpnopt", "lr": None, "default": None},
    }
    stored = json.loads(OUTCOME.to_json())
    stored["accuracy"] = stored.pop("metric")
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE runs (key TEXT PRIMARY KEY, outcome TEXT NOT NULL, code TEXT NOT NULL)")
        for run, parts in runs.items():
            options = {"options": json.loads(run.key)["options"]} if run.method == "ddpnopt" else {}
            key = json.dumps({**old, **parts, **options}, sort_keys=True)
            connection.execute("INSERT INTO runs VALUES (?, ?, 'x')", (key, json.dumps(stored)))
    assert Store(path).outcomes() == {run.key: OUTCOME for run in runs}
