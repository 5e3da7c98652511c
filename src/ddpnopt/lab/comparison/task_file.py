"""A task from a file of the user's: `model`, `batches`, `loss` and what else it defines."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from ddpnopt.lab.comparison.own_task import OwnTask
from ddpnopt.lab.errors import TaskError

STEPS = 300
"""Where a file does not say."""
NEEDED = {
    "model": "def model() that returns a new torch.nn.Module",
    "batches": "def batches(generator) that yields batches, or a DataLoader",
    "loss": "def loss(model, batch) that returns the loss to call backward on",
}
OPTIONAL = ("evaluate", "metric", "better", "steps")


def read_task(path: Path, steps: int | None = None) -> OwnTask:
    """The task that a file defines, with a number of steps other than its own if it is given."""
    text = _text(path)
    module = _run(path)
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        defined = [name for name in vars(module) if not name.startswith("_")]
        raise TaskError(f"{path.name} lacks {'; '.join(_hint(name, defined) for name in missing)}.")
    return OwnTask(
        name=path.stem,
        model=module.model,
        batches=module.batches,
        loss=module.loss,
        steps=getattr(module, "steps", STEPS) if steps is None else steps,
        evaluate=getattr(module, "evaluate", None),
        metric=str(getattr(module, "metric", "")),
        better=getattr(module, "better", "higher"),
        # comments and line breaks do not change a run
        source=hashlib.sha256(ast.dump(ast.parse(text)).encode()).hexdigest()[:12],
    )


def near_misses(path: Path) -> list[str]:
    """What a file defines under a name that is almost that of something optional, which then goes unused."""
    defined: set[str] = set()
    for part in ast.parse(_text(path)).body:
        if isinstance(part, ast.FunctionDef):
            defined.add(part.name)
        elif isinstance(part, ast.Assign):
            defined |= {target.id for target in part.targets if isinstance(target, ast.Name)}
    others = sorted(defined - {*NEEDED, *OPTIONAL})
    pairs = [(name, difflib.get_close_matches(name, others, 1, 0.8)) for name in OPTIONAL if name not in defined]
    return [f"{path.name} has no `{name}`; is `{close[0]}` meant for it?" for name, close in pairs if close]


def _text(path: Path) -> str:
    if path.suffix != ".py" or not path.is_file():
        raise TaskError(f"there is no Python file {path}.")
    try:
        text = path.read_text(encoding="utf-8")
        ast.parse(text)
    except SyntaxError as wrong:
        line = (wrong.text or "").strip()
        raise TaskError(f"{path.name}, line {wrong.lineno}: {wrong.msg}: {line}") from wrong
    except (OSError, UnicodeDecodeError) as wrong:
        raise TaskError(f"{path} cannot be read: {wrong}") from wrong
    return text


def _run(path: Path) -> ModuleType:
    """The file as a module; it may import what lies beside it."""
    spec = importlib.util.spec_from_file_location(f"_ddpnopt_task_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes of the file can be pickled, and dataclasses find their annotations
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except TaskError:
        raise
    except Exception as failed:
        # the origin is absolute, also where the path is not
        frames = [each for each in traceback.extract_tb(failed.__traceback__) if each.filename == spec.origin]
        line = f", line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
        what = " ".join(str(failed).split())
        raise TaskError(f"{path.name} failed with {type(failed).__name__}: {what} ({path.name}{line})") from failed
    return module


def _hint(name: str, defined: list[str]) -> str:
    close = difflib.get_close_matches(name, defined, 1)
    return f"`{name}`: {NEEDED[name]}" + (f" (it has `{close[0]}`)" if close else "")
