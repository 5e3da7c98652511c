"""Recurrences with other losses and forms: rewriting with a decoder, labels without places, a linear state."""

from __future__ import annotations

import datetime
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import digits, generator, split
from ddpnopt.lab.suite.measures import error_of_mean, squared_error
from ddpnopt.lab.suite.regression import mean_squared_error
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
SYMBOLS = sorted(set("".join(MONTHS) + "0123456789 ,-.th^"))
LONGEST = 16


def dates(number: int = 4000) -> Splits:
    """Dates of one century in six forms, what has been written so far, and the date as 1987-03-21."""
    source = generator(129)
    code = {symbol: k for k, symbol in enumerate(SYMBOLS)}
    days = torch.randint(36525, (number,), generator=source).tolist()
    forms = torch.randint(6, (number,), generator=source).tolist()
    given, written, wanted = [], [], []
    for day, form in zip(days, forms, strict=True):
        date = datetime.date(1950, 1, 1) + datetime.timedelta(days=day)
        month = MONTHS[date.month - 1]
        text = (
            f"{date.day} {month} {date.year}",
            f"{month} {date.day}, {date.year}",
            f"{date.day}.{date.month}.{date.year}",
            f"{month} {date.day}th {date.year}",
            f"{date.year}, {month} {date.day}",
            f"{date.day:02}-{date.month:02}-{date.year % 100:02}",
        )[form]
        given.append([code[symbol] for symbol in text.ljust(LONGEST)])
        wanted.append([code[symbol] for symbol in date.isoformat()])
        written.append([code["^"], *wanted[-1][:-1]])
    return split((torch.tensor(given), torch.tensor(written), torch.tensor(wanted)), 400, 600)


class Rewriter(nn.Module):
    """A GRU reads, a GRU writes and attends to what was read; it sees what it should have written so far."""

    def __init__(self, symbols: int, width: int = 48) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, 24)
        self.reader = nn.GRU(24, width, batch_first=True)
        self.writer = nn.GRU(24, width, batch_first=True)
        self.query, self.head = nn.Linear(width, width), nn.Linear(2 * width, symbols)

    def forward(self, given: Tensor, written: Tensor) -> Tensor:
        read, last = self.reader(self.symbols(given))
        states, _ = self.writer(self.symbols(written), last)
        attention = torch.softmax(self.query(states) @ read.transpose(1, 2) / math.sqrt(read.shape[2]), 2)
        return self.head(torch.cat([states, attention @ read], 2))


@suite_task("recurrent", "accuracy %", "higher", steps=300, batch_size=32)
def date_rewriting() -> Setup:
    """Dates of several forms into one, teacher forcing; the share of right symbols, each after the right ones."""
    splits = dates()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(*batch[:2]).flatten(0, 1), batch[2].flatten())

    def measure(model: nn.Module, data: Batch) -> float:
        return 100 * (model(*data[:2]).argmax(2) == data[2]).double().mean().item()

    chance = 100 * (splits.train[2].mode(0).values == splits.test[2]).double().mean().item()
    return Setup(Rewriter(len(SYMBOLS)), splits, loss, measure, chance)


PLACES, BLANK = 3, 10


def digit_strips(copies: int = 2000) -> Splits:
    """Three digits in a row with gaps of zero to three columns between them, 33 columns in all, and their names."""
    source = generator(130)

    def strips(data: Batch, number: int) -> Batch:
        pictures, labels = data
        chosen = torch.randint(len(labels), (number, PLACES), generator=source)
        gaps = torch.randint(4, (number, PLACES), generator=source).tolist()
        x = torch.zeros(number, 33, 8)
        for row in range(number):
            column = 0
            for place in range(PLACES):
                column += gaps[row][place]
                x[row, column : column + 8] = pictures[chosen[row, place]].T
                column += 8
        return x + 0.1 * torch.randn(x.shape, generator=source), labels[chosen]

    parts = digits()
    return Splits(strips(parts.train, copies), strips(parts.validation, 300), strips(parts.test, 500))


class StripReader(nn.Module):
    """An LSTM in both directions over the columns; log-probabilities of ten names and of none, every third column."""

    def __init__(self, hidden: int = 40) -> None:
        super().__init__()
        self.lift = nn.Conv1d(8, 32, 5, stride=3, padding=2)
        self.layer = nn.LSTM(32, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, 11)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.lift(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.layer(h)[0]).log_softmax(2)


