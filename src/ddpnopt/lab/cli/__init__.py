"""The command line: one program, one file per command."""

from __future__ import annotations

import typer

from ddpnopt.lab.cli.bench import app as bench
from ddpnopt.lab.cli.compare import compare
from ddpnopt.lab.cli.data import data
from ddpnopt.lab.cli.report import report
from ddpnopt.lab.cli.reproduce import reproduce
from ddpnopt.lab.cli.train import train
from ddpnopt.lab.cli.view import view

app = typer.Typer(
    name="ddpnopt",
    help="DDPNOpt, a PyTorch optimizer without a learning rate: compare it on your own task, look at a training, "
    "repeat the experiments.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(compare)
app.command()(train)
app.command()(view)
app.command()(data)
app.command()(reproduce)
app.command()(report)
app.add_typer(bench, name="bench")

__all__ = ["app"]
