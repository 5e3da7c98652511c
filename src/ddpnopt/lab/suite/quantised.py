"""An autoencoder whose code is made of entries of a learned book: gradients pass the choice straight through."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import draw_shape, generator, split
from ddpnopt.lab.suite.measures import error_of_mean
from ddpnopt.lab.suite.task import Batch, Setup, suite_task


class CodeBook(nn.Module):
    """The nearest entry of each vector, and how far both are to be drawn together."""

    def __init__(self, entries: int, width: int) -> None:
        super().__init__()
        self.entries = nn.Embedding(entries, width)
        nn.init.uniform_(self.entries.weight, -0.5, 0.5)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        vectors = z.permute(0, 2, 3, 1)
        chosen = torch.cdist(vectors.reshape(-1, z.shape[1]), self.entries.weight).argmin(1)
        nearest = self.entries(chosen).view(vectors.shape)
        drawn = F.mse_loss(nearest, vectors.detach()) + 0.25 * F.mse_loss(vectors, nearest.detach())
        passed = vectors + (nearest - vectors).detach()
        return passed.permute(0, 3, 1, 2), drawn


class QuantisedAutoencoder(nn.Module):
    """16x16 pixels to 4x4 entries of a book of 32 and back."""

    def __init__(self, width: int = 16, code: int = 6) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, 2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, code, 1),
        )
        self.book = CodeBook(32, code)
        self.decoder = nn.Sequential(
            nn.Conv2d(code, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, padding=1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code, drawn = self.book(self.encoder(x))
        return self.decoder(code), drawn


@suite_task("generative", "squared error", "lower", steps=400, batch_size=16, sealed=True)
def vq_shapes() -> Setup:
    """A light shape before a dark one through a book of 32 entries (VQ-VAE); chance is the mean picture."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found, drawn = model(batch[0])
        return F.mse_loss(found, batch[0]) + drawn

    def measure(model: nn.Module, data: Batch) -> float:
        return F.mse_loss(model(data[0])[0], data[0]).item()

    source = generator(190)
    number = 2600
    front, back = (draw_shape(torch.randint(4, (number,), generator=source), 16, source) for _ in range(2))
    light = 0.5 + 0.5 * torch.rand(2, number, 1, 1, generator=source)
    splits = split((torch.where(front > 0, light[0], -light[1] * back)[:, None],), 300, 500)
    return Setup(QuantisedAutoencoder(), splits, loss, measure, error_of_mean(splits.train[0], splits.test[0]))


TASKS = (vq_shapes,)
