"""DDPNOpt in Hugging Face Accelerate, in full precision or bfloat16.

`accelerator.backward(loss)` divides the loss by the number of accumulated batches, which is 1 here, and `prepare` may
wrap the model's forward pass in autocast, which also applies to the second forward pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from digits import accuracy, data, network
from torch.utils.data import DataLoader

from ddpnopt import DDPNOpt


def main(epochs: int = 5, mixed_precision: str = "no") -> float:
    """Test accuracy in percent."""
    torch.manual_seed(0)
    train, test = data()
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    model = network()
    opt = DDPNOpt(model)  # the unwrapped model: its hooks remain active after wrapping
    model, opt, loader = accelerator.prepare(model, opt, DataLoader(train, 64, shuffle=True))
    for _ in range(epochs):
        for x, y in loader:
            opt.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            opt.step()
    return accuracy(accelerator.unwrap_model(model), test)


if __name__ == "__main__":
    print(f"test accuracy {main():.1f} %")
