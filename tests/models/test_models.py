"""Models and loops of others: `DDPNOpt(model)` trains them about as well as AdamW, or refuses and names the way out."""

from __future__ import annotations

import pytest
from registry import CASES
from trial import Case, adamw, ddpnopt, passes

ENTRIES = [
    pytest.param(entry, id=name, marks=pytest.mark.xfail(reason=entry.fails) if entry.fails else ())
    for name, entry in CASES.items()
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_it_trains_about_as_well_as_adamw_or_names_the_way_out(entry: Case) -> None:
    for package in entry.needs:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'ddpnopt[models]'")
    ours = ddpnopt(entry)
    if entry.refused is not None:
        assert ours.refusal is not None
        assert entry.refused in ours.refusal
        return
    assert ours.refusal is None, ours.refusal
    theirs = adamw(entry)
    assert passes(ours, theirs), f"{ours.before:.4g} -> {ours.after:.4g}, AdamW {theirs.after:.4g}"


def test_there_are_enough_cases_of_every_group() -> None:
    assert len(CASES) >= 40
    assert len({entry.group for entry in CASES.values()}) >= 6
