"""`ddpnopt train DATASET`: one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

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
from ddpnopt.lab.data import load
from ddpnopt.lab.data.cache import write_atomically
from ddpnopt.lab.methods.registry import TRAINED_METHODS
from ddpnopt.lab.methods.registry import method as known_method
from ddpnopt.lab.runs.checkpoints import Checkpoints
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome, RunDetails
from ddpnopt.lab.runs.training import Progress
from ddpnopt.lab.runs.training import train as run


@one_line_errors
def train(
    dataset: DatasetName,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(TRAINED_METHODS)}.")] = "ddpnopt",
    lr: Annotated[float | None, typer.Option(help="By default the method's.", show_default=False)] = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    network: NetworkName = None,
    n_train: NTrain = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws split, weights and batches.")] = 0,
    save: Annotated[
        Path | None, typer.Option(help="Write the weights and the configuration here (torch.save).")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Keep the run here; if the file exists, continue from it, bit for bit.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps from one checkpoint to the next.")] = 100,
    data_dir: DataDir = None,
) -> None:
    """Train one network with one method."""
    known_method(method, TRAINED_METHODS)
    task = described_task(dataset, network, epochs, batch_size, n_train)
    config = RunConfig(method, task, lr, seed=seed)
    if save is not None:
        writable_folder(save.parent)
    checkpoints = None
    if checkpoint is not None:
        writable_folder(checkpoint.parent)
        checkpoints = Checkpoints(checkpoint, every, config.settings)
        if checkpoint.exists():
            status_console().print(f"[dim]continuing from[/] {checkpoint}", soft_wrap=True)
    with status_console().status("data") as waiting:
        data = load(task.dataset, seed=seed, data_dir=data_dir, report=waiting.update)
    if n_train is not None:
        data = data.subset(n_train, seed)
    with bar() as progress:
        row = progress.add_task(method, total=None, detail="")

        def on_step(now: Progress) -> None:
            detail = f"epoch {now.epoch + 1}/{task.epochs}, loss {now.loss:.4f}"
            progress.update(row, total=now.steps, completed=now.step, detail=detail)

        outcome = run(config, task.problem_on(data, seed), on_step=on_step, checkpoints=checkpoints)
    details = outcome.details
    assert details is not None
    _show(config, outcome, details, data.note)
    if save is not None:
        content = {"state_dict": details.weights, "config": {**config.settings, "lr": outcome.lr}}
        write_atomically(save, lambda file: torch.save(content, file))
        console().print(f"[dim]saved[/] {save}", soft_wrap=True)
    if outcome.diverged:
        raise typer.Exit(1)


def _show(config: RunConfig, outcome: Outcome, details: RunDetails, note: str) -> None:
    settings = config.settings
    out = console()
    out.print(
        f"[bold]{config.method}[/] on {settings['dataset']} ({settings['network']}), learning rate {outcome.lr:g}"
    )
    if outcome.diverged:
        out.print(f"[red]diverged[/] after {outcome.steps} steps")
    else:
        for epoch, loss in enumerate(details.record.epoch_losses, start=1):
            out.print(f"  [dim]epoch {epoch:3d}[/]  loss {loss:.4f}")
        out.print(f"train loss {outcome.train_loss:.4f}, test accuracy {outcome.accuracy:.2f} %")
    milliseconds = 1000 * details.record.median_step_seconds
    out.print(f"[dim]{outcome.steps} steps in {outcome.seconds:.1f} s ({milliseconds:.2f} ms each)")
    if note:
        out.print(f"[dim]{note}")
