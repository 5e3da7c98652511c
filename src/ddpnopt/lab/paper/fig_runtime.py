"""`fig-runtime`: time and memory of one iteration of every method, on the networks of MNIST and DIGITS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ddpnopt.lab import networks as paper
from ddpnopt.lab import style
from ddpnopt.lab.methods.method import UNIT
from ddpnopt.lab.methods.registry import METHODS
from ddpnopt.lab.paper.captions import caption, compact, finish
from ddpnopt.lab.paper.item import Claim, Context, Item, Picture, Result, Table
from ddpnopt.lab.timing.networks import Network, shaped
from ddpnopt.lab.timing.speed import Cost, measure

STANDARD = ("sgd", "rmsprop", "adam", "ekfac")
SLOW = ("emsa", "vanilla-ddp")
NEARLY, LARGE_MARGIN = 2.0, 2.0
"""What we take "nearly as fast" and "by a large margin" to mean."""


@dataclass(frozen=True)
class RuntimeSetting:
    """A network with the methods that can train it."""

    network: Network
    ours: str
    """DDPNOpt as the paper takes it for this kind of network."""
    without: str = ""
    """What cannot be measured, and why."""

    @property
    def names(self) -> list[str]:
        slow = [name for name in SLOW if not (self.without and name == "vanilla-ddp")]
        return [*STANDARD, self.ours, "ddpnopt", *slow]


TOO_LARGE = "vanilla DDP: its Q_uu of the first layer alone would take 5 GB"
NO_CNN = "vanilla DDP: for fully connected networks only, as in the paper"
MNIST, DIGITS = shaped("mnist", 1, 28, 28), shaped("digits", 64)
SETTINGS = (
    RuntimeSetting(
        Network("mnist-fcn", "FCN of MNIST", lambda: paper.fcn(MNIST), lambda B: torch.randn(B, *MNIST.shape), 32),
        "ddpnopt-rmsprop",
        TOO_LARGE,
    ),
    RuntimeSetting(
        Network("mnist-cnn", "CNN of MNIST", lambda: paper.cnn(MNIST), lambda B: torch.randn(B, *MNIST.shape), 128),
        "ddpnopt-ekfac",
        NO_CNN,
    ),
    RuntimeSetting(
        Network("digits-fcn", "FCN of DIGITS", lambda: paper.fcn6(DIGITS), lambda B: torch.randn(B, *DIGITS.shape), 8),
        "ddpnopt-rmsprop",
    ),
)
QUICK_BATCH = 8


def run(context: Context) -> Result:
    repeats = 1 if context.quick else 9
    costs: dict[str, list[Cost]] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number, setting in enumerate(SETTINGS):
            size = min(setting.network.batch_size, QUICK_BATCH) if context.quick else setting.network.batch_size
            context.on_progress(setting.network.label, 2 * number, 2 * len(SETTINGS))
            fast = [METHODS[name] for name in setting.names if name not in SLOW]
            found = measure(setting.network, size, fast, repeats)
            context.on_progress(f"{setting.network.label}, the slow methods", 2 * number + 1, 2 * len(SETTINGS))
            # Seconds per step, far from all others: one round is enough.
            slow = [METHODS[UNIT], *(METHODS[name] for name in setting.names if name in SLOW)]
            found += measure(setting.network, size, slow, 1)[1:]
            costs[setting.network.label] = [cost for cost in found if cost.applies]
    finally:
        torch.set_num_threads(before)
    context.on_progress("done", 2 * len(SETTINGS), 2 * len(SETTINGS))
    claims = judge(costs)
    if context.quick:
        claims = [replace(claim, holds=None) for claim in claims]
    text = (
        "Time (median of the rounds) and peak memory of one iteration, logarithmic; in brackets, as a "
        "multiple of SGD's. One thread of a processor, where the paper had a GPU."
    )
    words = caption(text, claims)
    notes = [
        f"One round-robin of {repeats} round(s), the slow methods one; random inputs of the data's shape. "
        f"Batch sizes: {', '.join(f'{label} {found[0].batch_size}' for label, found in costs.items())}.",
        f"'Nearly as fast' is taken as at most {NEARLY:g} times Adam's time, 'a large margin' as at least "
        f"{LARGE_MARGIN:g} times.",
        *(f"{setting.network.label}, not measured: {setting.without}." for setting in SETTINGS if setting.without),
    ]
    if context.quick:
        notes.append(f"Quick: batches of {QUICK_BATCH}, one round; not enough to decide a claim.")
    return Result(
        claims,
        [Table("runtime", "Time and peak memory of one iteration.", table(costs))],
        [Picture("runtime", words, draw(costs, words), _series(costs))],
        notes,
    )


def judge(costs: dict[str, list[Cost]], device: str = "cpu") -> list[Claim]:
    """The paper's statements; what it says of a GPU is not judged on a processor."""
    times, texts, margins = [], [], []
    for setting in SETTINGS:
        found = {cost.method.name: cost for cost in costs[setting.network.label]}
        mine, adam = found[setting.ours], found["adam"]
        times.append(mine.milliseconds / adam.milliseconds)
        texts.append(f"{setting.network.label} {times[-1]:.1f}")
        if "emsa" in found:
            margins.append((setting.network.label, found["emsa"].milliseconds / mine.milliseconds))
    # both are said of one measurement, "with GPU parallelism": what holds on a processor is not judged either
    there = device != "cpu"
    why = "" if there else "The paper measures with GPU parallelism; a processor does not decide it."
    digits = {cost.method.name: cost for cost in costs[SETTINGS[-1].network.label]}
    mine = digits[SETTINGS[-1].ours]
    claims = [
        Claim(
            "DDPNOpt runs nearly as fast as standard methods.",
            max(times) <= NEARLY if there else None,
            "nearly as fast (GPU)",
            f"times Adam's: {', '.join(texts)}",
            why,
            judged=there,
        ),
        Claim(
            "It outperforms E-MSA by a large margin.",
            min(ratio for _, ratio in margins) >= LARGE_MARGIN if there else None,
            "by a large margin (GPU)",
            "E-MSA takes " + ", ".join(f"{ratio:.0f} times as long ({label})" for label, ratio in margins),
            why,
            judged=there,
        ),
    ]
    if "vanilla-ddp" in digits:
        ratio = digits["vanilla-ddp"].bytes / mine.bytes
        claims.append(
            Claim(
                "DDPNOpt is much more memory-efficient than vanilla DDP.",
                ratio >= LARGE_MARGIN,
                "much more",
                f"vanilla DDP takes {ratio:.0f} times the memory on the {SETTINGS[-1].network.label}",
            )
        )
    return claims


