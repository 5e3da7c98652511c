"""What a comparison looks like: a table, a picture, a file of numbers."""

from __future__ import annotations

import math
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ddpnopt.lab.comparison.comparison import Comparison, Summary
from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.tables import Spread, screen_table, write_csv


def table(result: Comparison, title: str | None = None) -> Table:
    """Mean ± standard deviation over the seeds, the best of each column marked."""
    lowest = min((row.train_loss.mean for row in result.summaries if math.isfinite(row.train_loss.mean)), default=0.0)
    digits = 2 if result.best >= 10 else 4
    judged = result.column == "test_accuracy" or result.metric != "final training loss"  # not the same column twice
    headings = ["method", "lr", "train loss", *([result.metric] if judged else []), "step time\n(SGD = 1)"]
    rows = [
        (
            row.label,
            _rate(row),
            _cell(row.train_loss, 4, row.train_loss.mean == lowest) + _divergence(row),
            *([_cell(row.metric, digits, row.metric.mean == result.best)] if judged else []),
            "–" if math.isnan(row.relative_step_time) else f"{row.relative_step_time:.1f}",
        )
        for row in result.summaries
    ]
    return screen_table(result.title if title is None else title, headings, rows)


def text(result: Comparison) -> str:
    """The table as plain text."""
    paper = Console(width=110, color_system=None, force_terminal=False)
    with paper.capture() as captured:
        paper.print(table(result))
        if result.note:
            paper.print(result.note, highlight=False)
    return captured.get().rstrip()


def save(result: Comparison, folder: Path) -> list[Path]:
    """The picture in two formats and the numbers of every run."""
    from ddpnopt.lab.comparison.comparison_figure import draw  # matplotlib takes a second to import: only when drawing

    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"compare-{re.sub(r'[^A-Za-z0-9_.-]+', '-', result.stem)}"
    return [*draw(result, stem), write_csv(stem.with_name(f"{stem.name}.csv"), list(result.records()))]


def count(number: int, noun: str) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _rate(row: Summary) -> str:
    """A step of DDPNOpt finds its own length: what torch calls its learning rate is a factor of 1."""
    automatic = method(row.method).is_ddpnopt and row.runs[0].config.lr is None
    return "automatic" if automatic else f"{row.lr:g}"


def _cell(spread: Spread, digits: int, best: bool) -> str:
    if not math.isfinite(spread.mean):
        return "–"
    return f"[bold green]★ {spread.text(digits)}[/]" if best else spread.text(digits)


def _divergence(row: Summary) -> str:
    return f" [red]({row.diverged}/{len(row.runs)} diverged)[/]" if row.diverged else ""
