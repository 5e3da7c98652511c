"""Which methods can be trained in a stack, and what may differ from run to run in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddpnopt.curvature.base import Curvature
from ddpnopt.curvature.diagonal import Adam, Identity, RMSprop
from ddpnopt.curvature.kronecker import EKFAC, KFAC
from ddpnopt.lab.methods.factories import FULL_FORM
from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig

# Numbers in which the runs of a stack may differ, in addition to the learning rate and the seed.
OWN = ("momentum", "vxx_reg", "weight")


@dataclass(frozen=True)
class Recipe:
    """What all runs of a stack share."""

    curvature: Curvature
    feedback: bool
    careful: bool
    """Whether the optimizer refuses a step that is not finite, as those of this package do."""
    loss: str = "cross_entropy"
    """Of the task."""
    terminal: str = "cross_entropy"
    guard: bool = True
    order: int = 1
    vxx_power: int | None = None
    penalised: bool = False
    """Whether the gradient has SGD-VGR's penalty in addition, with a weight of each run."""

    def planned_share(self, batch: int) -> float:
        """eta of the recursion over that of the update, as in `ValueForm`."""
        return float(batch) if self.vxx_power == 0 else 1.0

    def vxx_scale(self, batch: int) -> float:
        """The power of the batch size in V_xx: of itself 1/B^2 for "gn" and 1/B for the others."""
        power = 2 if self.terminal == "gn" else 1
        return float(batch) ** -(power if self.vxx_power is None else max(self.vxx_power, 1))


@dataclass(frozen=True)
class _StackedMethod:
    curvature: Callable[..., Curvature]
    feedback: bool
    options: tuple[str, ...] = ()
    """Options that go to the curvature."""
    own: tuple[str, ...] = ()
    momentum: float = 0.0
    weight: float = 0.0


_KRONECKER = ("damping", "refresh", "decay")
_FORM = ("terminal", "guard", "order", "vxx_power")
"""Options of the value function."""
_PAPER = ("momentum", "vxx_reg")
ENTRIES = {
    "sgd": _StackedMethod(Identity, False, own=("momentum",)),
    "sgd-m": _StackedMethod(Identity, False, own=("momentum",), momentum=0.9),
    "sgd-vgr": _StackedMethod(Identity, False, own=("momentum", "weight"), weight=2.0),
    "rmsprop": _StackedMethod(RMSprop, False, ("alpha", "eps")),
    "adam": _StackedMethod(Adam, False, ("betas", "eps")),
    "kfac": _StackedMethod(KFAC, False, _KRONECKER, ("momentum",)),
    "ekfac": _StackedMethod(EKFAC, False, _KRONECKER, ("momentum",)),
    "ddpnopt-sgd": _StackedMethod(Identity, True, own=_PAPER),
    "ddpnopt-rmsprop": _StackedMethod(RMSprop, True, ("whole",), _PAPER),
    "ddpnopt-adam": _StackedMethod(Adam, True, ("whole",), ("vxx_reg",)),
    "ddpnopt-kfac": _StackedMethod(KFAC, True, _KRONECKER, _PAPER),
    "ddpnopt-ekfac": _StackedMethod(EKFAC, True, _KRONECKER, _PAPER),
}


def classification(config: RunConfig) -> ClassificationTask:
    """The task of a run of a stack."""
    assert isinstance(config.task, ClassificationTask)
    return config.task


def shared(config: RunConfig) -> str | None:
    """The same text for configurations that fit into one stack; None where none can hold them."""
    entry = ENTRIES.get(config.method) if isinstance(config.task, ClassificationTask) else None
    if entry is None or _rate(config) is None:
        return None
    form = _FORM if entry.feedback else ()
    if not set(config.options) <= {*entry.options, *entry.own, *form}:
        return None
    terminal = {**FULL_FORM, **config.options}["terminal"]
    if entry.feedback and terminal not in ("gn", classification(config).loss):
        return None
    common = {name: value for name, value in config.options.items() if name in (*entry.options, *form)}
    return repr((config.method, sorted(config.task.identity.items()), config.validation, sorted(common.items())))


def recipe(config: RunConfig) -> Recipe:
    entry = ENTRIES[config.method]
    options = {name: value for name, value in config.options.items() if name in entry.options}
    careful = entry.feedback or config.method in ("kfac", "ekfac", "sgd-vgr")
    loss = classification(config).loss
    form = {"terminal": FULL_FORM["terminal"]} | {n: v for n, v in config.options.items() if n in _FORM}
    return Recipe(entry.curvature(**options), entry.feedback, careful, loss, penalised=entry.weight > 0, **form)


def own(config: RunConfig) -> Mapping[str, float]:
    """The numbers of one run: lr, momentum, vxx_reg and weight."""
    rate = _rate(config)
    assert rate is not None
    given: Mapping[str, Any] = config.options
    entry = ENTRIES[config.method]
    usual = {"momentum": entry.momentum, "vxx_reg": 0.0, "weight": entry.weight}
    return {"lr": rate, **{name: float(given.get(name, usual[name])) for name in OWN}}


def _rate(config: RunConfig) -> float | None:
    return method(config.method).lr if config.lr is None else config.lr
