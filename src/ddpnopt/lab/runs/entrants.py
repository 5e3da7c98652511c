"""A method as it takes part in a comparison: which learning rates it is tried at, and which runs that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpnopt.lab.methods.method import Method
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.search import search
from ddpnopt.lab.runs.task import Task

RATES: Mapping[str, tuple[float, ...]] = {
    "adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "sgd-m": (3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
}
"""Half decades, from which the best is taken. All other methods have one rate."""
# AdamW's rate in the registry was tuned on DIGITS; for tasks of any kind it has the default of torch.
OWN_DEFAULTS: Mapping[str, float] = {"adamw": 1e-3}


@dataclass(frozen=True)
class Entrant:
    """A method as it takes part."""

    method: Method
    rates: tuple[float, ...] = ()
    """To choose from on the validation split; empty where `lr` is used."""
    lr: float | None = None
    """None is the method's default."""
    held_out: bool = True
    """Whether the rate is chosen on held-out data; otherwise by what the runs themselves are judged by."""

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def label(self) -> str:
        """With the number of rates, where there are several."""
        return f"{self.method.label}, best of {len(self.rates)}" if self.rates else self.method.label

    def trials(self, task: Task) -> list[RunConfig]:
        """The runs that decide the rate: one seed each, measured on the validation split if it is held out."""
        return [RunConfig(self.name, task, lr, validation=self.held_out) for lr in self.rates]

    def chosen_rate(self, task: Task, outcomes: Mapping[RunConfig, Outcome]) -> float | None:
        """The best rate; `lr` where there is nothing to choose."""
        if not self.rates:
            return self.lr
        found = search([self.trials(task)], 1, lambda runs: [outcomes[run] for run in runs], validation=self.held_out)
        return found[0][0].config.lr

    def runs(self, task: Task, outcomes: Mapping[RunConfig, Outcome], seeds: int) -> list[RunConfig]:
        """The runs that are compared; none where a trial of a rate is missing."""
        if any(run not in outcomes for run in self.trials(task)):
            return []
        lr = self.chosen_rate(task, outcomes)
        return [RunConfig(self.name, task, lr, seed=seed) for seed in range(seeds)]


def all_trials(tasks: Sequence[Task], methods: Sequence[Entrant]) -> list[RunConfig]:
    """Every run that decides a rate, task by task."""
    return [run for task in tasks for each in methods for run in each.trials(task)]


def all_runs(
    tasks: Sequence[Task], methods: Sequence[Entrant], outcomes: Mapping[RunConfig, Outcome], seeds: int
) -> list[RunConfig]:
    """Every run that is compared, task by task."""
    return [run for task in tasks for each in methods for run in each.runs(task, outcomes, seeds)]
