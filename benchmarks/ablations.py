"""`DDPNOpt(model)` without one of its parts, or with another constant, as methods of the suite:

    PYTHONPATH=benchmarks ddpnopt bench suite --open --seeds 1 --out results/ablations \\
        --methods ddpnopt,adam,$(python benchmarks/ablations.py)

Each function takes a model and returns its optimizer. The constants are set for the duration of a step only, so that
runs in one process do not disturb each other. `python benchmarks/ablations.py results/ablations/suite.csv` then
compares them with the default, and shows which constant is the best choice for the tasks of all families but one, and
how it does on the family left out.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

import ddpnopt._step_length as applied
from ddpnopt import DDPNOpt
from ddpnopt.ddp import balance, step_length
from ddpnopt.ddp.value import scale_free, shares
from ddpnopt.linear.convolution import Conv
from ddpnopt.linear.linear import Linear
from ddpnopt.trace.arrivals import Arrivals

Constants = Mapping[tuple[Any, str], Any]
COUNTS = 0.03  # a difference of scores that counts


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


# -- without a part ----------------------------------------------------------------------------------------------------


def no_memory(model: nn.Module) -> DDPNOpt:
    """Each step starts from zero, not from what the last one has left undone."""
    return Changed(model, {(step_length, "MEMORY"): 0.0, (step_length, "HELD"): 0.0})


def no_limit(model: nn.Module) -> DDPNOpt:
    """A step may change a layer by any share of its size."""
    return _reach(model, math.inf)


def no_curvature(model: nn.Module) -> DDPNOpt:
    """kappa = 1: the model of the batch is trusted."""
    return Changed(model, {(step_length.StepLength, "_measure"): lambda self, *_: setattr(self, "kappa", 1.0)})


def equal_shares(model: nn.Module) -> DDPNOpt:
    """All layers move by the same share of their sizes, whatever the slopes along their updates say."""
    return Changed(model, {(shares, "GAIN"): 0.0})


def diagonal(model: nn.Module) -> DDPNOpt:
    """Features are not mixed: the diagonals of the second moments alone."""
    return Changed(model, {(Linear, "mixes_features"): False, (Conv, "mixes_features"): False})


def channels_alone(model: nn.Module) -> DDPNOpt:
    """Convolutions mix their channels, but not the places of the kernel."""
    return Changed(model, {(Conv, "kernel_places"): 1})


def no_balance(model: nn.Module) -> DDPNOpt:
    """All inputs and outputs of a layer as they are."""
    return Changed(model, {(balance, "POWER"): 0.0})


def loss_not_seen(model: nn.Module) -> DDPNOpt:
    """The loss recognised from outputs and gradients alone, without its value."""
    return Changed(model, {(Arrivals, "loss_value"): lambda _: None})


def last_weights(model: nn.Module) -> DDPNOpt:
    """The weights of the last step, not their average."""
    return DDPNOpt(model, average=False)


def rolled_out(model: nn.Module) -> DDPNOpt:
    """A second forward pass in every step."""
    return DDPNOpt(model, closed_loop=True)


def open_loop(model: nn.Module) -> DDPNOpt:
    """The plan alone: no step has a second forward pass, so that there is no measured curvature."""
    return DDPNOpt(model, closed_loop=False)


# -- with another constant ---------------------------------------------------------------------------------------------


def less_damping(model: nn.Module) -> DDPNOpt:
    """A quarter of the damping."""
    return Changed(model, {(scale_free, "DAMPING"): scale_free.DAMPING / 4})


def more_damping(model: nn.Module) -> DDPNOpt:
    """Four times the damping."""
    return Changed(model, {(scale_free, "DAMPING"): 4 * scale_free.DAMPING})


def half_reach(model: nn.Module) -> DDPNOpt:
    """Half of the limit on what a step may change."""
    return _reach(model, step_length.REACH / 2)


def twice_reach(model: nn.Module) -> DDPNOpt:
    """Twice the limit on what a step may change."""
    return _reach(model, 2 * step_length.REACH)


def half_patience(model: nn.Module) -> DDPNOpt:
    """Steps of half the length, as far as samples left out decide on it."""
    return Changed(model, {(step_length, "PATIENCE"): step_length.PATIENCE / 2, (step_length, "OWN"): 0.35})


def impatient(model: nn.Module) -> DDPNOpt:
    """The fraction that is best for the next step alone."""
    return Changed(model, {(step_length, "PATIENCE"): 1.0, (step_length, "OWN"): 1.2})


def less_memory(model: nn.Module) -> DDPNOpt:
    """0.7 of what the last step has left undone."""
    return Changed(model, {(step_length, "MEMORY"): 0.7, (step_length, "HELD"): 0.7})


def weaker_shares(model: nn.Module) -> DDPNOpt:
    """Half of the effect of the slopes on the shares of the layers."""
    return Changed(model, {(shares, "GAIN"): shares.GAIN / 2})


def stronger_shares(model: nn.Module) -> DDPNOpt:
    """Twice the effect of the slopes on the shares of the layers."""
    return Changed(model, {(shares, "GAIN"): 2 * shares.GAIN})


def higher_floor(model: nn.Module) -> DDPNOpt:
    """Directions with small gradients are followed a tenth as far down."""
    return Changed(model, {(balance, "LOW"): balance.FLOOR})


def longer_metric(model: nn.Module) -> DDPNOpt:
    """Second moments of twice as many steps."""
    return Changed(model, {(balance, "LATER"): 2 * balance.LATER})


def _reach(model: nn.Module, reach: float) -> DDPNOpt:
    return Changed(model, {(step_length, "REACH"): reach, (applied, "REACH"): reach})


PARTS: tuple[Callable[[nn.Module], DDPNOpt], ...] = (
    no_memory, no_limit, no_curvature, equal_shares, diagonal, channels_alone, no_balance, loss_not_seen, last_weights,
    rolled_out, open_loop,
)  # fmt: skip
CONSTANTS: tuple[Callable[[nn.Module], DDPNOpt], ...] = (
    less_damping, more_damping, half_reach, twice_reach, half_patience, impatient, less_memory, weaker_shares,
    stronger_shares, higher_floor, longer_metric,
)  # fmt: skip


class Scores:
    """Of each variant on each task: the share of tuned Adam's way from chance, between -0.5 and 1.5."""

    def __init__(self, path: Path) -> None:
        with path.open() as file:
            rows = list(csv.DictReader(file))
        self.families = {row["task"]: row["family"] for row in rows}
        adam = {row["task"]: float(row["mean"]) for row in rows if row["method"] == "adam"}
        self.found: dict[str, dict[str, float]] = {}
        for row in rows:
            chance, mean = float(row["chance"]), float(row["mean"])
            share = (mean - chance) / (adam[row["task"]] - chance)
            self.found.setdefault(row["method"], {})[row["task"]] = min(max(share, -0.5), 1.5)

    def mean(self, variant: str, families: set[str]) -> float:
        found = [score for task, score in self.found[variant].items() if self.families[task] in families]
        return sum(found) / len(found)

    def known(self, variants: tuple[Callable[[nn.Module], DDPNOpt], ...]) -> list[Callable[[nn.Module], DDPNOpt]]:
        return [variant for variant in variants if _named(variant) in self.found]


