"""Fine-tuning: adapters of low rank in a frozen language model, all weights of a picture classifier with few labels."""

from __future__ import annotations

import argparse
import copy
import inspect
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, scattered_digits
from ddpnopt.lab.suite.fully_connected import classifier, cross_entropy
from ddpnopt.lab.suite.sequences import manual, windows
from ddpnopt.lab.suite.task import Batch, LossOf, Setup, Splits, SuiteProblem, suite_task
from ddpnopt.lab.suite.tokens import CONTEXT, CharacterGPT, nats, next_token_loss, source_text
from ddpnopt.lab.suite.vision import plain_cnn


def pretrain(model: nn.Module, train: Batch, loss: LossOf, steps: int, batch_size: int) -> None:
    """Adam at 0.003 with batches of fixed order."""
    data = Setup(model, Splits(train, train, train), loss, lambda *_: 0.0, 0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for batch in islice(SuiteProblem(data, batch_size).batches(generator(126)), steps):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


@lru_cache
def trained_on_code() -> CharacterGPT:
    """A model of the characters of Python code, the same for all seeds."""
    splits, characters, _ = source_text()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(126)
        model = CharacterGPT(characters)
        pretrain(model, splits.train, next_token_loss, 300, 16)
    return model.requires_grad_(False)


class LowRank(nn.Module):
    """A frozen layer and a product of two thin matrices beside it, which is zero at first."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + 2 * self.up(self.down(x))


def with_adapters(module: nn.Module, rank: int) -> None:
    """Puts an adapter beside every linear layer."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LowRank(child, rank))
        else:
            with_adapters(child, rank)


def prose(stride: int = 9) -> tuple[Splits, float]:
    """Python's manual in the alphabet of the code, in which what is missing becomes a space; the model as it was."""
    alphabet = {character: number for number, character in enumerate(sorted(set(inspect.getsource(argparse))))}
    codes = torch.tensor([alphabet.get(character, alphabet[" "]) for character in manual()[:90_000]])
    splits, _ = windows(codes, CONTEXT, stride)
    return splits, nats(trained_on_code(), splits.test)


@suite_task("tokens", "nats", "lower", steps=300, batch_size=16)
def low_rank_adapters() -> Setup:
    """From code to prose: a character model keeps its weights and learns adapters of rank four; chance is without."""
    splits, chance = prose()
    model = copy.deepcopy(trained_on_code())
    with_adapters(model, 4)
    return Setup(model, splits, next_token_loss, nats, chance)


@lru_cache
def trained_on_upright() -> nn.Sequential:
    """A classifier of digits somewhere on a canvas, the same for all seeds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(127)
        model = plain_cnn(1, 10, 12)
        pretrain(model, scattered_digits(12, 0.15, 3).train, cross_entropy, 300, 50)
    return model


def turned(splits: Splits, labelled: int) -> Splits:
    """The pictures in negative and on their side; even or odd and above four or not: four classes, few labels."""

    def prepared(data: Batch) -> Batch:
        x, y = data
        return 0.5 - x.transpose(2, 3).flip(3), y % 2 + 2 * (y > 4)

    x, y = prepared(splits.train)
    return Splits((x[:labelled], y[:labelled]), prepared(splits.validation), prepared(splits.test))


@suite_task("convolutional", "accuracy %", "higher", steps=250, batch_size=32)
def fine_tuned_cnn() -> Setup:
    """All weights of a trained classifier go on with a new head: other classes of turned negatives."""
    model = copy.deepcopy(trained_on_upright())
    model[-1] = nn.Linear(48, 4)
    return classifier(model, turned(scattered_digits(12, 0.15, 3), 1200))


TASKS = (low_rank_adapters, fine_tuned_cnn)
