"""`ddpnopt compare DATASET`: DDPNOpt compared with the baselines, as a table, a picture and a file of numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ddpnopt.lab.cli.errors import one_line_errors
from ddpnopt.lab.cli.options import (
    BatchSize,
    DataDir,
    DatasetName,
    Epochs,
    NetworkName,
    NTrain,
    described_task,
    writable_folder,
)
from ddpnopt.lab.cli.progress import bar, console, status_console
from ddpnopt.lab.compare.comparison import DEFAULT_METHODS, ComparedMethod, Comparison, Summary, tuned
from ddpnopt.lab.compare.comparison import compare as run_comparison
from ddpnopt.lab.data import IMAGE_SETS, load
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.runs.training import Progress
from ddpnopt.lab.tables import Spread, screen_table, write_csv


@one_line_errors
def compare(
    dataset: DatasetName,
    methods: Annotated[
        str, typer.Option(help="Comma separated; `name@lr` fixes a learning rate, as in adam@0.01.")
    ] = ",".join(DEFAULT_METHODS),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 3,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    network: NetworkName = None,
    n_train: NTrain = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="First choose the baselines' learning rates on held-out training data."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("results/compare"),
    data_dir: DataDir = None,
) -> None:
    """Compare DDPNOpt with the baselines; print a table, save the curves as a picture."""
    task = described_task(dataset, network, epochs, batch_size, n_train)
    chosen = list(dict.fromkeys(ComparedMethod.parse(text) for text in methods.split(",") if text.strip()))
    if not chosen:
        raise ExperimentError("--methods names no method")
    folder = writable_folder(out)
    status = status_console()
    with status.status("data") as waiting:
        data = load(task.dataset, data_dir=data_dir, report=waiting.update)
        images = data if task.dataset in IMAGE_SETS else None
    if tune:
        with status.status("choosing learning rates on held-out training data"):
            chosen = tuned(task, chosen, images=images)

    per_run = math.ceil((n_train or len(data.y_train)) / task.batch_size) * task.epochs
    runs = len(chosen) * seeds
    with bar() as progress:
        row = progress.add_task(task.dataset, total=runs * per_run, detail="")
        order = {each: position for position, each in enumerate(chosen)}

        def on_step(each: ComparedMethod, seed: int, now: Progress) -> None:
            finished = seed * len(chosen) + order[each]
            detail = f"{each.method}, seed {seed}, loss {now.loss:.3f}"
            progress.update(row, completed=finished * per_run + now.step, detail=detail)

        result = run_comparison(task, chosen, range(seeds), images=images, on_step=on_step)

    title = (
        f"{task.dataset}, {task.network}, {_count(task.epochs, 'epoch')}, batch size {task.batch_size}, "
        f"{_count(seeds, 'seed')}"
    )
    console().print(table(result, title))
    if result.note:
        console().print(f"[dim]{result.note}")
    for path in save(result, folder):
        console().print(f"[dim]saved[/] {path}", soft_wrap=True)


def table(result: Comparison, title: str) -> Table:
    """Mean ± standard deviation over the seeds, the best of each column marked."""
    lowest = min((row.train_loss.mean for row in result.summaries if math.isfinite(row.train_loss.mean)), default=0.0)
    highest = max(
        (row.test_accuracy.mean for row in result.summaries if math.isfinite(row.test_accuracy.mean)), default=0.0
    )
    rows = [
        (
            row.label,
            f"{row.lr:g}",
            _cell(row.train_loss, 4, row.train_loss.mean == lowest) + _divergence(row),
            _cell(row.test_accuracy, 2, row.test_accuracy.mean == highest),
            "–" if math.isnan(row.relative_step_time) else f"{row.relative_step_time:.1f}",
        )
        for row in result.summaries
    ]
    return screen_table(title, ("method", "lr", "train loss", "test accuracy %", "step time\n(SGD = 1)"), rows)


def save(result: Comparison, folder: Path) -> list[Path]:
    """The picture in two formats and the numbers of every run."""
    from ddpnopt.lab.compare.comparison_figure import draw  # matplotlib takes a second to import: only when drawing

    stem = folder / f"compare-{result.task.dataset}"
    return [*draw(result, stem), write_csv(stem.with_name(f"{stem.name}.csv"), list(result.records()))]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cell(spread: Spread, digits: int, best: bool) -> str:
    if not math.isfinite(spread.mean):
        return "–"
    return f"[bold green]★ {spread.text(digits)}[/]" if best else spread.text(digits)


def _divergence(row: Summary) -> str:
    return f" [red]({row.diverged}/{len(row.runs)} diverged)[/]" if row.diverged else ""
