"""No figure in README or docs that a file under `results/` does not bear out."""

from __future__ import annotations

import importlib.util
import re
import shutil
from bisect import bisect_left
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

# Numbers of the README that are no measurements: versions, settings, the citation.
SETTINGS = {
    "3.10", "3.11", "3.13", "2.5", "2.7", "2.9", "2.13", "2.15", "0.1.0", "16", "512", "2,000", "18",
    "2021", "2002.08809",
}  # fmt: skip


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_figures", ROOT / "docs" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


figures = module()
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


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/results.md"])
def test_no_measured_number_stands_outside_a_mark(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for pattern in (r"<!--= .*?<!--/-->", r"<!--.*?-->", r"<img[^>]*>", r"```.*?```", r"`[^`]*`", r"\]\([^)]*\)"):
        text = re.sub(pattern, " ", text, flags=re.S)
    found = re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)*", text)
    allowed = SETTINGS | (
        {"1", "784", "1024", "10", "256", "128", "8", "6,000", "10,000", "0.4", "0.6", "0.8"}
        if "docs" in page
        else set()
    )
    assert sorted(set(found) - allowed) == []


def test_new_results_are_written_into_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results" / "suite"
    results.mkdir(parents=True)
    shutil.copy(ROOT / "results" / "suite" / "suite.csv", results)
    text = (results / "suite.csv").read_text(encoding="utf-8")
    fresh = module()
    before = fresh.figure("suite ddpnopt ahead")
    (results / "suite.csv").write_text(text.replace(",ahead,", ",level,"), encoding="utf-8")
    monkeypatch.setattr(fresh, "RESULTS", tmp_path / "results")
    fresh.rows.cache_clear()
    page = tmp_path / "page.md"
    page.write_text(f"ahead on <!--= suite ddpnopt ahead -->{before}<!--/-->.", encoding="utf-8")
    assert fresh.renew(page)
    assert page.read_text(encoding="utf-8") == "ahead on <!--= suite ddpnopt ahead -->0<!--/-->."


def test_a_mark_that_names_nothing_is_an_error() -> None:
    with pytest.raises(KeyError, match="no figure 'guess x'"):
        figures.figure("guess x")


# Measured figures for which there is no file under results/ yet: fewer are welcome, more are not.
NOT_BORNE_OUT = {
    "README.md": {"2002.08809"},  # the number of the paper
    "docs/baselines.md": {"66.7"},
    "docs/distributed.md": {"103.7", "976.9", "312.6", "274.9", "47.4"},
    "docs/method.md": {
        "0.0212",
        "0.1487",
        "0.0569",
        "0.0371",
        "0.0556",
        "0.3856",
        "0.1071",
        "0.0708",
        "0.5642",
        "0.0332",
        "0.369",
    },  # the last is the paper's
}


@pytest.fixture(scope="module")
def measured() -> list[float]:
    """Every number of every table under results/."""
    texts = [
        path.read_text(encoding="utf-8")
        for path in figures.RESULTS.rglob("*.*")
        if path.suffix in (".csv", ".md", ".json")
    ]
    return sorted(
        {abs(float(number)) for text in texts for number in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", text)}
    )


@pytest.mark.parametrize(
    "page", [page for page in figures.PAGES if page.parent.name != "api"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_decimal_of_a_page_is_a_number_of_some_result(page: Path, measured: list[float]) -> None:
    text = page.read_text(encoding="utf-8")
    for pattern in (r"<!--.*?-->", r"```.*?```", r"`[^`]*`", r"\]\([^)]*\)"):
        text = re.sub(pattern, " ", text, flags=re.S)
    decimals = set(re.findall(r"(?<![\w.-])\d+\.\d+(?![\w.]*\d)", text))
    missing = {number for number in decimals if not _is_there(number, measured)}
    assert missing <= NOT_BORNE_OUT.get(str(page.relative_to(ROOT)), set())


def _is_there(number: str, measured: list[float]) -> bool:
    """Rounded to the digits that the page shows."""
    half = 0.5 * 10.0 ** -len(number.split(".")[1]) + 1e-12
    place = bisect_left(measured, float(number) - half)
    return place < len(measured) and measured[place] <= float(number) + half
