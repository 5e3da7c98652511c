"""What the paper says about its grid, whether the runs bear it out, and if not, what it depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from ddpnopt.lab.paper.captions import verdict
from ddpnopt.lab.paper.digits_runs import ACCURACY, LOSS, Cells
from ddpnopt.lab.paper.item import Claim
from ddpnopt.lab.paper.readings import Reading
from ddpnopt.lab.paper.verdicts import Estimate, all_of, better, held_elsewhere, open_because

CLOSE = 0.2
"""Relative distance up to which a baseline's training loss counts as the paper's."""
STRANGE = 1.0
"""Relative distance beyond which a learning rate does something else here than in the paper."""
FEWEST_RATES = 3
"""Without so many learning rates nothing can be said of most settings."""

ByReading = Mapping[Reading, Sequence[Cells]]


def claims_of(each: Cells) -> list[Claim]:
    """Both statements about one curvature, at the learning rates where the baseline is the paper's."""
    part = comparable(each)
    return [judge(part) for judge in JUDGES]


def explained(each: Cells, judged: Reading, compared: Sequence[tuple[Reading, Cells]]) -> list[Claim]:
    """The claims with the rates that were left out, and behind one that does not hold what the verdict depends on."""
    part = comparable(each)
    made = []
    for judge in JUDGES:
        claim = judge(part)
        if part is not each:
            claim = replace(claim, ours=f"{claim.ours}; {_left_out(each, judge)}")
        if not claim.holds:
            others = [
                (reading, {claim.text: judge(comparable(its)).holds}) for reading, its in compared if reading != judged
            ]
            claim = replace(claim, why=f"{claim.why} {held_elsewhere(claim, others)}".strip())
        made.append(claim)
    return made


def consistent(each: Cells) -> Claim:
    """Better in more than half of the cells, and on the mean over all of them, in both measures."""
    ours, paper, verdicts, within = [], [], [], []
    for measure, digits in ((LOSS, 3), (ACCURACY, 2)):
        gains = [cell for row in each.gains(measure) for cell in row]
        ahead = sum(map(better, gains))
        overall = Estimate.of(fmean(seed) for seed in zip(*gains, strict=True))
        most = ahead > len(gains) / 2
        if overall.positive is None:
            within.append(open_because(f"The mean gain in {measure.partition(' (')[0]}", overall))
        verdicts.append(None if overall.positive is None else overall.positive == most and most)
        ours.append(
            f"{measure.partition(' (')[0]} better in {ahead} of {len(gains)} cells, "
            f"by {overall.text(digits)} on average"
        )
        rows = each.paper(measure)
        if rows:
            sign = -1 if measure == LOSS else 1
            known = sum(sign * (cell - row[0]) > 0 for row in rows for cell in row[1:])
            paper.append(f"{known} of {sum(len(row) - 1 for row in rows)}")
    holds = all_of(verdicts)
    return Claim(
        f"{each.grid.label}: feedback improves on the baseline in most settings",
        holds,
        "loss better in {}, accuracy in {}".format(*paper) if paper else "most (a picture)",
        ", ".join(ours),
        "" if holds else _why(holds, " ".join(within)),
    )


def grows(each: Cells) -> Claim:
    """Compare the mean gap in training loss at the larger two learning rates with that at the smaller two."""
    gaps = [[fmean(seed) for seed in zip(*row, strict=True)] for row in each.gains(LOSS)]  # rates, seeds
    low, high = ([fmean(seed) for seed in zip(*part, strict=True)] for part in (gaps[:2], gaps[2:]))
    more = Estimate.of(b - a for a, b in zip(low, high, strict=True))
    text = "mean gap in training loss {:.3f} at the smaller two, {:.3f} at the larger two"
    paper = "a picture"
    if each.grid.loss:
        known = [fmean(row[0] - cell for cell in row[1:]) for row in each.grid.loss]
        paper = text.format(fmean(known[:2]), fmean(known[2:]))
    return Claim(
        f"{each.grid.label}: the gap becomes larger as the learning rate increases",
        more.positive,
        paper,
        f"{text.format(fmean(low), fmean(high))}, {more.text(3)} more",
        "" if more.positive else _why(more.positive, open_because("The growth", more)),
    )


JUDGES: Sequence[Callable[[Cells], Claim]] = (consistent, grows)


def _why(holds: bool | None, within: str) -> str:
    return within if holds is None else "It is the other way round, beyond the margin of error."


def strange_rates(each: Cells) -> list[int]:
    """Rows in which the baseline itself, without any feedback, is not where the paper's is."""
    rows = []
    for i, row in enumerate(each.values(LOSS) if each.grid.loss else ()):
        known, found = each.grid.loss[i][0], Estimate.of(row[0])
        if abs(found.mean / known - 1) > STRANGE and abs(found.mean - known) > found.margin:
            rows.append(i)
    return rows


def comparable(each: Cells) -> Cells:
    """The rates at which the baseline, without any feedback, is the paper's: the others cannot judge what it says.

    All of them where fewer than three are left.
    """
    strange = strange_rates(each)
    kept = [i for i in range(len(each.rows)) if i not in strange]
    if not strange or len(kept) < FEWEST_RATES:
        return each
    grid = each.grid
    chosen = replace(
        grid,
        lrs=[grid.lrs[i] for i in kept],
        loss=[grid.loss[i] for i in kept],
        accuracy=[grid.accuracy[i] for i in kept],
    )
    return Cells(chosen, [each.rows[i] for i in kept])


def _left_out(each: Cells, judge: Callable[[Cells], Claim]) -> str:
    """Which rates do not count and why, and what the verdict would be with them."""
    grid = each.grid
    at = ", ".join(
        f"{grid.lrs[i]:g}, where {grid.label} itself has {fmean(each.values(LOSS)[i][0]):.2f} here and "
        f"{grid.loss[i][0]:.2f} in the paper"
        for i in strange_rates(each)
    )
    return f"without the learning rate {at} (with it {_becomes(judge(each).holds)})"


def _becomes(holds: bool | None) -> str:
    return "is open" if holds is None else verdict(holds)


def tally(found: Sequence[Claim]) -> str:
    """How many of the claims hold, do not, and are open."""
    counts = [sum(claim.holds is verdict for claim in found) for verdict in (True, False, None)]
    return "{} hold, {} do not, {} open".format(*counts)
