"""Reads the lines that `ddpnopt.logging.Recorder` writes, while they are being written or later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpnopt.lab.errors import ExperimentError

HINT = "ddpnopt.logging.Recorder writes such files"


class NothingRecordedError(ExperimentError):
    """A file that is not there, or has no step: a training may be about to write it."""


@dataclass(frozen=True)
class RunLog:
    """A training, step by step; a number that was not recorded at a step is None there."""

    name: str
    steps: list[int]
    columns: dict[str, list[float | None]]
    kind: str | None
    """Which loss was recognised."""
    open_loop: Sequence[str]
    """Parameters that are trained without feedback."""

    def column(self, name: str) -> list[float | None]:
        """Empty if it was never recorded."""
        values = self.columns.get(name, [])
        return values if any(value is not None for value in values) else []

    def known(self, name: str, last: float = 1.0) -> list[float]:
        """The numbers of the last part of the run, without gaps."""
        values = self.columns.get(name, [])
        return [value for value in values[int(len(values) * (1 - last)) :] if value is not None]

    def final(self, name: str) -> float:
        """The last number, 0 if there is none."""
        return next(iter(reversed(self.known(name))), 0.0)

    @property
    def layers(self) -> list[str]:
        """The layers with feedback, in the order of the model."""
        return [name.split("/")[1] for name in self.columns if name.startswith("layers/") and name.endswith("/update")]


def read_log(path: Path) -> RunLog:
    """The run in a file; a last line that is being written is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError as missing:
        raise NothingRecordedError(f"there is no file {path}; {HINT}") from missing
    except (OSError, UnicodeDecodeError) as wrong:
        raise ExperimentError(f"{path} cannot be read: {wrong}; {HINT}") from wrong
    records: dict[int, dict[str, Any]] = {}
    about: dict[str, Any] = {}
    for number, text in enumerate(lines, start=1):
        if number == len(lines) and not text.endswith("\n"):
            break
        record = _record(path, number, text)
        about = record.pop("about", about)
        step = int(record["step"])
        if step <= max(records, default=0):  # continued from a checkpoint, or begun again
            records = {each: content for each, content in records.items() if each < step}
        records[step] = record
    if not records:
        raise NothingRecordedError(f"{path} holds no step yet")
    names = dict.fromkeys(name for record in records.values() for name in record if name != "step")
    columns = {name: [record.get(name) for record in records.values()] for name in names}
    return RunLog(path.stem, list(records), columns, about.get("kind"), about.get("open_loop", ()))


def _record(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as wrong:
        raise ExperimentError(f"{path}, line {number} is not JSON: {wrong.msg}; {HINT}") from wrong
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ExperimentError(f"{path}, line {number} has no step; {HINT}")
    return record
