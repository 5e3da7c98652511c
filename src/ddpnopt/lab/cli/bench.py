"""`ddpnopt bench`: how much the learning rate matters, and what a step costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ddpnopt.lab.cli.bench_speed import speed
from ddpnopt.lab.cli.errors import one_line_errors
from ddpnopt.lab.cli.options import DataDir, split_names, writable_folder
from ddpnopt.lab.cli.progress import bar, console, status_console
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.windows.campaign import plan, promising
from ddpnopt.lab.windows.contenders import ABLATIONS, CONTENDERS, POINTS, contenders
from ddpnopt.lab.windows.runs import Run
from ddpnopt.lab.windows.tasks import TASKS, Task, tasks

app = typer.Typer(help="How much the learning rate matters, and what a step costs.", no_args_is_help=True)
app.command("speed")(one_line_errors(speed))

QUICK_SAMPLES = 0.1
QUICK_EPOCHS = 0.34
QUICK_POINTS = 5
LOG_EVERY = 20


@app.command("lr-window")
@one_line_errors
def lr_window(
    task_names: Annotated[str, typer.Option("--tasks", help="Comma separated.")] = ",".join(TASKS),
    method_names: Annotated[
        str | None,
        typer.Option("--methods", help=f"Comma separated; all of {', '.join(CONTENDERS)}.", show_default=False),
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
        int, typer.Option(min=2, max=POINTS, help="How many learning rates over seven decades.")
    ] = POINTS,
    epochs_scale: Annotated[float, typer.Option(help="Multiplies the epochs of every task.")] = 1.0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once, one torch thread each.")] = 1,
    ablations: Annotated[
        bool, typer.Option("--ablations", help=f"Forms of DDPNOpt in place of methods: {', '.join(ABLATIONS)}.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, five rates, a tenth of the images: to see that it works.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Tables and pictures of what the store holds; no training.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the store, tables and pictures.")] = Path("results/lr-window"),
    data_dir: DataDir = None,
) -> None:
    """Test accuracy over seven decades of learning rates; interrupted, it goes on where it was."""
    known = ABLATIONS if ablations else CONTENDERS
    scale = (epochs_scale * QUICK_EPOCHS, QUICK_SAMPLES) if quick else (epochs_scale, 1.0)
    chosen = [task.scaled(*scale) for task in tasks(split_names("--tasks", task_names))]
    methods = contenders(list(known) if method_names is None else split_names("--methods", method_names), known)
    wanted = plan(chosen, methods, 1 if quick else seeds, min(points, QUICK_POINTS) if quick else points, _rates(lrs))
    folder = writable_folder(out)
    jobs = 0 if report_only else jobs
    if near is not None:
        first = [run for run in wanted if run.seed == 0]
        further = promising([run for run in wanted if run.seed], _collect(first, folder, jobs, data_dir), near)
        wanted = [*first, *further]
    outcomes = _collect(wanted, folder, jobs, data_dir)
    _show(chosen, outcomes, folder, "ablations" if ablations else "lr-window")


def _collect(wanted: Sequence[Run], folder: Path, jobs: int, data_dir: Path | None) -> dict[Run, Outcome]:
    """What is in the store, and the rest computed now, under a bar or with a line now and then in a log file."""
    from ddpnopt.lab.runs.store import Store, code_state
    from ddpnopt.lab.runs.sweep import carry_out, unfinished
    from ddpnopt.lab.runs.work import Single

    status = status_console()
    store = Store(folder / "results.sqlite")
    if store.codes(run.key for run in wanted) - {code_state()}:
        status.print("[dim]some results in the store come from another state of the optimizer's code")
    missing = unfinished(wanted, store) if jobs else []
    with bar() as progress:
        row = progress.add_task("runs", total=len(missing), detail="")
        units = [Single(run) for run in missing]
        for done, (run, outcome) in enumerate(carry_out(units, store, jobs=jobs, data_dir=data_dir), start=1):
            detail = _detail(run, outcome)
            progress.update(row, completed=done, detail=detail)
            if progress.disable and (done % LOG_EVERY == 0 or done == len(missing)):
                status.print(f"{done}/{len(missing)} runs; {detail}", soft_wrap=True, highlight=False)
    there = store.outcomes()
    store.close()
    return {run: there[key] for run in wanted if (key := run.key) in there}


def _show(chosen: Sequence[Task], outcomes: dict[Run, Outcome], folder: Path, stem: str) -> None:
    from ddpnopt.lab.timing.machine import heading
    from ddpnopt.lab.windows import window_figures, window_report
    from ddpnopt.lab.windows.windows import standings

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


def _detail(run: Run, outcome: Outcome | None) -> str:
    rate = "default" if run.lr is None else f"{run.lr:g}"
    what = f"{run.task.name}, {run.contender.name}, lr {rate}, seed {run.seed}"
    if outcome is None:
        return f"{what}: no such setting"
    return f"{what}: {'diverged' if outcome.diverged else f'{outcome.accuracy:.1f} %'}, {outcome.seconds:.0f} s"
