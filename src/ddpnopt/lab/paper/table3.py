"""Table 3: accuracy of seven methods on seven data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import pandas as pd

from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.paper.item import Claim, Context, Item, Result, Table
from ddpnopt.lab.paper.table3_columns import BASELINES, MOST_DEFAULT_SEEDS, READING, Column, columns
from ddpnopt.lab.paper.table3_kept import with_earlier
from ddpnopt.lab.paper.table3_runs import TunedMethod, measure, notes, settings_table
from ddpnopt.lab.paper.verdicts import FEWEST_SEEDS, RULE, all_of, fair, joint_seeds, lead_over, would_decide
from ddpnopt.lab.timing.machine import command

STANDARD, CONTROL = ("SGD-m", "RMSprop", "Adam", "EKFAC"), ("E-MSA", "vanilla DDP")
HEADINGS = (*STANDARD, *CONTROL, "DDPNOpt")


def run(context: Context) -> Result:
    chosen = columns(context)
    found, slow, own = [], [], []
    for column in chosen:
        found.append(measure(context, column, (*BASELINES, column.paper_method)))
        own.append(measure(context, column, ("ddpnopt",), seeds=column.default_seeds))
        quicker = measure(context, column, ("emsa", column.paper_method), size=column.slow, seeds=column.slow_seeds)
        slowest = measure(context, column, ("vanilla-ddp",), size=column.slow, seeds=column.ddp_seeds)
        slow.append([quicker[0], *slowest, quicker[1]])
    claims = [claim for pair in zip(found, slow, strict=True) for claim in (best_claim(pair[0]), ocp_claim(pair[1]))]
    orders = [_ordering(entries) for entries in found]
    tables = [
        Table(
            "accuracy",
            "Test accuracy in percent, mean ± deviation over seeds; the paper's in brackets. DDPNOpt(model), untuned, "
            f"is this package's own form, with {MOST_DEFAULT_SEEDS} seeds at most, and takes part in no claim.",
            _frame(found, STANDARD).assign(**{"DDPNOpt(model)": [each.seeds.accuracy.text(2) for [each] in own]}),
        ),
        Table(
            "control",
            "DDPNOpt and the other methods of optimal control, all at a size that those can bear, on the seeds that "
            "both have; the paper's in brackets.",
            _frame(slow, CONTROL),
        ),
        Table(
            "ordering",
            "The methods from best to worst, and how many pairs stand as in the paper.",
            pd.DataFrame(orders),
        ),
        settings_table([each for parts in zip(found, own, slow, strict=True) for part in parts for each in part]),
    ]
    extra = [
        "DDPNOpt has the adaptive diagonal for fully connected networks and the Kronecker-factored Gauss-Newton matrix "
        f"for convolutional ones, as in the paper, with {READING.label} and Proposition 2, respectively.",
        "E-MSA and vanilla DDP are compared with DDPNOpt at fewer epochs (see the table of settings), on the "
        "seeds that both have; nothing of theirs is in the paper's ranges, so they keep their default settings, but "
        "for the damping of vanilla DDP on DIGITS, chosen on held-out data.",
        f"A claim holds or fails where the difference, seed by seed, exceeds {RULE}, against every rival; within it "
        "it is open. Seeds on which a rival diverged or did not learn are left out, in its favour; one that learned on "
        "fewer than three seeds, or had one epoch, is not beaten. Among several rivals the margin by which one refutes "
        "is wider, and so is the margin for a second look at seeds that left a claim open (SVHN: 6 before 12).",
        "Vanilla DDP on 784 inputs would factor matrices of 25,000 rows at each step: left out.",
    ]
    result = Result(claims, tables, notes=[*notes(context, chosen), *extra])
    return result if context.quick else with_earlier(result, chosen, context.out / ITEM.name, command())


def _known(column: Column, heading: str) -> float | None:
    return column.paper[HEADINGS.index(heading)]


def _heading(name: str) -> str:
    return "DDPNOpt" if name.startswith("ddpnopt") else method(name).label


def _frame(found: Sequence[Sequence[TunedMethod]], rivals: Sequence[str]) -> pd.DataFrame:
    """DDPNOpt and those it is compared with, a row for each data set."""
    rows = []
    for entries in found:
        column = entries[0].column
        ours = {_heading(each.method): each.seeds.accuracy.text(2) for each in entries}
        cells = {}
        for heading in (*rivals, "DDPNOpt"):
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


def best_claim(entries: Sequence[TunedMethod]) -> Claim:
    """Whether the paper's most accurate method is that here, too."""
    column = entries[0].column
    by_name = {_heading(each.method): each for each in entries}
    ours, paper = _both(entries)
    best = max(paper, key=lambda name: paper[name])
    holds, why, left_out = _ahead(by_name, best)
    same = _pairs(ours, paper)
    leading = max(ours, key=lambda name: ours[name])
    shown = dict.fromkeys((best, "DDPNOpt", leading))
    return Claim(
        f"{column.label}: {best} is the most accurate of the methods",
        holds,
        ", ".join(f"{name} {paper[name]:.2f}" for name in sorted(paper, key=lambda n: -paper[n])[:3]),
        f"{', '.join(_text(by_name[name]) for name in shown)}; {same[0]} of {same[1]} pairs ordered as in the paper"
        f"{left_out}",
        why,
    )