def read_off(found: Tensor) -> list[int]:
    """The names without repetitions and blanks."""
    return [int(k) for k in found.unique_consecutive() if k != BLANK]


@suite_task("recurrent", "accuracy %", "higher", steps=500, batch_size=32)
def digit_strips_ctc() -> Setup:
    """Which three digits a strip shows, without being told where they are (CTC); the share of places that are right."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logs = model(batch[0]).transpose(0, 1)
        lengths = torch.full((logs.shape[1],), logs.shape[0]), torch.full((logs.shape[1],), PLACES)
        return F.ctc_loss(logs, batch[1], *lengths, blank=BLANK)

    def measure(model: nn.Module, data: Batch) -> float:
        right = 0
        for found, names in zip(model(data[0]).argmax(2), data[1].tolist(), strict=True):
            right += sum(a == b for a, b in zip(read_off(found), names, strict=False))
        return 100 * right / data[1].numel()

    return Setup(StripReader(), digit_strips(), loss, measure, chance=10.0)


class StateSpace(nn.Module):
    """Damped oscillators per channel, driven by the input, as one long convolution (S4D)."""

    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.empty(width, 1).uniform_(math.log(0.02), math.log(0.3)))
        self.log_decay = nn.Parameter(torch.full((width, states), math.log(0.5)))
        self.frequency = nn.Parameter(math.pi * torch.arange(states).float().repeat(width, 1))
        self.real, self.imaginary = (nn.Parameter(torch.randn(width, states) / math.sqrt(states)) for _ in range(2))
        self.through = nn.Parameter(torch.randn(width))
        self.mix = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        step = self.log_step.exp()
        time = torch.arange(length)
        decay = torch.exp(-(self.log_decay.exp() * step)[..., None] * time)
        angle = (self.frequency * step)[..., None] * time
        waves = self.real[..., None] * angle.cos() - self.imaginary[..., None] * angle.sin()
        kernel = (step[..., None] * decay * waves).sum(1)
        spectrum = torch.fft.rfft(x.transpose(1, 2), 2 * length) * torch.fft.rfft(kernel, 2 * length)
        h = torch.fft.irfft(spectrum, 2 * length)[..., :length].transpose(1, 2)
        return x + F.glu(self.mix(F.gelu(h + self.through * x)), 2)


class StateSpaceModel(nn.Module):
    """Two layers of states between linear ones, with layer norm; an output at every time."""

    def __init__(self, inputs: int, outputs: int, width: int = 24) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.layers = nn.ModuleList(StateSpace(width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.lift(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = norm(layer(h))
        return self.head(h)


def driven_tank(number: int = 1500, length: int = 80) -> Splits:
    """The level of the second of two tanks, of which one runs into the other, from the pump and the leak."""
    source = generator(131)
    pump = torch.rand(number, length // 8, generator=source).repeat_interleave(8, 1)
    leak = 0.5 + torch.rand(number, 1, generator=source).expand(-1, length)
    first, second = torch.full((number,), 0.5), torch.full((number,), 0.5)
    levels = []
    for t in range(length):
        flow = 0.5 * first.clamp_min(0).sqrt()
        first = (first + 0.3 * (pump[:, t] - flow)).clamp(0, 2)
        second = (second + 0.3 * (flow - 0.5 * leak[:, t] * second.clamp_min(0).sqrt())).clamp(0, 2)
        levels.append(second)
    y = torch.stack(levels, 1) - 0.5
    noisy = y + 0.01 * torch.randn(y.shape, generator=source)
    return split((torch.stack([pump, leak], 2), noisy[..., None]), 200, 300)


@suite_task("recurrent", "squared error", "lower", steps=300, batch_size=20)
def state_space_tanks() -> Setup:
    """The level of a tank over time from what drives it."""
    splits = driven_tank()
    chance = error_of_mean(splits.train[1].flatten(), splits.test[1].flatten())
    return Setup(StateSpaceModel(2, 1), splits, mean_squared_error, squared_error, chance)


TASKS = (date_rewriting, digit_strips_ctc, state_space_tanks)
