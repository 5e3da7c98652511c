"""Recurrent networks: a loop over one cell, PyTorch's fused layers, short and long memories."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import digits, generator, split
from ddpnopt.lab.suite.fully_connected import classifier
from ddpnopt.lab.suite.measures import error_of_mean, majority_accuracy, squared_error
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task
from ddpnopt.lab.suite.tokens import nats, next_token_loss, source_text


class CellLoop(nn.Module):
    """A GRU cell called once per time step, a linear read-out of the last state."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(inputs, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.cell.hidden_size)
        for inputs in x.unbind(1):
            state = self.cell(inputs, state)
        return self.out(state)[:, 0]


class LayerWithHead(nn.Module):
    """One of PyTorch's recurrent layers and a linear head on every state or on the last."""

    def __init__(self, layer: nn.RNNBase, outputs: int, every: bool) -> None:
        super().__init__()
        self.layer, self.every = layer, every
        self.head = nn.Linear(layer.hidden_size, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states = self.layer(x)[0]
        return self.head(states if self.every else states[:, -1])


class CharacterLSTM(nn.Module):
    """Embedding, one LSTM layer, a linear head."""

    def __init__(self, characters: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


@suite_task("recurrent", "squared error", "lower", steps=500, batch_size=50)
def gru_cell_adding() -> Setup:
    """Add the two marked numbers of a sequence of 16."""
    number, length = 3000, 16
    source = generator(20)
    numbers = torch.rand(number, length, generator=source)
    marked = torch.rand(number, length, generator=source).argsort(1)[:, :2]
    marks = torch.zeros(number, length).scatter(1, marked, 1.0)
    splits = split((torch.stack([numbers, marks], 2), (numbers * marks).sum(1)), 400, 600)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)

    return Setup(CellLoop(2, 24), splits, loss, squared_error, error_of_mean(splits.train[1], splits.test[1]))


@suite_task("recurrent", "accuracy %", "higher", steps=150, batch_size=50)
def lstm_modular_sum() -> Setup:
    """The sum modulo five of the digits so far: twelve places for training, 60 in the held-out sequences."""
    source = generator(21)

    def sequences(number: int, length: int) -> Batch:
        digit = torch.randint(5, (number, length), generator=source)
        return F.one_hot(digit, 5).float(), digit.cumsum(1) % 5

    splits = Splits(sequences(2000, 12), sequences(200, 60), sequences(300, 60))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).transpose(1, 2), y)

    def right_places(model: nn.Module, data: Batch) -> float:
        x, y = data
        return 100 * (model(x).argmax(2) == y).double().mean().item()

    model = LayerWithHead(nn.LSTM(5, 32, batch_first=True), 5, every=True)
    return Setup(model, splits, loss, right_places, majority_accuracy(splits.test[1].flatten()))


@suite_task("recurrent", "accuracy %", "higher", steps=500, batch_size=50)
def rnn_digit_columns() -> Setup:
    """Digits read in 16 strips of four pixels by a tanh recurrence."""
    parts = digits()
    noise = generator(22)
    tensors = [torch.cat(pair) for pair in zip(parts.train, parts.validation, parts.test, strict=True)]
    x = tensors[0] + 0.2 * torch.randn(tensors[0].shape, generator=noise)
    splits = split((x.reshape(-1, 16, 4), tensors[1]), 397, 400)
    return classifier(LayerWithHead(nn.RNN(4, 48, batch_first=True), 10, every=False), splits)


@suite_task("recurrent", "nats", "lower", steps=300, batch_size=16)
def lstm_characters() -> Setup:
    """The characters of Python code with an LSTM."""
    splits, characters, chance = source_text()
    return Setup(CharacterLSTM(characters), splits, next_token_loss, nats, chance)


TASKS = (gru_cell_adding, lstm_modular_sum, rnn_digit_columns, lstm_characters)
