"""`ddpnopt view run.jsonl`: the diagnostics of a training as curves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from ddpnopt.lab.cli.errors import one_line_errors
from ddpnopt.lab.cli.progress import console
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.view.run_log import NothingRecordedError, read_log
from ddpnopt.lab.view.terminal import view as drawn


@one_line_errors
def view(
    file: Annotated[Path, typer.Argument(help="Written by ddpnopt.logging.Recorder.", show_default=False)],
    page: Annotated[
        Path | None,
        typer.Option(help="Write a self-contained HTML page here instead of drawing.", show_default=False),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Draw again while the file grows, until Ctrl-C.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds from one picture to the next.")] = 1.0,
) -> None:
    """Show the curves of a training: loss, predicted and actual change, length of the steps, layers."""
    screen = console()
    if page is not None:
        if follow:
            raise ExperimentError("--follow draws in the terminal; --page writes a file once")
        from ddpnopt.lab.view.page import write_view

        write_view(read_log(file), page)
        screen.print(f"[dim]saved[/] {page}", soft_wrap=True)
        return
    if not follow:
        screen.print(drawn(read_log(file), screen.width))
        return
    with Live(console=screen, auto_refresh=False, screen=True) as live:
        last: tuple[int, int, int] | None = None
        try:
            while True:
                now = (file.stat().st_size if file.exists() else -1, *screen.size)
                if now != last:
                    last = now
                    live.update(shown_now(file, screen), refresh=True)
                time.sleep(every)
        except KeyboardInterrupt:
            pass
    screen.print(drawn(read_log(file), screen.width))


def shown_now(file: Path, screen: Console) -> RenderableType:
    """What the file holds so far; the training may start after its viewer."""
    try:
        return drawn(read_log(file), screen.width, screen.height)
    except NothingRecordedError:
        return f"waiting for the first step in {file}; Ctrl-C ends"
