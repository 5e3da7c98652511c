"""What is trained: five small image tasks, each with one network, batch size and length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ddpnopt.lab.errors import ExperimentError, UnknownNameError


@dataclass(frozen=True)
class Task:
    """A data set, a network, and how long to train."""

    name: str
    label: str
    dataset: str
    network: str
    n_train: int | None
    epochs: int
    batch_size: int
    classes: int = 10

    @property
    def chance(self) -> float:
        """The accuracy of guessing, in percent: what a run that diverged is worth."""
        return 100 / self.classes

    def scaled(self, epochs: float = 1.0, samples: float = 1.0) -> Task:
        """The same task made shorter or longer, and smaller."""
        if not (epochs > 0 and 0 < samples <= 1):
            raise ExperimentError("the scale of the epochs must be positive")
        n_train = None if self.n_train is None else max(self.batch_size, round(samples * self.n_train))
        return replace(self, epochs=max(1, round(epochs * self.epochs)), n_train=n_train)


TASKS = {
    each.name: each
    for each in (
        Task("digits", "DIGITS, FCN", "digits", "fcn", None, epochs=15, batch_size=16),
        Task("mnist-fcn", "MNIST (6,000), FCN", "mnist", "fcn", 6_000, epochs=3, batch_size=32),
        Task("mnist-cnn", "MNIST (6,000), CNN", "mnist", "cnn", 6_000, epochs=3, batch_size=128),
        Task("fashion-cnn", "Fashion-MNIST (6,000), CNN", "fashion_mnist", "cnn", 6_000, epochs=3, batch_size=128),
        Task("cifar10-cnn", "CIFAR-10 (10,000), CNN", "cifar10", "cnn", 10_000, epochs=4, batch_size=128),
    )
}


def tasks(names: Iterable[str]) -> list[Task]:
    """The tasks of these names, each once; an error lists the known ones."""
    chosen = []
    for name in dict.fromkeys(names):
        if name not in TASKS:
            raise UnknownNameError("task", name, TASKS)
        chosen.append(TASKS[name])
    return chosen
