"""Small trainings that go wrong, one for each symptom that `ddpnopt view` names, each recorded as a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.logging import Recorder

Batches = Iterator[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


def record(
    model: nn.Module,
    batches: Batches,
    loss_of: Loss,
    path: Path,
    *,
    tell: bool = True,
    factor: float = 1.0,
    **options: object,
) -> None:
    """Train on all batches and keep what each step did; a scheduler multiplies each of them by `factor`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they speak of the trouble that is wanted here
        opt = DDPNOpt(model, diagnostics=True, **options)
        opt.param_groups[0]["lr"] *= factor
        with Recorder(opt, path) as log:
            for x, y in batches:
                opt.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                opt.step(loss=loss if tell and math.isfinite(float(loss)) else None)
                log(loss)


def classes(steps: int, batch: int = 32, noise: float = 0.0, spoilt: int = 0) -> Batches:
    """Two classes of 20 numbers; a share of the labels is random, every so many batches hold a NaN."""
    for step in range(steps):
        x = torch.randn(batch, 20)
        y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).long()
        wrong = torch.rand(batch) < noise
        y[wrong] = torch.randint(2, (int(wrong.sum()),))
        if spoilt and step % spoilt == spoilt - 1:
            x[0, 0] = math.nan
        yield x, y


def small(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def skipped(steps: int, path: Path) -> None:
    """A NaN in every tenth batch."""
    record(small(), classes(steps, spoilt=10), F.cross_entropy, path, on_nonfinite="skip")


class Power(nn.Module):
    """An activation that grows faster than any quadratic model."""

    def __init__(self, exponent: int) -> None:
        super().__init__()
        self.exponent = exponent

    def forward(self, x: Tensor) -> Tensor:
        return x.pow(self.exponent)


def powers(exponent: int) -> nn.Module:
    parts = nn.Linear(20, 32), Power(exponent), nn.Linear(32, 32), Power(exponent), nn.Linear(32, 2)
    return nn.Sequential(*parts)


def repeated(steps: int, path: Path) -> None:
    """Fifth powers as activations, and steps with a fixed damping that is far too weak."""
    record(powers(5), classes(steps, 8), F.cross_entropy, path, lr=1e6, relax=1.0)


class Wavy(nn.Module):
    """A line with ripples so fine that its derivative says nothing about the next step."""

    def __init__(self, height: float) -> None:
        super().__init__()
        self.height = height

    def forward(self, x: Tensor) -> Tensor:
        return x + self.height * torch.sin(400 * x)


def wavy(height: float) -> nn.Module:
    parts = nn.Linear(20, 32), Wavy(height), nn.Linear(32, 32), Wavy(height), nn.Linear(32, 2)
    return nn.Sequential(*parts)


def undone(steps: int, path: Path) -> None:
    """Ninth powers: even steps that were shortened several times go wrong."""
    record(powers(9), classes(steps, 8), F.cross_entropy, path, lr=1e12, relax=1.0, on_nonfinite="skip")


def curved(steps: int, path: Path) -> None:
    """A deep autoencoder without norms or shortcuts."""
    widths = [20, 64, 32, 16, 4, 16, 32, 64, 20]
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    record(nn.Sequential(*layers[:-1]), ((x, x) for x, _ in classes(steps)), F.mse_loss, path)


def shortened(steps: int, path: Path) -> None:
    """A scheduler that was made for another optimizer: it multiplies every step by a small learning rate."""
    record(small(), classes(steps), F.cross_entropy, path, factor=1e-3)


def nothing_to_learn(steps: int, path: Path) -> None:
    """Random labels, and every sample is seen once."""
    record(small(), classes(steps, noise=1.0), F.cross_entropy, path)


def promises(steps: int, path: Path) -> None:
    """Activations with fine ripples, and steps with a fixed damping: those of automatic length learn to expect less."""
    record(wavy(0.02), classes(steps), F.cross_entropy, path, lr=3)


class Dead(nn.Module):
    """A shortcut around ReLUs that never fire."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.constant_(self.first.bias, -20.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


def still(steps: int, path: Path) -> None:
    """Dead ReLUs beside a shortcut: no gradient reaches the layer before them."""
    parts = nn.Linear(20, 32), nn.ReLU(), Dead(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
    record(nn.Sequential(*parts), classes(steps), F.cross_entropy, path)


def unknown(steps: int, path: Path) -> None:
    """A Huber loss that is not told to the optimizer."""

    def huber(outputs: Tensor, y: Tensor) -> Tensor:
        return 10 * F.huber_loss(outputs[:, 0], y.float(), delta=0.3)

    record(small(), classes(steps), huber, path, tell=False)


class Recurrent(nn.Module):
    """A cell that reads the numbers one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(1, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x[:, :6, None])[0][:, -1])


def recurrent(steps: int, path: Path) -> None:
    """An LSTM that is excluded, so that its weights have no feedback."""
    record(Recurrent(), classes(steps), F.cross_entropy, path, exclude=["cell"])


CASES: dict[str, Callable[[int, Path], None]] = {
    "Skipped steps": skipped,
    "Undone steps": undone,
    "Repeated steps": repeated,
    "Strongly curved": curved,
    "Small steps": shortened,
    "Promises not kept": promises,
    "Loss does not fall": nothing_to_learn,
    "Layers that stand still": still,
    "Loss not recognised": unknown,
    "Parameters without feedback": recurrent,
}
