"""The gradient of each sample in recorded models equals autograd's, parameter by parameter, to 1e-9."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from optimizer_networks import check_sample_gradients
from torch import Tensor, nn

B = 5


class Tied(nn.Module):
    """An embedding whose weights are those of the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.hidden(self.words(x).mean(1))))
        return out


class Reused(nn.Module):
    """A layer and a norm that run three times."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.cell, self.norm, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        for _ in range(3):
            h = torch.tanh(self.norm(self.cell(h)))
        out: Tensor = self.out(h)
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.attend(x, x, x)[0].mean(1))
        return out


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.run, self.out = kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.run(x)[0][:, -1])
        return out


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 5)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        out: Tensor = self.out(h)
        return out


def vectors() -> Tensor:
    return torch.randn(B, 4)


def sequences() -> Tensor:
    return torch.randn(B, 3, 4)


def ids() -> Tensor:
    return torch.randint(7, (B, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 2), nn.Flatten(), nn.Tanh(), nn.Linear(6, 3)), ids),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)), vectors),
    "group norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Tanh(), nn.Linear(6, 3)), vectors),
    "tied embedding": (Tied, ids),
    "used several times": (Reused, vectors),
    "attention": (Attention, sequences),
    "LSTM": (lambda: Recurrent(nn.LSTM), sequences),
    "GRU": (lambda: Recurrent(nn.GRU), sequences),
    "GRU cell": (Cell, sequences),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_of_each_sample_is_that_of_autograd(name: str) -> None:
    torch.set_default_dtype(torch.float64)
    make, inputs = MODELS[name]
    model, x = make(), inputs()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # no symmetry
    check_sample_gradients(model, x, torch.arange(B) % 3)
