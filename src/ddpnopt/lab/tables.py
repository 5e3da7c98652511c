"""The one writer of tables: Markdown pages, CSV files, and tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd
from rich.table import Table as ScreenTable

Rows = Iterable[Sequence[object]]


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over the seeds; the latter is NaN for a single one."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        numbers = list(values)
        finite = len(numbers) > 1 and all(map(math.isfinite, numbers))
        return cls(fmean(numbers), stdev(numbers) if finite else math.nan)

    def text(self, digits: int) -> str:
        """Mean ± standard deviation."""
        shown = f"{self.mean:.{digits}f}"
        return f"{shown} ± {self.std:.{digits}f}" if math.isfinite(self.std) else shown


def markdown_table(headings: Sequence[object], rows: Rows, *, left: int | None = None) -> str:
    """The lines of a table; columns from position `left` on are aligned to the right, none if it is None."""
    aligned = len(headings) if left is None else left
    rules = ["---" if position < aligned else "---:" for position in range(len(headings))]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (headings, rules, *rows))


def markdown_section(title: str, headings: Sequence[object], rows: Rows, notes: Sequence[str] = ()) -> str:
    """A heading, remarks, and a table of numbers whose first column is text."""
    return "\n".join([f"### {title}", "", *(line for note in notes for line in (note, "")),
                      markdown_table(headings, rows, left=1), ""])  # fmt: skip


def write_markdown(path: Path, *parts: str) -> Path:
    """A page of parts, each on lines of its own."""
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def write_csv(path: Path, content: pd.DataFrame | Sequence[Mapping[str, Any]]) -> Path:
    """A file of numbers, from a frame or from one mapping per row."""
    frame = content if isinstance(content, pd.DataFrame) else pd.DataFrame(list(content))
    frame.to_csv(path, index=False)
    return path


def screen_table(
    title: str, headings: Sequence[str], rows: Rows, *, left: int = 1, folded: bool = False
) -> ScreenTable:
    """For the terminal: columns from position `left` on are numbers, aligned to the right.

    With `folded` all columns are text, and long cells continue on further lines.
    """
    made = ScreenTable(title=title, title_justify="left", title_style="italic" if folded else "bold")
    for position, heading in enumerate(headings):
        if folded:
            made.add_column(heading, overflow="fold")
        else:
            made.add_column(heading, justify="right" if position >= left else "left", no_wrap=position < left)
    for row in rows:
        made.add_row(*map(str, row))
    return made
