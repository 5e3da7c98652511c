"""DDPNOpt in skorch: a classifier with the scikit-learn interface.

skorch builds optimizers from parameters; DDPNOpt needs the model, so the class overrides `initialize_optimizer`. Pass
options as for any other optimizer: `Classifier(network, optimizer__value="outer", optimizer__lr=0.1)`. skorch passes a
closure to `step`; it is called once. Do not use `GradientNormClipping`: it acts on `.grad`, which layers with feedback
do not use.
"""

from __future__ import annotations

from typing import Any

import torch
from digits import data, network
from skorch import NeuralNetClassifier
from torch import nn

from ddpnopt import DDPNOpt


class Classifier(NeuralNetClassifier):
    def initialize_optimizer(self, *_: Any, **__: Any) -> Any:
        options = self.get_params_for("optimizer")
        self.optimizer_ = DDPNOpt(self.module_, **options)
        return self


def main(epochs: int = 5, **options: Any) -> float:
    """Test accuracy in percent."""
    train, test = data()
    torch.manual_seed(0)
    classifier = Classifier(
        network, criterion=nn.CrossEntropyLoss, optimizer=DDPNOpt, max_epochs=epochs, batch_size=64,
        train_split=None, iterator_train__shuffle=True, verbose=0, **options,
    )  # fmt: skip
    classifier.fit(*(t.numpy() for t in train.tensors))
    x, y = (t.numpy() for t in test.tensors)
    return 100 * float((classifier.predict(x) == y).mean())


if __name__ == "__main__":
    print(f"test accuracy {main():.1f} %")
