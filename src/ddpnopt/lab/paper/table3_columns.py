"""The data sets of Table 3: network, length and seeds of each, and what was shortened for a small machine.

Each column has three sizes: that of the final runs, that on which learning rates are chosen, and that on which E-MSA
and vanilla DDP, whose steps take a hundred times as long and more, are compared with DDPNOpt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpnopt.lab.errors import UnknownNameError
from ddpnopt.lab.paper.digits_runs import BATCH_SIZE, EPOCHS, NETWORK
from ddpnopt.lab.paper.item import Context
from ddpnopt.lab.paper.item_runs import seeds_of
from ddpnopt.lab.paper.readings import READINGS, options
from ddpnopt.lab.paper.verdicts import USUAL_SEEDS
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.presets import preset

BASELINES = ("sgd-m", "rmsprop", "adam", "ekfac")
READING = READINGS["outer"]
"""Of DDPNOpt: z z' of Proposition 2. The exact Hessian is unstable on ReLU networks with the adaptive diagonal."""
SLOW_SEEDS = 3
MOST_DEFAULT_SEEDS = 5
# The smallest damping at which vanilla DDP is stable to the end, of 1, 10, 30 and 50 on held-out training data (see
# docs/baselines.md); on WINE the default is stable.
SLOW_OPTIONS: Mapping[tuple[str, str], Mapping[str, Any]] = {("vanilla-ddp", "digits"): {"damping": 30.0}}


@dataclass(frozen=True)
class Size:
    """How much is trained: epochs over so many samples, drawn again by each seed; None takes all."""

    epochs: int
    n_train: int | None = None


@dataclass(frozen=True)
class Column:
    """One data set with its network."""

    name: str
    label: str
    dataset: str
    network: str
    batch_size: int
    size: Size
    tuning: Size
    """Of the runs that choose learning rates."""
    slow: Size
    """Of E-MSA and vanilla DDP, and of DDPNOpt where it is compared with them."""
    whole: Size
    """Of the final runs with --full."""
    seeds: int
    tuning_seeds: int
    rates: int
    """How many learning rates of the paper's range are tried."""
    paper: Sequence[float | None]
    """Accuracies of SGD-m, RMSprop, Adam, EKFAC, E-MSA, vanilla DDP and DDPNOpt."""
    looked: int = USUAL_SEEDS
    """Seeds that left a claim open: with more of them the margin of error is that of a second look."""
    most_slow_seeds: int = SLOW_SEEDS
    most_ddp_seeds: int = SLOW_SEEDS
    """Of vanilla DDP, whose steps take several times as long as those of E-MSA."""

    @property
    def convolutional(self) -> bool:
        return self.network == "cnn"

    @property
    def paper_method(self) -> str:
        """The paper's DDPNOpt: the adaptive diagonal for fully connected networks, Gauss-Newton for CNNs."""
        return "ddpnopt-ekfac" if self.convolutional else "ddpnopt-rmsprop"

    def task(self, size: Size) -> ClassificationTask:
        return ClassificationTask(self.dataset, self.network, size.epochs, self.batch_size, size.n_train)

    def config(self, method: str, size: Size) -> RunConfig:
        """One run, at the method's default learning rate."""
        # the factored form of a CNN has no options to choose: its terminal curvature is z z' already
        form = READINGS["mean"] if self.convolutional else READING
        own = options(method, form)
        if self.convolutional:
            own = {name: value for name, value in own.items() if name != "vxx_power"}
        return RunConfig(method, self.task(size), options={**own, **SLOW_OPTIONS.get((method, self.name), {})})

    @property
    def default_seeds(self) -> int:
        """Of DDPNOpt(model), which is shown next to the paper's methods and takes part in no claim."""
        return min(self.seeds, MOST_DEFAULT_SEEDS)

    @property
    def slow_seeds(self) -> int:
        """As many for DDPNOpt as for E-MSA."""
        return min(self.seeds, self.most_slow_seeds)

    @property
    def ddp_seeds(self) -> int:
        """Of vanilla DDP: DDPNOpt is compared with it on the seeds that both have."""
        return min(self.slow_seeds, self.most_ddp_seeds)

    def possible(self, method: str) -> bool:
        """Vanilla DDP on 784 inputs would have to factor matrices of 25,000 rows at each step."""
        return method != "vanilla-ddp" or self.name in ("wine", "digits")

    def for_context(self, context: Context) -> Column:
        """The column as long as the context asks for."""
        chosen = replace(self, seeds=len(seeds_of(context, self.seeds, quick=1 if self.convolutional else 2)))
        if context.full:
            fewer = self.images and context.seeds is None
            chosen = replace(chosen, size=self.whole, seeds=min(chosen.seeds, SLOW_SEEDS) if fewer else chosen.seeds)
            if self.images and not self.convolutional:  # E-MSA takes minutes there, on a CNN hours
                chosen = replace(chosen, slow=self.whole)
        if not context.quick:
            return chosen
        n_train = None if self.name == "wine" else 320 if self.name == "digits" else 640
        short = Size(10 if self.name == "wine" else 1, n_train)
        slow = Size(1, n_train)
        return replace(chosen, size=short, tuning=short, slow=slow, rates=2, tuning_seeds=1)

    @property
    def images(self) -> bool:
        return self.dataset not in ("wine", "digits")


