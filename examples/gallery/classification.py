"""Handwritten digits with a small convolutional network: `python examples/gallery/classification.py --out pictures`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from drawing import arguments, picture
from sklearn.datasets import load_digits
from torch import nn

from ddpnopt import DDPNOpt


def main(steps: int = 150, out: Path | None = None) -> float:
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    train, test = torch.randperm(len(x)).tensor_split([1400])

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    opt = DDPNOpt(model)
    losses = []
    for _ in range(steps):
        rows = train[torch.randint(len(train), (64,))]
        opt.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        opt.step()
        losses.append(loss.item())
    opt.eval()  # the averaged weights
    model.eval()
    with torch.no_grad():
        guesses = model(x[test]).argmax(1)
    accuracy = (guesses == y[test]).float().mean().item()
    if out is not None:
        with picture(
            out / "gallery-classification", "Digits: loss, and test images with the answer", losses, 12
        ) as axes:
            for axis, row, guess in zip(axes, test, guesses, strict=False):
                axis.imshow(x[row, 0], cmap="gray_r")
                axis.set_title(str(guess.item()), color="#1b7a4b" if guess == y[row] else "#c8381e")
    return accuracy


if __name__ == "__main__":
    print(f"test accuracy {main(**arguments()):.1%}")
