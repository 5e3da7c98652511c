"""`ddpnopt bench`: how much the learning rate matters, what a step costs, and many small tasks."""

from __future__ import annotations

import typer

from ddpnopt.lab.cli.bench_lr_window import lr_window
from ddpnopt.lab.cli.bench_speed import speed
from ddpnopt.lab.cli.bench_suite import suite
from ddpnopt.lab.cli.errors import one_line_errors

app = typer.Typer(
    help="How much the learning rate matters, what a step costs, and many small tasks.", no_args_is_help=True
)
app.command("speed")(one_line_errors(speed))
app.command("lr-window")(one_line_errors(lr_window))
app.command("suite")(one_line_errors(suite))
