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
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.presets import batch_size_for, preset

DatasetName = Annotated[
    str,
    typer.Argument(help="wine, digits, mnist, fashion_mnist, svhn, cifar10 or gaussian-K.", show_default=False),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder with <name>/train.parquet and test.parquet; else DDPNOPT_DATA, else Hugging Face."),
]
NetworkName = Annotated[
    str | None,
    typer.Option(help=f"One of {', '.join(NETWORKS)}; by default the data set's.", show_default=False),
]
Epochs = Annotated[int | None, typer.Option(min=1, help="By default the data set's.", show_default=False)]
BatchSize = Annotated[int | None, typer.Option(min=1, help="By default the data set's.", show_default=False)]
NTrain = Annotated[
    int | None,
    typer.Option(min=1, help="Train on this many samples, drawn by seed; by default all.", show_default=False),
]


def described_task(
    dataset: str, network: str | None, epochs: int | None, batch_size: int | None, n_train: int | None
) -> ClassificationTask:
    """The task that the options describe, with the data set's preset for what is not given."""
    name = canonical(dataset)
    chosen = preset(name)
    network = known(network or chosen.network)
    return ClassificationTask(
        name, network, epochs or chosen.epochs, batch_size or batch_size_for(name, network), n_train
    )


def writable_folder(folder: Path) -> Path:
    """The folder, created if necessary; an error now rather than after minutes of training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as failed:
        reason = os.strerror(failed.errno) if failed.errno else str(failed)
        raise ExperimentError(f"cannot write into {folder}: {reason}") from failed
    return folder


def split_names(option: str, text: str) -> list[str]:
    """The parts of a comma-separated option; an error if there are none."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise ExperimentError(f"{option} is empty")
    return names


StorePath = Annotated[
    Path | None,
    typer.Option("--store", help="SQLite file of finished runs; by default runs.sqlite in --out.", show_default=False),
]
