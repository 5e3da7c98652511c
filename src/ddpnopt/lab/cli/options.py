"""Options that several commands share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ddpnopt.lab.data import canonical
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.networks import NETWORKS, known
from ddpnopt.lab.presets import batch_size_for, preset
from ddpnopt.lab.runs.training import RunConfig

DatasetName = Annotated[
    str,
    typer.Argument(help="wine, digits, mnist, fashion_mnist, svhn, cifar10 or gaussian-K.", show_default=False),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder with <name>/train.parquet and test.parquet; else DDPNOPT_DATA, else the hub."),
]
Network = Annotated[
    str | None,
    typer.Option(help=f"One of {', '.join(NETWORKS)}; by default the data set's.", show_default=False),
]
Epochs = Annotated[int | None, typer.Option(min=1, help="By default the data set's.", show_default=False)]
BatchSize = Annotated[int | None, typer.Option(min=1, help="By default the data set's.", show_default=False)]
NTrain = Annotated[
    int | None,
    typer.Option(min=1, help="Train on this many samples, drawn by seed; by default all.", show_default=False),
]


def configuration(
    dataset: str, network: str | None, epochs: int | None, batch_size: int | None, n_train: int | None
) -> RunConfig:
    """The run that the options describe, with the data set's preset for what is not said."""
    name = canonical(dataset)
    chosen = preset(name)
    network = known(network or chosen.network)
    return RunConfig(
        method="ddpnopt",
        dataset=name,
        network=network,
        epochs=epochs or chosen.epochs,
        batch_size=batch_size or batch_size_for(name, network),
        n_train=n_train,
    )


def writable_folder(folder: Path) -> Path:
    """The folder, made if need be; an error now and not after minutes of training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as failed:
        reason = os.strerror(failed.errno) if failed.errno else str(failed)
        raise ExperimentError(f"cannot write into {folder}: {reason}") from failed
    return folder


def split_names(option: str, text: str) -> list[str]:
    """The parts of a comma-separated option; an error names it where there are none."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise ExperimentError(f"{option} is empty")
    return names