def against_the_default(scores: Scores, variants: tuple[Callable[[nn.Module], DDPNOpt], ...]) -> str:
    """A Markdown table: on how many tasks a variant is better or worse than the default by 3 % of Adam's way."""
    default, everything = scores.found["ddpnopt"], set(scores.families.values())
    lines = [
        "| | what changes | mean score | better on | worse on | median difference |",
        "| --- | --- |" + " ---: |" * 4,
    ]
    lines.append(f"| `DDPNOpt(model)` | | {scores.mean('ddpnopt', everything):.3f} | | | |")
    for variant in scores.known(variants):
        own = scores.found[_named(variant)]
        differences = [own[task] - default[task] for task in default if task in own]
        better, worse = (sum(sign * each > COUNTS for each in differences) for sign in (1, -1))
        what = (variant.__doc__ or "").strip().rstrip(".")
        mean, middle = scores.mean(_named(variant), everything), median(differences)
        lines.append(f"| `{variant.__name__}` | {what} | {mean:.3f} | {better} | {worse} | {middle:+.3f} |")
    return "\n".join(lines)


def leave_one_family_out(scores: Scores) -> str:
    """A Markdown table: the best constant by the mean score over all other families, and how it does."""
    variants = ["ddpnopt", *map(_named, scores.known(CONSTANTS))]
    families = sorted(set(scores.families.values()))
    lines = [
        "| family left out | best on the others | its score there | on this family | the default here |",
        "| --- | --- |" + " ---: |" * 3,
    ]
    differences = []
    for family in families:
        others = set(families) - {family}
        best = max(variants, key=lambda variant: scores.mean(variant, others))
        here = (scores.mean(best, {family}), scores.mean("ddpnopt", {family}))
        differences.append(here[0] - here[1])
        name = "the default" if best == "ddpnopt" else f"`{best.removeprefix('ablations:')}`"
        lines.append(f"| {family} | {name} | {scores.mean(best, others):.3f} | {here[0]:.3f} | {here[1]:.3f} |")
    lines.append(f"| mean difference | | | {sum(differences) / len(differences):+.3f} | |")
    return "\n".join(lines)


def _named(variant: Callable[[nn.Module], DDPNOpt]) -> str:
    return f"ablations:{variant.__name__}"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(",".join(map(_named, PARTS + CONSTANTS)))
    else:
        scores = Scores(Path(sys.argv[1]))
        tables = (
            against_the_default(scores, PARTS),
            against_the_default(scores, CONSTANTS),
            leave_one_family_out(scores),
        )
        print("\n\n".join(tables))
