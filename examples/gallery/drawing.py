"""The pictures of the gallery: a loss curve, and what the model does."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpnopt.lab import style


def arguments() -> dict[str, Any]:
    """`--steps` and `--out`, where they are given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, help="of the training")
    parser.add_argument("--out", type=Path, help="folder for a picture")
    return {name: value for name, value in vars(parser.parse_args()).items() if value is not None}


@contextmanager
def picture(
    stem: Path, title: str, losses: Sequence[float], count: int, *, axes_shown: bool = False
) -> Iterator[list[Any]]:
    """The loss on the left, `count` axes on the right to draw on; saved at the end."""
    from matplotlib.figure import Figure

    with style.style():
        made = Figure(figsize=(8.4, 2.9))
        left, right = made.subfigures(1, 2, width_ratios=[1, 1.15])
        curve = left.subplots()
        curve.plot(range(1, len(losses) + 1), losses, color=style.COLOURS["ddpnopt"], linewidth=1.4)
        curve.set(xlabel="step", title="Training loss", yscale="log")
        rows = 3 if count > 6 else 1
        axes = list(right.subplots(rows, count // rows, squeeze=False).flat)
        for axis in axes:
            axis.grid(visible=False)
            if not axes_shown:
                axis.set_axis_off()
        made.suptitle(title, x=0.012, ha="left", fontsize=11, fontweight="bold")
        yield axes
        stem.parent.mkdir(parents=True, exist_ok=True)
        style.save(made, stem, ("png",))
