"""No figure in README or docs that a file under `results/` does not bear out."""

from __future__ import annotations

import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
from scripts import script
from settings_of_pages import NOT_MEASURED
from unmarked import prose, unmarked

from ddpnopt.ddp import distance, step_length

ROOT = Path(__file__).parents[2]

# Written whole by the script that measures, into the page and under results/ alike.
WRITTEN = {"docs/models.md": "models/models.md", "docs/losses-table.md": "losses/losses.md"}


FIGURES = ("docs/figures.py", "docs_figures")
figures = script(*FIGURES)
PROSE = [name for page in figures.PAGES if (name := str(page.relative_to(ROOT))) not in WRITTEN]
MARKED = [page for page in figures.PAGES if "<!--= " in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", MARKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_marked_figure_is_that_of_the_results(page: Path) -> None:
    wrong = [f"{name}: {shown}, the results say {real}" for name, shown, real in figures.marks(page) if shown != real]
    assert wrong == [], "`python docs/figures.py` writes the figures of the results into the pages"


@pytest.mark.parametrize("page", MARKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_begins_with_a_mark(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    broken = [number for number, line in enumerate(lines, start=1) if line.lstrip().startswith("<!--= ")]
    assert broken == [], "Markdown ends the paragraph there: a comment at the start of a line is a block of its own"


def test_readme_and_the_page_of_results_have_marked_figures() -> None:
    pages = {ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("results", "speed", "suite", "from-adam"))}
    assert all(len(list(figures.marks(page))) >= 8 for page in pages)
    assert pages | {ROOT / "docs" / f"{name}.md" for name in ("index", "limits", "trouble", "gallery")} <= set(MARKED)


@pytest.mark.parametrize("page", PROSE)
def test_every_number_is_marked_or_no_measurement_by_a_stated_rule(page: str) -> None:
    text, listed = (ROOT / page).read_text(encoding="utf-8"), NOT_MEASURED.get(page, {})
    found = unmarked(text, [phrase for phrases in listed.values() for phrase in phrases])
    assert found == [], (
        "a measured figure is marked with where it comes from (docs/figures.py); the phrase of one that is set and not "
        "measured belongs into tests/docs/settings_of_pages.py, with the reason"
    )


@pytest.mark.parametrize("page", NOT_MEASURED)
def test_every_listed_phrase_is_in_its_page_and_needed(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    phrases = [phrase for listed in NOT_MEASURED[page].values() for phrase in listed]
    assert [phrase for phrase in phrases if phrase not in prose(text)] == []
    for phrase in phrases:
        assert unmarked(text, [other for other in phrases if other != phrase]) != [], f"{phrase!r} excuses nothing"


def test_it_is_said_what_writes_each_folder_of_the_results() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("| folder of `results/` |")[2]
    said = [name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.partition(" | ")[0])]
    folders = {path.relative_to(figures.RESULTS).parts[0] for path in figures.RESULTS.rglob("*.*")} - {"report.html"}
    # `make run` writes one that is not under version control
    missing = {folder for folder in folders - {"compare"} if not any(fnmatch(folder, name) for name in said)}
    assert missing == set()


@pytest.mark.parametrize(("page", "result"), WRITTEN.items())
def test_a_page_that_a_script_writes_is_that_of_the_results(page: str, result: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == (figures.RESULTS / result).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    [
        "It reaches 95.3 % on DIGITS.",
        "It is behind on 6 of 45 tasks.",
        "24/15/6 of them",
        "A step takes 2.2 times as long.",
        "max pooling is ten times as fast",
        "about twice the time of SGD",
        "ahead by 4 points",
        "three points behind",
        "| network | time |\n| --- | --- |\n| CNN, batch 128 | 1.92 |",
        "the loss fell from 0.87\nto 0.012",
        "3 steps were undone",
        "366 torch calls",
        "- **Memory** is 4.2 MB above SGD's",
        "accuracy = 97.1",
    ],
)
def test_a_measurement_without_a_mark_is_found(text: str) -> None:
    assert unmarked(text) != []


@pytest.mark.parametrize(
    "text",
    [
        "Tables 6 to 8 and Figure 4a, Eq. 13, 14, line 12 of Algorithm 3",
        "(Liu, Chen and Theodorou, ICLR 2021), arXiv 2002.08809",
        "Python 3.10 to 3.13 and torch 2.5, 2.7, 2.9 and the newest; version 0.1.0",
        "FCN 784-1024-1024-10, batch 256, three seeds, 10 epochs",
        "It is ahead on <!--= suite ddpnopt ahead -->67<!--/--> tasks.",
        "`lr=3` and 1 / (1 + s), mu = 1, 2 (c_t - c), n^2, A^1/2",
        "| learning rate | loss |\n| --- | --- |\n| 0.4 | <!--= grid 0.4 / SGD -->0.1<!--/--> |",
        "after 160 steps, learning rates 0.4 and 0.6, weight decay of 0.01",
        "ResNet-18, CIFAR-10, Conv2d",
    ],
)
def test_what_is_no_measurement_needs_no_mark(text: str) -> None:
    assert unmarked(text) == []


def test_new_results_are_written_into_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results" / "suite"
    results.mkdir(parents=True)
    shutil.copy(ROOT / "results" / "suite" / "suite.csv", results)
    text = (results / "suite.csv").read_text(encoding="utf-8")
    fresh = script(*FIGURES)
    before = fresh.figure("suite ddpnopt ahead")
    (results / "suite.csv").write_text(text.replace(",ahead,", ",level,"), encoding="utf-8")
    monkeypatch.setattr(fresh, "RESULTS", tmp_path / "results")
    fresh.rows.cache_clear()
    page = tmp_path / "page.md"
    page.write_text(f"ahead on <!--= suite ddpnopt ahead -->{before}<!--/-->.", encoding="utf-8")
    assert fresh.renew(page)
    assert page.read_text(encoding="utf-8") == "ahead on <!--= suite ddpnopt ahead -->0<!--/-->."


def test_a_page_with_a_mark_that_leads_nowhere_is_named_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = script(*FIGURES)
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("<!--= constant step_length.REACH -->?<!--/-->", encoding="utf-8")
    bad.write_text(
        "<!--= constant step_length.REACH -->?<!--/--> <!--= cell no.csv / a / b -->1<!--/-->", encoding="utf-8"
    )
    monkeypatch.setattr(fresh, "ROOT", tmp_path)
    (tmp_path / "src").mkdir()
    shutil.copy(ROOT / "src" / "ddpnopt" / "ddp" / "step_length.py", tmp_path / "src")
    monkeypatch.setattr(fresh, "PAGES", (bad, good))
    before = bad.read_text(encoding="utf-8")
    assert fresh.main() == 1
    assert bad.read_text(encoding="utf-8") == before
    assert good.read_text(encoding="utf-8") == f"<!--= constant step_length.REACH -->{step_length.REACH:g}<!--/-->"
    said = capsys.readouterr()
    assert "bad.md is left as it is" in said.err
    assert "no.csv" in said.err
    assert said.out == "good.md\n"


def test_a_mark_that_names_nothing_is_an_error() -> None:
    with pytest.raises(KeyError, match="no figure 'guess x'"):
        figures.figure("guess x")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cell table.csv / DIGITS / SGD", "91.09 ± 0.79 (91.68)"),
        ("cell table.csv / DIGITS / SGD / 1", "91.1 ± 0.8 (91.7)"),
        ("cell table.csv / DIGITS / SGD / mean 1", "91.1"),
        ("cell table.csv / DIGITS / SGD / plain", "91.09 ± 0.79"),
        ("cell table.csv / DIGITS / SGD / bracket 0", "92"),
        ("cell two.md#Second / a & 2 / value", "4"),
        ("cell two.md#Second / a & 1 / value / percent 0", "310"),
        ("range two.md#Second / a & 1 | a & 2 / value / 1", "3.1 to 4.0"),
        ("ratio two.md#First / b / a / value / 2", "2.00"),
    ],
)
def test_a_mark_reads_any_table(name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table.csv").write_text("data,SGD\nDIGITS,91.09 ± 0.79 (91.68)\n", encoding="utf-8")
    (tmp_path / "two.md").write_text(
        "# First\n\n| | value |\n| --- | --- |\n| a | 1 |\n| b | 2 |\n\n"
        "# Second\n\n| key | number | value |\n| --- | --- | --- |\n| a | 1 | **3.1** |\n| a | 2 | 4 |\n",
        encoding="utf-8",
    )
    fresh = script(*FIGURES)
    monkeypatch.setattr(fresh, "RESULTS", tmp_path)
    assert fresh.figure(name) == text


def test_a_row_that_is_not_there_or_there_twice_is_an_error() -> None:
    with pytest.raises(KeyError, match="0 cells"):
        figures.figure("cell paper-form/paper-form.csv / 0.5 / SGD")
    with pytest.raises(KeyError, match="3 cells"):
        figures.figure("cell defaults/defaults.md / Adam / digits")


def test_a_mark_reads_constants_of_the_source() -> None:
    assert figures.figure("constant step_length.REACH") == f"{step_length.REACH:g}"
    assert figures.figure("constant step_length.START / percent") == f"{100 * step_length.START:g}"
    assert figures.figure("constant distance.SECOND") == f"{distance.SECOND:g}"
    assert figures.figure("constant sketched.WORK") == "2^22, 2^25"
    with pytest.raises(KeyError, match="0 constants"):
        figures.figure("constant step_length.ABSENT")