def _images(
    name: str,
    label: str,
    network: str,
    paper: Sequence[float | None],
    *,
    n_train: int,
    slow: Size,
    whole: int,
    looked: int = USUAL_SEEDS,
    slow_seeds: int = SLOW_SEEDS,
) -> Column:
    """An image set: a part of it unless --full is given, on which the learning rates are chosen in any case."""
    dataset = {"mnist": "mnist", "fashion": "fashion_mnist", "svhn": "svhn", "cifar10": "cifar10"}[name.split("-")[0]]
    usual = preset(dataset)
    part = Size(usual.epochs, n_train)
    convolutional = network == "cnn"
    return Column(
        name, label, dataset, network, 128 if convolutional else usual.batch_size, part, part, slow, Size(whole),
        seeds=3 if convolutional else 5, tuning_seeds=1 if convolutional else 2, rates=4 if convolutional else 6,
        paper=paper, looked=looked, most_slow_seeds=slow_seeds,
    )  # fmt: skip


_WINE, _DIGITS = Size(preset("wine").epochs), Size(EPOCHS)
COLUMNS = (
    Column(
        "wine", "WINE", "wine", "fcn", preset("wine").batch_size, _WINE, _WINE, Size(10), _WINE, seeds=10,
        tuning_seeds=5, rates=6, paper=(94.35, 98.10, 98.13, 94.60, 93.56, 98.00, 98.18), most_slow_seeds=10,
        most_ddp_seeds=10,
    ),
    Column(
        "digits", "DIGITS", "digits", NETWORK, BATCH_SIZE, _DIGITS, _DIGITS, Size(4), _DIGITS, seeds=10,
        tuning_seeds=3, rates=6, paper=(95.36, 94.33, 94.98, 95.24, 94.87, 91.68, 95.13), most_slow_seeds=10,
    ),
    _images(
        "mnist-fcn", "MNIST, FCN", "fcn", (92.65, 91.89, 92.54, 92.73, 90.24, 90.42, 93.30),
        n_train=10_000, slow=Size(2, 10_000), whole=1,
    ),
    _images(
        "fashion-fcn", "F-MNIST, FCN", "fcn", (82.49, 83.87, 84.36, 84.12, 82.04, 81.98, 84.98),
        n_train=10_000, slow=Size(2, 10_000), whole=2,
    ),
    _images(
        "mnist-cnn", "MNIST, CNN", "cnn", (97.94, 98.05, 98.04, 98.02, 96.48, None, 98.09),
        n_train=6_000, slow=Size(2, 6_000), whole=1, slow_seeds=5,
    ),
    _images(
        "svhn-cnn", "SVHN, CNN", "cnn", (89.00, 88.41, 87.76, 90.63, 79.45, None, 90.70),
        n_train=10_000, slow=Size(2, 10_000), whole=4, looked=6,
    ),
    _images(
        "cifar10-cnn", "CIFAR-10, CNN", "cnn", (71.26, 70.52, 70.04, 71.85, 61.42, None, 71.92),
        n_train=10_000, slow=Size(2, 10_000), whole=10,
    ),
)  # fmt: skip


def columns(context: Context) -> list[Column]:
    """The columns that are asked for, by their own name or by that of the data set."""
    for name in context.datasets:
        if not any(name in (each.name, each.dataset) for each in COLUMNS):
            raise UnknownNameError("data set of this item", name, [each.name for each in COLUMNS])
    chosen = [c for c in COLUMNS if not context.datasets or {c.name, c.dataset} & set(context.datasets)]
    return [each.for_context(context) for each in chosen]
