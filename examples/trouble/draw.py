"""Draws the pictures of docs/trouble.md: the loss and the telling curve of each case.

python examples/trouble/draw.py docs/img results/trouble

The second folder gets a table of what `ddpnopt view` says about each run.
"""

from __future__ import annotations

import csv
import re
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import torch
from cases import CASES

from ddpnopt.lab import style
from ddpnopt.lab.view.curves import CurvePanel, panels
from ddpnopt.lab.view.run_log import RunLog, read_log
from ddpnopt.lab.view.symptoms import STILL, symptoms

STEPS = 150
TELLING = {
    "Skipped steps": "counters",
    "Undone steps": "counters",
    "Repeated steps": "counters",
    "Strongly curved": "kappa",
    "Small steps": "fraction",
    "Promises not kept": "change",
    "Loss does not fall": "fraction",
    "Layers that stand still": "layers",
    "Loss not recognised": "kappa",
    "Parameters without feedback": "layers",
}
COLOURS = (style.COLOURS["ddpnopt"], style.COLOURS["adam"], style.COLOURS["rmsprop"], *style.SPARE)


def stem(name: str) -> str:
    return f"trouble-{re.sub('[^a-z]+', '-', name.lower())}"


def run(name: str, steps: int, folder: Path) -> RunLog:
    """The recorded run of a case."""
    path = folder / f"{stem(name)}.jsonl"
    path.unlink(missing_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        CASES[name](steps, path)
    return read_log(path)


def draw(name: str, log: RunLog, folder: Path) -> Path:
    """Two curves side by side."""
    shown = {panel.name: panel for panel in panels(log)}
    with style.style():
        made, axes = style.figure(2, width=4.0, height=2.5)
        for axis, panel in zip(axes, (shown["loss"], shown[TELLING[name]]), strict=True):
            lines(axis, log, panel)
        return style.save(made, folder / stem(name), ("svg",))[0]


def lines(axis, log: RunLog, panel: CurvePanel) -> None:
    values = {line.label: [float("nan") if value is None else value for value in line.values] for line in panel.lines}
    if len(values) > 4:  # too many for a legend: only those that stand still are named
        size = {name: fmean(each) for name, each in values.items()}
        moving = [name for name in values if size[name] >= STILL * max(size.values())]
        for name in moving:
            label = "the other layers" if name == moving[0] else None
            axis.plot(log.steps, values.pop(name), color="#b3bac4", label=label, linewidth=1.0)
    for (name, each), colour in zip(values.items(), COLOURS, strict=False):
        axis.plot(log.steps, each, color=colour, label=name, linewidth=1.4)
    positive = all(value is None or value > 0 for line in panel.lines for value in line.values)
    if panel.logarithmic and positive:
        axis.set_yscale("log")
    if len(panel.lines) > 1 or panel.name == "layers":
        axis.legend(loc="best")
    axis.set(title=panel.title, xlabel="step")


def main(folder: Path, table: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table.mkdir(parents=True, exist_ok=True)
    said = []
    with tempfile.TemporaryDirectory() as runs:
        for name in CASES:
            log = run(name, STEPS, Path(runs))
            seen = {each.name: each.text for each in symptoms(log)}
            assert name in seen, f"{name}: {seen}"
            said.append((name, seen[name]))
            print(draw(name, log, folder), list(seen), flush=True)
    with (table / "trouble.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("symptom", "said"), *said])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
