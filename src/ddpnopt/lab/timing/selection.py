"""Which methods are timed on which network."""

from __future__ import annotations

from collections.abc import Iterable

from ddpnopt.lab.methods.method import UNIT, Method
from ddpnopt.lab.methods.registry import METHODS, TIMED_METHODS, select
from ddpnopt.lab.timing.networks import Network
from ddpnopt.lab.timing.peers import REFRESH


def timed_methods(names: Iterable[str]) -> list[Method]:
    """The methods with these names, each once, SGD first; an error lists the known ones."""
    return [METHODS[UNIT], *(each for each in select(names, TIMED_METHODS) if each.name != UNIT)]


def affordable(chosen: Iterable[Method], network: Network) -> list[Method]:
    """Without the methods that decompose large matrices, on a network where that takes minutes per step."""
    return [method for method in chosen if not (network.large and method.timing.period == REFRESH)]
