"""What the tests of the paper's items share: the command, and outcomes of runs that were never made."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from ddpnopt.lab.cli import app
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.outcome import Curve, Outcome

DIGITS = ClassificationTask("digits")


def reproduce(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["reproduce", *arguments])


def outcome(accuracy: float, loss: float, diverged: bool = False) -> Outcome:
    return Outcome(accuracy, 0.1, 1.0, 1.0, 10, diverged, "", Curve([], [], [], []), loss)
