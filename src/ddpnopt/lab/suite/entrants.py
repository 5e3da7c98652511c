"""The methods that the suite compares, and which learning rates each is tried at."""

from __future__ import annotations

from collections.abc import Iterable

from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.runs.entrants import OWN_DEFAULTS, RATES, Entrant, all_runs, all_trials

__all__ = ["RATES", "REFERENCE", "SUITE_METHODS", "Entrant", "all_runs", "all_trials", "entrants"]

REFERENCE = "adam"
"""The method that the others are compared with."""
SUITE_METHODS = ("ddpnopt", "adam", "sgd-m", "adamw", "schedule-free", "prodigy", "soap", "muon")


def entrants(names: Iterable[str]) -> list[Entrant]:
    """The methods with these names, each once; `module:function` is a method of one's own."""
    found = (method(name, SUITE_METHODS) for name in dict.fromkeys(names))
    return [Entrant(each, RATES.get(each.name, ()), OWN_DEFAULTS.get(each.name)) for each in found]
