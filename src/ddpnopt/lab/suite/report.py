"""The tables of the suite: on the screen, as Markdown, and as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from ddpnopt.lab.runs.outcome import SETTLED
from ddpnopt.lab.suite.comparison import COLLAPSED_BELOW, POINTS, SHARE, MethodResult, TaskResult, Verdict
from ddpnopt.lab.suite.entrants import REFERENCE, Entrant
from ddpnopt.lab.tables import Spread, markdown_section, screen_table, write_csv, write_markdown

SUMMARY = (
    "method", "tasks", "ahead of Adam", "level", "behind", "collapsed", "best of all", "mean rank", "diverged runs",
    "Adam's loss reached", "time to it",
)  # fmt: skip
NONE = "–"
WIDE = 160
"""Columns of a terminal that the whole table needs."""
MARKS = {Verdict.AHEAD: " ▲", Verdict.LEVEL: "", Verdict.BEHIND: " ▽", Verdict.COLLAPSED: " ✗"}


def write(results: Sequence[TaskResult], methods: Sequence[Entrant], folder: Path, head: str) -> list[Path]:
    """`suite.md` and `suite.csv`."""
    sections = [markdown_section("Summary", SUMMARY, summary_rows(results, methods), [explanation(results)])]
    for title, headings, rows in task_tables(results, methods, "**{}**"):
        sections.append(markdown_section(title, headings, rows))
    timed = time_rows(results, methods)
    if timed:
        headings = ["task", *(each.label for each in methods)]
        sections.append(markdown_section("Processor seconds until Adam's final training loss", headings, timed))
    return [
        write_markdown(folder / "suite.md", head, "", *sections),
        write_csv(folder / "suite.csv", records(results)),
    ]


def screen_tables(results: Sequence[TaskResult], methods: Sequence[Entrant], width: int) -> list[Table]:
    """For the terminal: each figure, then the summary; without deviations where they do not fit."""
    brief = width < WIDE
    made = [
        screen_table(title, headings, rows, left=2)
        for title, headings, rows in task_tables(results, methods, "[bold]{}[/]", brief=brief)
    ]
    headings = [heading.replace(" ", "\n", 1) for heading in SUMMARY]
    return [*made, screen_table("Summary", headings, summary_rows(results, methods))]


def task_tables(
    results: Sequence[TaskResult], methods: Sequence[Entrant], mark: str, *, brief: bool = False
) -> list[tuple[str, list[str], list[list[str]]]]:
    """Open and sealed tasks apart: title, headings and rows, the best figure of each row marked."""
    headings = ["task", "metric", "chance", *(each.label for each in methods)]
    parts = [("Open tasks", False), ("Sealed tasks", True)]
    tables = [
        (
            title,
            headings,
            [_figures(each, methods, mark, brief) for each in results if each.definition.sealed == sealed],
        )
        for title, sealed in parts
    ]
    return [table for table in tables if table[2]]


def _figures(result: TaskResult, methods: Sequence[Entrant], mark: str, brief: bool) -> list[str]:
    task = result.definition
    row = [task.name, f"{task.metric} {'↑' if task.better == 'higher' else '↓'}", _short(result.chance)]
    for each in methods:
        found = result.results.get(each.name)
        text = NONE if found is None else _short(found.figure.mean) if brief else _spread(found.figure)
        row.append(mark.format(text) if each.name == result.best and len(result.results) > 1 else text)
        verdict = None if found is None or each.name == REFERENCE else result.verdict(found)
        row[-1] += MARKS[verdict] if verdict else ""
    return row


def summary_rows(results: Sequence[TaskResult], methods: Sequence[Entrant]) -> list[list[str]]:
    """One row per method."""
    return [row for each in methods if (row := _summary(results, each))]


def _summary(results: Sequence[TaskResult], entrant: Entrant) -> list[str]:
    taken = [(result, found) for result in results if (found := result.results.get(entrant.name))]
    if not taken:
        return []
    verdicts = [result.verdict(found) for result, found in taken]
    counts = [str(verdicts.count(verdict)) for verdict in Verdict]
    ratios = [found.time_ratio for _, found in taken if not math.isnan(found.time_ratio)]
    reached = [ratio for ratio in ratios if math.isfinite(ratio)]
    return [
        entrant.label,
        str(len(taken)),
        *([NONE] * len(counts) if entrant.name == REFERENCE or not any(verdicts) else counts),
        str(sum(result.best == entrant.name for result, _ in taken)),
        f"{fmean(result.ranks[entrant.name] for result, _ in taken):.2f}",
        str(sum(found.diverged for _, found in taken)),
        f"{len(reached)}/{len(ratios)}" if ratios else NONE,
        f"{median(reached):.2f}" if reached else NONE,
    ]


def time_rows(results: Sequence[TaskResult], methods: Sequence[Entrant]) -> list[list[str]]:
    """Seconds to the reference's final training loss, for each task with a reference."""
    return [
        [result.definition.name, *(_seconds(result.results.get(each.name)) for each in methods)]
        for result in results
        if result.reference is not None
    ]


