"""`ddpnopt baselines`: every baseline on the small data sets, beside the paper's Table 3."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ddpnopt.lab.baselines.study import DATASETS, HEADINGS, METHODS, cells, save, study
from ddpnopt.lab.cli.errors import one_line_errors
from ddpnopt.lab.cli.options import writable_folder
from ddpnopt.lab.cli.progress import console, status_console
from ddpnopt.lab.data import canonical
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods import method
from ddpnopt.lab.timing import machine


@one_line_errors
def baselines(
    datasets: Annotated[str, typer.Option(help="Comma separated.")] = ",".join(DATASETS),
    methods: Annotated[str, typer.Option(help="Comma separated names of methods.")] = ",".join(METHODS),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 3,
    slow_seeds: Annotated[int, typer.Option(min=1, help="At most this many of them for E-MSA and vanilla DDP.")] = 1,
    max_epochs: Annotated[
        int | None, typer.Option(min=1, help="At most this many epochs a run.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the numbers (CSV) and the table (Markdown).")] = Path(
        "results/baselines"
    ),
) -> None:
    """Train every baseline on WINE and DIGITS; print their accuracies beside the paper's.

    E-MSA and vanilla DDP get fewer epochs and seeds: their steps are so much slower.
    """
    names = [name.strip() for name in methods.split(",") if name.strip()]
    sets = [canonical(name.strip()) for name in datasets.split(",") if name.strip()]
    if not names or not sets:
        raise ExperimentError("--methods and --datasets must name at least one each")
    for name in names:
        method(name)
    folder = writable_folder(out)
    with status_console().status("training") as waiting:
        rows = study(
            sets,
            names,
            range(seeds),
            slow_seeds=slow_seeds,
            max_epochs=max_epochs,
            on_run=lambda dataset, name, seed: waiting.update(f"{name} on {dataset}, seed {seed}"),
        )
    title = "Baselines beside Table 3"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        words = heading in ("data set", "method")
        table.add_column(heading, justify="left" if words else "right", no_wrap=heading in ("train loss", "accuracy %"))
    for row in rows:
        table.add_row(*(cell.replace(" ± ", "±") for cell in cells(row)))  # 80 columns
    console().print(table)
    for path in save(rows, folder, title, machine.heading()):
        console().print(f"[dim]saved[/] {path}", soft_wrap=True)
