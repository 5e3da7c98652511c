"""The notebook of the quick start runs from top to bottom, in a process and a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quick_start.ipynb"


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    script = tmp_path / "notebook.py"
    # Cells share one scope, as in a kernel; fewer passes over the data, as in all small forms.
    script.write_text(
        "\n\n".join(code).replace("range(4)", "range(1)").replace("steps=100", "steps=8"), encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stderr
    for word in ("test accuracy", "predicted", "layer 4", "Loss of the batch", "DDPNOpt", "SGD-m"):
        assert word in done.stdout
    assert (tmp_path / "quick_start.jsonl").is_file()


def test_the_notebook_is_plain_code_without_stored_output() -> None:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert not any(line.startswith(("%", "!")) for line in cell["source"])
