"""The configuration of a run: all that decides it, and its key in the store."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods.method import Method
from ddpnopt.lab.methods.registry import METHODS, ddpnopt_defaults, method
from ddpnopt.lab.runs.task import Task


@dataclass(frozen=True)
class RunConfig:
    """The same configuration gives the same curve."""

    method: str
    """A name of the registry of methods."""
    task: Task
    lr: float | None = None
    """None is the method's default."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Of the optimizer, in addition to those of the method."""
    seed: int = 0
    """Draws the split or subset of the data, the weights and the order of the batches."""
    validation: bool = False
    """Hold out a part of the training data in place of the test set, which a search must not see."""

    def __post_init__(self) -> None:
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise ExperimentError(f"the learning rate must be positive, not {self.lr:g}")

    @property
    def settings(self) -> dict[str, Any]:
        """Everything by name, without nesting the task."""
        return {
            **self.task.identity,
            "method": self.method,
            "lr": self.lr,
            "options": dict(self.options),
            "seed": self.seed,
            "validation": self.validation,
        }

    @property
    def key(self) -> str:
        """The same text for the same computation: DDPNOpt's defaults and default learning rates are spelled out."""
        chosen = method(self.method)
        parts = {"kind": "training", **self.settings}
        if self.lr is None:
            parts["default"] = _default(chosen)
        if chosen.source:
            parts["source"] = chosen.source
        if chosen.is_ddpnopt:  # its defaults are what is measured: other defaults make another run
            options = {**ddpnopt_defaults(), **chosen.options, **self.options}
            options.pop("lr")
            parts |= {"method": "ddpnopt", "options": options}
        return json.dumps(parts, sort_keys=True, default=str)

    def with_task(self, **changes: Any) -> RunConfig:
        """The same run with a task that differs in some of its fields."""
        return replace(self, task=replace(self.task, **changes))  # type: ignore[type-var]

    def __str__(self) -> str:
        rate = "default" if self.lr is None else f"{self.lr:g}"
        return f"{self.task.name}, {self.method}, lr {rate}, seed {self.seed}"


def _default(chosen: Method) -> list[float | None]:
    return [chosen.lr, chosen.convolutional_lr]


def upgraded_key(key: str) -> str:
    """The present form of a key that `bench lr-window` of version 0.1.0 has written; others are returned as they are.

    Those keys had neither a kind nor `validation`, and no default rates of the baselines.
    """
    parts = json.loads(key)
    if "kind" in parts:
        return key
    if parts["lr"] is None and parts["method"] in METHODS:
        parts["default"] = _default(METHODS[parts["method"]])
    return json.dumps({"kind": "training", "validation": False, "options": {}, **parts}, sort_keys=True)
