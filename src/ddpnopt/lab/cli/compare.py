"""`ddpnopt compare`: DDPNOpt compared with other optimizers on a data set or on a task of one's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from ddpnopt.lab.cli.errors import one_line_errors
from ddpnopt.lab.cli.options import (
    BatchSize,
    DataDir,
    Epochs,
    NetworkName,
    NTrain,
    described_task,
    split_names,
    writable_folder,
)
from ddpnopt.lab.cli.progress import bar, console, status_console
from ddpnopt.lab.comparison.comparison import DEFAULT_METHODS, ComparedMethod, Comparison, tuned
from ddpnopt.lab.comparison.comparison import compare as run_comparison
from ddpnopt.lab.comparison.output import count, save, table
from ddpnopt.lab.comparison.own import OWN_METHODS, compare_own, own_entrants, planned_runs
from ddpnopt.lab.comparison.task_file import near_misses, read_task
from ddpnopt.lab.data import IMAGE_SETS, load
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.store import STORE
from ddpnopt.lab.runs.training import Progress


@one_line_errors
def compare(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py | DATASET",
            help="A file with your model, batches and loss; or wine, digits, mnist, fashion_mnist, svhn, cifar10 or "
            "gaussian-K.",
            show_default=False,
        ),
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma separated; `name@lr` fixes a learning rate, as in adam@0.01. By default "
            f"{','.join(DEFAULT_METHODS)} on a data set and {','.join(OWN_METHODS)} on a file.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 3,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Of a file's runs; by default as the file says.", show_default=False)
    ] = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    network: NetworkName = None,
    n_train: NTrain = None,
    tune: Annotated[
        bool | None,
        typer.Option(
            "--tune/--no-tune",
            help="Choose the baselines' learning rates first: of a file by what it is judged by (the default), of a "
            "data set on held-out training data (not the default).",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run a file again instead of using kept runs.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("results/compare"),
    data_dir: DataDir = None,
) -> None:
    """Compare DDPNOpt with other optimizers; print a table, save the curves as a picture."""
    if what.endswith(".py"):
        given = {"--epochs": epochs, "--batch-size": batch_size, "--network": network, "--n-train": n_train}
        for option, value in given.items():
            if value is not None:
                raise ExperimentError(f"{option} belongs to a data set; {what} decides this itself")
        names = split_names("--methods", methods) if methods is not None else list(OWN_METHODS)
        result = _own(Path(what), names, seeds, steps, tune is not False, fresh, writable_folder(out))
        _show(result, f"{result.title}, {count(seeds, 'seed')}", out)
        return
    if steps is not None or fresh:
        raise ExperimentError(f"{'--fresh' if fresh else '--steps'} belongs to a file of your own, not to {what!r}")
    task = described_task(what, network, epochs, batch_size, n_train)
    texts = (methods if methods is not None else ",".join(DEFAULT_METHODS)).split(",")
    chosen = list(dict.fromkeys(ComparedMethod.parse(text) for text in texts if text.strip()))
    if not chosen:
        raise ExperimentError("--methods names no method")
    folder = writable_folder(out)
    result = _on_data_set(task, chosen, seeds, bool(tune), data_dir)
    title = (
        f"{task.dataset}, {task.network}, {count(task.epochs, 'epoch')}, batch size {task.batch_size}, "
        f"{count(seeds, 'seed')}"
    )
    _show(result, title, folder)


def _on_data_set(
    task: ClassificationTask, chosen: list[ComparedMethod], seeds: int, tune: bool, data_dir: Path | None
) -> Comparison:
    status = status_console()
    with status.status("data") as waiting:
        data = load(task.dataset, data_dir=data_dir, report=waiting.update)
        images = data if task.dataset in IMAGE_SETS else None
    if tune:
        with status.status("choosing learning rates on held-out training data"):
            chosen = tuned(task, chosen, images=images)
    per_run = math.ceil((task.n_train or len(data.y_train)) / task.batch_size) * task.epochs
    with bar() as progress:
        row = progress.add_task(task.dataset, total=len(chosen) * seeds * per_run, detail="")
        order = {each: position for position, each in enumerate(chosen)}

        def on_step(each: ComparedMethod, seed: int, now: Progress) -> None:
            finished = seed * len(chosen) + order[each]
            detail = f"{each.method}, seed {seed}, loss {now.loss:.3f}"
            progress.update(row, completed=finished * per_run + now.step, detail=detail)

        return run_comparison(task, chosen, range(seeds), images=images, on_step=on_step)


def _own(
    path: Path, methods: list[str], seeds: int, steps: int | None, tune: bool, fresh: bool, folder: Path
) -> Comparison:
    entrants = own_entrants(methods, tune=tune)  # a misspelt method is told before the file is run
    task = read_task(path, steps)
    status = status_console()
    for remark in near_misses(path):
        status.print(remark, soft_wrap=True, highlight=False)
    store = folder / STORE
    kept = 0
    seen: set[RunConfig] = set()
    with bar() as progress:
        row = progress.add_task(task.name, total=planned_runs(entrants, seeds) * task.steps, detail="")

        def on_step(run: RunConfig, number: int, total: int, now: Progress | None) -> None:
            nonlocal kept
            if run not in seen:
                kept += now is None
                seen.add(run)
                if progress.disable and now is not None:  # a log file
                    status.print(f"{run}", soft_wrap=True, highlight=False)
            done = task.steps if now is None else now.step
            rate = "" if run.lr is None else f", lr {run.lr:g}"
            detail = "" if now is None else f"{run.method}{rate}, seed {run.seed}, loss {now.loss:.3g}"
            progress.update(row, completed=(len(seen) - 1) * task.steps + done, detail=detail)

        try:
            result = compare_own(task, methods, seeds, tune=tune, store=store, fresh=fresh, on_step=on_step)
        except KeyboardInterrupt:
            status.print(f"interrupted: finished runs are in {store}; the same command continues", soft_wrap=True)
            raise
    if kept:
        status.print(f"[dim]{count(kept, 'run')} of an earlier call taken from {store}; --fresh runs them again[/]")
    return result


def _show(result: Comparison, title: str, folder: Path) -> None:
    console().print(table(result, title))
    if result.note:
        console().print(f"[dim]{result.note}", highlight=False)
    for path in save(result, folder):
        console().print(f"[dim]saved[/] {path}", soft_wrap=True)
