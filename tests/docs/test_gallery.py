"""Every example of the gallery and every case of the page on trouble runs, in small form."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from scripts import script

from ddpnopt.lab.view.symptoms import symptoms

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "examples" / "gallery"
NAMES = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "drawing")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Imports a script with its folder on the path, and forgets it."""
    before = set(sys.modules)

    def of_folder(folder: str, name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(ROOT / "examples" / folder))
        return script(f"examples/{folder}/{name}.py", f"example_{folder}_{name}")

    yield of_folder
    for name in set(sys.modules) - before:
        if name in ("drawing", "cases", "draw", "problems"):
            del sys.modules[name]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_of_the_gallery_trains_and_draws_its_picture(name: str, load, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert load("gallery", name).main(steps=4, out=tmp_path) is not None
    assert (tmp_path / f"gallery-{name}.png").stat().st_size > 5000


def test_the_gallery_shows_every_example_and_names_only_what_exists() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"`examples/gallery/{name}.py`" in page
        assert f"(img/gallery-{name}.png)" in page
        assert (ROOT / "docs" / "img" / f"gallery-{name}.png").is_file()


def test_physics_informed_networks_are_compared_in_tables_and_a_picture(load, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ends = load("pinn", "compare").main(seconds=0.02, seeds=1, out=tmp_path)
    assert {(row["problem"], row["method"].split()[0]) for row in ends} == {
        (problem, method) for problem in ("poisson", "burgers") for method in ("DDPNOpt", "Adam", "L-BFGS")
    }
    assert (tmp_path / "fixed.csv").is_file()
    assert (tmp_path / "pinn-fixed.png").stat().st_size > 5000


@pytest.mark.parametrize("name", ["Skipped steps", "Undone steps", "Repeated steps", "Loss not recognised"])
def test_a_case_of_trouble_shows_its_symptom_and_can_be_drawn(name: str, load, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    draw = load("trouble", "draw")
    log = draw.run(name, 40, tmp_path)
    assert name in [each.name for each in symptoms(log)]
    assert draw.draw(name, log, tmp_path).stat().st_size > 5000


def test_the_first_steps_are_measured_for_every_method_on_both_tasks(
    load,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure = load("first_steps", "measure")
    monkeypatch.setattr(measure, "SHOWN", (1, 3))
    monkeypatch.setattr(measure, "SEEDS", 1)
    measure.main(tmp_path)
    with (tmp_path / "first-steps.csv").open(encoding="utf-8", newline="") as file:
        rows = [(row["task"], row["method"], row["step"]) for row in csv.DictReader(file)]
    with (ROOT / "results" / "first-steps" / "first-steps.csv").open(encoding="utf-8", newline="") as file:
        kept = {(row["task"], row["method"]) for row in csv.DictReader(file)}
    assert {row[:2] for row in rows} == kept
    assert len(rows) == 2 * len(kept)


def test_the_table_of_the_gallery_has_what_every_example_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    benchmark = script("benchmarks/gallery.py", "benchmark_gallery")
    assert sorted(benchmark.EXAMPLES) == NAMES
    monkeypatch.setattr(benchmark, "EXAMPLES", ("pinn",))
    benchmark.main(tmp_path, tmp_path / "table", "--steps", "2")
    with (tmp_path / "table" / "gallery.csv").open(encoding="utf-8", newline="") as file:
        [row] = csv.DictReader(file)
    assert row["example"] == "pinn"
    assert row["printed"].startswith("largest error")
    assert (tmp_path / "gallery-pinn.png").is_file()


def test_the_table_of_troubles_has_what_is_said_about_every_case(load, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    draw = load("trouble", "draw")
    for name in set(draw.CASES) - {"Skipped steps"}:
        del draw.CASES[name]
    draw.STEPS = 25
    draw.main(tmp_path, tmp_path / "table")
    with (tmp_path / "table" / "trouble.csv").open(encoding="utf-8", newline="") as file:
        assert [row["symptom"] for row in csv.DictReader(file)] == ["Skipped steps"]
    with (ROOT / "results" / "trouble" / "trouble.csv").open(encoding="utf-8", newline="") as file:
        kept = {row["symptom"] for row in csv.DictReader(file)}
    assert kept == set(draw.TELLING)


def test_every_symptom_has_a_case_and_a_picture(load) -> None:  # type: ignore[no-untyped-def]
    draw = load("trouble", "draw")
    page = (ROOT / "docs" / "trouble.md").read_text(encoding="utf-8")
    assert set(draw.CASES) == set(draw.TELLING)
    for name in draw.CASES:
        assert f"\n## {name}\n" in page
        assert f"(img/{draw.stem(name)}.svg)" in page
        assert (ROOT / "docs" / "img" / f"{draw.stem(name)}.svg").is_file()
