"""The same sweep on a local Ray cluster with two workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.runs import cluster
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.stacking import work_units
from ddpnopt.lab.runs.store import Store
from ddpnopt.lab.runs.sweep import carry_out, unfinished


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ddpnopt[ray]'")
    # without it Ray writes a token into the home folder
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()
    del os.environ["RAY_AUTH_MODE"]


def test_a_sweep_on_ray_gives_what_it_gives_here_and_computes_nothing_twice(ray: Any, tmp_path: Path) -> None:
    wanted = [
        RunConfig(method, ClassificationTask("wine", epochs=2, batch_size=8), lr, seed=seed)
        for method, lr in (("ddpnopt-sgd", 0.1), ("adamw", 0.003))
        for seed in range(3)
    ]
    store = Store(tmp_path / "runs.sqlite")
    made = work_units(unfinished(wanted, store))
    done = {job.key: outcome for job, outcome in carry_out(made, store, ray=True)}
    assert store.keys() == done.keys() == {job.key for job in wanted}
    assert not unfinished(wanted, store)
    for unit in made:
        for job, here in zip(unit.runs, unit.perform(None), strict=True):
            there = done[job.key]
            assert there is not None
            assert here is not None
            assert there.accuracy == here.accuracy
            assert there.curve.losses == here.curve.losses
    assert ray.is_initialized(), "a cluster that was there before is left alone"


def test_bad_input_of_a_run_on_ray_is_the_same_clear_error(ray: Any, tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.sqlite")
    wrong = work_units([RunConfig("adamw", ClassificationTask("wine"), 0.1, {"speed": 3})])
    with pytest.raises(ExperimentError, match=r"adamw: .*speed"):
        list(carry_out(wrong, store, ray=True))


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ExperimentError, match=r"pip install 'ddpnopt\[ray\]'"):
        next(cluster.execute(work_units([RunConfig("sgd", ClassificationTask("wine"))]), None))
