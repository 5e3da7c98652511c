"""`fig-spectrum`: the eigenvalues of the feedback in the prediction layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpnopt.lab.paper import fig_spectrum as spectrum
from ddpnopt.lab.paper.item import Context, write


def test_the_feedback_has_as_many_nontrivial_eigenvalues_as_the_hessian_of_the_loss_has_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spectrum, "CLUSTERS", (5, 12))
    context = Context(out=tmp_path, quick=True)
    result = spectrum.ITEM.run(context)
    counted = result.tables[0].frame["nontrivial eigenvalues"].tolist()
    assert counted == ["4", "11", "5", "12"]  # cross-entropy has the rank k - 1, a squared distance k
    assert [claim.holds for claim in result.claims] == [False, None, True, None]  # one seed cannot show growth
    folder = write(spectrum.ITEM, result, context)
    kept = json.loads((folder / "result.json").read_text())
    assert len(kept["pictures"][0]["series"]) == 4 * 3  # panels x (before training and two epochs)
    assert "Does not hold here: k = 5: 4" in kept["pictures"][0]["caption"]
