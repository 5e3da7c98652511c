"""All tasks of the suite by name."""

from __future__ import annotations

from ddpnopt.lab.suite import (
    embeddings,
    fully_connected,
    generative,
    recurrent,
    regression,
    reinforcement,
    tokens,
    variants,
    vision,
)
from ddpnopt.lab.suite.task import SuiteTask

MODULES = (fully_connected, vision, tokens, recurrent, generative, regression, variants, embeddings, reinforcement)

TASKS: dict[str, SuiteTask] = {task.name: task for module in MODULES for task in module.TASKS}


def open_tasks() -> list[SuiteTask]:
    """The tasks to develop methods on."""
    return [task for task in TASKS.values() if not task.sealed]


def sealed_tasks() -> list[SuiteTask]:
    """The tasks kept for the final comparison."""
    return [task for task in TASKS.values() if task.sealed]
