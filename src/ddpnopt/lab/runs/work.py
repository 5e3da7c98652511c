"""What is sent to a process: one run, or several that are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.training import perform


class WorkUnit(Protocol):
    """Runs that are computed in one go; it can be pickled."""

    @property
    def runs(self) -> Sequence[RunConfig]: ...

    def perform(self, data_dir: Path | None) -> list[Outcome | None]:
        """The outcomes, in the order of the runs; None where a setting does not exist."""


@dataclass(frozen=True)
class SingleRun:
    """A run by itself."""

    run: RunConfig

    @property
    def runs(self) -> Sequence[RunConfig]:
        return [self.run]

    def perform(self, data_dir: Path | None) -> list[Outcome | None]:
        return [perform(self.run, data_dir)]
