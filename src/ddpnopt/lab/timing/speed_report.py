"""The tables of speed: on the screen, as Markdown, and as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from ddpnopt.lab.tables import markdown_section, screen_table, write_csv, write_markdown
from ddpnopt.lab.timing.growth import MODERATE, Growth
from ddpnopt.lab.timing.profiles import Place
from ddpnopt.lab.timing.speed import Cost, middle_half, relative

HEADINGS = (
    "method", "time / SGD", "quartiles", "ms per step", "first 20 / later", "repeated", "memory / SGD", "peak MB"
)  # fmt: skip
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
        return [cost.method.timing_label, *["–"] * (len(HEADINGS) - 1)]
    low, high = cost.quartiles
    return [
        cost.method.timing_label,
        f"{cost.ratio:.2f}",
        f"{low:.2f} – {high:.2f}",
        f"{cost.milliseconds:.2f}",
        "–" if math.isnan(cost.start) else f"{cost.start:.2f}",
        f"{cost.repeated:.0%}",
        f"{cost.memory_ratio:.2f}",
        f"{cost.bytes / 1e6:.3g}",
    ]


def base_rows(costs: Sequence[Cost]) -> list[list[str]]:
    """The methods with feedback compared with the same without, where both were measured."""
    rows = []
    for cost, base in _pairs(costs):
        ratios = relative(cost, base)
        low, high = middle_half(ratios)
        rows.append(
            [cost.method.timing_label, base.method.timing_label, f"{median(ratios):.2f}", f"{low:.2f} – {high:.2f}"]
        )
    return rows


def reasons(costs: Iterable[Cost]) -> list[str]:
    """Which methods were not measured, and why."""
    return [f"{cost.method.timing_label}: {cost.reason}" for cost in costs if not cost.applies]


def _pairs(costs: Sequence[Cost]) -> Iterator[tuple[Cost, Cost]]:
    by_name = {cost.method.name: cost for cost in costs if cost.applies}
    for cost in by_name.values():
        if cost.method.timing.without_feedback in by_name:
            yield cost, by_name[cost.method.timing.without_feedback]


def base_table(title: str, costs: Sequence[Cost]) -> Table:
    return screen_table(f"with feedback / without: {title}", BASE_HEADINGS, base_rows(costs))


def cost_table(title: str, costs: Sequence[Cost]) -> Table:
    return screen_table(title, HEADINGS, map(cells, costs))


def growth_table(what: str, found: Sequence[Growth]) -> Table:
    return screen_table(f"growth with the {what}", *_growth(found))


def profile_table(title: str, shares: Mapping[Place, float]) -> Table:
    """The places that take at least two percent, phase by phase."""
    return screen_table(f"where the time goes: {title}", PROFILE_HEADINGS, _profile(shares), left=2)


def write_profiles(found: Mapping[str, Mapping[Place, float]], folder: Path, head: str) -> list[Path]:
    """`profile.md`: a table for every method on every network."""
    tables = [markdown_section(title, PROFILE_HEADINGS, _profile(shares)) for title, shares in found.items()]
    return [write_markdown(folder / "profile.md", head, "", *tables)]


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
    parts = [head, ""]
    if found:
        parts.append(markdown_section("Exponents", *_growth(found)))
    for title, rows in groups(costs).items():
        parts.append(markdown_section(title, HEADINGS, map(cells, rows)))
        parts += [*(f"- {reason}" for reason in reasons(rows)), ""]
        if not found and base_rows(rows):
            parts.append(markdown_section(f"{title}: with feedback / without", BASE_HEADINGS, base_rows(rows)))
    page = write_markdown(folder / f"{stem}.md", *parts)
    return [page, write_csv(folder / f"{stem}.csv", records(costs))]


def records(costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """Every row as numbers; a method that does not apply has a reason instead."""
    to_base = {
        (title, cost.method.name): median(relative(cost, base))
        for title, rows in groups(costs).items()
        for cost, base in _pairs(rows)
    }
    return [
        {
            "network": cost.network.name,
            "batch_size": cost.batch_size,
            "method": cost.method.name,
            "time_ratio": cost.ratio,
            "time_ratio_q1": cost.quartiles[0],
            "time_ratio_q3": cost.quartiles[1],
            "milliseconds": cost.milliseconds,
            "first_20_to_later": cost.start,
            "repeated": cost.repeated,
            "memory_ratio": cost.memory_ratio,
            "peak_bytes": cost.bytes or math.nan,
            "rounds": len(cost.seconds),
            "without_feedback": cost.method.timing.without_feedback,
            "time_ratio_to_it": to_base.get((title, cost.method.name), math.nan),
            "reason": cost.reason,
        }
        for title, rows in groups(costs).items()
        for cost in rows
    ]


def _growth(found: Sequence[Growth]) -> tuple[tuple[str, ...], list[list[str]]]:
    twice = any(each.moderate is not None for each in found)
    headings = ("method", "exponent of the time", "more than SGD's", "exponent of the memory")
    extra = (f"more than SGD's, up to {MODERATE}",) if twice else ()
    rows = []
    for each in found:
        moderate = [f"{each.moderate:+.2f}"] if each.moderate is not None else []
        rows.append(
            [each.method.timing_label, f"{each.time:.2f}", f"{each.beyond:+.2f}", f"{each.memory:.2f}", *moderate]
        )
    return (*headings, *extra), rows
