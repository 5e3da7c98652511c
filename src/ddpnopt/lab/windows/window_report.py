"""The tables of learning-rate windows: on the screen, as Markdown, and as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.tables import markdown_section, screen_table, write_csv, write_markdown
from ddpnopt.lab.windows.standings import LOST, MARGIN, Point, Standing, Standings, Window

TIME = "time to loss"
HEADINGS = (
    "method", "window (decades)", "from – to", "best %", "at lr", "default %", "diverged", "own window", TIME,
)  # fmt: skip


def headings(result: Standings) -> Sequence[str]:
    """Without the times where the runs that set the loss to reach are kept without their curves."""
    return HEADINGS if math.isfinite(result.target) else HEADINGS[: HEADINGS.index(TIME)]


def cells(row: Standing) -> list[str]:
    """One row as text."""
    bounded = math.isfinite(row.window.lowest)
    return [
        row.method.label,
        _decades(row.window),
        f"{_rate(row.window.lowest)} – {_rate(row.window.highest)}" if bounded else "–",
        _accuracy(row.best),
        _rate(row.best.lr) if row.has_rate else "no rate",
        _accuracy(row.default) if row.default else "–",
        f"{row.diverged}/{row.runs}",
        _decades(row.own_window),
        "–" if math.isnan(row.time_ratio) else f"{row.time_ratio:.2f}",
    ]


def table(result: Standings) -> Table:
    """For the screen; the best of each column is marked."""
    title = f"{result.task.label}, {result.seeds_in_words}"
    lines = [heading.replace(" ", "\n", 1) for heading in headings(result)]
    return screen_table(title, lines, _marked(result, "[bold green]{}[/]"))


def markdown(result: Standings) -> str:
    """A section of the page; the best of each column is bold."""
    return markdown_section(result.task.label, headings(result), _marked(result, "**{}**"), [explanation(result)])


def _marked(result: Standings, mark: str) -> list[list[str]]:
    """All rows as text, the best cell of each column marked."""
    winners = _winners(result)
    count = len(headings(result))
    rows = []
    for row in result.rows:
        texts = cells(row)[:count]
        for column, winner in winners.items():
            if winner is row and column < count:
                texts[column] = mark.format(texts[column])
        rows.append(texts)
    return rows


def explanation(result: Standings) -> str:
    """What the columns mean, for this task."""
    without = "; all: there is no learning rate to choose" if any(not row.has_rate for row in result.rows) else ""
    text = (
        f"{result.seeds_in_words.capitalize()}, {_epochs(result)}, batch size {result.task.batch_size}. Window: "
        f"decades of learning rates within {MARGIN:g} points of the best of all methods "
        f"({result.best_accuracy:.1f} %), ≥ where it reaches the end of what was tried; own window: of the best of the "
        f"method itself{without}. Diverged: runs that ended in NaN, an error, or a loss above {LOST:g} times that of "
        "guessing."
    )
    if math.isfinite(result.target):
        kind = "form" if all(row.method.is_ddpnopt for row in result.rows) else "baseline"
        text += (
            f" Time to loss: seconds until the training loss is {result.target:.3g}, every method at its best learning "
            f"rate; {result.target_of}, the most accurate {kind}, is there after two thirds of its run. 1 is the "
            f"fastest {kind}, {result.fastest}."
        )
    errors = {row.method.label: row.errors for row in result.rows if row.errors}
    if errors:
        text += " Errors: " + "; ".join(f"{label}: {', '.join(kinds)}" for label, kinds in errors.items()) + "."
    return text


def summary_records(results: Sequence[Standings]) -> list[dict[str, Any]]:
    """All rows of all tasks as numbers."""
    return [
        {
            "task": result.task.name,
            "method": row.method.name,
            "window_decades": row.window.decades,
            "window_from": row.window.lowest,
            "window_to": row.window.highest,
            "window_open_ended": row.window.open_ended,
            "own_window_decades": row.own_window.decades,
            "own_window_open_ended": row.own_window.open_ended,
            "best_accuracy": row.best.accuracy,
            "best_std": row.best.spread,
            "best_lr": row.best.lr if row.has_rate else math.nan,
            "default_accuracy": row.default.accuracy if row.default else math.nan,
            "default_std": row.default.spread if row.default else math.nan,
            "default_lr": row.default.lr if row.default and row.has_rate else math.nan,
            "diverged": row.diverged,
            "runs": row.runs,
            "target_loss": result.target,
            "target_of": result.target_of if math.isfinite(result.target) else "",
            "fastest": result.fastest if math.isfinite(result.target) else "",
            "seconds_to_loss": row.seconds_to_loss,
            "time_ratio": row.time_ratio,
            "cpu_time_ratio": row.cpu_ratio,
            "default_time_ratio": row.default_time_ratio,
            "best_seconds": sum(o.seconds for o in row.best.outcomes) / len(row.best.outcomes),
        }
        for result in results
        for row in result.rows
    ]


def run_records(outcomes: Mapping[RunConfig, Outcome]) -> list[dict[str, Any]]:
    """Every run."""
    return [
        {
            "task": run.task.name,
            "samples": run.task.identity["n_train"],
            "epochs": run.task.identity["epochs"],
            "method": run.method,
            "default": run.lr is None,
            "lr": math.nan if method(run.method).lowest_decade is None else outcome.lr,
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


def write(
    results: Sequence[Standings], outcomes: Mapping[RunConfig, Outcome], folder: Path, stem: str, head: str
) -> list[Path]:
    """`<stem>.md`, `<stem>.csv` and `<stem>-runs.csv`."""
    return [
        write_markdown(folder / f"{stem}.md", head, "", *map(markdown, results)),
        write_csv(folder / f"{stem}.csv", summary_records(results)),
        write_csv(folder / f"{stem}-runs.csv", run_records(outcomes)),
    ]


def _winners(result: Standings) -> dict[int, Standing]:
    """The best row of each column that has one, by position."""
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
        won[HEADINGS.index(TIME)] = min(timed, key=lambda row: row.time_ratio)
    return won


def _decades(window: Window) -> str:
    if math.isinf(window.decades):
        return "all"
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
