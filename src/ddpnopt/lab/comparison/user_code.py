"""Errors in functions that a user has written: which function, what was wrong, and in which line of which file."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from ddpnopt.errors import DDPNOptError
from ddpnopt.lab.errors import ExperimentError, TaskError

SHOWN = 4
"""Parts of a batch that a message describes."""


@contextmanager
def called(
    name: str,
    source: object,
    *,
    unless: Callable[[], bool] = lambda: False,
    model: nn.Module | None = None,
    batch: object = None,
) -> Iterator[None]:
    """An exception inside becomes a `TaskError` with its line; what the optimizer itself refuses stays as it is.

    With `model` it names the layer in which it happened, and says what `batch` was: most mistakes are there.

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
        where = "" if model is None else _given(failed, model, batch)
        raise TaskError(
            f"`{name}` failed with {type(failed).__name__}: {what}{_line_of(failed, source)}{where}"
        ) from failed


def returned(name: str, source: object, found: object, wanted: str) -> TaskError:
    """The error of a function that returned something else than `wanted`."""
    shape = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.60}"
    kind = "" if isinstance(found, Tensor) or found is None else f" ({type(found).__name__})"
    forgotten = ": is a `return` missing?" if found is None else "."
    return TaskError(f"`{name}` must return {wanted}; it returned {shape}{kind}{place(source)}{forgotten}")


def place(source: object) -> str:
    """Where a function is defined: ` (my_task.py, line 12)`; nothing where that is not known."""
    code = getattr(inspect.unwrap(source), "__code__", None) if callable(source) else None
    return f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code is not None else ""


def fault_of(batch: object) -> str:
    """What makes any loss of a batch a NaN: no samples, or a NaN in it; nothing where it is sound.

    Infinities are not looked for: masks of attention have them.
    """
    for number, part in enumerate(_tensors(batch), start=1):
        if part.numel() == 0:
            return f"is empty: its tensor {number} has the shape {tuple(part.shape)}"
        if part.is_floating_point() and bool(part.isnan().any()):
            return f"holds a NaN, in its tensor {number} of shape {tuple(part.shape)}"
    return ""


def _tensors(batch: object) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors(part)


def _line_of(failed: Exception, source: object) -> str:
    """The innermost line in the file of the function, where the user can change something."""
    code = getattr(source, "__code__", None)
    frames = traceback.extract_tb(failed.__traceback__)
    own = [each for each in frames if code is not None and each.filename == code.co_filename]
    if not own:
        return place(source) + "."
    text = f": {own[-1].line}" if own[-1].line else ""
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}{text})"


def _given(failed: Exception, model: nn.Module, batch: object) -> str:
    """The innermost layer of the model that was at work, and what the function was called with."""
    names = {module: name for name, module in model.named_modules() if name}
    frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(failed.__traceback__))
    layers = [each for each in frames if isinstance(each, nn.Module) and each in names]
    layer = f" It happened in the layer `{names[layers[-1]]}`, {layers[-1]!r:.80}." if layers else ""
    return f".{layer} It was called with the model, {type(model).__name__}, and a batch: {described(batch)}."


def described(value: object, depth: int = 2) -> str:
    """A batch in a few words: kinds and shapes, not numbers."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    kind = type(value).__name__
    if depth and isinstance(value, Mapping):
        parts = [f"{key}: {described(part, depth - 1)}" for key, part in value.items()]
    elif depth and isinstance(value, tuple | list):
        parts = [described(part, depth - 1) for part in value]
    else:
        return kind
    return f"{kind} of {len(parts)} ({', '.join(parts[:SHOWN])}{', …' if len(parts) > SHOWN else ''})"
