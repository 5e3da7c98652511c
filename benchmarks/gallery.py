"""Runs every example of the gallery: its picture for docs/gallery.md, and what it prints as a table.

python benchmarks/gallery.py [pictures [table]]      # docs/img and results/gallery by default
"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ("classification", "gpt", "unet", "pinn")


def printed(example: str, *options: str) -> str:
    """What an example prints, in one line."""
    command = [sys.executable, str(ROOT / "examples" / "gallery" / f"{example}.py"), *options]
    return " ".join(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def main(pictures: Path, table: Path, *options: str) -> None:
    table.mkdir(parents=True, exist_ok=True)
    lines = [(example, printed(example, "--out", str(pictures), *options)) for example in EXAMPLES]
    with (table / "gallery.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("example", "printed"), *lines])


if __name__ == "__main__":
    given = [Path(each) for each in sys.argv[1:]]
    main(*given, *(ROOT / "docs" / "img", ROOT / "results" / "gallery")[len(given) :])
