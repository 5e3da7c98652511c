"""A suite of small training tasks of many kinds, to compare optimizers on: nothing to download, seconds per run."""

from ddpnopt.lab.suite.task import Setup, Splits, SuiteProblem, SuiteTask
from ddpnopt.lab.suite.tasks import TASKS, open_tasks, sealed_tasks

__all__ = [
    "TASKS",
    "Setup",
    "Splits",
    "SuiteProblem",
    "SuiteTask",
    "open_tasks",
    "sealed_tasks",
]
