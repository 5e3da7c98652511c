"""What is trained for the learning-rate windows: five small image tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ddpnopt.lab.errors import ExperimentError, UnknownNameError
from ddpnopt.lab.runs.classification import ClassificationTask

TASKS = {
    each.name: each
    for each in (
        ClassificationTask("digits", "fcn", 15, 16, None, "digits", "DIGITS, FCN"),
        ClassificationTask("mnist", "fcn", 3, 32, 6_000, "mnist-fcn", "MNIST (6,000), FCN"),
        ClassificationTask("mnist", "cnn", 3, 128, 6_000, "mnist-cnn", "MNIST (6,000), CNN"),
        ClassificationTask("fashion_mnist", "cnn", 3, 128, 6_000, "fashion-cnn", "Fashion-MNIST (6,000), CNN"),
        ClassificationTask("cifar10", "cnn", 4, 128, 10_000, "cifar10-cnn", "CIFAR-10 (10,000), CNN"),
    )
}


def scaled(task: ClassificationTask, epochs: float = 1.0, samples: float = 1.0) -> ClassificationTask:
    """The same task made shorter or longer, and smaller."""
    if not (epochs > 0 and 0 < samples <= 1):
        raise ExperimentError("the scale of the epochs must be positive")
    n_train = None if task.n_train is None else max(task.batch_size, round(samples * task.n_train))
    return replace(task, epochs=max(1, round(epochs * task.epochs)), n_train=n_train)


def window_tasks(names: Iterable[str]) -> list[ClassificationTask]:
    """The tasks with these names, each once; an error lists the known ones."""
    chosen = []
    for name in dict.fromkeys(names):
        if name not in TASKS:
            raise UnknownNameError("task", name, TASKS)
        chosen.append(TASKS[name])
    return chosen
