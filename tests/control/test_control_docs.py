"""The page's code blocks run in order, and the examples draw their pictures."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_code_blocks_of_the_page_run_in_order(capsys) -> None:
    page = (ROOT / "docs" / "control.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    assert len(blocks) >= 6
    scope: dict[str, object] = {}
    for block in blocks:
        exec(block, scope)
    assert "converged: gradient 249.5608979308" in capsys.readouterr().out


def test_pictures_of_the_page_exist() -> None:
    page = (ROOT / "docs" / "control.md").read_text()
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", page)
    assert len(pictures) == 3
    for picture in pictures:
        assert (ROOT / "docs" / picture).stat().st_size > 10_000


def test_unicycle_example_prints_quadratic_convergence_and_saves_its_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = ROOT / "examples" / "control" / "unicycle.py"
    run = subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(tmp_path), "PATH": ""},
    )
    ddp = run.stdout.split("iLQR:")[0]
    assert "249.560897930822" in ddp
    norms = [float(line.split()[2]) for line in ddp.splitlines() if re.match(r"\s+\d", line)]
    assert all(b <= 2 * a * a for a, b in pairwise(norms[-4:]))
    assert (tmp_path / "control_unicycle.png").stat().st_size > 10_000