def ocp_claim(entries: Sequence[TunedMethod]) -> Claim:
    """Whether DDPNOpt is more accurate than the other methods of optimal control, at the same size and seeds."""
    by_name = {_heading(each.method): each for each in entries}
    rivals = [name for name in by_name if name != "DDPNOpt"]
    column = by_name["DDPNOpt"].column
    holds, why, left_out = _ahead(by_name, "DDPNOpt")
    paper = {name: known for name in ("DDPNOpt", *rivals) if (known := _known(column, name)) is not None}
    epochs = by_name["DDPNOpt"].seeds.task.epochs
    return Claim(
        f"{column.label}: DDPNOpt outperforms {' and '.join(rivals)}",
        holds,
        ", ".join(f"{name} {known:.2f}" for name, known in paper.items()),
        f"after {epochs} epoch{'s' if epochs > 1 else ''}: "
        + ", ".join(_text(by_name[name]) for name in ("DDPNOpt", *rivals))
        + left_out,
        why,
    )


def _ahead(by_name: Mapping[str, TunedMethod], best: str) -> tuple[bool | None, str, str]:
    """Whether one method is more accurate than all others; if not, its lead where it is not beyond the margin.

    Last, the seeds that were left out because a rival did not learn.
    """
    mine, looked = by_name[best].seeds.accuracies(), by_name[best].column.looked
    rivals = {name: rival.seeds for name, rival in by_name.items() if name != best}
    verdicts, leads, within, without = [], [], [], []
    for name, rival in rivals.items():
        learned = rival.learned[: len(mine)]
        verdict, lead = lead_over(mine, rival.accuracies(), learned, len(rivals), looked)
        # one epoch of a small part is too little; one of a whole image set, as in --full, is a training
        epochs = rival.task.epochs if rival.task.n_train is not None else max(rival.task.epochs, 2)
        verdict, reason = fair(verdict, rival_seeds=sum(learned), rival_epochs=epochs)
        verdicts.append(verdict)
        lost = len(learned) - sum(learned)
        if lost:
            without.append(f"{lost} of {name}")
        if not verdict:
            if sum(learned) < FEWEST_SEEDS and lost:
                reason = f"it learned on {sum(learned)} of {len(learned)} seeds"
            within += [] if reason or lead.seeds < FEWEST_SEEDS else [lead]
            seeds = reason or f"{lead.seeds} seed{'s' if lead.seeds > 1 else ''}"
            leads.append(f"{name} {lead.text(2)} ({seeds})")
    holds = all_of(verdicts)
    what = "Not ahead beyond" if holds is None else "At least one is ahead of it, beyond"
    why = f"{what} the margin of error; its lead: {', '.join(leads)}."
    if holds is None and len(within) == len(leads):
        why += f" {would_decide(joint_seeds(within, len(rivals)), min(each.seeds for each in within)).capitalize()}."
    elif holds is None:
        why += f" {FEWEST_SEEDS} seeds at least on which each rival learns, in two epochs or more, could decide it."
    left_out = f"; seeds left out because the rival did not learn: {', '.join(without)}" if without else ""
    return holds, "" if holds else why, left_out


def _text(each: TunedMethod) -> str:
    return f"{_heading(each.method)} {each.seeds.accuracy.text(2)}"


ITEM = Item("table3", "Accuracy of seven methods on seven data sets", "Table 3", run, stored=True)
