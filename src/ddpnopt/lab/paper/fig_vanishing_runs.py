"""The trainings of `fig-vanishing`: nine layers on DIGITS, and the size of every layer's update during training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpnopt.lab import style
from ddpnopt.lab.paper.captions import spread
from ddpnopt.lab.paper.item import Context
from ddpnopt.lab.paper.item_runs import outcomes
from ddpnopt.lab.paper.readings import KRONECKER, reading
from ddpnopt.lab.runs.classification import MMC_UNTRAINED, ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome

CLASSES = 10
ESCAPED = 0.9
"""The share of the plateau's loss below which a training has left it."""
JUDGED = "thrice"
"""The reading of V_xx: that of the other items without its guard, which takes too long with second order."""
VGR_WEIGHT = 2.0
"""As in the experiments of Pascanu et al.; the paper gives none."""


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
PLATEAUS = {"MMC": MMC_UNTRAINED, "CE": math.log(CLASSES)}
"""The loss of a network that does not distinguish the classes at all."""
LOSSES = {"MMC": "mmc", "CE": "cross_entropy"}
# The learning rates of the paper's Figure 6; its Figure 12 tries others around them.
RATES = {"SGD": 0.1, "SGD-VGR": 0.1, "EKFAC": 0.03, "DDPNOpt": 0.03, "DDPNOpt2nd": 0.03}
NETWORKS = {"sigmoid": "sigmoid-9", "ReLU": "relu-9"}


@dataclass(frozen=True)
class VanishingCase:
    """One training, except for its seed."""

    way: str
    lr: float
    objective: str = "MMC"
    activation: str = "sigmoid"
    reading: str = ""
    """Of V_xx, by its name; empty for the one that is judged."""
    weight: float = VGR_WEIGHT
    """Of the penalty of SGD-VGR."""


@dataclass(frozen=True)
class VanishingEffort:
    """How thorough to be."""

    epochs: int
    lrs: tuple[float, ...]
    n_train: int | None = None
    batch_size: int = 8
    lower: tuple[float, ...] = ()
    """Further rates on the ReLU network, for the methods that are stable at none of the others on every seed."""

    @property
    def steps(self) -> int:
        return self.epochs * math.ceil((self.n_train or 1437) / self.batch_size)


@dataclass(frozen=True, eq=False)
class VanishingRun:
    """What one training gave."""

    case: VanishingCase
    steps: Sequence[int]
    losses: Sequence[float]
    """The training loss at about fifty moments, each the mean of the batches since the one before."""
    norms: Sequence[float]
    """How far each layer's weights move in a step after the first epoch, on average."""
    final: float
    """The loss on the training set at the end; infinite where the run diverged."""
    accuracy: float
    """On the test set, in percent."""

    @classmethod
    def of(cls, case: VanishingCase, outcome: Outcome) -> VanishingRun:
        final = math.inf if outcome.diverged else outcome.train_loss
        accuracy = 100 / CLASSES if outcome.diverged else outcome.metric
        return cls(case, outcome.curve.steps, outcome.curve.losses, outcome.update_norms, final, accuracy)

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.final)

    @property
    def escaped(self) -> bool:
        return self.final < ESCAPED * PLATEAUS[self.case.objective]


@dataclass(frozen=True, eq=False)
class VanishingRuns:
    """All trainings, several seeds of each case."""

    of: Mapping[VanishingCase, Sequence[VanishingRun]]

    def escapes(self, case: VanishingCase) -> int:
        return sum(each.escaped for each in self.of[case])

    def stuck(self, cases: Iterable[VanishingCase]) -> bool:
        return all(self.escapes(case) == 0 for case in cases)

    def free(self, cases: Iterable[VanishingCase]) -> bool:
        return all(self.escapes(case) == len(self.of[case]) for case in cases)

    def finals(self, case: VanishingCase) -> list[float]:
        return [each.final for each in self.of[case]]

    def final_losses(self, cases: Iterable[VanishingCase]) -> str:
        """Method, learning rate and training loss at the end."""
        return ", ".join(f"{case.way} at {case.lr:g}: {spread(self.finals(case))}" for case in cases)

    def escaping(self, cases: Iterable[VanishingCase]) -> str:
        """Which of the cases leave the plateau, on how many seeds."""
        found = [f"{case.way} at {case.lr:g} ({self.escapes(case)} of {len(self.of[case])})" for case in cases]
        return ", ".join(found)

    @property
    def seeds(self) -> int:
        return min(len(each) for each in self.of.values())


def config(case: VanishingCase, seed: int, effort: VanishingEffort, judged: str = JUDGED) -> RunConfig:
    """The run of a case."""
    way, loss = VANISHING_METHODS[case.way], LOSSES[case.objective]
    task = ClassificationTask(
        "digits", NETWORKS[case.activation], effort.epochs, effort.batch_size, effort.n_train, loss=loss,
        measure_updates=True,
    )  # fmt: skip
    options: dict[str, Any] = dict(KRONECKER) if way.name in ("ekfac", "ddpnopt-ekfac") else {}
    if way.name == "sgd-vgr":
        options["weight"] = case.weight
    if way.ours:
        options |= {"terminal": loss, "order": way.order, **reading(case.reading or judged).options_of(way.name)}
    return RunConfig(way.name, task, case.lr, options, seed)


def trained(
    context: Context, plan: Mapping[VanishingCase, Sequence[int]], effort: VanishingEffort
) -> dict[VanishingCase, list[VanishingRun]]:
    """All cases with their seeds, from the store where they are there."""
    wanted = [(case, config(case, seed, effort, context.judged.name)) for case, seeds in plan.items() for seed in seeds]
    found = outcomes(context, [each for _, each in wanted], "nine layers")
    made: dict[VanishingCase, list[VanishingRun]] = {case: [] for case in plan}
    for (case, _), outcome in zip(wanted, found, strict=True):
        made[case].append(VanishingRun.of(case, outcome))
    return made
