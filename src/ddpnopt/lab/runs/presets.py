"""Network, epochs and batch size of each data set unless they are given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """Batches of 8 to 32 for fully connected and of 128 for convolutional networks, as in the paper."""

    network: str
    epochs: int
    batch_size: int


PRESETS = {
    "wine": Preset("fcn", epochs=60, batch_size=8),
    "digits": Preset("fcn", epochs=15, batch_size=16),
    "mnist": Preset("fcn", epochs=3, batch_size=32),
    "fashion_mnist": Preset("fcn", epochs=3, batch_size=32),
    "svhn": Preset("cnn", epochs=3, batch_size=128),
    "cifar10": Preset("cnn", epochs=5, batch_size=128),
}
CLUSTERS = Preset("fcn", epochs=10, batch_size=16)
CONVOLUTIONAL_BATCH = 128


def preset(dataset: str) -> Preset:
    """The preset of a data set; one for all Gaussian clusters."""
    return PRESETS.get(dataset, CLUSTERS)


def batch_size_for(dataset: str, network: str) -> int:
    """The preset's batch size, unless another kind of network is asked for."""
    chosen = preset(dataset)
    convolutional = not network.endswith("fcn")
    if convolutional and chosen.network == "fcn":
        return CONVOLUTIONAL_BATCH
    return chosen.batch_size
