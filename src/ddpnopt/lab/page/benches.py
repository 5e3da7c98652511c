"""The measurements in addition to the paper's items: the Markdown pages and figures that `ddpnopt bench` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddpnopt.lab.page.images import ShownImage, read_image
from ddpnopt.lab.page.tables import ShownTable
from ddpnopt.lab.page.text import anchor, plain

FOLDERS = {
    "suite": "Many small tasks, compared with Adam",
    "lr-window": "How wide the window of learning rates is",
    "speed": "Time and memory of a step compared with SGD",
}


@dataclass
class Part:
    """What is under one heading of a page: text and a table."""

    title: str
    words: list[str] = field(default_factory=list)
    table: ShownTable | None = None


@dataclass(frozen=True)
class ShownBench:
    """One folder of measurements."""

    name: str
    title: str
    facts: Sequence[str]
    parts: Sequence[Part]
    images: Sequence[ShownImage]

    @property
    def anchor(self) -> str:
        return anchor("bench", self.name)

    @property
    def command(self) -> str:
        return f"ddpnopt bench {self.name}"


def read_benches(results: Path) -> list[ShownBench]:
    """Those that have been run."""
    found = (read_bench(results / name, title) for name, title in FOLDERS.items())
    return [bench for bench in found if bench.parts or bench.images]


def read_bench(folder: Path, title: str) -> ShownBench:
    """All pages of a folder, one after the other, and its figures."""
    facts: list[str] = []
    parts: list[Part] = []
    for page in sorted(folder.glob("*.md")):
        head, found = parse(page.read_text(encoding="utf-8"))
        facts += [fact for fact in head if fact not in facts]
        parts += found[:1] if page.stem.startswith("growth") else found  # the exponents, not each size
    stems = dict.fromkeys(path.with_suffix("") for path in sorted(folder.glob("*")) if path.suffix in (".svg", ".png"))
    images = [read_image(stem, stem.name.replace("-", " ")) for stem in stems]
    return ShownBench(folder.name, title, facts, parts, images)


def parse(text: str) -> tuple[list[str], list[Part]]:
    """The list at the top, and what is under each heading."""
    facts: list[str] = []
    parts: list[Part] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("#"):
            parts.append(Part(line.lstrip("# ").strip()))
        elif line.startswith("|") and parts:
            parts[-1].table = _table(parts[-1].title, line, lines)
        elif line.startswith("- ") and not parts:
            facts.append(line[2:])
        elif line.strip() and parts:
            parts[-1].words.append(line.strip())
    return facts, [part for part in parts if part.table or part.words]


def _table(title: str, first: str, rest: Iterator[str]) -> ShownTable:
    rows = [_cells(first)]
    for line in rest:
        if not line.startswith("|"):
            break
        rows.append(_cells(line))
    columns, body = rows[0], rows[2:]  # the second line is the rule
    width = len(columns)
    return ShownTable(anchor(plain(title)), title, columns, [[*row, *[""] * width][:width] for row in body])


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
