"""Learning rates chosen through Optuna over the ranges of the paper's Table 5, on held-out training data.

Every trial is a run in the store, so that a search that was interrupted goes on, and one that is repeated costs
nothing. The points are a grid: all trials are known at once and can be trained together.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.paper.item import Context
from ddpnopt.lab.paper.sweeps import Seeds, outcomes
from ddpnopt.lab.runs.training import RunConfig

SGD_RANGE, ADAPTIVE_RANGE, EKFAC_RANGE = (0.07, 0.5), (7e-4, 1e-2), (1e-2, 3e-1)
# A DDPNOpt variant has the range of the method it extends.
RANGES = {
    "sgd-m": SGD_RANGE,
    "rmsprop": ADAPTIVE_RANGE,
    "adam": ADAPTIVE_RANGE,
    "ekfac": EKFAC_RANGE,
    "ddpnopt-rmsprop": ADAPTIVE_RANGE,
    "ddpnopt-ekfac": EKFAC_RANGE,
}
# "SGD with tuned momentum"
MOMENTA = (0.0, 0.5, 0.9)


@dataclass(frozen=True)
class Wish:
    """A method to tune on a data set."""

    base: RunConfig
    rates: int
    seeds: int
    classes: int


@dataclass(frozen=True)
class Chosen:
    """The configuration that was best on the held-out data."""

    config: RunConfig
    accuracy: float
    trials: int


def search(context: Context, wishes: Sequence[Wish], what: str) -> list[Chosen]:
    """The best configuration of each wish; methods without a range stay as they are."""
    optuna = _optuna()
    studies = []
    configs: list[RunConfig] = []
    for wish in wishes:
        # The sampler is not asked: every point of the grid is put into the queue. (Optuna's own grid sampler wants to
        # call the objective itself, one trial after the other.)
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
        trials = []
        for point in _grid(wish):
            study.enqueue_trial(point)
            trial = study.ask()
            trial.suggest_float("rate", *RANGES[wish.base.method], log=True)
            if "momentum" in point:
                trial.suggest_categorical("momentum", list(MOMENTA))
            trials.append((trial, _applied(wish.base, trial.params)))
        studies.append((study, trials))
        configs += [replace(config, seed=seed, validation=True) for _, config in trials for seed in range(wish.seeds)]
    found = iter(outcomes(context, configs, what))
    chosen = []
    for wish, (study, trials) in zip(wishes, studies, strict=True):
        for trial, _ in trials:
            seeds = Seeds([next(found) for _ in range(wish.seeds)], wish.classes)
            # accuracies of a small set come in steps: the training loss decides between equal ones
            trial_value = fmean(seeds.accuracies()) - 1e-3 * min(fmean(seeds.losses()), 10.0)
            study.tell(trial, trial_value)
        if not trials:
            chosen.append(Chosen(wish.base, math.nan, 0))
            continue
        best = study.best_trial
        config = {trial.number: config for trial, config in trials}[best.number]
        chosen.append(Chosen(config, float(best.value), len(trials)))
    return chosen


def _grid(wish: Wish) -> list[dict[str, float]]:
    """The points to try, evenly in the logarithm of the rate; none where there is nothing to tune."""
    name = wish.base.method
    if name not in RANGES:
        return []
    low, high = RANGES[name]
    steps = max(wish.rates - 1, 1)
    rates = [float(f"{low * (high / low) ** (i / steps):.3g}") for i in range(wish.rates)]
    if name != "sgd-m":
        return [{"rate": rate} for rate in rates]
    return [{"rate": rate, "momentum": momentum} for rate in rates for momentum in MOMENTA]


def _applied(base: RunConfig, point: Mapping[str, float]) -> RunConfig:
    """Momentum m multiplies the step by up to 1 / (1 - m): the rate is that of the whole step."""
    momentum = point.get("momentum")
    if momentum is None:
        return replace(base, lr=point["rate"])
    lr = float(f"{point['rate'] * (1 - momentum):.3g}")
    return replace(base, lr=lr, options={**base.options, "momentum": momentum})


def _optuna() -> Any:
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError as missing:
        raise ExperimentError("choosing learning rates needs Optuna: pip install 'ddpnopt[reproduce]'") from missing
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
