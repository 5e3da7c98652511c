"""The last words of `ddpnopt reproduce`: what became of every item, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ddpnopt.lab.paper.item import Claim, Item
from ddpnopt.lab.tables import screen_table


@dataclass(frozen=True)
class Finished:
    """An item that was asked for."""

    item: Item
    claims: Sequence[Claim] | None
    """None where its data is missing."""
    seconds: float


def summarise(screen: Console, finished: Sequence[Finished], folder: Path, *, quick: bool) -> None:
    """How many claims of each item hold, do not hold and are open, and how long it took."""
    rows = [(each.item.name, *_counts(each.claims), duration(each.seconds)) for each in finished]
    counted = [claim for each in finished for claim in each.claims or () if claim.counted]
    total = duration(sum(each.seconds for each in finished))
    rows.append((f"the paper's {len(counted)} claims", *_counts(counted), total))
    headings = ("item", "hold", "do not hold", "open", "time")
    screen.print(screen_table("Summary", headings, rows))
    if quick:
        screen.print(
            "[dim]Shortened by --quick: it shows that everything runs, and decides few claims.", soft_wrap=True
        )
    screen.print(f"[dim]All of it on one page:[/] ddpnopt report --results {folder}", soft_wrap=True, highlight=False)


def _counts(claims: Sequence[Claim] | None) -> tuple[str, str, str]:
    if claims is None:
        return "no data", "", ""
    judged = [claim for claim in claims if claim.judged]
    hold, fail, open_ = (str(sum(claim.holds is verdict for claim in judged)) for verdict in (True, False, None))
    return hold, fail, open_


def duration(seconds: float) -> str:
    """As a person would say it: 12 s, 3 min, 2 h 10 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
