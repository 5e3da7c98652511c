"""`ddpnopt reproduce`: the paper's tables and figures, each by its name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TaskID

from ddpnopt.lab.cli.errors import one_line_errors
from ddpnopt.lab.cli.options import DataDir, StorePath, split_names, writable_folder
from ddpnopt.lab.cli.progress import bar, console, status_console
from ddpnopt.lab.cli.reproduce_summary import Finished, summarise
from ddpnopt.lab.errors import DataError, ExperimentError
from ddpnopt.lab.paper.item import Claim, Context, Item, Result, write
from ddpnopt.lab.paper.readings import PAPER, READINGS, reading
from ddpnopt.lab.runs.store import STORE, start_from_nothing
from ddpnopt.lab.tables import screen_table

LOG_EVERY = 20


@one_line_errors
def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="ITEM...",
            help="Such as toy, table3 or fig-grid, or all; an unknown name lists them.",
            show_default=False,
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Few seeds and short runs: to see that it works.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the runs, tables and pictures.")] = Path("results"),
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once, one torch thread each.")] = 1,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds, from 0 on; by default the item's.", show_default=False)
    ] = None,
    datasets: Annotated[
        str | None, typer.Option(help="Only these of an item's data sets, comma separated.", show_default=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Whole image sets where an item takes a part of them.")] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Runs on the Ray cluster at RAY_ADDRESS, or on a local one.")
    ] = False,
    readings: Annotated[
        str | None,
        typer.Option(
            help=f"Readings of V_xx ({', '.join(READINGS)}), comma separated: the claims are judged in the first, the "
            f"others are compared with it. By default {PAPER} and all others.",
            show_default=False,
        ),
    ] = None,
    store: StorePath = None,
    data_dir: DataDir = None,
) -> None:
    """Repeat the paper's tables and figures; if interrupted, it continues where it was."""
    from ddpnopt.lab.paper.registry import items

    chosen = items(names)
    asked = [] if readings is None else [reading(name).name for name in split_names("--readings", readings)]
    folder = writable_folder(out)
    path = store or folder / STORE
    if not path.exists() and not quick and any(item.stored for item in chosen):
        status_console().print(f"[dim]{start_from_nothing(path)}", soft_wrap=True, highlight=False)
    missing: list[str] = []
    finished: list[Finished] = []
    for item in chosen:
        started = time.perf_counter()
        with bar() as progress:
            context = Context(
                folder,
                quick=quick,
                data_dir=data_dir,
                jobs=jobs,
                seeds=seeds,
                full=full,
                datasets=[name.strip() for name in (datasets or "").split(",") if name.strip()],
                ray=ray,
                store=store,
                readings=asked,
                on_progress=Reporter(progress, item),
            )
            try:
                result = item.run(context)
            except DataError as absent:  # the other items may not need it
                missing.append(f"{item.name}: {absent}")
                finished.append(Finished(item, None, time.perf_counter() - started))
                continue
        where = _written(item, result, context)
        show(item, result)
        console().print(f"[dim]saved[/] {where}\n", soft_wrap=True)
        finished.append(Finished(item, result.claims, time.perf_counter() - started))
    if len(finished) > 1:
        summarise(console(), finished, folder, quick=quick)
    if missing:
        raise DataError("; ".join(missing))


def _written(item: Item, result: Result, context: Context) -> Path:
    try:
        return write(item, result, context)
    except OSError as failed:
        reason = os.strerror(failed.errno) if failed.errno else str(failed)
        raise ExperimentError(
            f"cannot write the tables and pictures of {item.name} into {context.out}: {reason}; its runs are kept, "
            "so that the same command will finish at once when there is space"
        ) from failed


class Reporter:
    """A bar for each part of an item; in a log file a line every few runs."""

    def __init__(self, progress: Progress, item: Item) -> None:
        self.progress, self.item = progress, item
        self.rows: dict[str, TaskID] = {}
        self.before: dict[str, int] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self.rows:
            # runs from the store are not part of the bar: the estimate of the time left would be far too short
            self.rows[what] = self.progress.add_task(f"{self.item.name} {what}", total=total - done, detail="")
            self.before[what] = done
        came = done - self.before[what]
        self.progress.update(self.rows[what], completed=came)
        if self.progress.disable and came and (came % LOG_EVERY == 0 or done == total):
            status_console().print(f"{self.item.name} {what}: {done}/{total}", highlight=False)


def show(item: Item, result: Result) -> None:
    """Tables, claims and remarks in the terminal."""
    screen = console()
    screen.print(f"[bold]{item.title}[/] [dim]({item.where})")
    for table in result.tables:
        headings = list(map(str, table.frame.columns))
        screen.print(screen_table(table.caption, headings, table.frame.values.tolist(), folded=True))
    if result.claims:
        rows = [
            (claim.text, claim.paper, f"{claim.ours}. {claim.why}" if claim.why else claim.ours, verdict(claim))
            for claim in result.claims
        ]
        screen.print(screen_table("Claims", ("claim", "paper", "here", ""), rows, folded=True))
    for note in result.notes:
        screen.print(f"[dim]- {note}", soft_wrap=True)


def verdict(claim: Claim) -> str:
    """In words, for readers who do not see the colour."""
    if not claim.judged:
        return "[dim]not judged"
    if claim.holds is None:
        return "[yellow]open"
    return "[green]holds" if claim.holds else "[red]does not hold"
