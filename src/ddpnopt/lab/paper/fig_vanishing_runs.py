"""The trainings of `fig-vanishing`: nine layers on DIGITS, and the size of every layer's update during training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ddpnopt.ddp.terminal import TerminalOption
from ddpnopt.lab import style
from ddpnopt.lab.baselines import MMCLoss, mmc_terminal
from ddpnopt.lab.data import Dataset, digits
from ddpnopt.lab.methods.registry import make_optimizer
from ddpnopt.lab.networks import build
from ddpnopt.lab.runs.classification import LossFunction
from ddpnopt.lab.runs.training import Progress, fit, one_thread_for_small

CLASSES = 10
ESCAPED = 0.9
"""The share of the plateau's loss below which a training has left it."""


@dataclass(frozen=True)
class VanishingMethod:
    """A method of the figure."""

    label: str
    name: str
    """As `make_optimizer` knows it."""
    colour: str
    order: int = 1

    @property
    def ours(self) -> bool:
        return self.name.startswith("ddpnopt-")


VANISHING_METHODS = {
    way.label: way
    for way in (
        VanishingMethod("SGD", "sgd", style.COLOURS["sgd"]),
        VanishingMethod("SGD-VGR", "sgd-vgr", style.COLOURS["rmsprop"]),
        VanishingMethod("EKFAC", "ekfac", style.COLOURS["ekfac"]),
        VanishingMethod("DDPNOpt", "ddpnopt-ekfac", style.COLOURS["ddpnopt"]),
        VanishingMethod("DDPNOpt2nd", "ddpnopt-ekfac", style.COLOURS["ddpnopt-kfac"], order=2),
        VanishingMethod("Adam", "adam", style.COLOURS["adam"]),
        VanishingMethod("RMSprop", "rmsprop", style.COLOURS["rmsprop"]),
        VanishingMethod("DDPNOpt*", "ddpnopt-rmsprop", style.COLOURS["ddpnopt"]),
    )
}


@dataclass(frozen=True)
class VanishingObjective:
    """A loss, and its value for a network that does not distinguish the classes at all."""

    label: str
    loss: LossFunction
    terminal: TerminalOption
    plateau: float
    predict: Callable[[Tensor], Tensor]


MMC_LOSS = MMCLoss(CLASSES)
MMC = VanishingObjective("MMC", MMC_LOSS, mmc_terminal, 50.0, MMC_LOSS.predict)
"""The centres have norm 10 and mean zero: half a squared distance of 50 from there."""
CE = VanishingObjective("CE", F.cross_entropy, "cross_entropy", math.log(CLASSES), lambda z: z.argmax(1))
OBJECTIVES = {each.label: each for each in (MMC, CE)}


@dataclass(frozen=True)
class VanishingCase:
    """One training, except for its seed."""

    way: str
    lr: float
    objective: str = "MMC"
    activation: str = "sigmoid"


@dataclass(frozen=True)
class VanishingEffort:
    """How thorough to be."""

    epochs: int
    lrs: tuple[float, ...]
    n_train: int | None = None
    batch_size: int = 16


@dataclass(frozen=True, eq=False)
class VanishingRun:
    """What one training gave."""

    case: VanishingCase
    losses: NDArray[np.float64]
    """Of every batch before its step."""
    norms: NDArray[np.float64]
    """Steps x layers: how far each layer's weights have moved."""
    accuracy: float
    """On the test set, in percent."""
    per_epoch: int
    diverged: bool

    @property
    def final(self) -> float:
        """The mean loss of the last epoch; infinite where there was none that could be finished."""
        return math.inf if self.diverged else float(self.losses[-self.per_epoch :].mean())

    @property
    def escaped(self) -> bool:
        return self.final < ESCAPED * OBJECTIVES[self.case.objective].plateau


def network(dataset: Dataset, activation: str, seed: int) -> nn.Sequential:
    """The nine layers, with the same weights for every activation."""
    built = build("sigmoid-fcn", dataset, seed)
    assert isinstance(built, nn.Sequential)
    if activation == "sigmoid":
        return built
    return nn.Sequential(*(nn.ReLU() if isinstance(module, nn.Sigmoid) else module for module in built))


def train(case: VanishingCase, seed: int, effort: VanishingEffort) -> VanishingRun:
    """One training."""
    dataset = digits(seed)
    if effort.n_train is not None:
        dataset = dataset.subset(effort.n_train, seed)
    way, objective = VANISHING_METHODS[case.way], OBJECTIVES[case.objective]
    model = network(dataset, case.activation, seed)
    options: dict[str, Any] = {"terminal": objective.terminal, "order": way.order} if way.ours else {}
    optimizer = make_optimizer(way.name, model, case.lr, **options)
    watch = _Watch(model)
    with one_thread_for_small(model):
        record = fit(
            model, optimizer, dataset, epochs=effort.epochs, batch_size=effort.batch_size,
            generator=torch.Generator().manual_seed(seed), loss_function=objective.loss, on_step=watch,
        )  # fmt: skip
        with torch.no_grad():
            right = objective.predict(model(dataset.x_test)) == dataset.y_test
    return VanishingRun(
        case,
        np.array(record.losses),
        np.array(watch.norms),
        100 * float(right.double().mean()),
        math.ceil(len(dataset.y_train) / effort.batch_size),
        record.diverged,
    )


class _Watch:
    """Measures after each step how far it went."""

    def __init__(self, model: nn.Sequential) -> None:
        self.layers = [[*module.parameters()] for module in model if isinstance(module, nn.Linear)]
        self.norms: list[list[float]] = []
        self._before = self._weights()

    def __call__(self, _: Progress) -> None:
        after = self._weights()
        moved = [(new - old).norm() for new, old in zip(after, self._before, strict=True)]
        self.norms.append(torch.stack(moved).tolist())
        self._before = after

    def _weights(self) -> list[Tensor]:
        return [torch.cat([p.detach().flatten() for p in layer]) for layer in self.layers]
