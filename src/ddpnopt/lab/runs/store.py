"""The outcomes in one SQLite file: each run is committed as it comes, so that a kill loses only what was under way."""

from __future__ import annotations

import hashlib
import sqlite3
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import ddpnopt
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.timing.machine import facts

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY,
    outcome TEXT NOT NULL,
    code TEXT NOT NULL,
    finished TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    origin TEXT NOT NULL DEFAULT ''
)
"""


class Store:
    """Outcomes by the key of their run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # The time-out is for a second command that writes into the same file.
            self.connection = sqlite3.connect(path, timeout=60)
            with self.connection:
                self.connection.execute(SCHEMA)
                columns = {row[1] for row in self.connection.execute("PRAGMA table_info(runs)")}
                if "origin" not in columns:  # a file from before the column was added
                    self.connection.execute("ALTER TABLE runs ADD COLUMN origin TEXT NOT NULL DEFAULT ''")
        except sqlite3.Error as wrong:
            raise ExperimentError(f"{path} cannot be used as a store of results: {wrong}") from wrong

    def add(self, outcomes: Mapping[str, Outcome], code: str = "") -> None:
        """Keeps outcomes by key, all or none, on the disk when this returns; what is already there stays."""
        try:
            with self.connection:
                self.connection.executemany(
                    "INSERT OR IGNORE INTO runs (key, outcome, code, origin) VALUES (?, ?, ?, ?)",
                    [(key, each.to_json(), code or code_state(), origin()) for key, each in outcomes.items()],
                )
        except sqlite3.Error as failed:
            raise ExperimentError(
                f"cannot write to {self.path}: {failed}; the runs that were finished before are kept: "
                "make room or allow writing, and give the same command again to go on"
            ) from failed

    def outcomes(self) -> dict[str, Outcome]:
        """All that is there."""
        return {key: Outcome.from_json(text) for key, text in self._read("SELECT key, outcome FROM runs")}

    def keys(self) -> set[str]:
        """The runs that are there."""
        return {key for (key,) in self._read("SELECT key FROM runs")}

    def codes(self, keys: Iterable[str]) -> set[str]:
        """The states of the code that computed these."""
        by_key: dict[str, str] = dict(self._read("SELECT key, code FROM runs"))
        return {by_key[key] for key in keys if key in by_key}

    def close(self) -> None:
        self.connection.close()

    def _read(self, query: str) -> list[Any]:
        try:
            return self.connection.execute(query).fetchall()
        except sqlite3.Error as damaged:
            raise ExperimentError(f"{self.path} cannot be read: {damaged}") from damaged


@cache
def code_state() -> str:
    """A digest of the optimizer's sources: results of different states in one table deserve a remark."""
    root = Path(ddpnopt.__file__).parent
    files = sorted([*root.glob("*.py"), *(root / "value").glob("*.py")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


@cache
def origin() -> str:
    """Where a run was computed: machine, versions, and the commit where the code is under version control."""
    found = facts()
    try:
        command = ["git", "-C", str(Path(ddpnopt.__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        commit = answer.stdout.strip() if answer.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    return "; ".join([*found, f"commit {commit}"] if commit else found)
