"""Bad input ends in one line and exit code 2, without a traceback."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import typer

from ddpnopt.errors import DDPNOptError
from ddpnopt.lab.errors import ExperimentError

P = ParamSpec("P")
R = TypeVar("R")


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Wraps a command: errors that the user can correct are reported in one line."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (ExperimentError, DDPNOptError) as wrong:
            typer.echo(f"ddpnopt: {' '.join(str(wrong).splitlines())}", err=True)
            raise typer.Exit(2) from wrong

    return wrapped
