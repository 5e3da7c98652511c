"""One training run of the benchmark: a task, a method and a learning rate."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpnopt.bench.contenders import Contender
from ddpnopt.bench.tasks import Task
from ddpnopt.errors import OptionError
from ddpnopt.experiments.methods import ddpnopt_defaults
from ddpnopt.experiments.networks import build
from ddpnopt.experiments.training import RunConfig
from ddpnopt.runner.data import data_of
from ddpnopt.runner.measured import measured
from ddpnopt.runner.outcome import Outcome


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
