"""The rooms of the package: who may import whom, one meaning per class name, short files."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import ddpnopt

ROOT = Path(ddpnopt.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LONGEST = 350  # lines

BASE = ["errors", "report", "_checks", "_distributed"]
# Each room may import itself and the rooms listed, at run time.
MAY_IMPORT: dict[str, list[str]] = {
    "errors": [],
    "report": [],
    "_checks": ["errors"],
    "_distributed": ["errors"],
    "_memory": [],
    "_options": ["errors"],
    "_averaging": [],
    "checkpoint": ["errors"],
    "linear": BASE,
    "curvature": [*BASE, "linear"],
    "ddp": [*BASE, "linear", "curvature"],
    "trace": [*BASE, "linear"],
    "_parameters": [*BASE, "linear", "curvature", "ddp", "trace"],
    "_losses": [*BASE, "linear", "ddp", "trace"],
    "_penalties": [*BASE, "linear", "ddp", "trace"],
    "_value": [*BASE, "linear", "curvature", "ddp", "trace", "_losses"],
    "_step_length": [*BASE, "linear", "ddp", "_losses"],
    "_taking_back": [*BASE, "linear", "ddp", "_losses", "_step_length"],
    "_troubles": BASE,
    "_held": [*BASE, "linear", "trace"],
    "_capture_of": ["trace"],
    "_repeatable": [*BASE, "trace", "_value"],
    "_common_sizes": [*BASE, "linear", "trace", "_value"],
    "_collect": [*BASE, "linear", "ddp", "trace", "_losses", "_value", "_repeatable"],
    "_rescale": [*BASE, "linear", "ddp", "trace", "_losses", "_penalties", "_collect"],
    "_step": [
        *BASE, "linear", "curvature", "ddp", "trace", "_parameters", "_losses", "_value", "_step_length", "_collect",
        "_common_sizes", "_rescale", "_taking_back", "_troubles",
    ],
    "_derivative_step": [
        *BASE, "linear", "curvature", "ddp", "trace", "_value", "_collect", "_step_length", "_step", "_taking_back",
    ],
    "optimizer": [
        *BASE, "_memory", "_options", "_averaging", "checkpoint",
        "linear", "curvature", "ddp", "trace", "_parameters", "_value", "_step", "_derivative_step",
        "_troubles", "_held", "_capture_of",
    ],
    "logging": [*BASE, "optimizer"],
    "control": ["errors", "_checks"],
}  # fmt: skip
SEE_DDP_AND_TRACE = {
    "_parameters", "_losses", "_penalties", "_value", "_collect", "_rescale", "_step",
    "_derivative_step", "optimizer",
}  # fmt: skip


def room(path: Path) -> str:
    """The folder or module below the package that a file belongs to."""
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(path: Path) -> set[str]:
    """The rooms that a file imports at run time, also inside functions; "" for the package itself."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = ["ddpnopt", *path.relative_to(ROOT).parts][: -node.level] if node.level else []
            module = ".".join([*here, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "ddpnopt" else [module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "ddpnopt":
                known = len(parts) > 1 and any((ROOT / f"{parts[1]}{end}").exists() for end in ("", ".py"))
                found.add(parts[1] if known else "")
        todo.extend(child for child in ast.iter_child_nodes(node) if not is_type_checking(child))  # type: ignore[arg-type]
    return found


CORE = [path for path in FILES if room(path) not in ("lab", "__init__", "__main__")]


def test_every_room_of_the_core_is_listed_in_order() -> None:
    assert {room(path) for path in CORE} == set(MAY_IMPORT)
    order = list(MAY_IMPORT)
    for name, others in MAY_IMPORT.items():
        assert all(order.index(other) < order.index(name) for other in others), name


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_the_rooms_below_it(path: Path) -> None:
    own = room(path)
    allowed = {own, *MAY_IMPORT[own]}
    if own == "checkpoint":
        allowed.add("")  # the version of the package
    assert imports(path) <= allowed


def test_ddp_and_trace_do_not_know_each_other() -> None:
    assert "trace" not in MAY_IMPORT["ddp"]
    assert "ddp" not in MAY_IMPORT["trace"]
    both = {room(path) for path in CORE if {"ddp", "trace"} <= imports(path)}
    assert both <= SEE_DDP_AND_TRACE


@pytest.mark.parametrize("path", [*CORE, ROOT / "__init__.py"], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_in_the_core_imports_the_lab(path: Path) -> None:
    assert "lab" not in imports(path)


def test_no_class_name_is_defined_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_long(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST
