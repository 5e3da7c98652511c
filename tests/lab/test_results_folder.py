"""What is committed of the results: light, without stores of runs, and every figure once."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "results"
LARGEST_RESULTS = 8_000_000


@pytest.fixture
def committed() -> list[Path]:
    """The files of `results/` that are under version control."""
    try:
        answer = subprocess.run(["git", "ls-files", "-z", "."], cwd=RESULTS, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not in a clone of the repository")
    found = [RESULTS / name for name in answer.stdout.split("\0") if name]
    return [path for path in found if path.is_file()]


def test_the_results_are_light_without_stores_and_every_picture_is_there_once(committed: list[Path]) -> None:
    assert sum(path.stat().st_size for path in committed) < LARGEST_RESULTS
    assert [path for path in committed if path.suffix in (".sqlite", ".pt")] == []
    pictures = [path.with_suffix("") for path in committed if path.suffix in (".png", ".svg")]
    assert len(pictures) == len(set(pictures)) > 0


def test_no_picture_of_the_results_is_copied_into_the_documents(committed: list[Path]) -> None:
    documents = RESULTS.parent / "docs"
    pictures = {path.stem for path in committed if path.suffix == ".svg"}
    assert [path for path in documents.rglob("*.*") if path.suffix in (".png", ".svg") and path.stem in pictures] == []
    text = "\n".join(path.read_text(encoding="utf-8") for path in documents.rglob("*.md"))
    shown = re.findall(r"\(\.\./(results/[^)\s]+\.svg)\)", text)
    assert shown
    assert [path for path in shown if not (RESULTS.parent / path).is_file()] == []
