"""Table 3: accuracy of seven methods on seven data sets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pandas as pd

from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.paper.item import Claim, Context, Item, Result, Table
from ddpnopt.lab.paper.table3_columns import BASELINES, OCP, SLOW_SEEDS, Column, columns
from ddpnopt.lab.paper.table3_runs import TunedMethod, measure, notes, settings_table

HEADINGS = ("SGD-m", "RMSprop", "Adam", "EKFAC", "E-MSA", "vanilla DDP", "DDPNOpt")


def run(context: Context) -> Result:
    chosen = columns(context)
    found = [measure(context, column, (*BASELINES, *OCP, column.paper_method)) for column in chosen]
    claims = [claim for entries in found for claim in _claims(entries)]
    orders = [_ordering(entries) for entries in found]
    tables = [
        Table(
            "accuracy", "Test accuracy in percent, mean ± deviation over seeds; the paper's in brackets.", _frame(found)
        ),
        Table(
            "ordering",
            "The methods from best to worst, and how many pairs stand as in the paper.",
            pd.DataFrame(orders),
        ),
        settings_table([entry for entries in found for entry in entries]),
    ]
    extra = [
        "DDPNOpt is the paper's form: the adaptive diagonal with V_xx of each sample for fully connected networks, the "
        "Kronecker-factored Gauss-Newton matrix with Proposition 2 for convolutional ones.",
        "E-MSA and vanilla DDP have fewer epochs, as many as run in a few minutes (see the table of settings), and "
        f"{SLOW_SEEDS} seeds at most, one with convolutions; nothing of theirs is in the paper's ranges, so they keep "
        "their default settings, but for the damping of vanilla DDP on DIGITS, chosen on held-out data.",
        "Vanilla DDP on 784 inputs would factor matrices of 25,000 rows at each step: left out.",
    ]
    return Result(claims, tables, notes=[*notes(context, chosen), *extra])


def _known(column: Column, heading: str) -> float | None:
    return column.paper[HEADINGS.index(heading)]


def _heading(name: str) -> str:
    return "DDPNOpt" if name.startswith("ddpnopt") else method(name).label


def _frame(found: Sequence[Sequence[TunedMethod]]) -> pd.DataFrame:
    rows = []
    for entries in found:
        column = entries[0].column
        ours = {_heading(each.method): each.seeds.accuracy.text(2) for each in entries}
        cells = {}
        for heading in HEADINGS:
            known = _known(column, heading)
            cells[heading] = ours.get(heading, "-") + (" (N/A)" if known is None else f" ({known:.2f})")
        rows.append({"data set": column.label, **cells})
    return pd.DataFrame(rows)


def _ordering(entries: Sequence[TunedMethod]) -> dict[str, str]:
    """Both orders as text, over the methods that both have."""
    ours, paper = _both(entries)
    same = _pairs(ours, paper)
    return {
        "data set": entries[0].column.label,
        "here": " > ".join(sorted(ours, key=lambda name: -ours[name])),
        "in the paper": " > ".join(sorted(paper, key=lambda name: -paper[name])),
        "pairs as in the paper": f"{same[0]} of {same[1]}",
    }


def _both(entries: Sequence[TunedMethod]) -> tuple[dict[str, float], dict[str, float]]:
    means = {_heading(each.method): each.seeds.accuracy.mean for each in entries}
    known = {name: value for name in means if (value := _known(entries[0].column, name)) is not None}
    return {name: means[name] for name in known}, known


def _pairs(ours: dict[str, float], paper: dict[str, float]) -> tuple[int, int]:
    pairs = list(combinations(paper, 2))
    return sum((ours[a] - ours[b]) * (paper[a] - paper[b]) > 0 for a, b in pairs), len(pairs)


def _claims(entries: Sequence[TunedMethod]) -> list[Claim]:
    column = entries[0].column
    by_name = {_heading(each.method): each for each in entries}
    ours, paper = _both(entries)

    def text(name: str) -> str:
        return f"{name} {by_name[name].seeds.accuracy.text(2)}"

    best_paper, best_ours = max(paper, key=lambda n: paper[n]), max(ours, key=lambda n: ours[n])
    same = _pairs(ours, paper)
    first = text("DDPNOpt")
    others = f"best: {text(best_ours)}"
    made = [
        Claim(
            f"{column.label}: {best_paper} is the most accurate of the methods",
            ours[best_paper] >= ours[best_ours],
            ", ".join(f"{name} {paper[name]:.2f}" for name in sorted(paper, key=lambda n: -paper[n])[:3]),
            f"{others}; {first}; {same[0]} of {same[1]} pairs ordered as in the paper",
        )
    ]
    rivals = [name for name in ("E-MSA", "vanilla DDP") if name in by_name]
    if rivals:
        made.append(
            Claim(
                f"{column.label}: DDPNOpt outperforms {' and '.join(rivals)}",
                all(ours["DDPNOpt"] > by_name[name].seeds.accuracy.mean for name in rivals),
                ", ".join(f"{name} {paper[name]:.2f}" for name in ("DDPNOpt", *rivals) if name in paper),
                ", ".join(text(name) for name in ("DDPNOpt", *rivals)),
            )
        )
    return made


ITEM = Item("table3", "Accuracy of seven methods on seven data sets", "Table 3", run, stored=True)
