"""The command line: one program, one file a command."""

from __future__ import annotations

import typer

from ddpnopt.cli.baselines import baselines
from ddpnopt.cli.bench import app as bench
from ddpnopt.cli.compare import compare
from ddpnopt.cli.data import data
from ddpnopt.cli.report import report
from ddpnopt.cli.reproduce import reproduce
from ddpnopt.cli.train import train

app = typer.Typer(
    name="ddpnopt",
    help="Differential dynamic programming as a PyTorch optimizer: comparisons and data sets.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(compare)
app.command()(train)
app.command()(data)
app.command()(baselines)
app.command()(reproduce)
app.command()(report)
app.add_typer(bench, name="bench")

__all__ = ["app"]
