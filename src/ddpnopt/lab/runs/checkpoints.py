"""A run that was killed continues from its last checkpoint, bit for bit, even in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpnopt.checkpoint import load, save
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.runs.outcome import TrainingRecord

FORMAT = 2
PER_STEP = ("losses", "epoch_losses", "step_seconds", "step_cpu_seconds")


@dataclass
class Checkpoints:
    """Saves a run every so many steps; where the file exists already, the run begins from it.

    The order of an epoch's batches is drawn once at its start. So the generator's state of that moment is kept, and how
    many batches have been taken since: the same order is drawn again and those batches left out.
    """

    path: Path
    every: int
    run: Mapping[str, Any] = field(default_factory=dict)
    """What decides the run; a checkpoint of another run is refused."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ExperimentError(f"a checkpoint can be written every 1 step or more, not every {self.every}")

    def resume(
        self, model: nn.Module, optimizer: Optimizer, generator: torch.Generator, record: TrainingRecord
    ) -> tuple[int, int]:
        """Bring everything to where the file says; the epoch, and how many of its batches are done."""
        if not self.path.exists():
            return 0, 0
        saved = load(self.path)
        if saved.get("format") != FORMAT:
            raise ExperimentError(
                f"{self.path} has format {saved.get('format')}, this version reads {FORMAT}; delete it to start again"
            )
        run = saved["run"]
        differing = [name for name in {**run, **self.run} if run.get(name) != self.run.get(name)]
        if differing:
            differences = ", ".join(f"{name} {run.get(name)!r}, not {self.run.get(name)!r}" for name in differing)
            raise ExperimentError(f"{self.path} is of a run with {differences}; delete it or choose another file")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"])
        torch.set_rng_state(saved["rng"])
        for name in PER_STEP:
            getattr(record, name).extend(saved[name].tolist())
        return saved["epoch"], saved["batch"]

    def after_step(
        self, model: nn.Module, optimizer: Optimizer, record: TrainingRecord, epoch: int, batch: int, drawn: Tensor
    ) -> None:
        """Save if it is time; `drawn` is the generator's state from before this epoch's order was drawn."""
        if len(record.losses) % self.every:
            return
        content = {
            "format": FORMAT,
            "run": dict(self.run),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "generator": drawn,
            "rng": torch.get_rng_state(),
            "epoch": epoch,
            "batch": batch,
        }
        for name in PER_STEP:
            content[name] = torch.tensor(getattr(record, name), dtype=torch.float64)
        save(self.path, content)