def table(costs: dict[str, list[Cost]]) -> pd.DataFrame:
    rows = [
        {
            "network": label,
            "batch size": cost.batch_size,
            "method": cost.method.label,
            "ms an iteration": compact(cost.milliseconds),
            "times SGD": f"{cost.ratio:.1f}",
            "peak memory (MB)": f"{cost.bytes / 1e6:.2f}",
            "memory, times SGD": f"{cost.memory_ratio:.1f}",
        }
        for label, found in costs.items()
        for cost in found
    ]
    return pd.DataFrame(rows)


def draw(costs: dict[str, list[Cost]], words: str) -> Figure:
    """Time above, memory below, one column per network."""
    with style.style():
        made, axes = style.figure(len(costs), 2, width=4.4, height=2.9)
        for column, (label, found) in enumerate(costs.items()):
            _bars(axes[column], found, memory=False)
            _bars(axes[len(costs) + column], found, memory=True)
            axes[column].set_title(f"{label}, batch {found[0].batch_size} (ms)")
            axes[len(costs) + column].set_title("Peak memory (MB)")
        return finish(made, "Runtime and memory of one iteration", words)


def _bars(axes: Axes, found: Sequence[Cost], *, memory: bool) -> None:
    rows = list(range(len(found)))[::-1]
    values = [cost.bytes / 1e6 if memory else cost.milliseconds for cost in found]
    ratios = [cost.memory_ratio if memory else cost.ratio for cost in found]
    axes.barh(rows, values, 0.66, color=[_colour(cost) for cost in found], zorder=2)
    for row, value, ratio in zip(rows, values, ratios, strict=True):
        axes.annotate(
            f"{_short(value)} ({ratio:.1f})", (value, row), xytext=(3, 0), textcoords="offset points", va="center",
            fontsize=7.5, color=style.SOFT_INK,
        )  # fmt: skip
    axes.set_yticks(rows, [cost.method.label for cost in found], color=style.INK, fontsize=8.5)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 2, max(values) * 6)
    axes.xaxis.set_major_locator(LogLocator(10, numticks=6))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=False, axis="y")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _colour(cost: Cost) -> str:
    return style.COLOURS["ddpnopt"] if cost.method.name.startswith("ddpnopt") else style.COLOURS["sgd"]


def _series(costs: dict[str, list[Cost]]) -> list[dict[str, Any]]:
    return [
        {
            "panel": f"{label}: {'peak memory (MB)' if memory else 'ms an iteration'}",
            "label": cost.method.label,
            "x": [cost.method.label],
            "y": [float(f"{(cost.bytes / 1e6 if memory else cost.milliseconds):.4g}")],
        }
        for memory in (False, True)
        for label, found in costs.items()
        for cost in found
    ]


ITEM = Item("fig-runtime", "Runtime and memory of one iteration", "Figure 3, section 5.1", run)
