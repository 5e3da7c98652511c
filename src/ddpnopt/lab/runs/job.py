"""A training run as a job: its key in the store, and how it is computed by itself."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ddpnopt.lab.methods import ddpnopt_defaults, make_optimizer, method
from ddpnopt.lab.networks import build
from ddpnopt.lab.runs.data import data_of
from ddpnopt.lab.runs.measured import measured
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.training import RunConfig


@dataclass(frozen=True)
class Training:
    """A configuration, and nothing else."""

    config: RunConfig

    @property
    def key(self) -> str:
        """The configuration as text, with the default that a missing learning rate stands for."""
        parts = {"kind": "training", **asdict(self.config)}
        if self.config.lr is None:
            chosen = method(self.config.method)
            parts["default"] = [chosen.lr, chosen.convolutional_lr]
        if self.config.method == "ddpnopt":  # its defaults are what is measured: other ones are another run
            parts["options"] = {**ddpnopt_defaults(), **self.config.options}
            del parts["options"]["lr"]
        return json.dumps(parts, sort_keys=True, default=str)

    def perform(self, data_dir: Path | None = None) -> Outcome:
        config = self.config
        data = data_of(config, data_dir)
        model = build(config.network, data, config.seed)
        optimizer = make_optimizer(config.method, model, config.lr, **config.options)
        return measured(
            model,
            optimizer,
            data,
            epochs=config.epochs,
            batch_size=config.batch_size,
            seed=config.seed,
            train_loss=True,
        )