def explanation(results: Sequence[TaskResult]) -> str:
    """What the tables mean."""
    seeds = max(found.seeds for result in results for found in result.results.values())
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    return (
        f"Test metric, {over}; bold: the best of the row. The rate of methods marked as best of several is chosen on "
        "the validation split with one seed; all others have their own defaults. A run that diverges counts as chance. "
        f"Compared with Adam at its best rate: level (no mark) within a standard deviation, {POINTS:g} point of a "
        f"metric in percent or {100 * SHARE:g} % of another, ahead (▲) and behind (▽) outside it, collapsed (✗) with "
        f"less than {COLLAPSED_BELOW:g} of Adam's way from chance. Adam's loss reached: on how many tasks the smoothed "
        "training loss comes down to that with which Adam ends, and the median of the processor time to it as a "
        f"multiple of Adam's.{_repetitions(results)}"
    )


def _repetitions(results: Sequence[TaskResult]) -> str:
    """How often DDPNOpt made steps again, and gave them up."""
    runs = [(found, result.definition.name) for result in results if (found := result.results.get("ddpnopt"))]
    known = [(found.repeated, name) for found, name in runs if not math.isnan(found.repeated)]
    if not known:
        return ""
    share, name = max(known)
    return (
        f" Of the steps of one run of DDPNOpt after the first {SETTLED}, at most {100 * share:.1f} % ({name}) are made "
        f"again, shorter; {sum(found.undone or 0 for found, _ in runs)} steps of all runs are given up."
    )


def records(results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """All figures as numbers."""
    return [
        {
            "task": result.definition.name,
            "family": result.definition.family,
            "sealed": result.definition.sealed,
            "metric": result.definition.metric,
            "better": result.definition.better,
            "steps": result.task.length,
            "chance": result.chance,
            "method": name,
            "lr": found.lr,
            "mean": found.figure.mean,
            "std": found.figure.std,
            "seeds": found.seeds,
            "diverged": found.diverged,
            "verdict": verdict.value if (verdict := result.verdict(found)) else "",
            "rank": result.ranks[name],
            "shortfall": result.shortfall(found),
            "seconds": found.seconds,
            "cpu_seconds": found.cpu_seconds,
            "cpu_seconds_to_adams_loss": found.to_reference,
            "time_ratio": found.time_ratio,
            "repeated": found.repeated,
            "undone": found.undone,
        }
        for result in results
        for name, found in result.results.items()
    ]


def _seconds(found: MethodResult | None) -> str:
    seconds = math.inf if found is None else found.to_reference
    return f"{seconds:.2f}" if math.isfinite(seconds) else NONE


def _spread(figure: Spread) -> str:
    """With as many digits as a difference that counts has."""
    return figure.text(_digits(figure.mean))


def _short(value: float) -> str:
    return f"{value:.{_digits(value)}f}"


def _digits(value: float) -> int:
    return 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3 if abs(value) >= 0.1 else 4
