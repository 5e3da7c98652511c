"""What travels to a process: one run, or several that are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from ddpnopt.lab.runs.outcome import Outcome


class Job(Protocol):
    """One run; it can be pickled."""

    @property
    def key(self) -> str:
        """The same text for the same computation."""

    def perform(self, data_dir: Path | None) -> Outcome | None:
        """The outcome; None where the setting does not exist, which is neither a result nor a failure."""


J = TypeVar("J", bound=Job)
J_co = TypeVar("J_co", bound=Job, covariant=True)


class Unit(Protocol[J_co]):
    """Runs that are computed in one go."""

    @property
    def jobs(self) -> Sequence[J_co]: ...

    def perform(self, data_dir: Path | None) -> list[Outcome | None]:
        """The outcomes, in the order of the jobs."""


@dataclass(frozen=True)
class Single(Generic[J]):
    """A run by itself."""

    job: J

    @property
    def jobs(self) -> Sequence[J]:
        return [self.job]

    def perform(self, data_dir: Path | None) -> list[Outcome | None]:
        return [self.job.perform(data_dir)]
