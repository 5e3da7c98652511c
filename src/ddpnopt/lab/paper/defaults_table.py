"""`ours`: the accuracy of `DDPNOpt(model)` at its defaults, compared with the tuned methods of Table 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.paper import table3
from ddpnopt.lab.paper.item import Claim, Context, Item, Result, Table
from ddpnopt.lab.paper.table3_columns import BASELINES, Column, columns
from ddpnopt.lab.paper.table3_kept import with_earlier
from ddpnopt.lab.paper.table3_runs import measure, notes, settings_table
from ddpnopt.lab.paper.table3_tuned import tuned_column
from ddpnopt.lab.tables import Spread
from ddpnopt.lab.timing.machine import command

OURS = "ddpnopt"
NO_RATE = "none"


@dataclass(frozen=True, eq=False)
class Compared:
    """All methods on one data set."""

    column: Column
    accuracies: Mapping[str, Spread]
    settings: pd.DataFrame
    notes: Sequence[str] = ()


def run(context: Context) -> Result:
    chosen = columns(context)
    found = [_compare(context, column) for column in chosen]
    caption = (
        "Test accuracy in percent, mean ± deviation over seeds: DDPNOpt(model) at its defaults, without a learning "
        "rate, compared with methods whose learning rates were tuned on held-out data."
    )
    settings = settings_table([])
    tables = [
        Table("accuracy", caption, pd.DataFrame([_row(each) for each in found])),
        replace(settings, frame=pd.concat([each.settings for each in found], ignore_index=True)),
    ]
    extra = (
        "DDPNOpt(model) is this package's batch-coupled form, which the paper does not have; the claims are ours. It "
        "is tested with the average of its weights, opt.eval(), which is part of it; the baselines have none."
    )
    kept = [note for each in found for note in each.notes]
    result = Result([_claim(each) for each in found], tables, notes=[*notes(context, chosen), *kept, extra])
    return result if context.quick else with_earlier(result, chosen, context.out / ITEM.name, command())


def _compare(context: Context, column: Column) -> Compared:
    """The tuned methods do not depend on DDPNOpt's defaults: where Table 3 has them, they are not trained again."""
    shortened = context.quick or context.full
    kept = None if shortened else tuned_column(column, context.out / table3.ITEM.name)
    tuned = () if kept else (*BASELINES, column.paper_method)
    entries = measure(context, column, (*tuned, OURS))
    accuracies = {each.method: each.seeds.accuracy for each in entries}
    frame = settings_table(entries).frame
    frame.loc[frame["method"] == method(OURS).label, "learning rate"] = NO_RATE
    if kept is None:
        return Compared(column, accuracies, frame)
    return Compared(column, {**kept.accuracies, **accuracies}, pd.concat([kept.settings, frame]), [kept.note])


def _row(each: Compared) -> dict[str, str]:
    labels = {name: method(name).label for name in each.accuracies}
    labels |= {OURS: "DDPNOpt(model)", each.column.paper_method: "DDPNOpt, the paper's"}
    return {
        "data set": each.column.label,
        **{labels[name]: accuracy.text(2) for name, accuracy in each.accuracies.items()},
    }


def _claim(each: Compared) -> Claim:
    """Untuned, it should be within the spread of the best tuned baseline."""
    name = max((name for name in each.accuracies if name in BASELINES), key=lambda name: each.accuracies[name].mean)
    mine, theirs = each.accuracies[OURS], each.accuracies[name]
    below, spread = theirs.mean - mine.mean, max(mine.std, theirs.std)
    holds = None if each.column.seeds < 2 else below <= spread
    deviations = f"with deviations of {theirs.std:.2f} and {mine.std:.2f}"
    return Claim(
        f"{each.column.label}: DDPNOpt(model), untuned, is at most a standard deviation below the best tuned baseline",
        holds,
        "not in the paper",
        f"{mine.text(2)}; best tuned: {method(name).label} {theirs.text(2)}",
        "" if holds is not False else f"It is {below:.2f} below, {deviations}.",
        of_paper=False,
    )


ITEM = Item("ours", "Accuracy of DDPNOpt(model) at its defaults", "in addition to Table 3", run, stored=True)
