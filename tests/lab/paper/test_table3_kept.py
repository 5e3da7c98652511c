"""Table 3 measured in parts: what is measured again takes the place of what was there, and the rest stays."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from ddpnopt.lab.paper.item import Claim, Context, Result, Table, write
from ddpnopt.lab.paper.table3 import ITEM
from ddpnopt.lab.paper.table3_columns import COLUMNS, columns
from ddpnopt.lab.paper.table3_kept import with_earlier

WINE, DIGITS, MNIST = COLUMNS[:3]


def result(*labels: str, holds: bool | None = None, cell: str = "90.00", notes: tuple[str, ...] = ()) -> Result:
    frame = pd.DataFrame([{"data set": label, "Adam": cell} for label in labels])
    claims = [Claim(f"{label}: DDPNOpt outperforms E-MSA", holds, "", "") for label in labels]
    return Result(claims, [Table("accuracy", "Accuracy.", frame)], notes=notes)


def earlier(folder: Path, *, quick: bool = False) -> Path:
    notes = ("wine, fcn: 60 epochs.", "digits, fcn: 15 epochs.", "Every method has its own rate.")
    return write(ITEM, result("WINE", "DIGITS", notes=notes), Context(folder, quick=quick))


def test_a_data_set_that_is_measured_again_replaces_its_rows_and_claims_and_leaves_the_others(tmp_path: Path) -> None:
    folder = earlier(tmp_path)
    new = with_earlier(result("DIGITS", "MNIST, FCN", holds=True, cell="95.00"), [DIGITS, MNIST], folder, "again")
    assert [(claim.text.partition(":")[0], claim.holds) for claim in new.claims] == [
        ("WINE", None),
        ("DIGITS", True),
        ("MNIST, FCN", True),
    ]
    assert new.tables[0].frame.values.tolist() == [["WINE", "90.00"], ["DIGITS", "95.00"], ["MNIST, FCN", "95.00"]]


def test_with_another_number_of_seeds_a_data_set_replaces_itself_too(tmp_path: Path) -> None:
    [more] = columns(Context(tmp_path, seeds=30, datasets=("digits",)))
    assert more != DIGITS
    new = with_earlier(result("DIGITS", cell="95.00"), [more], earlier(tmp_path), "again")
    assert new.tables[0].frame.values.tolist() == [["WINE", "90.00"], ["DIGITS", "95.00"]]
    assert len(new.claims) == 2
    assert not any(note.startswith("digits, fcn: 15") for note in new.notes)


def test_a_note_on_a_data_set_that_is_measured_again_is_dropped(tmp_path: Path) -> None:
    notes = ("WINE: seven seeds.", "DIGITS: fifteen seeds.")
    folder = write(ITEM, result("WINE", "DIGITS", notes=notes), Context(tmp_path, quick=False))
    new = with_earlier(result("DIGITS"), [DIGITS], folder, "again")
    assert "WINE: seven seeds." in new.notes
    assert "DIGITS: fifteen seeds." not in new.notes


def test_the_notes_say_which_command_measured_each_data_set_and_keep_the_set_up_of_the_others(tmp_path: Path) -> None:
    folder = earlier(tmp_path)
    first = json.loads((folder / "result.json").read_text(encoding="utf-8"))["machine"].rpartition("`ddpnopt")[2]
    new = with_earlier(result("DIGITS", notes=("digits, fcn-6: 8 epochs.",)), [DIGITS], folder, "again")
    assert list(new.notes) == [
        f"WINE: measured by `ddpnopt{first}.",
        "DIGITS: measured by `again`.",
        "digits, fcn-6: 8 epochs.",
        "wine, fcn: 60 epochs.",
        "Every method has its own rate.",
    ]
    write(ITEM, new, Context(tmp_path))
    third = with_earlier(result("MNIST, FCN"), [MNIST], folder, "a third time")
    assert list(third.notes)[1:3] == ["DIGITS: measured by `again`.", "MNIST, FCN: measured by `a third time`."]


def test_nothing_of_a_quick_result_is_kept_and_nothing_is_needed(tmp_path: Path) -> None:
    alone = result("DIGITS")
    assert with_earlier(alone, [DIGITS], tmp_path / "table3", "again") is alone
    assert with_earlier(alone, [DIGITS], earlier(tmp_path, quick=True), "again") is alone
