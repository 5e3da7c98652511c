"""The backward pass of a loss in parts: one residual per sample in each.

A sample may have several residuals: the components of a system of equations, or an initial value and an initial slope
at one point. Each of them is an equation of its own, but one backward pass adds up their gradients. So the pass is
made several times, each time with the gradients of some residuals alone, as long as the rows of the joint system do not
become too many; beyond that, the residuals of a sample are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddpnopt.trace.loss_terms import Node, Term

MOST_ROWS = 1024  # of the joint system, in sets of samples whose residuals are taken apart
MOST_PARTS = 8


def assign(terms: list[Term]) -> int:
    """Set the part of each column of each term; the number of parts."""
    sets: list[tuple[set[int], list[Term]]] = []  # terms that share a pass
    for term in terms:
        ids = {id(recording) for recording, _ in term.rows}
        together = [term]
        for other in [each for each in sets if each[0] & ids]:
            sets.remove(other)
            ids |= other[0]
            together = other[1] + together
        sets.append((ids, together))
    total = sum(max(len(term.losses) for term in each) for _, each in sets)
    for _, each in sorted(sets, key=lambda pair: max(len(term.losses) for term in pair[1])):
        apart = _apart(each)
        more = sum(term.losses.numel() for term in each) - max(len(term.losses) for term in each)
        if max(max(parts) for parts in apart) < MOST_PARTS and (total + more <= MOST_ROWS or more <= 0):
            total += max(more, 0)
            for term, parts in zip(each, apart, strict=True):
                term.parts = parts
    return 1 + max((max(term.parts) for term in terms), default=0)


def _apart(terms: list[Term]) -> list[list[int]]:
    """For each column of each term the first part in which its samples have no other residual."""
    taken: list[list[range]] = []
    found = []
    for term in terms:
        start = term.rows[0][1] or 0
        mine, parts = range(start, start + len(term.losses)), []
        for _ in range(term.losses.shape[1]):
            k = 0
            while k < len(taken) and any(_overlap(mine, other) for other in taken[k]):
                k += 1
            if k == len(taken):
                taken.append([])
            taken[k].append(mine)
            parts.append(k)
        found.append(parts)
    return found


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


@contextmanager
def masked(terms: list[Term], strays: list[Node], part: Callable[[], int]) -> Iterator[None]:
    """Let only the residuals of the current part have a gradient; all else belongs to the first."""
    handles = [term.node.register_hook(partial(_columns, term, part)) for term in terms]
    handles += [node.register_prehook(partial(_first, part)) for node in strays]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _columns(term: Term, part: Callable[[], int], inputs: tuple[Tensor | None, ...], _: Any) -> Any:
    now = part()
    if all(each == now for each in term.parts):
        return None
    n, k = term.losses.shape
    mask = torch.tensor([each == now for each in term.parts], device=term.losses.device)
    return tuple(
        g if g is None else (g.reshape(n, k) * mask).reshape(g.shape) if g.numel() == n * k else g * bool(mask.any())
        for g in inputs
    )


def _first(part: Callable[[], int], grads: tuple[Tensor | None, ...]) -> Any:
    return None if part() == 0 else tuple(g if g is None else torch.zeros_like(g) for g in grads)
