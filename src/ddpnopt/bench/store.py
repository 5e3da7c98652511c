"""The results in one SQLite file: each run is committed as it comes, so that a kill loses only what was under way."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import ddpnopt
from ddpnopt.bench.runs import Outcome
from ddpnopt.experiments.errors import ExperimentError

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY,
    outcome TEXT NOT NULL,
    code TEXT NOT NULL,
    finished TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
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
        except sqlite3.Error as wrong:
            raise ExperimentError(f"{path} cannot be used as a store of results: {wrong}") from wrong

    def add(self, key: str, outcome: Outcome, code: str) -> None:
        """Keeps an outcome, on the disk when this returns; what is already there stays."""
        with self.connection:
            self.connection.execute(
                "INSERT OR IGNORE INTO runs (key, outcome, code) VALUES (?, ?, ?)", (key, outcome.to_json(), code)
            )

    def outcomes(self) -> dict[str, Outcome]:
        """All that is there."""
        return {key: Outcome.from_json(text) for key, text in self.connection.execute("SELECT key, outcome FROM runs")}

    def codes(self, keys: Iterable[str]) -> set[str]:
        """The states of the code that computed these."""
        by_key: dict[str, str] = dict(self.connection.execute("SELECT key, code FROM runs"))
        return {by_key[key] for key in keys if key in by_key}

    def close(self) -> None:
        self.connection.close()


def code_state() -> str:
    """A digest of the optimizer's sources: results of different states in one table deserve a remark."""
    root = Path(ddpnopt.__file__).parent
    files = sorted([*root.glob("*.py"), *(root / "value").glob("*.py")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
