"""`DDPNOpt(model)` without one of its parts, or with another constant, as methods of the suite:

    PYTHONPATH=benchmarks ddpnopt bench suite --open --seeds 1 --out results/ablations --methods \
        ddpnopt,adam,ablations:no_memory,ablations:impatient,ablations:less_damping,ablations:diagonal,ablations:no_balance,\
ablations:loss_not_seen,ablations:no_curvature,ablations:rolled_out,ablations:open_loop

Each function takes a model and returns its optimizer. The constants are set for the duration of a step only, so that
runs in one process do not disturb each other. `python benchmarks/ablations.py results/ablations/suite.csv` then shows
which of them is the best choice for the tasks of all families but one, and how that choice does on the family left out.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp import balance, step_length
from ddpnopt.ddp.value import scale_free
from ddpnopt.linear.convolution import Conv
from ddpnopt.linear.linear import Linear
from ddpnopt.trace.arrivals import Arrivals

Constants = Mapping[tuple[Any, str], Any]


@contextmanager
def replaced(constants: Constants) -> Iterator[None]:
    """Set attributes of modules and classes for a while."""
    before = {(owner, name): getattr(owner, name) for owner, name in constants}
    try:
        for (owner, name), value in constants.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)


class Changed(DDPNOpt):
    """DDPNOpt with other constants in its steps."""

    def __init__(self, model: nn.Module, constants: Constants, **options: Any) -> None:
        super().__init__(model, **options)
        self._constants = constants

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with replaced(self._constants):
            return super().step(*args, **kwargs)


def no_memory(model: nn.Module) -> DDPNOpt:
    """Each step starts from zero, not from what the last one has left undone."""
    return Changed(model, {(step_length, "MEMORY"): 0.0})


def impatient(model: nn.Module) -> DDPNOpt:
    """The fraction that is best for the next step alone."""
    return Changed(model, {(step_length, "PATIENCE"): 1.0, (step_length, "OWN"): 1.2})


def less_damping(model: nn.Module) -> DDPNOpt:
    """A tenth of the damping."""
    return Changed(model, {(scale_free, "DAMPING"): 0.1})


def diagonal(model: nn.Module) -> DDPNOpt:
    """Features are not mixed: the diagonals of the second moments alone."""
    return Changed(model, {(Linear, "mixes_features"): False, (Conv, "mixes_features"): False})


def no_balance(model: nn.Module) -> DDPNOpt:
    """All inputs and outputs of a layer as they are."""
    return Changed(model, {(balance, "POWER"): 0.0})


def loss_not_seen(model: nn.Module) -> DDPNOpt:
    """The loss recognised from outputs and gradients alone, without its value."""
    return Changed(model, {(Arrivals, "loss_value"): lambda _: None})


def no_curvature(model: nn.Module) -> DDPNOpt:
    """kappa = 1: the model of the batch is trusted."""
    return Changed(model, {(step_length.StepLength, "_measure"): lambda self, *_: setattr(self, "kappa", 1.0)})


def rolled_out(model: nn.Module) -> DDPNOpt:
    """A second forward pass in every step."""
    return DDPNOpt(model, closed_loop=True)


def open_loop(model: nn.Module) -> DDPNOpt:
    """The plan alone: no step has a second forward pass, so that there is no measured curvature."""
    return DDPNOpt(model, closed_loop=False)


def leave_one_family_out(path: Path) -> str:
    """A Markdown table: the best variant by the mean share of Adam's way over all other families, and how it does."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    adam = {row["task"]: float(row["mean"]) for row in rows if row["method"] == "adam"}
    variants = sorted({row["method"] for row in rows if row["method"] != "adam"})
    families = sorted({row["family"] for row in rows})

    def score(variant: str, where: set[str]) -> float:
        chosen = [row for row in rows if row["method"] == variant and row["family"] in where]
        chances = [float(row["chance"]) for row in chosen]
        ways = [(float(r["mean"]) - c) / (adam[r["task"]] - c) for r, c in zip(chosen, chances, strict=True)]
        return sum(min(max(way, -0.5), 1.5) for way in ways) / max(1, len(ways))

    lines = [
        "| family left out | best on the others | its score there | on this family | the default here |",
        "|" + " --- |" * 5,
    ]
    for family in families:
        others = set(families) - {family}
        best = max(variants, key=lambda variant: score(variant, others))
        here = (score(best, {family}), score("ddpnopt", {family}))
        lines.append(f"| {family} | {best} | {score(best, others):.3f} | {here[0]:.3f} | {here[1]:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(leave_one_family_out(Path(sys.argv[1])))
