"""The methods that the suite compares: which learning rates each is tried at, and which runs that takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpnopt.lab.methods.method import Method
from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.search import search
from ddpnopt.lab.suite.runs import SuiteRunTask

REFERENCE = "adam"
"""The method that the others are compared with."""
RATES: Mapping[str, tuple[float, ...]] = {
    "adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "sgd-m": (3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
}
"""Half decades; the best on the validation split is taken. All other methods have one rate."""
# AdamW's rate in the registry was tuned on DIGITS; here it has the default of torch.
OWN_DEFAULTS: Mapping[str, float] = {"adamw": 1e-3}
SUITE_METHODS = ("ddpnopt", "adam", "sgd-m", "adamw", "schedule-free", "prodigy", "soap", "muon")


@dataclass(frozen=True)
class Entrant:
    """A method as it takes part."""

    method: Method
    rates: tuple[float, ...] = ()
    """To choose from on the validation split; empty where `lr` is used."""
    lr: float | None = None
    """None is the method's default."""

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def label(self) -> str:
        """With the number of rates, where there are several."""
        return f"{self.method.label}, best of {len(self.rates)}" if self.rates else self.method.label

    def trials(self, task: SuiteRunTask) -> list[RunConfig]:
        """The runs that decide the rate: one seed each, measured on the validation split."""
        return [RunConfig(self.name, task, lr, validation=True) for lr in self.rates]

    def chosen_rate(self, task: SuiteRunTask, outcomes: Mapping[RunConfig, Outcome]) -> float | None:
        """The best rate; `lr` where there is nothing to choose."""
        if not self.rates:
            return self.lr
        [ranked] = search([self.trials(task)], 1, lambda runs: [outcomes[run] for run in runs])
        return ranked[0].config.lr

    def runs(self, task: SuiteRunTask, outcomes: Mapping[RunConfig, Outcome], seeds: int) -> list[RunConfig]:
        """The runs that are compared; none where a trial of a rate is missing."""
        if any(run not in outcomes for run in self.trials(task)):
            return []
        lr = self.chosen_rate(task, outcomes)
        return [RunConfig(self.name, task, lr, seed=seed) for seed in range(seeds)]


def entrants(names: Iterable[str]) -> list[Entrant]:
    """The methods with these names, each once; `module:function` is a method of one's own."""
    found = (method(name, SUITE_METHODS) for name in dict.fromkeys(names))
    return [Entrant(each, RATES.get(each.name, ()), OWN_DEFAULTS.get(each.name)) for each in found]


def all_trials(tasks: Sequence[SuiteRunTask], methods: Sequence[Entrant]) -> list[RunConfig]:
    """Every run that decides a rate, task by task."""
    return [run for task in tasks for each in methods for run in each.trials(task)]


def all_runs(
    tasks: Sequence[SuiteRunTask], methods: Sequence[Entrant], outcomes: Mapping[RunConfig, Outcome], seeds: int
) -> list[RunConfig]:
    """Every run that is compared, task by task."""
    return [run for task in tasks for each in methods for run in each.runs(task, outcomes, seeds)]
