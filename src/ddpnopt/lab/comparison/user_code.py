"""Errors in functions that a user has written: which function, what was wrong, and in which line of which file."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from ddpnopt.errors import DDPNOptError
from ddpnopt.lab.errors import ExperimentError, TaskError


@contextmanager
def called(name: str, source: object, *, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """An exception inside becomes a `TaskError` with its line; what the optimizer itself refuses stays as it is.

    It stays as it is, too, where `unless` says that the function is not to blame.
    """
    try:
        yield
    except (ExperimentError, DDPNOptError):
        raise
    except Exception as failed:
        if unless():
            raise
        what = " ".join(str(failed).split()) or "no message"
        raise TaskError(f"`{name}` failed with {type(failed).__name__}: {what}{_line_of(failed, source)}") from failed


def returned(name: str, source: object, found: object, wanted: str) -> TaskError:
    """The error of a function that returned something else than `wanted`."""
    shape = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.60}"
    kind = "" if isinstance(found, Tensor) or found is None else f" ({type(found).__name__})"
    return TaskError(f"`{name}` must return {wanted}; it returned {shape}{kind}{place(source)}.")


def place(source: object) -> str:
    """Where a function is defined: ` (my_task.py, line 12)`; nothing where that is not known."""
    code = getattr(inspect.unwrap(source), "__code__", None) if callable(source) else None
    return f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code is not None else ""


def _line_of(failed: Exception, source: object) -> str:
    """The innermost line in the file of the function, where the user can change something."""
    code = getattr(source, "__code__", None)
    frames = traceback.extract_tb(failed.__traceback__)
    own = [each for each in frames if code is not None and each.filename == code.co_filename]
    if not own:
        return place(source) + "."
    text = f": {own[-1].line}" if own[-1].line else ""
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}{text})"
