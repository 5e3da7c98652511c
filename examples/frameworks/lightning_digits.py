"""DDPNOpt in Lightning.

Create DDPNOpt from the network that `training_step` calls, not the LightningModule: its hooks see `self.network(x)`.
Lightning passes a closure to `step`; it is called once. Do not set `gradient_clip_val`: clipping acts on `.grad`, which
layers with feedback do not use (and value="batch" never lets the loss of the batch rise).
"""

from __future__ import annotations

from typing import Any

import lightning
import torch.nn.functional as F
from digits import accuracy, data, network
from torch import Tensor
from torch.utils.data import DataLoader

from ddpnopt import DDPNOpt


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.network(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return DDPNOpt(self.network)


def main(epochs: int = 5, **trainer: Any) -> float:
    """Test accuracy in percent."""
    lightning.seed_everything(0, verbose=False)
    train, test = data()
    model = Digits()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "accelerator": "cpu"}
    lightning.Trainer(max_epochs=epochs, **{**quiet, **trainer}).fit(model, DataLoader(train, 64, shuffle=True))
    return accuracy(model.network, test)


if __name__ == "__main__":
    print(f"test accuracy {main():.1f} %")
