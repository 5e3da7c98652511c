"""`ddpnopt train DATASET`: one run."""

from __future__ import annotations

from dataclasses import asdict, replace
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
    Network,
    NTrain,
    configuration,
    writable_folder,
)
from ddpnopt.lab.cli.progress import bar, console, status_console
from ddpnopt.lab.data import load
from ddpnopt.lab.data.cache import write_atomically
from ddpnopt.lab.methods import METHODS
from ddpnopt.lab.methods import method as known_method
from ddpnopt.lab.runs.checkpoints import Checkpoints
from ddpnopt.lab.runs.training import Progress, RunResult
from ddpnopt.lab.runs.training import train as run


@one_line_errors
def train(
    dataset: DatasetName,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "ddpnopt",
    lr: Annotated[float | None, typer.Option(help="By default the method's.", show_default=False)] = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    network: Network = None,
    n_train: NTrain = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws split, weights and batches.")] = 0,
    save: Annotated[
        Path | None, typer.Option(help="Write the weights and the configuration here (torch.save).")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Keep the run here; where the file exists, go on from it, bit for bit.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps from one checkpoint to the next.")] = 100,
    data_dir: DataDir = None,
) -> None:
    """Train one network with one method."""
    known_method(method)
    base = configuration(dataset, network, epochs, batch_size, n_train)
    config = replace(base, method=method, lr=lr, seed=seed)
    if save is not None:
        writable_folder(save.parent)
    checkpoints = None
    if checkpoint is not None:
        writable_folder(checkpoint.parent)
        checkpoints = Checkpoints(checkpoint, every, asdict(config))
        if checkpoint.exists():
            status_console().print(f"[dim]going on from[/] {checkpoint}", soft_wrap=True)
    with status_console().status("data") as waiting:
        data = load(config.dataset, seed=seed, data_dir=data_dir, report=waiting.update)
    if n_train is not None:
        data = data.subset(n_train, seed)
    with bar() as progress:
        task = progress.add_task(method, total=None, detail="")

        def on_step(now: Progress) -> None:
            detail = f"epoch {now.epoch + 1}/{config.epochs}, loss {now.loss:.4f}"
            progress.update(task, total=now.steps, completed=now.step, detail=detail)

        result = run(config, data, on_step=on_step, checkpoints=checkpoints)
    _tell(result, data.note)
    if save is not None:
        content = {"state_dict": result.weights, "config": {**asdict(config), "lr": result.lr}}
        write_atomically(save, lambda file: torch.save(content, file))
        console().print(f"[dim]saved[/] {save}", soft_wrap=True)
    if result.diverged:
        raise typer.Exit(1)


def _tell(result: RunResult, note: str) -> None:
    config = result.config
    out = console()
    out.print(f"[bold]{config.method}[/] on {config.dataset} ({config.network}), learning rate {result.lr:g}")
    if result.diverged:
        out.print(f"[red]diverged[/] after {result.steps} steps")
    else:
        for epoch, loss in enumerate(result.epoch_losses, start=1):
            out.print(f"  [dim]epoch {epoch:3d}[/]  loss {loss:.4f}")
    out.print(f"train loss {result.train_loss:.4f}, test accuracy {result.test_accuracy:.2f} %")
    out.print(f"[dim]{result.steps} steps in {result.seconds:.1f} s ({1000 * result.step_seconds:.2f} ms each)")
    if note:
        out.print(f"[dim]{note}")
