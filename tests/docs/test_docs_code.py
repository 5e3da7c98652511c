"""Every Python block of the documents runs."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import code_blocks
import pytest
import torch
from code_blocks import blocks, run_page

from ddpnopt import OpenLoopWarning

ROOT = Path(__file__).parents[2]
ELSEWHERE = {ROOT / "docs" / "control.md"}  # test_control_docs.py runs it, and looks at what it prints
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8") and page not in ELSEWHERE]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if any(not name.startswith("ddpnopt") for block in blocks(page) for name in block.needs):
        left_out = run_in_a_process_of_its_own(page)
    else:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", OpenLoopWarning)  # the pages speak of it
            left_out = run_page(page)
    if left_out:
        pytest.skip(f"not installed, so some blocks did not run: {', '.join(left_out)}")


def run_in_a_process_of_its_own(page: Path) -> list[str]:
    done = subprocess.run([sys.executable, code_blocks.__file__, str(page)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].removeprefix("left out:").split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_marked_in_the_one_way_that_is_run(page: Path) -> None:
    fences = re.findall(r"^ *```([^\n`]*)$", page.read_text(encoding="utf-8"), flags=re.M)
    assert {fence.split()[0] for fence in fences if fence.strip()} <= {"python", "bash", "toml", "yaml", "bibtex"}


def test_an_error_in_a_block_tells_page_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- python\na = 1\n-->\n\n```python\nb = a\nassert b == 2\n```\n", encoding="utf-8")
    first, second = blocks(page)
    scope: dict[str, object] = {}
    first.run(scope)
    with pytest.raises(AssertionError) as failed:
        second.run(scope)
    assert (str(failed.traceback[-1].path), failed.traceback[-1].lineno + 1) == (str(page), 9)


def test_a_block_whose_needs_are_not_there_is_known(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- needs: torch, no_such_module.part -->\n```python\n1\n```\n```python\n2\n```\n", encoding="utf-8"
    )
    assert [block.missing for block in blocks(page)] == [["no_such_module.part"], []]
