"""PyTorch's recurrent layers as users stack and pack them: a forecast of chaos, reviews of different length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.measures import error_of_mean, squared_error
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def lorenz(number: int = 3000, seen: int = 24, ahead: int = 8) -> Splits:
    """One coordinate of Lorenz's equations with noise, and where it is eight readings later."""
    source = generator(164)
    state = torch.randn(number, 3, generator=source) * 8 + torch.tensor([0.0, 0.0, 25.0])
    step, readings = 0.01, []
    for time in range(200 + 4 * (seen + ahead)):
        x, y, z = state.unbind(1)
        state = state + step * torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], 1)
        if time >= 200 and time % 4 == 0:
            readings.append(state[:, 0] / 8)
    series = torch.stack(readings, 1)
    past = series[:, :seen] + 0.05 * torch.randn(number, seen, generator=source)
    return split((past[:, :, None], series[:, -1:]), 400, 800)


class Forecaster(nn.Module):
    """Two layers of GRU with dropout between them, the answer from the last state."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.GRU(1, width, num_layers=2, dropout=0.05, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


@suite_task("recurrent", "squared error", "lower", steps=400, batch_size=32, sealed=True)
def lorenz_forecast() -> Setup:
    """A chaotic series some steps ahead, with the smooth absolute error."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.smooth_l1_loss(model(batch[0]), batch[1])

    splits = lorenz()
    return Setup(Forecaster(), splits, loss, squared_error, error_of_mean(splits.train[1], splits.test[1]))


WORDS = 80
# The first word pads, the second one turns the next word that praises or blames into its opposite.
NOT = 1


def reviews(number: int = 4500, longest: int = 16) -> Splits:
    """Words that praise or blame more or less, some of them neither; a review is good if the sum is above zero."""
    source = generator(165)
    worth = torch.randn(WORDS, generator=source) * (torch.rand(WORDS, generator=source) < 0.6)
    worth[:2] = 0
    length = torch.randint(5, longest + 1, (number,), generator=source)
    words = torch.randint(2, WORDS, (number, longest), generator=source)
    words = torch.where(torch.rand(words.shape, generator=source) < 0.12, NOT, words)
    inside = torch.arange(longest) < length[:, None]
    total, sign = torch.zeros(number), torch.ones(number)
    for word, counts in zip(words.unbind(1), inside.unbind(1), strict=True):
        value = worth[word]
        total = total + sign * value * counts
        sign = torch.where(word == NOT, -torch.ones(number), torch.where(value == 0, sign, torch.ones(number)))
    return split((words * inside, length, (total > 0).float()), 500, 1000)


class PackedReader(nn.Module):
    """An LSTM that stops at the end of each review."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, padding_idx=0)
        self.layer = nn.LSTM(16, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, words: Tensor, length: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(words), length, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.layer(packed)
        return self.head(last[0])[:, 0]


@suite_task("recurrent", "accuracy %", "higher", steps=500, batch_size=48, sealed=True)
def packed_reviews() -> Setup:
    """Is a review good? Sequences of 5 to 16 words, packed."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(*batch[:2]), batch[2])

    def measure(model: nn.Module, data: Batch) -> float:
        return 100 * ((model(*data[:2]) > 0) == (data[2] > 0)).double().mean().item()

    splits = reviews()
    good = splits.test[2].mean().item()
    return Setup(PackedReader(), splits, loss, measure, 100 * max(good, 1 - good))


TASKS = (lorenz_forecast, packed_reviews)
