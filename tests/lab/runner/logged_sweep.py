"""A sweep that writes down each computation it begins: `python logged_sweep.py STORE LOG JOBS`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ddpnopt.lab.runs.job import Training
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.store import Store
from ddpnopt.lab.runs.sweep import carry_out, unfinished
from ddpnopt.lab.runs.together import Together
from ddpnopt.lab.runs.training import RunConfig
from ddpnopt.lab.runs.work import Single, Unit


@dataclass(frozen=True)
class Logged:
    """A unit of work that appends the keys of its runs to a file before it computes them."""

    unit: Unit[Training]
    log: Path

    @property
    def jobs(self) -> list[Training]:
        return list(self.unit.jobs)

    def perform(self, data_dir: Path | None) -> list[Outcome | None]:
        line = "".join(f"{job.key}\n" for job in self.jobs).encode()
        file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line)  # one call: lines of several processes do not mix
        os.close(file)
        return self.unit.perform(data_dir)


def wanted() -> list[Training]:
    """Stacks of two and single runs, all short."""
    rates = [0.01 * (i + 1) for i in range(10)]
    small = [RunConfig("sgd", "wine", "fcn", lr, epochs=40, batch_size=8) for lr in rates]
    single = [RunConfig("adamw", "wine", "fcn", lr / 10, epochs=5, batch_size=8) for lr in rates]
    return [Training(config) for pair in zip(small, single, strict=True) for config in pair]


def main(store_path: Path, log: Path, jobs: int) -> None:
    store = Store(store_path)
    missing = unfinished(wanted(), store)
    stacks = [job for job in missing if job.config.method == "sgd"]
    units: list[Logged] = [Logged(Together(stacks[i : i + 2]), log) for i in range(0, len(stacks), 2)]
    units += [Logged(Single(job), log) for job in missing if job.config.method != "sgd"]
    for _ in carry_out(units, store, jobs=jobs):
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
