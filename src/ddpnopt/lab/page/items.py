"""Reads the folders that `ddpnopt reproduce` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpnopt.lab.page.charts import chart
from ddpnopt.lab.page.errors import DamagedResultError
from ddpnopt.lab.page.images import ShownImage, read_image
from ddpnopt.lab.page.tables import ShownTable, read_csv
from ddpnopt.lab.page.text import anchor
from ddpnopt.lab.paper.item import RESULT, Claim

TITLES = {
    "table3": "Accuracy of seven methods on seven data sets",
    "table4": "Growth of time and memory",
    "fig-runtime": "Time and memory of a step",
    "fig-grid": "Learning rates and regularisation",
    "fig-dynamics": "Training dynamics",
    "fig-adam": "Compared with Adam",
    "tables6-8": "Learning rates, in numbers",
    "fig-policy": "The feedback, seen as images",
    "fig-vanishing": "Vanishing gradients",
    "fig-spectrum": "Eigenvalues of the feedback",
    "toy": "The feedback in two dimensions",
    "ours": "DDPNOpt(model) at its defaults",
}
"""The items of the paper in the order of the page, and what to call one that has not been run."""


@dataclass(frozen=True)
class ShownPicture:
    """A figure, and the data of the chart that stands in for it where there is one."""

    image: ShownImage
    chart: dict[str, Any] | None


@dataclass(frozen=True)
class Named:
    """What every item has, run or not."""

    name: str
    title: str

    @property
    def anchor(self) -> str:
        return anchor(self.name)

    @property
    def command(self) -> str:
        return command(self.name)


@dataclass(frozen=True)
class ShownItem(Named):
    """One item of the paper as the page shows it."""

    where: str
    quick: bool
    claims: Sequence[Claim]
    tables: Sequence[ShownTable]
    pictures: Sequence[ShownPicture]
    notes: Sequence[str]
    machine: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class MissingItem(Named):
    """An item without a result: never run, or not to its end."""

    started: bool


def command(name: str) -> str:
    """What writes an item."""
    return f"ddpnopt reproduce {name}"


def read_items(results: Path) -> list[ShownItem | MissingItem]:
    """All items: those of the paper in its order, then whatever else has a result."""
    others = sorted(path.parent.name for path in results.glob(f"*/{RESULT}") if path.parent.name not in TITLES)
    return [read_item(results / name) for name in (*TITLES, *others)]


def read_item(folder: Path) -> ShownItem | MissingItem:
    """One item from its folder."""
    path = folder / RESULT
    if not path.is_file():
        started = folder.is_dir() and any(folder.iterdir())
        return MissingItem(folder.name, TITLES.get(folder.name, folder.name), started)
    how = command(folder.name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as wrong:
        raise DamagedResultError(path, f"is not whole JSON ({wrong})", how) from wrong
    try:
        return _shown(folder, content, how)
    except DamagedResultError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as wrong:
        said = f"lacks {wrong}" if isinstance(wrong, KeyError) else f"does not hold a result: {wrong}"
        raise DamagedResultError(path, said, how) from wrong


def _shown(folder: Path, content: dict[str, Any], how: str) -> ShownItem:
    if not isinstance(content, dict):
        raise TypeError(f"a JSON object was expected, not {type(content).__name__}")
    return ShownItem(
        name=folder.name,
        title=str(content["title"]),
        where=str(content["where"]),
        quick=bool(content["quick"]),
        claims=[_claim(each) for each in content["claims"]],
        tables=[read_csv(folder / f"{t['name']}.csv", str(t["caption"]), how) for t in content["tables"]],
        pictures=[_picture(folder, each) for each in content["pictures"]],
        notes=[str(note) for note in content["notes"]],
        machine=_facts(str(content["machine"])),
    )


def _claim(each: dict[str, Any]) -> Claim:
    holds = each["holds"]
    if holds is not None and not isinstance(holds, bool):
        raise TypeError(f"holds must be true, false or null, not {holds!r}")
    flags = {name: bool(each.get(name, True)) for name in ("of_paper", "judged")}
    return Claim(str(each["text"]), holds, str(each["paper"]), str(each["ours"]), str(each.get("why", "")), **flags)


def _picture(folder: Path, each: dict[str, Any]) -> ShownPicture:
    series = each.get("series") or []
    image = read_image(folder / str(each["name"]), str(each["caption"]))
    return ShownPicture(image, chart(series) if series else None)


def _facts(text: str) -> list[tuple[str, str]]:
    """The lines `- what: how` of the heading of a result."""
    pairs = (line.lstrip("- ").partition(":") for line in text.splitlines() if line.strip())
    return [(what.strip(), how.strip()) for what, _, how in pairs]
