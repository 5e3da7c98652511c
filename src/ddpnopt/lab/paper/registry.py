"""Every item of the paper by its name, in the order of the paper."""

from __future__ import annotations

from collections.abc import Iterable

from ddpnopt.lab.errors import UnknownNameError
from ddpnopt.lab.paper import (
    best_tuned,
    complexity,
    dynamics,
    grid,
    ours,
    policy,
    runtime,
    spectrum,
    table3,
    toy,
    vanishing,
)
from ddpnopt.lab.paper.item import Item

ITEMS = {
    each.name: each
    for each in (
        toy.ITEM,
        table3.ITEM,
        complexity.ITEM,
        runtime.ITEM,
        grid.GRID_ITEM,
        dynamics.ITEM,
        policy.ITEM,
        vanishing.ITEM,
        grid.ADAM_ITEM,
        best_tuned.ITEM,
        spectrum.ITEM,
        ours.ITEM,
    )
}


def items(names: Iterable[str]) -> list[Item]:
    """The items of these names, each once; `all` is all of them, and an error lists the known ones."""
    chosen: dict[str, Item] = {}
    for name in names:
        if name == "all":
            chosen |= ITEMS
        elif name in ITEMS:
            chosen[name] = ITEMS[name]
        else:
            raise UnknownNameError("item", name, [*ITEMS, "all"])
    return list(chosen.values())
