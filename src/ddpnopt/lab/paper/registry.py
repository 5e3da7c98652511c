"""Every item of the paper by its name, in the order of the paper."""

from __future__ import annotations

from collections.abc import Iterable

from ddpnopt.lab.errors import UnknownNameError
from ddpnopt.lab.paper import (
    defaults_table,
    fig_dynamics,
    fig_grid,
    fig_policy,
    fig_runtime,
    fig_spectrum,
    fig_vanishing,
    table3,
    table4,
    tables6to8,
    toy,
)
from ddpnopt.lab.paper.item import Item

ITEMS = {
    each.name: each
    for each in (
        toy.ITEM,
        table3.ITEM,
        table4.ITEM,
        fig_runtime.ITEM,
        fig_grid.GRID_ITEM,
        fig_dynamics.ITEM,
        fig_policy.ITEM,
        fig_vanishing.ITEM,
        fig_grid.ADAM_ITEM,
        tables6to8.ITEM,
        fig_spectrum.ITEM,
        defaults_table.ITEM,
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
