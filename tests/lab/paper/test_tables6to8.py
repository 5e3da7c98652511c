"""The verdicts of Tables 6 to 8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paper_runs import DIGITS, outcome

from ddpnopt.lab.paper import tables6to8
from ddpnopt.lab.paper.item_runs import SeedRuns


def pair_of_runs(loss: Sequence[float], accuracy: Sequence[float]) -> tuple[SeedRuns, SeedRuns]:
    """A baseline, and runs that are lower by `loss` and more accurate by `accuracy`."""
    base = [outcome(90.0 + seed, 0.1 + 0.01 * seed) for seed in range(len(loss))]
    ours = [replace(b, metric=b.metric + a, train_loss=b.train_loss - x)
            for b, x, a in zip(base, loss, accuracy, strict=True)]  # fmt: skip
    return SeedRuns(base, DIGITS), SeedRuns(ours, DIGITS)


def test_most_cases_of_the_tables_are_judged_together() -> None:
    small, none, worse = [0.001, 0.003, -0.001, 0.002], [0.5, -0.4, 0.1, -0.2], [-0.004, -0.005, -0.004, -0.005]
    mixed = tables6to8._in_most_cases([pair_of_runs(small, small)] * 3)
    alone = tables6to8._claims(tables6to8.TABLES[0], *pair_of_runs(small, small))
    assert [claim.holds for claim in alone.values()] == [None, None], "each within its margin of error"
    assert mixed.holds is None, "six times the same seeds are not six times the evidence"
    other = [[0.003, -0.001, 0.002, 0.001], [0.002, 0.001, 0.003, -0.001], [-0.001, 0.002, 0.001, 0.003]]
    apart = [pair_of_runs(small, other[0]), pair_of_runs(other[1], other[2]), pair_of_runs(small, other[1])]
    assert tables6to8._in_most_cases(apart).holds is True
    assert tables6to8._in_most_cases([pair_of_runs(worse, worse)] * 3).holds is False
    assert tables6to8._in_most_cases([pair_of_runs(none, none)] * 3).holds is None


def test_what_the_papers_figures_do_not_show_is_no_claim() -> None:
    last = tables6to8.TABLES[2]
    assert last.accuracy[1] < last.accuracy[0]
    assert list(tables6to8._claims(last, *pair_of_runs([0.1] * 3, [0.1] * 3))) == ["training loss"]


def test_tables_with_unlike_numbers_of_seeds_are_judged_together_on_those_that_all_have() -> None:
    few, many = [0.002, 0.003, 0.001], [0.002, 0.003, 0.001, -9.0]
    pairs = [pair_of_runs(many, many), pair_of_runs(few, few), pair_of_runs(few, few)]
    assert tables6to8._in_most_cases(pairs) == tables6to8._in_most_cases([pair_of_runs(few, few)] * 3)
