"""What is read from the folders of results, and what is said of those that are not whole."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from page_results import write_grid, write_table3, write_toy
from typer.testing import CliRunner

from ddpnopt.lab.cli import app
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.page.benches import parse
from ddpnopt.lab.page.build import write_page
from ddpnopt.lab.page.charts import chart
from ddpnopt.lab.page.items import MissingItem, ShownItem, read_item, read_items
from ddpnopt.lab.page.tables import ShownTable
from ddpnopt.lab.page.text import inline


def test_an_item_comes_back_as_it_was_written(results: Path) -> None:
    item = read_item(results / "fig-grid")
    assert isinstance(item, ShownItem)
    assert [claim.holds for claim in item.claims] == [True, False]
    assert item.quick
    assert item.tables[0].columns == ["data set", "method", "lr", "loss"]
    assert item.tables[0].rows[0][3] == "0.0250 ± 0.0050"
    assert item.pictures[0].image.source is not None
    assert {what for what, _ in item.machine} >= {"machine", "versions", "command"}


def test_the_paper_s_items_come_in_its_order_and_those_without_a_result_are_said(results: Path) -> None:
    items = read_items(results)
    assert [item.name for item in items if isinstance(item, ShownItem)] == ["table3", "fig-grid", "toy"]
    missing = {item.name: item.started for item in items if isinstance(item, MissingItem)}
    assert missing["fig-adam"]
    assert not missing["ours"]
    assert len(missing) == len(items) - 3


def test_an_item_the_page_has_no_title_for_is_shown_after_the_others(tmp_path: Path) -> None:
    shutil.copytree(write_toy(tmp_path), tmp_path / "fig-extra")
    assert [item.name for item in read_items(tmp_path) if isinstance(item, ShownItem)] == ["toy", "fig-extra"]


def test_a_table_and_a_figure_whose_files_are_gone_are_said_in_their_place(tmp_path: Path) -> None:
    folder = write_table3(tmp_path)
    for name in ("accuracy.csv", "accuracy.svg"):
        (folder / name).unlink()
    write_page(tmp_path, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "The table <em>accuracy</em> is missing" in text
    assert "The printed figure <em>accuracy</em> is missing" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"title": "half', "not whole JSON"),
        ("[]", "a JSON object was expected"),
        ('{"title": "T"}', "lacks 'where'"),
        (b"\xff\xfe", "not whole JSON"),
    ],
)
def test_a_damaged_result_is_an_error_that_names_the_file(tmp_path: Path, content: str | bytes, said: str) -> None:
    path = write_toy(tmp_path) / "result.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    shown = CliRunner().invoke(app, ["report", "--results", str(tmp_path)])
    assert shown.exit_code == 2
    assert str(path) in shown.stderr
    assert said in shown.stderr
    assert "ddpnopt reproduce toy" in shown.stderr
    assert not (tmp_path / "report.html").exists()


def test_a_series_of_unequal_lengths_names_the_file_and_the_series(tmp_path: Path) -> None:
    path = write_grid(tmp_path) / "result.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["pictures"][0]["series"][0]["y"].pop()
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ExperimentError, match=r"fig-grid/result\.json.*'SGD' needs lists x and y"):
        read_items(tmp_path)


def test_an_empty_table_file_names_the_file(tmp_path: Path) -> None:
    path = write_table3(tmp_path) / "accuracy.csv"
    path.write_text("", encoding="utf-8")
    with pytest.raises(ExperimentError, match=r"accuracy\.csv: is not a table"):
        read_items(tmp_path)


def test_no_folder_of_results_says_what_makes_one(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["report", "--results", str(tmp_path / "none")])
    assert shown.exit_code == 2
    assert "ddpnopt reproduce all" in shown.stderr


def test_an_out_that_cannot_be_written_says_so(results: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shown = CliRunner().invoke(app, ["report", "--results", str(results), "--out", str(tmp_path / "file" / "p.html")])
    assert shown.exit_code == 2
    assert "--out: cannot write" in shown.stderr


def test_every_claim_of_the_paper_that_does_not_hold_or_is_open_has_a_sentence_why() -> None:
    stored = [item for item in read_items(Path(__file__).parents[3] / "results") if isinstance(item, ShownItem)]
    claims = [(item.name, claim) for item in stored for claim in item.claims if claim.of_paper]
    assert len(claims) == 57
    assert [(name, claim.text) for name, claim in claims if not claim.holds and not claim.why] == []


def test_a_reason_stands_with_its_claim_in_the_summary_and_with_the_item(tmp_path: Path) -> None:
    claim = {"paper": "a", "ours": "b"}
    content = {
        "title": "T", "where": "W", "quick": False, "tables": [], "pictures": [], "notes": [], "machine": "",
        "claims": [
            {"text": "DIGITS: one", "holds": False, "why": "Too few seeds.", **claim},
            {"text": "DIGITS: two", "holds": True, **claim},
        ],
    }  # fmt: skip
    (tmp_path / "table3").mkdir()
    (tmp_path / "table3" / "result.json").write_text(json.dumps(content), encoding="utf-8")
    write_page(tmp_path, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count('<span class="why">Too few seeds.</span>') == 2


def test_the_command_counts_items_and_claims(results: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["report", "--results", str(results), "--out", str(tmp_path / "p.html")])
    assert shown.exit_code == 0
    assert "3 of 12 items; 3 claims of the paper: 1 hold, 1 do not, 1 open" in shown.stdout
    assert "fig-adam: not run to its end" in shown.stdout


def test_what_the_package_claims_of_itself_is_shown_with_its_item_and_not_counted(
    results: Path, tmp_path: Path
) -> None:
    path = results / "table3" / "result.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    own = {"text": "Ours is best.", "holds": True, "paper": "", "ours": "yes", "why": "Because.", "of_paper": False}
    path.write_text(json.dumps({**content, "claims": [*content["claims"], own]}), encoding="utf-8")
    shown = CliRunner().invoke(app, ["report", "--results", str(results), "--out", str(tmp_path / "p.html")])
    assert "3 claims of the paper: 1 hold" in shown.stdout
    assert (tmp_path / "p.html").read_text(encoding="utf-8").count("Ours is best.") == 1
    assert "Because." in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_what_this_machine_cannot_judge_is_shown_with_its_reason_and_not_counted(results: Path, tmp_path: Path) -> None:
    path = results / "fig-runtime" / "result.json"
    content = json.loads((results / "table3" / "result.json").read_text(encoding="utf-8"))
    about_gpu = {"text": "Fast.", "holds": None, "paper": "", "ours": "2", "why": "No GPU.", "judged": False}
    path.parent.mkdir()
    path.write_text(json.dumps({**content, "tables": [], "pictures": [], "claims": [about_gpu]}), encoding="utf-8")
    try:
        shown = CliRunner().invoke(app, ["report", "--results", str(results), "--out", str(tmp_path / "p.html")])
    finally:
        path.unlink()
        path.parent.rmdir()
    assert "3 claims of the paper: 1 hold, 1 do not, 1 open" in shown.stdout
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "1 further claim is shown and not counted" in text
    assert text.count("No GPU.") == text.count('<span class="badge not-judged">not judged</span>') == 2


def test_the_same_results_give_the_same_page(results: Path, tmp_path: Path) -> None:
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    for out in pages:
        write_page(results, out)
    assert pages[0].read_bytes() == pages[1].read_bytes()


def test_numbers_without_a_place_in_json_become_gaps() -> None:
    line = chart([{"label": "SGD", "x": [1, 2, 3], "y": [1.0, math.nan, math.inf], "spread": None}])["panels"][0][
        "lines"
    ][0]
    assert line["y"] == [1.0, None, None]


def test_one_seed_has_no_spread_rather_than_one_of_nil() -> None:
    lines = [
        {"label": str(s), "x": [1, 2], "y": [1.0, 2.0], "spread": s} for s in ([0.0, 0.0], [math.nan, math.nan], 0.5)
    ]
    assert [line["spread"] for line in chart(lines)["panels"][0]["lines"]] == [None, None, [0.5, 0.5]]


def test_axes_are_logarithmic_for_grids_of_rates_and_not_for_counts() -> None:
    def log_x(x: list[float]) -> bool:
        return bool(chart([{"label": "a", "x": x, "y": [1.0] * len(x)}])["panels"][0]["logX"])

    assert log_x([1e-4, 1e-3, 1e-2, 1e-1])
    assert log_x([16, 32, 64, 128])
    assert not log_x(list(range(1, 500)))
    assert not log_x([0.0, 0.1, 1.0, 10.0])


def test_a_label_has_one_colour_in_all_panels_and_no_two_share_one() -> None:
    series = [{"panel": p, "label": f"eps {k}", "x": [1, 2], "y": [1, 2]} for p in "ab" for k in range(8)]
    panels = chart([*series, {"panel": "b", "label": "DDPNOpt", "x": [1, 2], "y": [1, 2]}])["panels"]
    first, second = ({line["label"]: line["colour"] for line in panel["lines"]} for panel in panels)
    assert all(second[label] == colour for label, colour in first.items())
    assert len(set(second.values())) == 9


def test_rows_are_chosen_by_a_first_column_whose_names_come_again() -> None:
    again = ShownTable("t", "", ["data set", "lr"], [["WINE", "1"], ["WINE", "2"], ["DIGITS", "1"]])
    once = ShownTable("t", "", ["data set", "lr"], [["WINE", "1"], ["DIGITS", "1"]])
    assert (again.choices, once.choices) == (["WINE", "DIGITS"], [])


def test_the_measurements_pages_are_read_table_by_table() -> None:
    facts, parts = parse(
        "- machine: M\n\n### One\n\nWords.\n\n| a | b |\n| --- | ---: |\n| x | 1 |\n\n"
        "### Two\n\n| c |\n| --- |\n| y |\n"
    )
    assert facts == ["machine: M"]
    assert [(p.title, p.words, p.table.rows if p.table else None) for p in parts] == [
        ("One", ["Words."], [["x", "1"]]),
        ("Two", [], [["y"]]),
    ]


def test_text_of_results_is_never_markup_of_the_page(page: Path) -> None:
    assert inline("<script>`a<b`**c**") == "&lt;script&gt;<code>a&lt;b</code><strong>c</strong>"
    assert "<b>most</b>" not in page.read_text(encoding="utf-8")
