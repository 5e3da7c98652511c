"""Folders of results as `ddpnopt reproduce` writes them: by the same function, with real tables and figures."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from ddpnopt.lab.paper.item import Claim, Context, Item, Picture, Result, Table, write
from ddpnopt.lab.style import figure, style

RATES = [0.1, 0.2, 0.4, 0.8, 1.6]
METHODS = {"SGD": 0.5, "DDPNOpt": 0.2, "EKFAC": 0.35}


def _nothing(context: Context) -> Result:
    raise AssertionError("only the folder of this item is used")


def write_grid(out: Path, *, quick: bool = True) -> Path:
    """Curves over learning rates for two data sets, with spreads and a diverged run."""
    series = []
    for panel, level in (("DIGITS", 1.0), ("WINE", 0.3)):
        for method, steep in METHODS.items():
            loss = [level * (0.02 + steep * rate**2) for rate in RATES]
            if method == "SGD":
                loss[-1] = math.nan
            series.append(
                {
                    "panel": panel,
                    "label": method,
                    "x": RATES,
                    "y": loss,
                    "spread": [y / 5 for y in loss],
                    "x_label": "learning rate",
                    "y_label": "training loss",
                }
            )
    rows = [
        {"data set": each["panel"], "method": each["label"], "lr": f"{x:g}", "loss": f"{y:.4f} ± {s:.4f}"}
        for each in series
        for x, y, s in zip(each["x"], each["y"], each["spread"], strict=True)
        if math.isfinite(y)
    ]
    with style():
        drawn, (left, right) = figure(2)
        for each in series:
            (left if each["panel"] == "DIGITS" else right).plot(each["x"], each["y"], label=each["label"])
        left.legend()
        result = Result(
            claims=[
                Claim("At large learning rates feedback lowers the loss.", True, "0.4 → 0.1 at 0.6", "0.39 → 0.05"),
                Claim("EKFAC gains <b>most</b> & `eps` matters.", False, "−0.2", "+0.1"),
            ],
            tables=[Table("grid", "Training loss, mean ± deviation; **lower** is better.", pd.DataFrame(rows))],
            pictures=[Picture("grid", "Training loss over learning rates. Holds.", drawn, series)],
            notes=["Ten seeds became two; `--quick`."],
        )
        return write(Item("fig-grid", "Learning rates", "Figure 4", _nothing), result, Context(out, quick=quick))


def write_table3(out: Path) -> Path:
    """A wide table, and accuracies over names of data sets."""
    methods = ["SGD", "RMSprop", "Adam", "EKFAC", "E-MSA", "DDP", "DDPNOpt"]
    sets = ["WINE", "DIGITS", "MNIST", "F-MNIST", "MNIST CNN", "SVHN CNN", "CIFAR-10 CNN"]
    accuracy = {m: [98.0 - 3 * j - 0.5 * i for j in range(len(sets))] for i, m in enumerate(reversed(methods))}
    table = {"data set": sets} | {m: [f"{a:.2f} ± 0.30" for a in accuracy[m]] for m in methods}
    table["DDP"] = ["12.5 ± 0.1", "9.00 ± 1.0", "–", "–", "–", "–", "–"]
    frame = pd.DataFrame(table)
    series = [{"panel": "", "label": m, "x": sets, "y": accuracy[m], "spread": [0.3] * len(sets)} for m in methods]
    with style():
        drawn, (axes,) = figure()
        axes.bar(sets, accuracy["DDPNOpt"])
        result = Result(
            claims=[Claim("DDPNOpt is best on most data sets.", None, "5 of 7", "3 of 7, within the spread")],
            tables=[Table("accuracy", "Test accuracy (%).", frame)],
            pictures=[Picture("accuracy", "Accuracy.", drawn, series)],
        )
        return write(Item("table3", "Accuracy", "Table 3", _nothing), result, Context(out))


def write_toy(out: Path) -> Path:
    """A figure alone, without series."""
    with style():
        drawn, (axes,) = figure()
        axes.plot([0, 1], [1, 0])
        result = Result(claims=[], pictures=[Picture("toy", "Feedback in the plane.", drawn)])
        return write(Item("toy", "Toy", "Figure 2", _nothing), result, Context(out))


def write_speed(out: Path) -> None:
    """Pages as `ddpnopt bench speed` writes them: two networks, and a growth of which the exponents alone are shown."""
    folder = out / "speed"
    folder.mkdir()
    head = "- machine: some, 2 cores\n- command: `ddpnopt bench speed`\n"
    table = "| method | time / SGD |\n| --- | ---: |\n| SGD | 1.00 |\n| outer | 1.59 |\n"
    for name, titles in (
        ("speed", ("FCN of DIGITS, batch size 8", "CNN, batch size 128")),
        ("growth-batch", ("Exponents", "fcn-256x4, batch size 8", "fcn-256x4, batch size 16")),
    ):
        parts = [f"### {title}\n\n{table}" for title in titles]
        (folder / f"{name}.md").write_text("\n".join([head, *parts]), encoding="utf-8")
