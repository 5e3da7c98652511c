"""A sweep that writes down each computation it begins: `python logged_sweep.py STORE LOG JOBS`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.stacking import StackedRuns
from ddpnopt.lab.runs.store import Store
from ddpnopt.lab.runs.sweep import carry_out, unfinished
from ddpnopt.lab.runs.work import SingleRun, WorkUnit


@dataclass(frozen=True)
class Logged:
    """A unit of work that appends the keys of its runs to a file before it computes them."""

    unit: WorkUnit
    log: Path

    @property
    def runs(self) -> list[RunConfig]:
        return list(self.unit.runs)

    def perform(self, data_dir: Path | None) -> list[Outcome | None]:
        line = "".join(f"{run.key}\n" for run in self.runs).encode()
        file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line)  # one call: lines of several processes do not mix
        os.close(file)
        return self.unit.perform(data_dir)


def wanted() -> list[RunConfig]:
    """Stacks of two and single runs, all short."""
    rates = [0.01 * (i + 1) for i in range(10)]
    small = [RunConfig("sgd", ClassificationTask("wine", epochs=40, batch_size=8), lr) for lr in rates]
    single = [RunConfig("adamw", ClassificationTask("wine", epochs=5, batch_size=8), lr / 10) for lr in rates]
    return [config for pair in zip(small, single, strict=True) for config in pair]


def main(store_path: Path, log: Path, jobs: int) -> None:
    store = Store(store_path)
    missing = unfinished(wanted(), store)
    stacks = [run for run in missing if run.method == "sgd"]
    units: list[Logged] = [Logged(StackedRuns(stacks[i : i + 2]), log) for i in range(0, len(stacks), 2)]
    units += [Logged(SingleRun(run), log) for run in missing if run.method != "sgd"]
    for _ in carry_out(units, store, jobs=jobs):
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
