"""Every item of the paper by its name, in the order of the paper."""

from __future__ import annotations

from collections.abc import Iterable

from ddpnopt.experiments.errors import UnknownNameError
from ddpnopt.reproduce import best_tuned, dynamics, grid, ours, table3
from ddpnopt.reproduce.item import Item

ITEMS = {
    each.name: each
    for each in (
        table3.ITEM,
        grid.GRID_ITEM,
        dynamics.ITEM,
        grid.ADAM_ITEM,
        best_tuned.ITEM,
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
