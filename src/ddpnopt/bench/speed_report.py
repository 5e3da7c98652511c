"""The tables of speed: on the screen, as Markdown, and as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from rich.table import Table

from ddpnopt.bench.growth import Growth
from ddpnopt.bench.profiles import Place
from ddpnopt.bench.speed import Cost

HEADINGS = ("method", "time / SGD", "quartiles", "ms a step", "memory / SGD", "peak MB")
SMALLEST_SHARE = 0.02


def groups(costs: Iterable[Cost]) -> dict[str, list[Cost]]:
    """By network and batch size, with a title for each."""
    found: dict[str, list[Cost]] = {}
    for cost in costs:
        found.setdefault(f"{cost.network.label}, batch size {cost.batch_size}", []).append(cost)
    return found


def cells(cost: Cost) -> list[str]:
    """One row as text."""
    if not cost.applies:
        return [cost.form.label, "–", "does not apply", *["–"] * 3]
    low, high = cost.quartiles
    return [
        cost.form.label,
        f"{cost.ratio:.2f}",
        f"{low:.2f} – {high:.2f}",
        f"{cost.milliseconds:.2f}",
        f"{cost.memory_ratio:.2f}",
        f"{cost.bytes / 1e6:.3g}",
    ]


def cost_table(title: str, costs: Sequence[Cost]) -> Table:
    return _table(title, HEADINGS, map(cells, costs))


def growth_table(what: str, found: Sequence[Growth]) -> Table:
    return _table(f"growth with the {what}", *_growth(found))


def profile_table(title: str, shares: Mapping[Place, float]) -> Table:
    """The places that take at least two percent, phase by phase."""
    made = Table(title=f"where the time goes: {title}", title_justify="left", title_style="bold")
    for heading in ("phase", "function", "share"):
        made.add_column(heading, justify="right" if heading == "share" else "left")
    phases: dict[str, float] = {}
    for (phase, _), share in shares.items():
        phases[phase] = phases.get(phase, 0.0) + share
    for phase in sorted(phases, key=lambda phase: -phases[phase]):
        made.add_row(f"[bold]{phase}", "", f"[bold]{phases[phase]:.0%}")
        for (within, function), share in shares.items():
            if within == phase and share >= SMALLEST_SHARE:
                made.add_row("", function, f"{share:.0%}")
    return made


def write(costs: Sequence[Cost], folder: Path, stem: str, head: str, found: Sequence[Growth] = ()) -> list[Path]:
    """`<stem>.md` and `<stem>.csv`."""
    page, numbers = folder / f"{stem}.md", folder / f"{stem}.csv"
    parts = [head, ""]
    if found:
        parts.append(_markdown("Exponents", *_growth(found)))
    parts += [_markdown(title, HEADINGS, map(cells, rows)) for title, rows in groups(costs).items()]
    page.write_text("\n".join(parts), encoding="utf-8")
    frame(costs).to_csv(numbers, index=False)
    return [page, numbers]


def frame(costs: Iterable[Cost]) -> pd.DataFrame:
    """Every row as numbers; a form that does not apply has none."""
    return pd.DataFrame(
        [
            {
                "network": cost.network.name,
                "batch_size": cost.batch_size,
                "method": cost.form.name,
                "time_ratio": cost.ratio,
                "time_ratio_q1": cost.quartiles[0],
                "time_ratio_q3": cost.quartiles[1],
                "milliseconds": cost.milliseconds,
                "memory_ratio": cost.memory_ratio,
                "peak_bytes": cost.bytes or math.nan,
                "rounds": len(cost.seconds),
            }
            for cost in costs
        ]
    )


def _growth(found: Sequence[Growth]) -> tuple[tuple[str, ...], list[list[str]]]:
    rows = [[each.form.label, f"{each.time:.2f}", f"{each.memory:.2f}"] for each in found]
    return ("method", "exponent of the time", "exponent of the memory"), rows


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold")
    for position, heading in enumerate(headings):
        made.add_column(heading, justify="right" if position else "left", no_wrap=not position)
    for row in rows:
        made.add_row(*row)
    return made


def _markdown(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"### {title}", "", "| " + " | ".join(headings) + " |", "| --- |" + " ---: |" * (len(headings) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])
