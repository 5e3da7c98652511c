"""One training run of the benchmark: a task, a method and a learning rate."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpnopt.errors import OptionError
from ddpnopt.lab.methods import ddpnopt_defaults
from ddpnopt.lab.networks import build
from ddpnopt.lab.runs.data import data_of
from ddpnopt.lab.runs.measured import measured
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.training import RunConfig
from ddpnopt.lab.windows.contenders import Contender
from ddpnopt.lab.windows.tasks import Task


@dataclass(frozen=True)
class Run:
    """All that decides a run."""

    task: Task
    contender: Contender
    lr: float | None
    """None is the default setting."""
    seed: int

    @property
    def key(self) -> str:
        """The same text for the same computation: names and labels are left out, DDPNOpt's defaults spelled out."""
        task = self.task
        parts: dict[str, Any] = {
            "dataset": task.dataset,
            "network": task.network,
            "n_train": task.n_train,
            "epochs": task.epochs,
            "batch_size": task.batch_size,
            "method": "ddpnopt" if self.contender.ours else self.contender.name,
            "lr": self.lr,
            "seed": self.seed,
        }
        if self.contender.ours:
            parts["options"] = {**ddpnopt_defaults(), **self.contender.options}
            del parts["options"]["lr"]
            if self.lr is None:
                parts["default"] = ddpnopt_defaults()["lr"]
        return json.dumps(parts, sort_keys=True, default=str)

    def perform(self, data_dir: Path | None = None) -> Outcome | None:
        """Trains and tests; None where the optimizer does not take this setting: a form without a default rate."""
        task = self.task
        config = RunConfig(self.contender.name, task.dataset, task.network, seed=self.seed, n_train=task.n_train)
        data = data_of(config, data_dir)
        model = build(task.network, data, self.seed)
        try:
            optimizer = self.contender.build(model, self.lr)
        except OptionError:
            return None
        return measured(
            model,
            optimizer,
            data,
            epochs=task.epochs,
            batch_size=task.batch_size,
            seed=self.seed,
            train_loss=False,
        )
