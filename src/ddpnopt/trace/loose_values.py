"""Tensors that are computed from loose parameters alone, and how to compute them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn


@dataclass(eq=False)
class Made:
    """A tensor computed from parameters alone: a parameter itself, or how to compute it."""

    roots: set[nn.Parameter]
    parameter: nn.Parameter | None = None
    func: Callable[..., Any] | None = None
    args: Any = ()  # with tensors detached, and those computed from parameters replaced by what they are made of
    kwargs: Any = None
    index: int | None = None  # among several outputs
    shape: tuple[int, ...] = ()
    constant: Tensor | None = None  # what the model holds, or is computed from that alone; without roots

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Made:
        return cls({parameter}, parameter, shape=tuple(parameter.shape))


def tensors(tree: Any) -> Iterable[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from tensors(part)
    elif isinstance(tree, dict):
        yield from tensors(list(tree.values()))


def replaced(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, (Tensor, Made)):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(replaced(part, change) for part in tree) if type(tree) in (tuple, list) else tree
    return {key: replaced(part, change) for key, part in tree.items()} if isinstance(tree, dict) else tree


def value_of(t: Tensor | Made, *, env: dict[Any, Tensor], places: dict[int, int], parts: list[Tensor]) -> Tensor:
    """An argument of a function, for one sample and other values of the parameters."""
    if isinstance(t, Tensor):
        return parts[places[id(t)]] if id(t) in places else t
    if t.constant is not None:
        return t.constant
    key = t if t.parameter is None else t.parameter
    if key in env:
        return env[key]
    if t.func is None:
        assert t.parameter is not None
        return t.parameter.detach()
    change = partial(value_of, env=env, places=places, parts=parts)
    out = t.func(*replaced(t.args, change), **replaced(t.kwargs, change))
    env[key] = out if t.index is None else out[t.index]
    return env[key]
