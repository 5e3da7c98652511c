"""`ddpnopt bench lr-window`: how much the learning rate matters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ddpnopt.lab.cli.options import DataDir, StorePath, split_names, writable_folder
from ddpnopt.lab.cli.progress import console, status_console
from ddpnopt.lab.cli.sweeps import collect_showing_progress
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods.method import WINDOW_POINTS
from ddpnopt.lab.methods.registry import ABLATIONS, WINDOW_METHODS, require_installed, select
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.store import STORE, start_from_nothing
from ddpnopt.lab.windows.window_plan import plan, promising
from ddpnopt.lab.windows.window_tasks import TASKS, scaled, window_tasks

QUICK_SAMPLES = 0.1
QUICK_EPOCHS = 0.34
QUICK_POINTS = 5


def lr_window(
    task_names: Annotated[str, typer.Option("--tasks", help="Comma separated.")] = ",".join(TASKS),
    method_names: Annotated[
        str | None,
        typer.Option("--methods", help=f"Comma separated; all of {', '.join(WINDOW_METHODS)}.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 3,
    near: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="More seeds only where the first came within this many points of the best of its method.",
            show_default=False,
        ),
    ] = None,
    lrs: Annotated[
        str | None,
        typer.Option(
            help="Only these of the learning rates, comma separated; others are no error.", show_default=False
        ),
    ] = None,
    points: Annotated[
        int, typer.Option(min=2, max=WINDOW_POINTS, help="How many learning rates over seven decades.")
    ] = WINDOW_POINTS,
    epochs_scale: Annotated[float, typer.Option(help="Multiplies the epochs of every task.")] = 1.0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once, one torch thread each.")] = 1,
    ablations: Annotated[
        bool, typer.Option("--ablations", help=f"Forms of DDPNOpt instead of methods: {', '.join(ABLATIONS)}.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, five rates, a tenth of the images: to see that it works.")
    ] = False,
    report_only: Annotated[
        bool,
        typer.Option(
            "--report-only",
            help="Tables and pictures of what the store and the folder's own table of runs hold; no training.",
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the store, tables and pictures.")] = Path("results/lr-window"),
    store: StorePath = None,
    data_dir: DataDir = None,
) -> None:
    """Test accuracy over seven decades of learning rates; if interrupted, it continues where it was."""
    known = ABLATIONS if ablations else WINDOW_METHODS
    scale = (epochs_scale * QUICK_EPOCHS, QUICK_SAMPLES) if quick else (epochs_scale, 1.0)
    chosen = [scaled(task, *scale) for task in window_tasks(split_names("--tasks", task_names))]
    methods = select(known if method_names is None else split_names("--methods", method_names), known)
    require_installed(methods)
    wanted = plan(chosen, methods, 1 if quick else seeds, min(points, QUICK_POINTS) if quick else points, _rates(lrs))
    folder = writable_folder(out)
    path = store or folder / STORE
    stem = "ablations" if ablations else "lr-window"
    if report_only:
        _show(chosen, _reported(wanted, path, folder / f"{stem}-runs.csv", chosen), folder, stem)
        return
    if not path.exists():
        status_console().print(f"[dim]{start_from_nothing(path)}", soft_wrap=True, highlight=False)
    if near is not None:
        first = [run for run in wanted if run.seed == 0]
        found = collect_showing_progress(first, path, jobs, data_dir)
        further = promising([run for run in wanted if run.seed], found, near)
        wanted = [*first, *further]
    _show(chosen, collect_showing_progress(wanted, path, jobs, data_dir), folder, stem)


def _reported(
    wanted: Sequence[RunConfig], path: Path, table: Path, tasks: Sequence[ClassificationTask]
) -> dict[RunConfig, Outcome]:
    """What is there without training: the runs of the store, and those of an earlier report that it does not have."""
    from ddpnopt.lab.windows.kept_runs import kept_runs

    stored = collect_showing_progress(wanted, path, 0) if path.exists() else {}
    there = {**kept_runs(table, tasks), **stored}
    found = {run: there[run] for run in wanted if run in there}
    if not found:
        raise ExperimentError(
            f"there are no results to show: neither a store at {path} nor a table at {table} has these runs; without "
            "--report-only they are computed"
        )
    return found


def _show(chosen: Sequence[ClassificationTask], outcomes: dict[RunConfig, Outcome], folder: Path, stem: str) -> None:
    from ddpnopt.lab.timing.machine import heading
    from ddpnopt.lab.windows import window_figures, window_report
    from ddpnopt.lab.windows.standings import standings

    out = console()
    results = [found for task in chosen if (found := standings(task, outcomes)) is not None]
    if not results:
        raise ExperimentError("there are no results to show")
    saved = window_report.write(results, outcomes, folder, stem, heading())
    for result in results:
        out.print(window_report.table(result))
        out.print(f"[dim]{window_report.explanation(result)}\n")
        saved += window_figures.draw(result, folder / f"{stem}-{result.task.name}")
    for path in saved:
        out.print(f"[dim]saved[/] {path}", soft_wrap=True)


def _rates(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in split_names("--lrs", text)]
    except ValueError:
        raise ExperimentError(f"--lrs must be numbers separated by commas, not {text!r}") from None
