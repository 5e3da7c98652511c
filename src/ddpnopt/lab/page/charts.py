"""Series of a figure as data for the chart that the page draws: panels of lines, or of points over names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ddpnopt.lab.style import COLOURS

# Next to each other they differ in print and on a screen, light or dark; the methods' own colours come first.
PALETTE = ("#2f6fbb", "#2a9d8f", "#8a6bbe", "#b58900", "#d1477a", "#117733", "#5b6f86", "#661100", "#88a0c8", "#999933")
OURS = COLOURS["ddpnopt"]
WIDE = 100.0
"""From this ratio of largest to smallest on, an axis of positive numbers is logarithmic at first."""
GRID = 5.0


def chart(series: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the script of the page reads: `{"panels": [{"name", "kind", "x", "y", "logX", "logY", "lines"}]}`.

    Raises `ValueError` where a series is not `{"panel", "label", "x", "y", "spread"}` with lists of one length.
    """
    colours = _colours(str(each.get("label", "")) for each in series)
    panels: dict[str, list[dict[str, Any]]] = {}
    axes: dict[str, Mapping[str, Any]] = {}
    for position, each in enumerate(series):
        line = _line(each, position)
        line["colour"] = colours[line["label"]]
        panel = str(each.get("panel") or "")
        panels.setdefault(panel, []).append(line)
        axes.setdefault(panel, each)
    return {"panels": [_panel(name, lines, axes[name]) for name, lines in panels.items()]}


def _line(each: Mapping[str, Any], position: int) -> dict[str, Any]:
    label = str(each.get("label", f"series {position + 1}"))
    xs, ys, spread = each.get("x"), each.get("y"), each.get("spread")
    if not isinstance(xs, list) or not isinstance(ys, list) or len(xs) != len(ys):
        raise ValueError(f"series {label!r} needs lists x and y of the same length")
    if isinstance(spread, (int, float)):
        spread = [spread] * len(xs)
    if spread is not None and (not isinstance(spread, list) or len(spread) not in (0, len(xs))):
        raise ValueError(f"spread of series {label!r} must have one number for each x")
    deviations = [_rounded(_number(s, label)) for s in spread or []]
    return {
        "label": label,
        "x": [x if isinstance(x, str) else _number(x, label) for x in xs],
        "y": [_rounded(_number(y, label)) for y in ys],
        "spread": deviations if any(deviations) else None,  # of one seed there is none, rather than nil
    }


def _panel(name: str, lines: list[dict[str, Any]], said: Mapping[str, Any]) -> dict[str, Any]:
    xs = [x for line in lines for x in line["x"] if x is not None]
    named = any(isinstance(x, str) for x in xs)
    if named:  # one name makes all of them names
        for line in lines:
            line["x"] = [None if x is None else str(x) for x in line["x"]]
    ys = [y for line in lines for y in line["y"] if y is not None]
    return {
        "name": name,
        "kind": "names" if named else "lines",
        "x": str(said.get("x_label", "")),
        "y": str(said.get("y_label", "")),
        "logX": not named and _is_grid(xs),
        "logY": _is_wide(ys),
        "lines": lines,
    }


def _number(value: Any, label: str) -> float | None:
    """JSON has no NaN and no infinity: a gap."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"series {label!r} has {value!r} where a number should be")
    return value if math.isfinite(value) else None


def _rounded(value: float | None) -> float | None:
    """As many digits as the page can show: curves of thousands of steps stay small."""
    return None if value is None else float(f"{value:.5g}")


def _is_wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) >= WIDE


def _is_grid(values: Sequence[float]) -> bool:
    """Whether they grow by factors (learning rates, batch sizes) rather than by steps (epochs, iterations)."""
    places = sorted(set(values))
    if len(places) < 3 or places[0] <= 0 or places[-1] / places[0] < GRID:
        return False
    gaps = [b - a for a, b in pairwise(places)]
    factors = [b / a for a, b in pairwise(places)]
    return max(factors) / min(factors) < max(gaps) / min(gaps)


def _colours(labels: Any) -> dict[str, str]:
    """One colour for a label in all panels: a method's own where the label names one, else the next of the palette."""
    found: dict[str, str] = {}
    for label in labels:
        if label in found:
            continue
        key = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
        own = COLOURS.get(key) or (OURS if key.startswith("ddpnopt") else None)
        if own is None or own in found.values():
            free = [colour for colour in PALETTE if colour not in found.values()]
            own = free[0] if free else PALETTE[len(found) % len(PALETTE)]
        found[label] = own
    return found
