"""One look for every figure: quiet axes, and one colour for a method wherever it appears."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

INK = "#22272e"
SOFT_INK = "#5b6570"
GRID = "#e4e8ec"

# DDPNOpt is the strong colour, baselines are clearly apart from it and from each other, also for readers who
# cannot distinguish red from green (after Paul Tol's "bright" and "muted" schemes).
COLOURS = {
    "ddpnopt": "#c8381e",
    "given-lr": "#e9987f",
    "sgd": "#8f98a3",
    "sgd-m": "#4a5562",
    "rmsprop": "#2a9d8f",
    "adam": "#2f6fbb",
    "adamw": "#7fb2e5",
    "kfac": "#b58900",
    "ekfac": "#8a6bbe",
    "ddpnopt-sgd": "#e07a3f",
    "ddpnopt-rmsprop": "#d1477a",
    "ddpnopt-adam": "#a3195b",
    "ddpnopt-kfac": "#e3a008",
    "ddpnopt-ekfac": "#6d28b8",
    # Newer methods, in panels of their own: two of them share a colour with a classical method.
    "soap": "#117733",
    "muon": "#aa4499",
    "schedule-free": "#2f6fbb",
    "prodigy": "#b58900",
    # Ablations, in figures of their own.
    "open-loop": "#8f98a3",
    "uncoupled": "#4a5562",
    "sqrt": "#e07a3f",
    "gn": "#2f6fbb",
    "cross-entropy": "#2a9d8f",
    "sampled": "#8a6bbe",
}
LARGEST_LOSS = 1e4
SPARE = ("#117733", "#aa4499", "#999933", "#332288", "#88ccee", "#661100")

FONTS = ["Inter", "Helvetica Neue", "Arial", "DejaVu Sans"]
RC: Any = {
    "figure.dpi": 110,
    "savefig.dpi": 200,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": SOFT_INK,
    "axes.edgecolor": "#c3cad1",
    "axes.linewidth": 0.8,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT_INK,
    "ytick.color": SOFT_INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "svg.fonttype": "none",
    # Without a salt the identifiers in an SVG are random, and the same figure differs from run to run.
    "svg.hashsalt": "ddpnopt",
}


@contextmanager
def style() -> Iterator[None]:
    """Draws in the common look, and leaves matplotlib's own settings as they were."""
    with mpl.rc_context(RC):
        # Only the fonts that are installed: matplotlib warns of every other one.
        mpl.rcParams["font.sans-serif"] = _installed(FONTS)
        yield


def colour(method: str, position: int = 0) -> str:
    """The colour of a method; of one that has none, a spare by its position."""
    return COLOURS.get(method, SPARE[position % len(SPARE)])


def figure(columns: int = 1, rows: int = 1, *, width: float = 4.6, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row, without the global state of pyplot."""
    made = Figure(figsize=(width * columns, height * rows))
    return made, list(made.subplots(rows, columns, squeeze=False).flat)


def save(made: Figure, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Writes `<stem>.png` and `<stem>.svg`, or one of them."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    with style():  # SVG text as text: the settings count when the file is written
        for path in paths:
            # No date: a repeated run gives the same file.
            made.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
            if path.suffix == ".svg":
                path.write_text(compact_svg(path.read_text(encoding="utf-8")), encoding="utf-8")
    return paths


def compact_svg(text: str) -> str:
    """Coordinates to a hundredth of a point: a smaller file that looks the same."""
    return _ATTRIBUTE.sub(lambda found: _DECIMALS.sub(_rounded, found.group()), text)


_ATTRIBUTE = re.compile(r'(?:\b(?:d|x|y|width|height|cx|cy|r)|transform)="[^"]*"')
_DECIMALS = re.compile(r"-?\d+\.\d{3,}(?![\de])")


def _rounded(number: re.Match[str]) -> str:
    # A scale factor is small and exact digits matter; a coordinate is large.
    value = float(number.group())
    return number.group() if abs(value) < 1 else f"{value:.2f}".rstrip("0").rstrip(".")


def smoothed(losses: Sequence[float], window: int) -> NDArray[np.float64]:
    """The mean of each value and the window - 1 before it (of fewer at the start)."""
    # A loss of 1e30 on the way would swamp all later ones in the running sum; no axis shows it anyway.
    bounded = np.minimum(np.asarray(losses, dtype=np.float64), LARGEST_LOSS)
    sums = np.cumsum(np.concatenate([[0.0], bounded]))
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - window, 0)
    averaged: NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
    return averaged


def _installed(wanted: list[str]) -> list[str]:
    from matplotlib.font_manager import fontManager

    present = {font.name for font in fontManager.ttflist}
    return [name for name in wanted if name in present] or ["DejaVu Sans"]
