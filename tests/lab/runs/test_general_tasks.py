"""The run machinery with a task of another kind: its own data, network, loss and metric."""

from __future__ import annotations

from pathlib import Path

from regression_task import Parabola

from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.search import candidates, search
from ddpnopt.lab.runs.store import Store
from ddpnopt.lab.runs.sweep import collect

TASK = Parabola()


def test_runs_of_any_task_go_through_two_processes_into_the_store(tmp_path: Path) -> None:
    wanted = [RunConfig(method, TASK, 0.02, seed=seed) for method in ("adam", "sgd-m") for seed in (0, 1)]
    seen: list[tuple[int, int, RunConfig | None]] = []

    def on_run(done: int, total: int, run: RunConfig | None, _: Outcome | None) -> None:
        seen.append((done, total, run))

    store = Store(tmp_path / "runs.sqlite")
    found = collect(wanted, store, jobs=2, on_run=on_run)
    assert list(found) == wanted
    assert [done for done, *_ in seen] == [0, 1, 2, 3, 4]
    assert {run for *_, run in seen[1:]} == set(wanted)
    for outcome in found.values():
        assert outcome.metric < 0.1
        assert outcome.curve.losses[-1] < outcome.curve.losses[0]
        assert outcome.seconds > 0
        assert outcome.steps == 200
    seen.clear()
    assert collect(wanted, store, on_run=on_run) == found, "the second call takes all from the store"
    assert [done for done, *_ in seen] == [4]
    assert set(collect([*wanted, RunConfig("adam", TASK, 0.05)], store, jobs=0)) == set(wanted), "none is computed"


def test_a_search_takes_the_smallest_metric_where_smaller_is_better(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.sqlite")
    grid = candidates(RunConfig("adam", TASK), 3)
    [ranked] = search([grid], 1, lambda configs: list(collect(configs, store).values()))
    assert [each.metric for each in ranked] == sorted(each.metric for each in ranked)
    assert all(key.count('"validation": true') for key in store.keys())  # noqa: SIM118


def test_a_run_of_another_length_has_another_key() -> None:
    assert RunConfig("adam", TASK).key != RunConfig("adam", Parabola(steps=5)).key
    assert RunConfig("adam", TASK).with_task(steps=5).key == RunConfig("adam", Parabola(steps=5)).key
