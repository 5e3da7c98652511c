"""`ddpnopt data`: which data sets are there, and where."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from ddpnopt.lab.cli.errors import one_line_errors
from ddpnopt.lab.cli.options import DataDir
from ddpnopt.lab.cli.progress import console, status_console
from ddpnopt.lab.data import DATASETS, DatasetStatus, canonical, load, status, user_folder


@one_line_errors
def data(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Fetch, decode and check these now; without names, list all.", show_default=False),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """List the data sets: where they are, their sizes and checksums."""
    user_folder(data_dir)
    chosen = [canonical(name) for name in names] if names else list(DATASETS)
    if names:
        with status_console().status("data") as waiting:
            for name in chosen:
                load(name, data_dir=data_dir, report=waiting.update)
    found = [status(name, data_dir) for name in chosen]
    console().print(_table(found))
    for each in found:
        if each.note:
            console().print(f"[dim]{each.note}", soft_wrap=True)
    if not all(each.present for each in found):
        console().print(
            "[dim]A set that is not here is fetched at its first use, or read from a folder "
            "given by --data-dir or DDPNOPT_DATA."
        )


def _table(found: list[DatasetStatus]) -> Table:
    made = Table()
    made.add_column("data set", no_wrap=True)
    for heading in ("train", "test", "shape"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("where", overflow="fold")
    made.add_column("SHA-256 (train, test)", overflow="fold")
    for each in found:
        made.add_row(
            each.name if each.present else f"[dim]{each.name}",
            "" if each.train is None else f"{each.train:,}",
            "" if each.test is None else f"{each.test:,}",
            "x".join(map(str, each.shape)),
            each.place if each.present else f"[dim]{each.place}",
            ", ".join(checksum[:12] for checksum in each.checksums.values()),
        )
    return made
