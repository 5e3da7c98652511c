"""`table4`: how time and memory of a step grow with batch, width and depth, compared with the analytic growth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ddpnopt.lab import style
from ddpnopt.lab.methods.method import UNIT
from ddpnopt.lab.methods.registry import METHODS
from ddpnopt.lab.paper.captions import caption, finish
from ddpnopt.lab.paper.item import Claim, Context, Item, Picture, Result, Table
from ddpnopt.lab.paper.table4_ladders import DENSE, LADDERS, LARGE, SMALL, WHAT, Ladder, Measured
from ddpnopt.lab.timing.networks import scaled
from ddpnopt.lab.timing.speed import Cost, measure

COLOURS = {
    "Adam": style.COLOURS["adam"],
    "DDPNOpt": style.COLOURS["ddpnopt"],
    "DDPNOpt(model)": style.COLOURS["ddpnopt-kfac"],
    "DDPNOpt, value='full'": style.COLOURS["ddpnopt-adam"],
    "vanilla DDP": style.COLOURS["sgd-m"],
    "vanilla DDP, no Jacobians": style.COLOURS["ekfac"],
}
TOLERANCE = 0.35
"""On an exponent, in both directions: fixed costs bend the lines, and so does the cache."""
ORDERS = 100.0
"""Of magnitude, at least two."""
MANY = 200.0
"""The range of an axis from which on only powers of ten are labelled."""
QUICK_SIZES = 3


def run(context: Context) -> Result:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = [each for ladder in LADDERS for each in climb(ladder, context)]
    finally:
        torch.set_num_threads(before)
    return result_of(found, context.quick)


def result_of(found: Sequence[Measured], quick: bool) -> Result:
    """Claims, table and pictures of what was measured."""
    claims = judge(found)
    if quick:  # small sizes, one round: nothing but Python's overhead can be seen
        claims = [Claim(c.text, None, c.paper, c.ours) for c in claims]
    pictures = []
    for ladder, name in zip(LADDERS, ("large", "small", "dense"), strict=True):
        mine = [each for each in found if each.ladder.name == ladder.name]
        words = caption(f"Cost of a step, {ladder.name}; in brackets the measured exponents.", claims)
        pictures.append(Picture(f"complexity-{name}", words, draw(mine, words), _series(mine)))
    return Result(
        claims,
        [Table("table4", "Exponents of time and memory of a whole step, measured / analytic.", table(found))],
        pictures,
        _notes(quick),
    )


def climb(ladder: Ladder, context: Context) -> list[Measured]:
    """Every method of a ladder at every size."""
    repeats = 1 if context.quick else ladder.rounds
    methods = [METHODS[UNIT], *(row.method for row in ladder.rows)]
    costs: dict[str, dict[str, list[Cost]]] = {row.method.name: {what: [] for what in WHAT} for row in ladder.rows}
    for number, what in enumerate(WHAT):
        for case in ladder.cases(what)[: QUICK_SIZES if context.quick else None]:
            context.on_progress(f"{ladder.name}, {what} {case[what]}", number, len(WHAT))
            for cost in measure(scaled(case["width"], case["depth"]), case["batch"], methods, repeats):
                if cost.method.name in costs and cost.applies:
                    costs[cost.method.name][what].append(cost)
    return [Measured(ladder, row, costs[row.method.name]) for row in ladder.rows]


def judge(found: Sequence[Measured]) -> list[Claim]:
    by = {(each.ladder.name, each.row.label): each for each in found}
    adam, ours, slow = by[LARGE.name, "Adam"], by[LARGE.name, "DDPNOpt"], by[DENSE.name, "vanilla DDP"]
    small, factored = by[DENSE.name, "DDPNOpt"], by[SMALL.name, "vanilla DDP, no Jacobians"]
    within = {memory: all(_within(ours, what, memory) for what in WHAT) for memory in (False, True)}
    like = all(abs(ours.exponent(what, False) - adam.exponent(what, False)) <= TOLERANCE for what in WHAT)
    top = [each.values("batch", False)[-1] for each in (slow, small)]
    cubic = all(_within(slow, what, False) for what in ("batch", "width"))
    where = f"at batch {slow.sizes('batch')[-1]} and width {DENSE.fixed['width']}"
    many = f"{top[0] / top[1]:.0f} times DDPNOpt's time {where}"
    off_slow = (
        f"An exponent in B or X is more than {TOLERANCE:g} away from 3 at the sizes that were measured. It does take "
        f"{many}."
    )
    holds = cubic and top[0] > ORDERS * top[1]
    slow_why = off_slow if not cubic else f"It takes less than {ORDERS:g} times DDPNOpt's time."
    off = f"An exponent is more than {TOLERANCE:g} away from the analytic one at the sizes that were measured."
    return [
        Claim(
            "The time of DDPNOpt grows as B X^2 L.",
            within[False],
            "B 1, X 2, L 1",
            _exponents(ours, False),
            "" if within[False] else f"{off} Those of Adam, analytically the same: {_exponents(adam, False)}.",
        ),
        Claim(
            "Its memory grows as X^2 L + B X.",
            within[True],
            "B up to 1, X 2, L 1",
            _exponents(ours, True),
            "" if within[True] else f"{off} The activations, B X L, are part of the measured memory.",
        ),
        Claim(
            "The time of DDPNOpt grows as that of Adam does.",
            like,
            "the same",
            f"DDPNOpt's exponents: {_exponents(ours, False)}; Adam's: {_exponents(adam, False)}",
            "" if like else f"Exponents differ by more than {TOLERANCE:g}. {_ratios(ours, adam)}",
        ),
        Claim(
            "Vanilla DDP grows much faster, with the cube of B X; DDPNOpt takes orders of magnitude less.",
            holds,
            "B 3, X 3",
            f"{_exponents(slow, False)}; {many}; the same steps computed without Jacobians of the batch: "
            f"{_exponents(factored, False)}",
            "" if holds else slow_why,
        ),
    ]


def _ratios(ours: Measured, other: Measured) -> str:
    """How many times the other's time ours takes, at the ends of each ladder."""
    ends = []
    for what in WHAT:
        pairs = list(zip(ours.values(what, False), other.values(what, False), strict=False))
        first, last = (mine / theirs for mine, theirs in (pairs[0], pairs[-1]))
        sizes = ours.sizes(what)
        ends.append(f"{what} {sizes[0]} {first:.1f}, {sizes[len(pairs) - 1]} {last:.1f}")
    return f"Its time as a multiple of {other.row.label}'s: {'; '.join(ends)}."


