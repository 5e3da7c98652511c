"""The Python blocks of a Markdown page, in order.

A comment `<!-- needs: a, b -->` above a block names modules that it needs beyond the package; `<!-- python … -->` is
code that runs like a block but is not shown, for a page that leaves out what its reader has anyway.

As a script it runs one page, in a process of its own: frameworks leave their mark on the one they are imported in.
"""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_PART = re.compile(
    r"<!-- needs:(?P<needs>.*?)-->|<!-- python\n(?P<hidden>.*?)-->"
    r"|^(?P<indent> *)```python[^\n]*\n(?P<shown>.*?)^ *```",
    re.S | re.M,
)


@dataclass(frozen=True)
class Block:
    """A piece of code and where it stands."""

    page: Path
    line: int
    code: str
    needs: tuple[str, ...]

    def run(self, scope: dict[str, object]) -> None:
        """Errors tell page and line."""
        exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), scope)

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if not _is_there(name)]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    needs: tuple[str, ...] = ()
    for part in _PART.finditer(text):
        if part["needs"] is not None:
            needs = tuple(name.strip() for name in part["needs"].split(","))
            continue
        group = "hidden" if part["hidden"] is not None else "shown"
        code = part[group]
        if part["indent"]:
            code = re.sub(rf"^{part['indent']}", "", code, flags=re.M)
        found.append(Block(page, text.count("\n", 0, part.start(group)) + 1, code, needs))
        needs = ()
    return found


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def run_page(page: Path) -> list[str]:
    """Runs what can be run, from top to bottom in one scope; the modules that some blocks lacked."""
    scope: dict[str, object] = {"__name__": "__page__"}
    left_out: list[str] = []
    for block in blocks(page):
        if block.missing:
            left_out += block.missing
        else:
            block.run(scope)
    return list(dict.fromkeys(left_out))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("left out:", *run_page(Path(sys.argv[1])))
