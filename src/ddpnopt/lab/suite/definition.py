"""A digest of a task's definition: its module and the modules of the suite that it imports."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from ddpnopt.lab.suite.tasks import MODULES

PACKAGE = __name__.rpartition(".")[0]


@cache
def definition(name: str) -> str:
    """The digest of the task called `name`; comments, docstrings and line breaks do not count."""
    [module] = [module for module in MODULES if any(task.name == name for task in module.TASKS)]
    sources = [statements(inspect.getsource(part)) for part in closure(module)]
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()[:12]


def closure(module: ModuleType) -> list[ModuleType]:
    """The module and those of the suite that it imports, directly or not, in the order of their names."""
    found: dict[str, ModuleType] = {}
    left = [module]
    while left:
        part = left.pop()
        if part.__name__ not in found:
            found[part.__name__] = part
            left += [sys.modules[name] for name in imported(inspect.getsource(part))]
    return [found[name] for name in sorted(found)]


def imported(source: str) -> Iterator[str]:
    """The modules of the suite that a source imports from."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{PACKAGE}."):
            yield node.module


def statements(source: str) -> str:
    """The source without what does not change a run; whether a task is sealed does not."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "suite_task":
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "sealed"]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