def _within(each: Measured, what: str, memory: bool) -> bool:
    analytic = (each.row.memory if memory else each.row.time)[WHAT.index(what)]
    if memory and what == "batch":  # X^2 L + B X: anything between the two terms
        return -TOLERANCE <= each.exponent(what, memory) <= analytic + TOLERANCE
    return abs(each.exponent(what, memory) - analytic) <= TOLERANCE


def _exponents(each: Measured, memory: bool) -> str:
    return ", ".join(f"{letter} {each.exponent(what, memory):.2f}" for letter, what in zip("BXL", WHAT, strict=True))


def table(found: Sequence[Measured]) -> pd.DataFrame:
    rows = []
    for each in found:
        row: dict[str, Any] = {
            "method": each.row.label,
            "measured on": each.ladder.name,
            "analytic time": each.row.formulas[0],
            "analytic memory": each.row.formulas[1],
            "from": "paper" if each.row.in_paper else "ours",
        }
        for memory, title in ((False, "time"), (True, "memory")):
            analytic = each.row.memory if memory else each.row.time
            for letter, what, known in zip("BXL", WHAT, analytic, strict=True):
                row[f"{title}, {letter}"] = f"{each.exponent(what, memory):.2f} / {known:g}"
        rows.append(row)
    return pd.DataFrame(rows)


def draw(found: Sequence[Measured], words: str) -> Figure:
    """Time above, memory below; batch, width and depth from left to right."""
    with style.style():
        made, axes = style.figure(len(WHAT), 2, width=4.2, height=3.1)
        for number, where in enumerate(axes):
            _panel(where, WHAT[number % len(WHAT)], number >= len(WHAT), found)
        return finish(made, f"Growth of a step's cost: {found[0].ladder.name}", words)


def _panel(axes: Axes, what: str, memory: bool, found: Sequence[Measured]) -> None:
    for each in found:
        colour = COLOURS[each.row.label]
        label = f"{each.row.label} ({each.exponent(what, memory):.1f})"
        axes.plot(each.sizes(what), each.values(what, memory), color=colour, marker="o", markersize=3.5, label=label)
    sizes = max((each.sizes(what) for each in found), key=len)
    axes.set(xscale="log", yscale="log", xlabel=what, title="Peak memory (MB)" if memory else "Milliseconds per step")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.45)  # room for the legend above the lines
    # over many decades only their beginnings, or the labels would run into each other
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if high < MANY * low else (1.0,), numticks=8))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.legend(loc="upper left", fontsize=7.5, handlelength=1.2)


def _series(found: Sequence[Measured]) -> list[dict[str, Any]]:
    return [
        {
            "panel": f"{'Peak memory (MB)' if memory else 'Milliseconds per step'}, {what}",
            "label": each.row.label,
            "x": list(each.sizes(what)),
            "y": [float(f"{value:.4g}") for value in each.values(what, memory)],
        }
        for memory in (False, True)
        for what in WHAT
        for each in found
    ]


def _notes(quick: bool) -> list[str]:
    large, small, dense = LARGE.fixed, SMALL.fixed, DENSE.fixed
    rounds = 1 if quick else LARGE.rounds
    notes = [
        "The paper's table is analytic and about the backward pass; here a whole step is measured, on one thread: the "
        "forward passes are in it, and the activations, B X L, are part of everybody's memory. An exponent is fitted "
        "over the upper half of the sizes, where fixed costs matter least.",
        f"Large networks: what does not grow is batch {large['batch']}, width {large['width']}, depth "
        f"{large['depth']}. "
        f"Small ones: batch {small['batch']}, width {small['width']}, depth {small['depth']}; there Python's overhead "
        "flattens the lines of the fast methods.",
        f"DDPNOpt is the paper's factored form with M = I. Median of {rounds} round(s), beside vanilla DDP with its "
        f"Jacobians of {1 if quick else DENSE.rounds}.",
        "Vanilla DDP is Algorithm 1 as written, with the Jacobians of the stacked batch, at batches larger than the "
        f"width (batch {dense['batch']}, width {dense['width']}, depth {dense['depth']}): its Q_uu has X^2 rows, whose "
        "own share, X^6, is not in the paper's table. The rest of the package computes the same steps by products with "
        "inputs and weights, which need no such Jacobians and grow as the square of B: the row 'no Jacobians'. Judged "
        "on that row, as it was before, the claim about the cube does not hold. The sizes with Jacobians were fixed "
        "after single steps had been timed at six of them.",
    ]
    if quick:
        notes.append(f"Quick: the {QUICK_SIZES} smallest sizes of each, one round; not enough to decide a claim.")
    return notes


ITEM = Item("table4", "Growth of time and memory", "Table 4, section 5.1", run)
