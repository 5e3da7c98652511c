"""The tables of speed: on the screen, as Markdown, and as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import pandas as pd
from rich.table import Table

from ddpnopt.lab.timing.growth import MODERATE, Growth
from ddpnopt.lab.timing.profiles import Place
from ddpnopt.lab.timing.speed import Cost, middle_half, relative

HEADINGS = ("method", "time / SGD", "quartiles", "ms a step", "memory / SGD", "peak MB")
PROFILE_HEADINGS = ("phase", "function", "share")
BASE_HEADINGS = ("method", "without feedback", "time / without", "quartiles")
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
        return [cost.form.label, *["–"] * 5]
    low, high = cost.quartiles
    return [
        cost.form.label,
        f"{cost.ratio:.2f}",
        f"{low:.2f} – {high:.2f}",
        f"{cost.milliseconds:.2f}",
        f"{cost.memory_ratio:.2f}",
        f"{cost.bytes / 1e6:.3g}",
    ]


def base_rows(costs: Sequence[Cost]) -> list[list[str]]:
    """The forms with feedback beside the same without, where both were measured."""
    rows = []
    for cost, base in _pairs(costs):
        ratios = relative(cost, base)
        low, high = middle_half(ratios)
        rows.append([cost.form.label, base.form.label, f"{median(ratios):.2f}", f"{low:.2f} – {high:.2f}"])
    return rows


def reasons(costs: Iterable[Cost]) -> list[str]:
    """Which forms were not measured, and why."""
    return [f"{cost.form.label}: {cost.reason}" for cost in costs if not cost.applies]


def _pairs(costs: Sequence[Cost]) -> Iterator[tuple[Cost, Cost]]:
    by_name = {cost.form.name: cost for cost in costs if cost.applies}
    for cost in by_name.values():
        if cost.form.base in by_name:
            yield cost, by_name[cost.form.base]


def base_table(title: str, costs: Sequence[Cost]) -> Table:
    return _table(f"with feedback / without: {title}", BASE_HEADINGS, base_rows(costs))


def cost_table(title: str, costs: Sequence[Cost]) -> Table:
    return _table(title, HEADINGS, map(cells, costs))


def growth_table(what: str, found: Sequence[Growth]) -> Table:
    return _table(f"growth with the {what}", *_growth(found))


def profile_table(title: str, shares: Mapping[Place, float]) -> Table:
    """The places that take at least two percent, phase by phase."""
    return _table(f"where the time goes: {title}", PROFILE_HEADINGS, _profile(shares), left=2)


def write_profiles(found: Mapping[str, Mapping[Place, float]], folder: Path, head: str) -> list[Path]:
    """`profile.md`: a table for every method on every network."""
    page = folder / "profile.md"
    tables = [_markdown(title, PROFILE_HEADINGS, _profile(shares)) for title, shares in found.items()]
    page.write_text("\n".join([head, "", *tables]), encoding="utf-8")
    return [page]


def _profile(shares: Mapping[Place, float]) -> list[list[str]]:
    phases: dict[str, float] = {}
    for (phase, _), share in shares.items():
        phases[phase] = phases.get(phase, 0.0) + share
    rows = []
    for phase in sorted(phases, key=lambda phase: -phases[phase]):
        rows.append([phase, "all", f"{phases[phase]:.0%}"])
        for (within, function), share in shares.items():
            if within == phase and share >= SMALLEST_SHARE:
                rows.append(["", function, f"{share:.0%}"])
    return rows


def write(costs: Sequence[Cost], folder: Path, stem: str, head: str, found: Sequence[Growth] = ()) -> list[Path]:
    """`<stem>.md` and `<stem>.csv`."""
    page, numbers = folder / f"{stem}.md", folder / f"{stem}.csv"
    parts = [head, ""]
    if found:
        parts.append(_markdown("Exponents", *_growth(found)))
    for title, rows in groups(costs).items():
        parts.append(_markdown(title, HEADINGS, map(cells, rows)))
        parts += [*(f"- {reason}" for reason in reasons(rows)), ""]
        if not found and base_rows(rows):
            parts.append(_markdown(f"{title}: with feedback / without", BASE_HEADINGS, base_rows(rows)))
    page.write_text("\n".join(parts), encoding="utf-8")
    frame(costs).to_csv(numbers, index=False)
    return [page, numbers]


def frame(costs: Iterable[Cost]) -> pd.DataFrame:
    """Every row as numbers; a form that does not apply has none, but a reason."""
    costs = list(costs)
    to_base = {
        (title, cost.form.name): median(relative(cost, base))
        for title, rows in groups(costs).items()
        for cost, base in _pairs(rows)
    }
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
                "without_feedback": cost.form.base,
                "time_ratio_to_it": to_base.get((title, cost.form.name), math.nan),
                "reason": cost.reason,
            }
            for title, rows in groups(costs).items()
            for cost in rows
        ]
    )


def _growth(found: Sequence[Growth]) -> tuple[tuple[str, ...], list[list[str]]]:
    twice = any(each.moderate is not None for each in found)
    headings = ("method", "exponent of the time", "more than SGD's", "exponent of the memory")
    extra = (f"more than SGD's, up to {MODERATE}",) if twice else ()
    rows = []
    for each in found:
        moderate = [f"{each.moderate:+.2f}"] if each.moderate is not None else []
        rows.append([each.form.label, f"{each.time:.2f}", f"{each.beyond:+.2f}", f"{each.memory:.2f}", *moderate])
    return (*headings, *extra), rows


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold")
    for position, heading in enumerate(headings):
        made.add_column(heading, justify="right" if position >= left else "left", no_wrap=position < left)
    for row in rows:
        made.add_row(*row)
    return made


def _markdown(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"### {title}", "", "| " + " | ".join(headings) + " |", "| --- |" + " ---: |" * (len(headings) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])
