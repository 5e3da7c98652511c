"""The data sets of Table 3: network, length and seeds of each, and what was shortened for a small machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpnopt.lab.errors import UnknownNameError
from ddpnopt.lab.paper.item import Context
from ddpnopt.lab.paper.item_runs import seeds_of
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.presets import preset

BASELINES = ("sgd-m", "rmsprop", "adam", "ekfac")
OCP = ("emsa", "vanilla-ddp")
SLOW_SEEDS = 2
# E-MSA has converged after these epochs; more would only take longer.
SLOW_EPOCHS = {("emsa", "wine"): 10, ("emsa", "digits"): 8}
# The smallest damping at which vanilla DDP is stable to the end, of 1, 10, 20, 30 and 50 on held-out training data (see
# docs/baselines.md); on WINE the default is stable.
SLOW_OPTIONS: Mapping[tuple[str, str], Mapping[str, Any]] = {("vanilla-ddp", "digits"): {"damping": 30.0}}


@dataclass(frozen=True)
class Column:
    """One data set with its network."""

    name: str
    label: str
    dataset: str
    network: str
    epochs: int
    batch_size: int
    seeds: int
    tuning_seeds: int
    rates: int
    """How many learning rates of the paper's range are tried."""
    paper: Sequence[float | None]
    """Accuracies of SGD-m, RMSprop, Adam, EKFAC, E-MSA, vanilla DDP and DDPNOpt."""
    n_train: int | None = None
    slow_epochs: int | None = None
    """At most so many for E-MSA and vanilla DDP, whose steps take a hundred times as long and more."""

    @property
    def convolutional(self) -> bool:
        return self.network == "cnn"

    @property
    def paper_method(self) -> str:
        """The paper's DDPNOpt: the adaptive diagonal for fully connected networks, Gauss-Newton for CNNs."""
        return "ddpnopt-ekfac" if self.convolutional else "ddpnopt-rmsprop"

    def task(self, method: str) -> ClassificationTask:
        """What a method trains; the slow methods have fewer epochs."""
        epochs = min(self.epochs, SLOW_EPOCHS.get((method, self.name), self.epochs))
        if method in OCP and self.slow_epochs is not None:
            epochs = min(epochs, self.slow_epochs)
        return ClassificationTask(self.dataset, self.network, epochs, self.batch_size, self.n_train)

    def config(self, method: str) -> RunConfig:
        """One run, at the method's default learning rate."""
        return RunConfig(method, self.task(method), options=SLOW_OPTIONS.get((method, self.name), {}))

    def seeds_of(self, method: str) -> int:
        """How many seeds a method has; a run of the slow ones takes minutes, most on images."""
        slow = 1 if self.convolutional else SLOW_SEEDS
        return min(self.seeds, slow) if method in OCP else self.seeds

    def possible(self, method: str) -> bool:
        """Vanilla DDP on 784 inputs would have to factor matrices of 25,000 rows at each step."""
        return method != "vanilla-ddp" or self.name in ("wine", "digits")

    def for_context(self, context: Context) -> Column:
        """The column as long as the context asks for."""
        chosen = replace(self, seeds=len(seeds_of(context, self.seeds, quick=1 if self.convolutional else 2)))
        if context.full:
            chosen = replace(chosen, n_train=None)
        if not context.quick:
            return chosen
        images = None if self.name == "wine" else 320 if self.name == "digits" else 640
        short = 10 if self.name == "wine" else 1
        return replace(chosen, n_train=images, epochs=short, rates=2, tuning_seeds=1, slow_epochs=1)


def _column(name: str, label: str, dataset: str, network: str, paper: Sequence[float | None], **rest: int) -> Column:
    usual = preset(dataset)
    n_train = rest.get("n_train")
    return Column(
        name,
        label,
        dataset,
        network,
        rest.get("epochs", usual.epochs),
        128 if network == "cnn" else usual.batch_size,
        rest["seeds"],
        rest["tuning_seeds"],
        4 if network == "cnn" else 6,
        paper,
        n_train,
        None if dataset in ("wine", "digits") else 1,
    )


COLUMNS = (
    _column("wine", "WINE", "wine", "fcn", (94.35, 98.10, 98.13, 94.60, 93.56, 98.00, 98.18), seeds=10, tuning_seeds=5),
    _column(
        "digits", "DIGITS", "digits", "fcn", (95.36, 94.33, 94.98, 95.24, 94.87, 91.68, 95.13), seeds=10, tuning_seeds=3
    ),
    _column(
        "mnist-fcn", "MNIST, FCN", "mnist", "fcn", (92.65, 91.89, 92.54, 92.73, 90.24, 90.42, 93.30),
        seeds=5, tuning_seeds=2, n_train=10_000,
    ),
    _column(
        "fashion-fcn", "F-MNIST, FCN", "fashion_mnist", "fcn", (82.49, 83.87, 84.36, 84.12, 82.04, 81.98, 84.98),
        seeds=5, tuning_seeds=2, n_train=10_000,
    ),
    _column(
        "mnist-cnn", "MNIST, CNN", "mnist", "cnn", (97.94, 98.05, 98.04, 98.02, 96.48, None, 98.09),
        seeds=3, tuning_seeds=1, n_train=6_000,
    ),
    _column(
        "svhn-cnn", "SVHN, CNN", "svhn", "cnn", (89.00, 88.41, 87.76, 90.63, 79.45, None, 90.70),
        seeds=3, tuning_seeds=1, n_train=10_000,
    ),
    _column(
        "cifar10-cnn", "CIFAR-10, CNN", "cifar10", "cnn", (71.26, 70.52, 70.04, 71.85, 61.42, None, 71.92),
        seeds=3, tuning_seeds=1, n_train=10_000,
    ),
)  # fmt: skip


def columns(context: Context) -> list[Column]:
    """The columns that are asked for, by their own name or by that of the data set."""
    for name in context.datasets:
        if not any(name in (each.name, each.dataset) for each in COLUMNS):
            raise UnknownNameError("data set of this item", name, [each.name for each in COLUMNS])
    chosen = [c for c in COLUMNS if not context.datasets or {c.name, c.dataset} & set(context.datasets)]
    return [each.for_context(context) for each in chosen]
