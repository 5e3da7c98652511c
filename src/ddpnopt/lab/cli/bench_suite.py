"""`ddpnopt bench suite`: many small tasks of different kinds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ddpnopt.lab.cli.options import StorePath, split_names, writable_folder
from ddpnopt.lab.cli.progress import console, status_console
from ddpnopt.lab.cli.sweeps import collect_showing_progress
from ddpnopt.lab.errors import ExperimentError, UnknownNameError
from ddpnopt.lab.methods.registry import method, require_installed
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.store import STORE, Store, code_state
from ddpnopt.lab.suite.comparison import TaskResult, compare
from ddpnopt.lab.suite.entrants import SUITE_METHODS, Entrant, all_runs, all_trials, entrants
from ddpnopt.lab.suite.kept_rows import kept_rows
from ddpnopt.lab.suite.runs import SuiteRunTask
from ddpnopt.lab.suite.tasks import TASKS, open_tasks, sealed_tasks


def suite(
    task_names: Annotated[
        str | None, typer.Option("--tasks", help="Comma separated, open or sealed.", show_default=False)
    ] = None,
    families: Annotated[
        str | None, typer.Option(help="Only tasks of these families, comma separated.", show_default=False)
    ] = None,
    method_names: Annotated[
        str,
        typer.Option("--methods", help="Comma separated; module:function for one of your own (model -> optimizer)."),
    ] = ",".join(SUITE_METHODS),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 3,
    open_only: Annotated[bool, typer.Option("--open", help="The tasks to develop methods on (the default).")] = False,
    sealed: Annotated[bool, typer.Option("--sealed", help="The tasks kept for the final comparison.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Both.")] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Instead of each task's own number.", show_default=False)
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once, one torch thread each.")] = 2,
    renew: Annotated[
        bool, typer.Option("--renew", help="Compute DDPNOpt's runs again if another state of its code computed them.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Tables and picture of what the store holds; no training.")
    ] = False,
    keep: Annotated[
        list[Path] | None,
        typer.Option(help="An earlier suite.csv: its rows stand in for what is not run here.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the store, tables and picture.")] = Path("results/suite"),
    store: StorePath = None,
) -> None:
    """Compare methods on small tasks of many kinds; if interrupted, it continues where it was."""
    if sum((open_only, sealed, everything)) > 1:
        raise ExperimentError("--open, --sealed and --all exclude each other")
    tasks = [SuiteRunTask(name, steps) for name in _chosen(task_names, families, sealed, everything)]
    methods = entrants(split_names("--methods", method_names))
    require_installed(each.method for each in methods)
    shown = _with_others(methods) if keep else methods
    kept = {key: result for table in keep or () for key, result in kept_rows(table, tasks, shown).items()}
    path = store or writable_folder(out) / STORE
    if report_only and not path.exists() and not kept:
        raise ExperimentError(f"there are no results to show: {path} does not exist")
    writable_folder(path.parent)
    jobs = 0 if report_only else jobs
    if renew and not report_only:
        _discard_outdated([run for task in tasks for each in methods for run in each.runs(task, {}, seeds)], path)
    outcomes = collect_showing_progress(all_trials(tasks, methods), path, jobs, what="trials of rates")
    outcomes |= collect_showing_progress(all_runs(tasks, methods, outcomes, seeds), path, jobs)
    _show(compare(tasks, shown, outcomes, seeds, kept), shown, writable_folder(out))


def _with_others(methods: Sequence[Entrant]) -> list[Entrant]:
    """With the suite's other methods, in its order."""
    named = {each.name: each for each in methods}
    order = [*SUITE_METHODS, *(name for name in named if name not in SUITE_METHODS)]
    return [named.get(name) or entrants([name])[0] for name in order]


def _chosen(task_names: str | None, families: str | None, sealed: bool, everything: bool) -> list[str]:
    """The names of the tasks; tasks that are named are taken, sealed or not."""
    if sealed and not sealed_tasks():
        raise ExperimentError("no task is sealed at present: all of them have been looked at, see docs/suite.md")
    group = list(TASKS.values()) if everything else sealed_tasks() if sealed else open_tasks()
    if task_names is not None:
        names = split_names("--tasks", task_names)
        for name in names:
            if name not in TASKS:
                raise UnknownNameError("task", name, TASKS)
        group = [TASKS[name] for name in dict.fromkeys(names)]
    if families is not None:
        wanted = split_names("--families", families)
        known = dict.fromkeys(task.family for task in TASKS.values())
        for family in wanted:
            if family not in known:
                raise UnknownNameError("family", family, known)
        group = [task for task in group if task.family in wanted]
    if not group:
        raise ExperimentError("no task is left: see --tasks, --families, --sealed and --all")
    return [task.name for task in group]


def _discard_outdated(runs: Sequence[RunConfig], path: Path) -> None:
    """Remove the runs whose result depends on the optimizer's code, and which another state of it computed."""
    ours = [run.key for run in runs if method(run.method).is_ddpnopt or method(run.method).source]
    store = Store(path)
    removed = store.remove(ours, unless_code=code_state())
    store.close()
    status_console().print(f"[dim]{removed} runs of another state of the optimizer's code are computed again")


def _show(results: Sequence[TaskResult], methods: Sequence[Entrant], out: Path) -> None:
    from ddpnopt.lab.suite import profile_figure, report, verdict_figure
    from ddpnopt.lab.timing.machine import heading

    if not results:
        raise ExperimentError("there are no results to show")
    saved = report.write(results, methods, out, heading())
    saved += profile_figure.draw(results, methods, out / "profile")
    if judged := verdict_figure.verdicts(results, methods):
        saved += verdict_figure.draw(judged, out / "verdicts")
    screen = console()
    if not screen.is_terminal:
        screen.width = report.WIDE + 20 * len(methods)  # a file has room
    for table in report.screen_tables(results, methods, screen.width):
        screen.print(table)
    screen.print(f"[dim]{report.explanation(results)}")
    for path in saved:
        screen.print(f"[dim]saved[/] {path}", soft_wrap=True)
