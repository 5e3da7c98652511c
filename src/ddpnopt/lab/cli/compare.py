"""`ddpnopt compare DATASET`: DDPNOpt beside the baselines, as a table, a picture and a file of numbers."""

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
    Network,
    NTrain,
    configuration,
    writable_folder,
)
from ddpnopt.lab.cli.progress import bar, console, status_console
from ddpnopt.lab.comparison import DEFAULT_METHODS, Comparison, Entry, Spread, Summary, tuned
from ddpnopt.lab.comparison import compare as run_comparison
from ddpnopt.lab.data import IMAGE_SETS, load
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.runs.training import Progress


@one_line_errors
def compare(
    dataset: DatasetName,
    methods: Annotated[
        str, typer.Option(help="Comma separated; `name@lr` fixes a learning rate, as in adam@0.01.")
    ] = ",".join(DEFAULT_METHODS),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 3,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    network: Network = None,
    n_train: NTrain = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="First choose the baselines' learning rates on held-out training data."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("results/compare"),
    data_dir: DataDir = None,
) -> None:
    """Train DDPNOpt beside the baselines; print a table, save the curves as a picture."""
    base = configuration(dataset, network, epochs, batch_size, n_train)
    entries = list(dict.fromkeys(Entry.parse(text) for text in methods.split(",") if text.strip()))
    if not entries:
        raise ExperimentError("--methods names no method")
    folder = writable_folder(out)
    status = status_console()
    with status.status("data") as waiting:
        data = load(base.dataset, data_dir=data_dir, report=waiting.update)
        images = data if base.dataset in IMAGE_SETS else None
    if tune:
        with status.status("choosing learning rates on held-out training data"):
            entries = tuned(base, entries, images=images)

    per_run = math.ceil((n_train or len(data.y_train)) / base.batch_size) * base.epochs
    runs = len(entries) * seeds
    with bar() as progress:
        task = progress.add_task(base.dataset, total=runs * per_run, detail="")
        order = {entry: position for position, entry in enumerate(entries)}

        def on_step(entry: Entry, seed: int, now: Progress) -> None:
            finished = seed * len(entries) + order[entry]
            detail = f"{entry.method}, seed {seed}, loss {now.loss:.3f}"
            progress.update(task, completed=finished * per_run + now.step, detail=detail)

        result = run_comparison(base, entries, range(seeds), images=images, on_step=on_step)

    title = (
        f"{base.dataset}, {base.network}, {_count(base.epochs, 'epoch')}, batch size {base.batch_size}, "
        f"{_count(seeds, 'seed')}"
    )
    console().print(table(result, title))
    if result.note:
        console().print(f"[dim]{result.note}")
    for path in save(result, folder):
        console().print(f"[dim]saved[/] {path}", soft_wrap=True)


def table(result: Comparison, title: str) -> Table:
    """Mean ± standard deviation over the seeds, the best of each column marked."""
    losses = [row.train_loss.mean for row in result.summaries]
    accuracies = [row.test_accuracy.mean for row in result.summaries]
    lowest = min((loss for loss in losses if math.isfinite(loss)), default=math.nan)
    highest = max(accuracies)
    made = Table(title=title, title_justify="left", title_style="bold")
    made.add_column("method")
    for heading in ("lr", "train loss", "test accuracy %", "step time\n(SGD = 1)"):
        made.add_column(heading, justify="right", no_wrap=True)
    for row in result.summaries:
        made.add_row(
            row.label,
            f"{row.lr:g}",
            _cell(row.train_loss, 4, row.train_loss.mean == lowest) + _divergence(row),
            _cell(row.test_accuracy, 2, row.test_accuracy.mean == highest),
            "–" if math.isnan(row.relative_step_time) else f"{row.relative_step_time:.1f}",
        )
    return made


def save(result: Comparison, folder: Path) -> list[Path]:
    """The picture twice and the numbers of every run."""
    from ddpnopt.lab.figures import draw  # matplotlib takes a second to import: only when drawing

    stem = folder / f"compare-{result.dataset}"
    numbers = stem.with_name(f"{stem.name}.csv")
    result.table().to_csv(numbers, index=False)
    return [*draw(result, stem), numbers]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cell(spread: Spread, digits: int, best: bool) -> str:
    if not math.isfinite(spread.mean):
        return "–"
    text = f"{spread.mean:.{digits}f}"
    if math.isfinite(spread.std):
        text += f" ± {spread.std:.{digits}f}"
    return f"[bold green]★ {text}[/]" if best else text


def _divergence(row: Summary) -> str:
    return f" [red]({row.diverged}/{len(row.results)} diverged)[/]" if row.diverged else ""
