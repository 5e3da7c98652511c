"""Progress bars."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def console() -> Console:
    """Made at each use: it writes to the standard output of that moment."""
    return Console()


def status_console() -> Console:
    """For progress bars and remarks, which are not the result: standard error."""
    return Console(stderr=True)


def bar() -> Progress:
    """A bar of steps that vanishes when it is done."""
    err = status_console()
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TextColumn("[dim]{task.fields[detail]}"),
        TimeRemainingColumn(),
        TextColumn("[dim]left"),
        console=err,
        transient=True,
        disable=not err.is_terminal,  # in a log file it would leave only an empty line
    )
