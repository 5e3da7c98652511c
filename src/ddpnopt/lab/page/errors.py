"""A folder of results that cannot be shown."""

from __future__ import annotations

from pathlib import Path

from ddpnopt.lab.errors import ExperimentError


class DamagedResultError(ExperimentError):
    """A file that is there but cannot be read as what it should be."""

    def __init__(self, path: Path, what: str, command: str) -> None:
        super().__init__(f"{path}: {what}. Remove that file, or write it again with `{command}`.")
