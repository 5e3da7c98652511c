"""What one item of the paper gives: tables, figures, and whether its claims hold; and the folder it is kept in.

An item writes a folder `<out>/<item>/`: `result.json` (claims, captions, what was shortened, the command, machine,
versions), a CSV and a Markdown file per table, an SVG file per figure. The page reads nothing but these folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ddpnopt.lab.paper.readings import PAPER, READINGS, Reading, reading
from ddpnopt.lab.runs.store import STORE, Store
from ddpnopt.lab.style import save as save_figure
from ddpnopt.lab.tables import markdown_table, write_csv, write_markdown
from ddpnopt.lab.timing.machine import heading

RESULT = "result.json"


@dataclass(frozen=True)
class Claim:
    """A statement of the paper and what came out here."""

    text: str
    holds: bool | None
    """None where the runs cannot decide it."""
    paper: str
    """The paper's figure, as text."""
    ours: str
    why: str = ""
    """Why it does not hold, or why it is open, in a sentence."""
    of_paper: bool = True
    """False for what this package claims of itself, which the count of the paper's claims leaves out."""
    judged: bool = True
    """False for what this machine cannot decide, however long it runs: shown with its reason, and not counted."""

    @property
    def counted(self) -> bool:
        """Whether it is one of the paper's claims that are judged here."""
        return self.of_paper and self.judged


@dataclass(frozen=True, eq=False)
class Table:
    """A table as it is shown: every cell ready to print, so that terminal, Markdown, CSV and page agree."""

    name: str
    """The stem of its files."""
    caption: str
    frame: pd.DataFrame


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure with its caption; `series` is what the page needs to draw it with hover, if anything."""

    name: str
    caption: str
    figure: Figure
    series: Sequence[dict[str, Any]] = ()
    """Lines or bars as `{"panel", "label", "x", "y", "spread"}`, and `"x_label"`, `"y_label"` where there is one."""


@dataclass(frozen=True, eq=False)
class Result:
    """All that an item gives."""

    claims: Sequence[Claim]
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()
    """What differs from the paper, and what was shortened and how."""


@dataclass(frozen=True)
class Context:
    """How thorough an item is to be, and where data and results are."""

    out: Path
    quick: bool = False
    data_dir: Path | None = None
    jobs: int = 1
    seeds: int | None = None
    """Instead of the item's own number of them."""
    full: bool = False
    """Whole image sets where the item would take a part of them."""
    datasets: Sequence[str] = ()
    """Only these, in items that have several; none means all."""
    ray: bool = False
    """Runs on a Ray cluster instead of processes of this machine."""
    store: Path | None = None
    """The store of runs, if it is not in `out`."""
    readings: Sequence[str] = ()
    """Of V_xx: the claims are judged in the first, the others are compared with it; none means all, `PAPER` first."""
    used: set[str] = field(default_factory=set, compare=False)
    """The keys of the runs that the item took from the store or put there."""
    on_progress: Callable[[str, int, int], None] = field(default=lambda *_: None)
    """Called with what is going on, how much is done, and of how much."""

    @property
    def store_path(self) -> Path:
        return self.store or self.out / STORE

    @property
    def judged(self) -> Reading:
        """The reading of V_xx in which the claims are judged."""
        return reading(self.readings[0] if self.readings else PAPER)

    @property
    def compared(self) -> list[Reading]:
        """The readings that are shown side by side, among them the one that is judged."""
        return [reading(name) for name in self.readings or READINGS]


@dataclass(frozen=True)
class Item:
    """One table or figure of the paper."""

    name: str
    title: str
    where: str
    """Its place in the paper."""
    run: Callable[[Context], Result]
    stored: bool = False
    """Whether its runs are in the store."""


def _commits(context: Context) -> list[str]:
    """Which states of the code computed the runs, where it was more than one."""
    if not context.used:
        return []
    store = Store(context.store_path)
    try:
        found = store.commits(context.used)
    finally:
        store.close()
    if len(found) < 2:
        return []
    return ["Runs by the commit that computed them: " + ", ".join(f"{c} {n}" for c, n in found.most_common()) + "."]


def write(item: Item, result: Result, context: Context) -> Path:
    """Keeps a result in its folder; `result.json` comes last and whole, so that a folder with one is complete."""
    folder = context.out / item.name
    folder.mkdir(parents=True, exist_ok=True)
    for table in result.tables:
        write_csv(folder / f"{table.name}.csv", table.frame)
        text = markdown_table(list(table.frame.columns), table.frame.values.tolist())
        write_markdown(folder / f"{table.name}.md", f"# {item.title}", "", table.caption, "", text, "")
    for picture in result.pictures:
        save_figure(picture.figure, folder / picture.name, ("svg",))
    content = {
        "name": item.name,
        "title": item.title,
        "where": item.where,
        "quick": context.quick,
        "claims": [asdict(claim) for claim in result.claims],
        "tables": [{"name": t.name, "caption": t.caption} for t in result.tables],
        "pictures": [{"name": p.name, "caption": p.caption, "series": list(p.series)} for p in result.pictures],
        "notes": [*result.notes, *_commits(context)],
        "machine": heading(),
    }
    part = folder / f"{RESULT}.part"
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(folder / RESULT)
    return folder
