"""A masked autoencoder: half of a picture's patches are hidden and have to be drawn from the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import draw_shape, generator, split
from ddpnopt.lab.suite.measures import error_of_mean
from ddpnopt.lab.suite.task import Batch, Setup, suite_task


class MaskedAutoencoder(nn.Module):
    """Encodes the visible of 16 patches and decodes all, the others from one learned token."""

    def __init__(self, pixels: int = 16, places: int = 16, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Linear(pixels, width)
        self.places = nn.Parameter(0.5 * torch.randn(places, width))
        self.hidden = nn.Parameter(0.02 * torch.randn(width))
        self.encoder, self.decoder = self._layer(width), self._layer(width)
        self.head = nn.Linear(width, pixels)

    @staticmethod
    def _layer(width: int) -> nn.TransformerEncoderLayer:
        return nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, patches: Tensor, order: Tensor, visible: int) -> Tensor:
        """All patches in the given order, of which the first `visible` ones are seen."""
        places = self.places[order]
        seen = patches.gather(1, order[:, :visible, None].expand(-1, -1, patches.shape[2]))
        code = self.encoder(self.embed(seen) + places[:, :visible])
        hidden = self.hidden.expand(len(code), places.shape[1] - visible, -1)
        return self.head(self.decoder(torch.cat([code, hidden], 1) + places))


def hidden_patch_error(model: nn.Module, batch: Batch) -> Tensor:
    """Squared error on eight patches of 4x4 at random, given the other eight."""
    (x,) = batch
    patches = F.unfold(x, 4, stride=4).transpose(1, 2)
    order = torch.rand(len(x), 16).argsort(1)
    wanted = patches.gather(1, order[:, :, None].expand_as(patches))
    return F.mse_loss(model(patches, order, 8)[:, 8:], wanted[:, 8:])


@suite_task("patches", "squared error", "lower", steps=600, batch_size=40)
def masked_autoencoder() -> Setup:
    """Eight of the sixteen patches of a picture of one shape are hidden; chance is the mean picture."""
    source = generator(98)
    kind = torch.randint(4, (3000,), generator=source)
    x = 2 * draw_shape(kind, 16, source)[:, None] + 0.1 * torch.randn(3000, 1, 16, 16, generator=source)
    splits = split((x,), 400, 600)
    chance = error_of_mean(splits.train[0], splits.test[0])
    model = MaskedAutoencoder()
    return Setup(model, splits, hidden_patch_error, lambda net, data: hidden_patch_error(net, data).item(), chance)


TASKS = (masked_autoencoder,)
