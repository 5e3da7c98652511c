"""`ours`: the accuracy of `DDPNOpt(model)` at its defaults, compared with the tuned baselines of Table 3."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.paper.item import Claim, Context, Item, Result, Table
from ddpnopt.lab.paper.table3_columns import BASELINES, columns
from ddpnopt.lab.paper.table3_runs import TunedMethod, measure, notes, settings_table


def run(context: Context) -> Result:
    chosen = columns(context)
    found = [measure(context, column, (*BASELINES, column.paper_method, "ddpnopt")) for column in chosen]
    frame = pd.DataFrame([_row(entries) for entries in found])
    caption = (
        "Test accuracy in percent, mean ± deviation over seeds: DDPNOpt(model) at its defaults compared with "
        "methods whose learning rates were tuned on held-out data."
    )
    tables = [Table("accuracy", caption, frame), settings_table([e for entries in found for e in entries])]
    extra = (
        "DDPNOpt(model) is this package's batch-coupled form, which the paper does not have; the claims are ours. It "
        "is tested with the average of its weights, opt.eval(), which is part of it; the baselines have none."
    )
    return Result([_claim(entries) for entries in found], tables, notes=[*notes(context, chosen), extra])


def _row(entries: Sequence[TunedMethod]) -> dict[str, str]:
    labels = {each.method: method(each.method).label for each in entries}
    labels |= {"ddpnopt": "DDPNOpt(model)", entries[0].column.paper_method: "DDPNOpt, the paper's"}
    return {
        "data set": entries[0].column.label,
        **{labels[each.method]: each.seeds.accuracy.text(2) for each in entries},
    }


def _claim(entries: Sequence[TunedMethod]) -> Claim:
    """Untuned, it should be within the spread of the best tuned baseline."""
    [own] = [each for each in entries if each.method == "ddpnopt"]
    best = max((e for e in entries if e.method in BASELINES), key=lambda e: e.seeds.accuracy.mean)
    mine, theirs = own.seeds.accuracy, best.seeds.accuracy
    spread = max(mine.std, theirs.std)
    return Claim(
        f"{own.column.label}: DDPNOpt(model), untuned, is at most a standard deviation below the best tuned baseline",
        None if len(own.seeds.runs) < 2 else mine.mean >= theirs.mean - spread,
        "not in the paper",
        f"{mine.text(2)}; best tuned: {method(best.method).label} {theirs.text(2)}",
        of_paper=False,
    )


ITEM = Item("ours", "Accuracy of DDPNOpt(model) at its defaults", "in addition to Table 3", run, stored=True)
