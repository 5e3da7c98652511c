"""Curves in the terminal, drawn with Braille dots: each character is two dots wide and four high."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ddpnopt.lab.view.curves import COUNTERS, CurveLine, CurvePanel, binned, panels
from ddpnopt.lab.view.run_log import RunLog
from ddpnopt.lab.view.symptoms import symptoms

COLOURS = ("bright_red", "bright_blue", "green", "yellow", "magenta", "cyan", "bright_black", "white")
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a Braille character, by column and row
BLANK = 0x2800
ROWS = 7
LEAST_ROWS = 3
AROUND = 4  # rows of a box besides its curve: border, steps, legend
LABEL = 10  # columns for the numbers beside the axis
TWO_COLUMNS = 110
MOST_LINES = len(COLOURS)


def view(log: RunLog, width: int, height: int | None = None) -> RenderableType:
    """All curves of a run, two beside each other where there is room.

    On a screen of a given height the lower part may be cut off, so curves are lower there and the remarks stand first.
    """
    shown = panels(log)
    columns = 2 if width >= TWO_COLUMNS else 1
    inner = width // columns - 4
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    remarks = [f"[bold yellow]{each.name}[/]: {each.text}" for each in symptoms(log)]
    rows = ROWS if height is None else _rows(height - 1 - 2 * len(remarks), math.ceil(len(shown) / columns))
    boxes = [_box(log, panel, inner, rows) for panel in shown]
    for i in range(0, len(boxes), columns):
        grid.add_row(*boxes[i : i + columns])
    seconds = log.final("seconds")
    heading = f"[bold]{log.name}[/]  step {log.steps[-1]:,}, {seconds:.0f} s" + (f", {log.kind}" if log.kind else "")
    if log.column("shortened") and not any(log.final(name) for name in COUNTERS):
        heading += "; no step repeated, undone or skipped"
    missing = "" if log.column("predicted") or not log.column("kappa") else (
        "[dim]DDPNOpt(model, diagnostics=True) records predicted and actual change and the layers, too"
    )  # fmt: skip
    parts: list[RenderableType] = [grid, *remarks] if height is None else [*remarks, grid]
    return Group(heading, *parts, *([missing] if missing else []))


def _rows(height: int, boxes: int) -> int:
    """How high a curve may be so that so many boxes fit below each other, if they can."""
    return min(max(height // max(boxes, 1) - AROUND, LEAST_ROWS), ROWS)


def _box(log: RunLog, panel: CurvePanel, width: int, rows: int) -> Panel:
    lines = list(panel.lines)[:MOST_LINES]
    text = plot(log.steps, lines, width - LABEL, rows, logarithmic=panel.logarithmic)
    legend = Text(" " * LABEL)
    if len(panel.lines) > 1:
        for line, colour in zip(lines, COLOURS, strict=False):
            legend.append(f"━ {line.label}  ", style=colour)
        if len(panel.lines) > MOST_LINES:
            legend.append(f"and {len(panel.lines) - MOST_LINES} more", style="dim")
        legend.truncate(width, overflow="ellipsis")
    return Panel(Group(text, legend), title=panel.title, title_align="left", border_style="dim")


def plot(
    steps: Sequence[int], lines: Sequence[CurveLine], width: int, rows: int = ROWS, *, logarithmic: bool = False
) -> Text:
    """The lines over the steps, with the largest and the smallest number beside the axis."""
    shown = [binned(steps, line.values, 2 * width)[1] for line in lines]
    numbers = [value for line in shown for value in line if value is not None]
    scaled = logarithmic and bool(numbers) and min(numbers) > 0
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    bottom, top = (math.log(low), math.log(high)) if scaled else (low, high)
    cells: dict[tuple[int, int], tuple[int, int]] = {}
    for order, values in reversed(list(enumerate(shown))):  # the first line on top
        before: int | None = None
        for place in range(2 * width):
            value = values[min(place * len(values) // (2 * width), len(values) - 1)]
            if value is None:
                before = None
                continue
            height = (((math.log(value) if scaled else value) - bottom) / (top - bottom)) if top > bottom else 0.5
            dot = round(height * (4 * rows - 1))
            for level in _between(before, dot):
                _set(cells, place, 4 * rows - 1 - level, order)
            before = dot
    text = Text(no_wrap=True)
    for row in range(rows):
        label = short(high) if row == 0 else short(low) if row == rows - 1 else ""
        text.append(f"{label:>{LABEL - 2}} ┤", style="dim")
        for column in range(width):
            dots, order = cells.get((row, column), (0, 0))
            text.append(chr(BLANK + dots), style=COLOURS[order % len(COLOURS)] if dots else "")
        text.append("\n")
    last = f"{steps[-1]:,}"
    text.append(" " * LABEL + f"step {steps[0]}".ljust(max(width - len(last), 0)) + last, style="dim")
    return text


def _between(before: int | None, now: int) -> range:
    """The dots that join two neighbours."""
    if before is None or before == now:
        return range(now, now + 1)
    return range(min(before, now) + (before < now), max(before, now) + (before <= now))


def _set(cells: dict[tuple[int, int], tuple[int, int]], place: int, level: int, order: int) -> None:
    key = (level // 4, place // 2)
    dots = cells.get(key, (0, order))[0]
    cells[key] = (dots | DOTS[place % 2][level % 4], order)


def short(value: float) -> str:
    """At most seven characters."""
    if value == 0:
        return "0"
    size = abs(value)
    return f"{value:.1e}" if size < 1e-3 or size >= 1e5 else f"{value:.3g}"
