"""Which setting of DDPNOpt serves all tasks: accuracy on held-out training data, never on the test set.

    python benchmarks/defaults.py --jobs 2          # an interrupted run continues where it was

A fifth of the training data is held out. Each setting is judged by its last weights and by their running average
(`opt.eval()`). The seeds are not those of the published comparisons.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import typer

from ddpnopt.lab.methods.registry import METHODS
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.search import counted
from ddpnopt.lab.runs.store import STORE, Store
from ddpnopt.lab.runs.sweep import collect
from ddpnopt.lab.tables import markdown_section, write_markdown
from ddpnopt.lab.windows.window_tasks import TASKS, window_tasks

SEEDS = (20, 21)
BASELINES = ("adam", "sgd-m")
JUDGED = {"Last weights": False, "Running average of the weights": True}


def setting(lr: float, relax: float, steps: float | None = None, dof: float = 1.0, samples: float | None = None) -> Any:
    """relax is constant, or falls with the number of steps or of samples."""
    return lr, {"relax": relax, "relax_samples": samples, "dof": dof}, steps


SETTINGS = {
    "lr 3, relax 0.7": setting(3, 0.7),
    "lr 3, relax 1": setting(3, 1.0),
    "lr 3, relax 0.3": setting(3, 0.3),
    "lr 10, relax 0.3": setting(10, 0.3),
    "lr 30, relax 0.3": setting(30, 0.3),
    "lr 3, relax 0.7 decaying": setting(3, 0.7, 100),
    "lr 10, relax 0.7 decaying": setting(10, 0.7, 100),
    "lr 10, relax 1 decaying": setting(10, 1.0, 100),
    "lr 3, relax 0.7 decaying, dof 0.25": setting(3, 0.7, 100, 0.25),
    "lr 1000, relax 0.7 decaying": setting(1000, 0.7, 100),
    "lr 1000, relax 0.7 decaying, dof 0.25": setting(1000, 0.7, 100, 0.25),
    "lr 3, relax 1 decaying by samples, dof 0.25": setting(3, 1.0, dof=0.25, samples=6400),
    "lr 1000, relax 1 decaying by samples, dof 0.25": setting(1000, 1.0, dof=0.25, samples=6400),
}


def runs(task_names: list[str]) -> dict[tuple[str, str, str], list[RunConfig]]:
    """By how they are judged, setting and task: one run per seed."""
    wanted = {}
    for judged, average in JUDGED.items():
        for task in window_tasks(task_names):
            for name, (lr, options, steps) in SETTINGS.items():
                samples = options["relax_samples"] if steps is None else steps * task.batch_size
                given = {**options, "relax_samples": samples, "average": average}
                wanted[judged, name, task.name] = [RunConfig("ddpnopt", task, lr, given, s, True) for s in SEEDS]
            if not average:
                for name in BASELINES:
                    configs = [RunConfig(name, task, seed=seed, validation=True) for seed in SEEDS]
                    wanted[judged, METHODS[name].label, task.name] = configs
    return wanted


def main(
    jobs: int = 1, tasks: str = ",".join(TASKS), out: Path = Path("results/defaults"), data_dir: Path | None = None
) -> None:
    """Write one table for each way to judge: a row per setting, a column per task, mean over the seeds."""
    names = tasks.split(",")
    wanted = runs(names)
    out.mkdir(parents=True, exist_ok=True)
    every = [config for configs in wanted.values() for config in configs]
    found = collect(
        every,
        Store(out / STORE),
        jobs=jobs,
        data_dir=data_dir,
        on_run=lambda done, total, run, _: print(f"{done}/{total}: {run or 'in the store'}", flush=True),
    )
    sections = []
    for judged in JUDGED:
        rows = []
        for name in dict.fromkeys(name for way, name, _ in wanted if way == judged):
            values = [fmean(counted(found[c], c.task).metric for c in wanted[judged, name, task]) for task in names]
            rows.append([name, *(f"{value:.2f}" for value in (*values, fmean(values)))])
        sections.append(markdown_section(judged, ["setting", *names, "mean"], rows))
    command = " ".join(["python", "benchmarks/defaults.py", *sys.argv[1:]])
    about = f"Accuracy (%) on a fifth of the training data, mean over {len(SEEDS)} seeds: `{command}`."
    page = write_markdown(out / "defaults.md", "# Settings on held-out data", "", about, "", *sections)
    print(page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
