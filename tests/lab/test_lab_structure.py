"""What keeps the lab easy to find one's way in: names that mean one thing, short files, light results."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

import ddpnopt

PACKAGE = Path(ddpnopt.__file__).parent
RESULTS = Path(__file__).parents[2] / "results"
LONGEST_FILE = 350
LARGEST_RESULTS = 8_000_000


def sources() -> list[Path]:
    return [*(PACKAGE / "lab").rglob("*.py"), *(PACKAGE / "control").rglob("*.py")]


def test_no_class_name_means_two_things() -> None:
    where = defaultdict(list)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


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
