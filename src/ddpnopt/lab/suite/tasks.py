"""All tasks of the suite by name."""

from __future__ import annotations

from ddpnopt.lab.suite import (
    actor_critic,
    batch_extremes,
    convolution_kinds,
    counting,
    densities,
    embeddings,
    fully_connected,
    gated_layers,
    generative,
    keypoints,
    latent_pictures,
    latent_reading,
    likelihoods,
    logged_control,
    maps,
    masked_language,
    masked_patches,
    orders,
    photo_outputs,
    pretrained,
    recurrences,
    recurrent,
    regression,
    reinforcement,
    sequences,
    sets_and_graphs,
    signals,
    skewed_targets,
    tabular,
    tokens,
    variants,
    views,
    vision,
    vocabularies,
)
from ddpnopt.lab.suite.task import SuiteTask

MODULES = (
    fully_connected,
    vision,
    tokens,
    recurrent,
    generative,
    regression,
    variants,
    embeddings,
    reinforcement,
    tabular,
    signals,
    counting,
    sequences,
    densities,
    masked_patches,
    photo_outputs,
    keypoints,
    likelihoods,
    sets_and_graphs,
    views,
    actor_critic,
    gated_layers,
    convolution_kinds,
    latent_reading,
    pretrained,
    masked_language,
    recurrences,
    latent_pictures,
    maps,
    skewed_targets,
    orders,
    batch_extremes,
    vocabularies,
    logged_control,
)

TASKS: dict[str, SuiteTask] = {task.name: task for module in MODULES for task in module.TASKS}


def open_tasks() -> list[SuiteTask]:
    """The tasks to develop methods on."""
    return [task for task in TASKS.values() if not task.sealed]


def sealed_tasks() -> list[SuiteTask]:
    """The tasks kept for the final comparison."""
    return [task for task in TASKS.values() if task.sealed]
