"""Which setting of DDPNOpt serves all tasks: accuracy on held-out training data, never on the test set.

    python benchmarks/defaults.py --jobs 2          # goes on where it was interrupted
    python benchmarks/defaults.py --report-only

A fifth of the training data is held out. Each run is judged by its last weights, by their running average and by the
mean over the last quarter of the steps. The seeds are not those of the published comparisons. Results go to
results/defaults: one row a run, and a table.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpnopt import DDPNOpt
from ddpnopt.lab.methods import make_optimizer
from ddpnopt.lab.networks import build
from ddpnopt.lab.runs.data import data_of
from ddpnopt.lab.runs.training import RunConfig, evaluate
from ddpnopt.lab.windows.tasks import TASKS

SEEDS = (20, 21)
FOLDER = Path("results/defaults")
Schedule = Callable[[DDPNOpt, int], None]


def lookahead(every: int = 5, share: float = 0.5) -> Schedule:
    """Now and then the weights go back half of the way that they have come."""
    slow: list[Tensor] = []

    def before(optimizer: DDPNOpt, step: int) -> None:
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        with torch.no_grad():
            if step == 0:
                slow.extend(p.clone() for p in weights)
            elif step % every == 0:
                for p, old in zip(weights, slow, strict=True):
                    p.copy_(old.lerp_(p, share))

    return before


def setting(
    lr: float, relax: float, steps: float | None = None, dof: float = 1.0, samples: float | None = None
) -> dict[str, Any]:
    """relax is constant, or falls with the steps or with the samples."""
    options = {"lr": lr, "relax": relax, "relax_samples": samples, "dof": dof, "average": False}
    return options if steps is None else {**options, "relax_steps": steps}


SETTINGS: dict[str, tuple[dict[str, Any], Callable[[], Schedule] | None]] = {
    "lr 3, relax 0.7": (setting(3, 0.7), None),
    "lr 3, relax 1": (setting(3, 1.0), None),
    "lr 3, relax 0.3": (setting(3, 0.3), None),
    "lr 10, relax 0.3": (setting(10, 0.3), None),
    "lr 30, relax 0.3": (setting(30, 0.3), None),
    "lr 3, relax 0.7 decaying": (setting(3, 0.7, 100), None),
    "lr 10, relax 0.7 decaying": (setting(10, 0.7, 100), None),
    "lr 10, relax 1 decaying": (setting(10, 1.0, 100), None),
    "lr 3, relax 0.7, lookahead": (setting(3, 0.7), lookahead),
    "lr 3, relax 0.7 decaying, dof 0.25": (setting(3, 0.7, 100, 0.25), None),
    "lr 1000, relax 0.7 decaying": (setting(1000, 0.7, 100), None),
    "lr 1000, relax 0.7 decaying, dof 0.25": (setting(1000, 0.7, 100, 0.25), None),
    "lr 1000, relax 0.7 decaying, dof 0.15": (setting(1000, 0.7, 100, 0.15), None),
    "lr 1000, relax 0.7 decaying, dof 0.4": (setting(1000, 0.7, 100, 0.4), None),
    "lr 3, relax 1 decaying by samples, dof 0.25": (setting(3, 1.0, dof=0.25, samples=6400), None),
    "lr 1000, relax 1 decaying by samples, dof 0.25": (setting(1000, 1.0, dof=0.25, samples=6400), None),
    "Adam": ({}, None),
    "SGD-m": ({}, None),
}


class Averages:
    """Running average of the weights, and their mean over the last quarter."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.weights = [p.detach() for p in model.parameters()]
        self.running = [p.clone() for p in self.weights]
        self.total = [torch.zeros_like(p) for p in self.weights]
        self.steps, self.step, self.counted = steps, 0, 0

    def update(self) -> None:
        self.step += 1
        share = max(0.02, 9 / (self.step + 9))
        for average, weight in zip(self.running, self.weights, strict=True):
            average.lerp_(weight, share)
        if self.step > 0.75 * self.steps:
            self.counted += 1
            for total, weight in zip(self.total, self.weights, strict=True):
                total.add_(weight)

    def use(self, values: list[Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)


def perform(task_name: str, name: str, seed: int) -> dict[str, object]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = TASKS[task_name]
    data = data_of(RunConfig("", task.dataset, task.network, seed=seed, n_train=task.n_train, validation=True), None)
    model = build(task.network, data, seed)
    options, schedule = SETTINGS[name]
    optimizer: Optimizer
    if options:
        options = dict(options)
        if "relax_steps" in options:
            options["relax_samples"] = options.pop("relax_steps") * task.batch_size
        optimizer = DDPNOpt(model, **options)
    else:
        optimizer = make_optimizer(name.lower(), model, None)
    before = schedule() if schedule is not None else None
    length = task.epochs * math.ceil(len(data.y_train) / task.batch_size)
    averages, generator, step = Averages(model, length), torch.Generator().manual_seed(seed), 0
    for _ in range(task.epochs):
        for x, y in data.batches(task.batch_size, generator):
            if before is not None and isinstance(optimizer, DDPNOpt):
                before(optimizer, step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            averages.update()
            step += 1
    found = {"task": task_name, "setting": name, "seed": seed}
    found["last"] = evaluate(model, data.x_test, data.y_test)[1]
    averages.use(averages.running)
    found["running average"] = evaluate(model, data.x_test, data.y_test)[1]
    averages.use([total / averages.counted for total in averages.total])
    found["mean of the last quarter"] = evaluate(model, data.x_test, data.y_test)[1]
    return found


def report(rows: pd.DataFrame) -> str:
    """One table a way to judge: a row a setting, a column a task, mean over the seeds."""
    text = [
        "# Settings on held-out data\n",
        "Accuracy (%) on a fifth of the training data, mean over the seeds of `runs.csv`, at most "
        f"{rows.seed.nunique()}; `python benchmarks/defaults.py`.\n",
    ]
    for judged in ("last", "running average", "mean of the last quarter"):
        table = rows.pivot_table(index="setting", columns="task", values=judged, sort=False)
        table = table.reindex(index=[s for s in SETTINGS if s in table.index], columns=[t for t in TASKS if t in table])
        table["mean"] = table.mean(axis=1)
        text += [f"\n## {judged.capitalize()}{' weights' if judged == 'last' else ' of the weights'}\n"]
        text += ["| setting | " + " | ".join(table.columns) + " |", "| --- " * (1 + len(table.columns)) + "|"]
        text += [f"| {name} | " + " | ".join(f"{v:.2f}" for v in row) + " |" for name, row in table.iterrows()]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--settings", help="comma separated numbers of the rows, from 0 on")
    parser.add_argument("--report-only", action="store_true")
    chosen = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "runs.csv"
    rows = pd.read_csv(path) if path.exists() else pd.DataFrame()
    done = set() if rows.empty else set(zip(rows.task, rows.setting, rows.seed, strict=True))
    names = list(SETTINGS)
    settings = names if chosen.settings is None else [names[int(i)] for i in chosen.settings.split(",")]
    wanted = [(t, s, seed) for t in chosen.tasks.split(",") for seed in SEEDS for s in settings]
    missing = [] if chosen.report_only else [run for run in wanted if run not in done]
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for future in as_completed([pool.submit(perform, *run) for run in missing]):
            row = future.result()
            print(row, flush=True)
            rows = pd.concat([rows, pd.DataFrame([row])], ignore_index=True)
            rows.to_csv(f"{path}.new", index=False)
            Path(f"{path}.new").replace(path)  # whole or not at all
    text = report(rows)
    (FOLDER / "defaults.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
