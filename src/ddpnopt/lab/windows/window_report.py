"""The tables of learning-rate windows: on the screen, as Markdown, and as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from rich.table import Table

from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.windows.runs import Run
from ddpnopt.lab.windows.windows import LOST, MARGIN, Point, Standing, Standings, Window

HEADINGS = (
    "method", "window (decades)", "from – to", "best %", "at lr", "default %", "diverged", "time to loss", "own window",
)  # fmt: skip


def cells(row: Standing) -> list[str]:
    """One row as text."""
    return [
        row.contender.label,
        _decades(row.window),
        f"{_rate(row.window.lowest)} – {_rate(row.window.highest)}" if row.window.decades else "–",
        _accuracy(row.best),
        _rate(row.best.lr),
        _accuracy(row.default) if row.default else "–",
        f"{row.diverged}/{row.runs}",
        "–" if math.isnan(row.time_ratio) else f"{row.time_ratio:.2f}",
        _decades(row.own_window),
    ]


def table(result: Standings) -> Table:
    """For the screen; the best of each column is marked."""
    made = Table(title=f"{result.task.label}, {result.seeds_in_words}", title_justify="left", title_style="bold")
    for position, heading in enumerate(HEADINGS):
        made.add_column(heading.replace(" ", "\n", 1), justify="right" if position else "left", no_wrap=not position)
    for row in result.rows:
        texts = cells(row)
        for column, winner in _winners(result).items():
            if winner is row:
                texts[column] = f"[bold green]{texts[column]}[/]"
        made.add_row(*texts)
    return made


def markdown(result: Standings) -> str:
    """The same for a page."""
    lines = [f"### {result.task.label}", "", f"{explanation(result)}", ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "| --- |" + " ---: |" * (len(HEADINGS) - 1)]
    winners = _winners(result)
    for row in result.rows:
        texts = cells(row)
        for column, winner in winners.items():
            if winner is row:
                texts[column] = f"**{texts[column]}**"
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join([*lines, ""])


def explanation(result: Standings) -> str:
    """What the columns mean, for this task."""
    text = (
        f"{result.seeds_in_words.capitalize()}, {_epochs(result)}, batch size {result.task.batch_size}. Window: "
        f"decades of learning rates within {MARGIN:g} points of the best of all methods "
        f"({result.best_accuracy:.1f} %), ≥ where it reaches the end of what was tried; own window: of the best of the "
        f"method itself. Diverged: runs that ended in NaN, an error, or a loss above {LOST:g} times that of guessing."
    )
    if math.isfinite(result.target):
        kind = "form" if all(row.contender.ours for row in result.rows) else "baseline"
        text += (
            f" Time to loss: seconds until the training loss is {result.target:.3g}, every method at its best learning "
            f"rate; {result.target_of}, the most accurate {kind}, is there after two thirds of its run. 1 is the "
            f"fastest {kind}, {result.fastest}."
        )
    errors = {row.contender.label: row.errors for row in result.rows if row.errors}
    if errors:
        text += " Errors: " + "; ".join(f"{label}: {', '.join(kinds)}" for label, kinds in errors.items()) + "."
    return text


def summary_frame(results: list[Standings]) -> pd.DataFrame:
    """All rows of all tasks as numbers."""
    return pd.DataFrame(
        [
            {
                "task": result.task.name,
                "method": row.contender.name,
                "window_decades": row.window.decades,
                "window_from": row.window.lowest,
                "window_to": row.window.highest,
                "window_open_ended": row.window.open_ended,
                "own_window_decades": row.own_window.decades,
                "best_accuracy": row.best.accuracy,
                "best_std": row.best.spread,
                "best_lr": row.best.lr,
                "default_accuracy": row.default.accuracy if row.default else math.nan,
                "default_lr": row.default.lr if row.default else math.nan,
                "diverged": row.diverged,
                "runs": row.runs,
                "target_loss": result.target,
                "target_of": result.target_of,
                "fastest": result.fastest,
                "seconds_to_loss": row.seconds_to_loss,
                "time_ratio": row.time_ratio,
                "cpu_time_ratio": row.cpu_ratio,
                "default_time_ratio": row.default_time_ratio,
                "best_seconds": sum(o.seconds for o in row.best.outcomes) / len(row.best.outcomes),
            }
            for result in results
            for row in result.rows
        ]
    )


def runs_frame(outcomes: Mapping[Run, Outcome]) -> pd.DataFrame:
    """Every run."""
    return pd.DataFrame(
        [
            {
                "task": run.task.name,
                "method": run.contender.name,
                "default": run.lr is None,
                "lr": outcome.lr,
                "seed": run.seed,
                "accuracy": outcome.accuracy,
                "diverged": outcome.diverged,
                "steps": outcome.steps,
                "seconds": outcome.seconds,
                "cpu_seconds": outcome.cpu_seconds,
                "last_loss": outcome.curve.losses[-1] if outcome.curve.losses else math.nan,
                "error": outcome.error,
            }
            for run, outcome in outcomes.items()
        ]
    )


def write(results: list[Standings], outcomes: Mapping[Run, Outcome], folder: Path, stem: str, head: str) -> list[Path]:
    """`<stem>.md`, `<stem>.csv` and `<stem>-runs.csv`."""
    page, summary, runs = (folder / name for name in (f"{stem}.md", f"{stem}.csv", f"{stem}-runs.csv"))
    page.write_text("\n".join([head, "", *map(markdown, results)]), encoding="utf-8")
    summary_frame(results).to_csv(summary, index=False)
    runs_frame(outcomes).to_csv(runs, index=False)
    return [page, summary, runs]


def _winners(result: Standings) -> dict[int, Standing]:
    """The best row of the columns that can be won, by position."""
    rows = result.rows
    won = {3: max(rows, key=lambda row: row.best.accuracy)}
    widest = max(rows, key=lambda row: row.window.decades)
    if widest.window.decades > 0:
        won[1] = widest
    with_default = [row for row in rows if row.default]
    if with_default:
        won[5] = max(with_default, key=lambda row: row.default.accuracy if row.default else -math.inf)
    timed = [row for row in rows if not math.isnan(row.time_ratio)]
    if timed:
        won[7] = min(timed, key=lambda row: row.time_ratio)
    return won


def _decades(window: Window) -> str:
    if window.decades == 0 and math.isnan(window.lowest):
        return "0"
    return f"{'≥ ' if window.open_ended else ''}{window.decades:.1f}"


def _accuracy(point: Point) -> str:
    text = f"{point.accuracy:.1f}"
    return text if math.isnan(point.spread) else f"{text} ± {point.spread:.1f}"


def _rate(value: float) -> str:
    """A learning rate of a grid of half decades, short: 3e-4, 0.03, 3, 1e3."""
    if 0.01 <= value < 1000:
        return f"{value:.1g}" if value < 10 else f"{value:.0f}"
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _epochs(result: Standings) -> str:
    return "one epoch" if result.task.epochs == 1 else f"{result.task.epochs} epochs"
