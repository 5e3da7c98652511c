"""A table as the page shows it: headings, rows of text, which columns are numbers, and what to choose rows by."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from pandas.errors import EmptyDataError, ParserError

from ddpnopt.lab.page.errors import DamagedResultError

_NUMBER = re.compile(r"^[\s*≥≤<>~±]*[-+−]?\d")
_EMPTY = frozenset({"", "–", "-", "—", "nan"})
CHOICES = range(2, 25)
"""So many different values of a column make a choice; more would be a list to scroll through."""


@dataclass(frozen=True)
class ShownTable:
    """A table ready for the template."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    missing: bool = False
    """Named by the result, but its file is not there."""

    @property
    def numeric(self) -> list[bool]:
        """Which columns are set flush right."""
        return [_is_numeric([row[position] for row in self.rows]) for position in range(len(self.columns))]

    @property
    def choice(self) -> int | None:
        """The column to choose rows by, such as the data set: the first, if its values are repeated."""
        if len(self.columns) < 2:
            return None
        values = [row[0] for row in self.rows]
        different = len(set(values))
        return 0 if different in CHOICES and different < len(values) and not self.numeric[0] else None

    @property
    def choices(self) -> list[str]:
        return [] if self.choice is None else list(dict.fromkeys(row[self.choice] for row in self.rows))

    @property
    def csv_link(self) -> str:
        """The table as a file to save, inside the page."""
        frame = pd.DataFrame(list(self.rows), columns=list(self.columns))
        return "data:text/csv;base64," + base64.b64encode(frame.to_csv(index=False).encode()).decode()


def read_csv(path: Path, caption: str, command: str) -> ShownTable:
    """A table from its CSV file, every cell as it was printed."""
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    except FileNotFoundError:
        return ShownTable(path.stem, caption, (), (), missing=True)
    except (EmptyDataError, ParserError, UnicodeDecodeError) as wrong:
        raise DamagedResultError(path, f"is not a table ({wrong})", command) from wrong
    return ShownTable(path.stem, caption, [str(name) for name in frame.columns], frame.to_numpy().tolist())


def _is_numeric(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell.strip().lower() not in _EMPTY]
    return bool(filled) and all(_NUMBER.match(cell) for cell in filled)
