"""Which methods can be trained in a stack, and what may differ from run to run in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddpnopt.curvature.base import Curvature
from ddpnopt.curvature.diagonal import Adam, Identity, RMSprop
from ddpnopt.curvature.kronecker import EKFAC, KFAC
from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig

# Numbers in which the runs of a stack may differ, in addition to the learning rate and the seed.
OWN = ("momentum", "vxx_reg")


@dataclass(frozen=True)
class Recipe:
    """What all runs of a stack share."""

    curvature: Curvature
    feedback: bool
    careful: bool
    """Whether the optimizer refuses a step that is not finite, as those of this package do."""


@dataclass(frozen=True)
class _StackedMethod:
    curvature: Callable[..., Curvature]
    feedback: bool
    options: tuple[str, ...] = ()
    """Options that go to the curvature."""
    own: tuple[str, ...] = ()
    momentum: float = 0.0


_KRONECKER = ("damping", "refresh", "decay")
_PAPER = ("momentum", "vxx_reg")
ENTRIES = {
    "sgd": _StackedMethod(Identity, False, own=("momentum",)),
    "sgd-m": _StackedMethod(Identity, False, own=("momentum",), momentum=0.9),
    "rmsprop": _StackedMethod(RMSprop, False, ("alpha", "eps")),
    "adam": _StackedMethod(Adam, False, ("betas", "eps")),
    "kfac": _StackedMethod(KFAC, False, _KRONECKER, ("momentum",)),
    "ekfac": _StackedMethod(EKFAC, False, _KRONECKER, ("momentum",)),
    "ddpnopt-sgd": _StackedMethod(Identity, True, own=_PAPER),
    "ddpnopt-rmsprop": _StackedMethod(RMSprop, True, own=_PAPER),
    "ddpnopt-adam": _StackedMethod(Adam, True, own=("vxx_reg",)),
    "ddpnopt-kfac": _StackedMethod(KFAC, True, own=_PAPER),
    "ddpnopt-ekfac": _StackedMethod(EKFAC, True, own=_PAPER),
}


def classification(config: RunConfig) -> ClassificationTask:
    """The task of a run of a stack."""
    assert isinstance(config.task, ClassificationTask)
    return config.task


def shared(config: RunConfig) -> str | None:
    """The same text for configurations that fit into one stack; None where none can hold them."""
    entry = ENTRIES.get(config.method) if isinstance(config.task, ClassificationTask) else None
    if entry is None or not set(config.options) <= {*entry.options, *entry.own} or _rate(config) is None:
        return None
    own = {name: value for name, value in config.options.items() if name in entry.options}
    return repr((config.method, sorted(config.task.identity.items()), config.validation, sorted(own.items())))


def recipe(config: RunConfig) -> Recipe:
    entry = ENTRIES[config.method]
    options = {name: value for name, value in config.options.items() if name in entry.options}
    careful = entry.feedback or config.method in ("kfac", "ekfac")
    return Recipe(entry.curvature(**options), entry.feedback, careful)


def own(config: RunConfig) -> Mapping[str, float]:
    """The numbers of one run: lr, momentum and vxx_reg."""
    rate = _rate(config)
    assert rate is not None
    given: Mapping[str, Any] = config.options
    momentum = given.get("momentum", ENTRIES[config.method].momentum)
    return {"lr": rate, "momentum": float(momentum), "vxx_reg": float(given.get("vxx_reg", 0.0))}


def _rate(config: RunConfig) -> float | None:
    return method(config.method).lr if config.lr is None else config.lr
