"""The one store of outcomes, an SQLite file: each run is committed when it is finished, so that a kill loses little."""

from __future__ import annotations

import hashlib
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import ddpnopt
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.runs.config import upgraded_key
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.timing.machine import facts

STORE = "runs.sqlite"
"""Its name in the folder of results."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY,
    outcome TEXT NOT NULL,
    code TEXT NOT NULL,
    finished TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    origin TEXT NOT NULL DEFAULT ''
)
"""


def start_from_nothing(path: Path) -> str:
    """What to say where there is no store at `path` yet."""
    return f"no store of finished runs at {path}: all runs are computed and kept there, in case the command is stopped"


class Store:
    """Outcomes by the key of their run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # The timeout is for a second command that writes into the same file.
            self.connection = sqlite3.connect(path, timeout=60)
            with self.connection:
                self.connection.execute(SCHEMA)
                columns = {row[1] for row in self.connection.execute("PRAGMA table_info(runs)")}
                if "origin" not in columns:  # a file from before the column was added
                    self.connection.execute("ALTER TABLE runs ADD COLUMN origin TEXT NOT NULL DEFAULT ''")
                self._upgrade_keys()
        except sqlite3.Error as wrong:
            raise ExperimentError(f"{path} cannot be used as a store of results: {wrong}") from wrong

    def _upgrade_keys(self) -> None:
        old = [key for (key,) in self.connection.execute("SELECT key FROM runs WHERE key NOT LIKE '%\"kind\"%'")]
        changed = [(new, key) for key in old if key.startswith("{") and (new := upgraded_key(key)) != key]
        self.connection.executemany("UPDATE OR IGNORE runs SET key = ? WHERE key = ?", changed)

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
                "free some space or allow writing, and give the same command again to continue"
            ) from failed

    def remove(self, keys: Iterable[str], *, unless_code: str) -> int:
        """Forget these runs, except those that this state of the code computed; returns how many."""
        with self.connection:
            made = self.connection.executemany(
                "DELETE FROM runs WHERE key = ? AND code != ?", [(key, unless_code) for key in keys]
            )
        return made.rowcount

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

    def commits(self, keys: Iterable[str]) -> Counter[str]:
        """How many of these runs each commit computed; those of an unknown one are left out."""
        wanted = set(keys)
        found = (text.rpartition("; commit ")[2] for key, text in self._read("SELECT key, origin FROM runs")
                 if key in wanted and "; commit " in text)  # fmt: skip
        return Counter(found)

    def close(self) -> None:
        self.connection.close()

    def _read(self, query: str) -> list[Any]:
        try:
            return self.connection.execute(query).fetchall()
        except sqlite3.Error as damaged:
            raise ExperimentError(f"{self.path} cannot be read: {damaged}") from damaged


@cache
def code_state() -> str:
    """A digest of the optimizer's sources: a table with results of different states is marked."""
    root = Path(ddpnopt.__file__).parent
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.parts[0] not in ("lab", "control")):
        digest.update((root / file).read_bytes())
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
