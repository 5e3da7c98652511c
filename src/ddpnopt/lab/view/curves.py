"""Which curves are shown, and what each of them says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from ddpnopt.lab.view.run_log import RunLog

COUNTERS = {"shortened": "repeated", "undone": "undone", "skipped": "skipped"}


@dataclass(frozen=True)
class CurveLine:
    """One line: its label, and a number or a gap for each place."""

    label: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class CurvePanel:
    """One picture."""

    name: str
    title: str
    meaning: str
    lines: Sequence[CurveLine]
    logarithmic: bool = False


def panels(log: RunLog) -> list[CurvePanel]:
    """All curves of which there is something to show."""
    made = [
        _panel(log, "loss", "Loss of the batch", "Before each step.", {"loss": "loss"}, logarithmic=True),
        _panel(
            log,
            "change",
            "Change of the batch's loss by a step",
            "Predicted by the quadratic model, and what the step did to the same batch. The closer the two lines, the "
            "better the model; above zero the step has increased the loss.",
            {"predicted": "predicted", "actual": "actual"},
        ),
        _panel(
            log,
            "fraction",
            "Fraction of the loss asked for",
            "What a step tries to remove. Small in the first steps; later it falls when samples left out of the batch "
            "no longer gain, or when the network is strongly curved.",
            {"fraction": "fraction"},
            logarithmic=True,
        ),
        _panel(
            log,
            "kappa",
            "Curvature over that of the model (kappa)",
            "1: the model is right. Large: the network bends along the steps, and they are made shorter by as much.",
            {"kappa": "kappa"},
            logarithmic=True,
        ),
        _panel(
            log,
            "counters",
            "Repeated, undone, skipped steps",
            "How many so far. Repeated: made again, shorter, because the loss of the batch would have risen too much, "
            "or a layer would have changed too much. Undone: given up. Skipped: something was not finite.",
            COUNTERS if any(log.final(name) for name in COUNTERS) else {},
        ),
        CurvePanel(
            "layers",
            "Size of each layer's update",
            "Norm of what was added to the weights.",
            [CurveLine(name, log.column(f"layers/{name}/update")) for name in log.layers],
            logarithmic=True,
        ),
        CurvePanel(
            "feedback",
            "Feedback of each layer",
            "Its reaction to the layers before it, over its own step without that reaction.",
            [CurveLine(name, _ratio(log, name)) for name in log.layers],
        ),
    ]
    shown = [CurvePanel(p.name, p.title, p.meaning, _there(p.lines), p.logarithmic) for p in made]
    return [panel for panel in shown if panel.lines]


def binned(steps: Sequence[int], values: Sequence[float | None], bins: int) -> tuple[list[int], list[float | None]]:
    """Means over equal stretches of the run, so that a long run fits the width of a picture."""
    count = len(steps)
    if count <= bins:
        return list(steps), list(values)
    edges = [round(i * count / bins) for i in range(bins + 1)]
    places, means = [], []
    for a, b in pairwise(edges):
        known = [value for value in values[a:b] if value is not None and math.isfinite(value)]
        places.append(steps[b - 1])
        means.append(fmean(known) if known else None)
    return places, means


def _panel(
    log: RunLog, name: str, title: str, meaning: str, lines: dict[str, str], *, logarithmic: bool = False
) -> CurvePanel:
    return CurvePanel(
        name, title, meaning, [CurveLine(label, log.column(c)) for c, label in lines.items()], logarithmic
    )


def _there(lines: Sequence[CurveLine]) -> list[CurveLine]:
    return [line for line in lines if line.values]


def _ratio(log: RunLog, layer: str) -> list[float | None]:
    parts = (log.column(f"layers/{layer}/feedback"), log.column(f"layers/{layer}/open_loop"))
    return [a / b if a is not None and b else None for a, b in zip(*parts, strict=True)]
