"""Thirty losses, each with a small network and a small data set of scikit-learn: digits, diabetes or wine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes, load_digits, load_wine
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class LossTask:
    """A fresh network, its data, and the loss of a batch."""

    data: Callable[[], Batch]  # training and test data together, the samples in dimension 0
    network: Callable[[], nn.Module]
    loss: Loss
    classes: bool = False  # whether the test figure is the error rate on the last tensor of the batch, not the loss
    batch: int = 64

    def split(self) -> tuple[Batch, Batch]:
        """Four fifths for training, the others for the test."""
        everything = self.data()
        order = torch.randperm(len(everything[0]), generator=torch.Generator().manual_seed(0))
        cut = 4 * len(order) // 5
        return tuple(t[order[:cut]] for t in everything), tuple(t[order[cut:]] for t in everything)

    @torch.no_grad()
    def figure(self, model: nn.Module, test: Batch) -> float:
        """Smaller is better."""
        if not self.classes:
            return float(self.loss(model, test))
        return float((model(test[0]).argmax(1) != test[-1]).float().mean())


# -- data ------------------------------------------------------------------------------------------------------------


@cache
def _digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)


def digits() -> Batch:
    x, y = _digits()
    return (2 * x - 1, y)


def wine() -> Batch:
    x, y = load_wine(return_X_y=True)
    inputs = torch.tensor(x, dtype=torch.float32)
    return ((inputs - inputs.mean(0)) / inputs.std(0), torch.tensor(y))


def diabetes() -> Batch:
    x, y = load_diabetes(return_X_y=True)
    both = [torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None]]
    inputs, targets = ((t - t.mean(0)) / t.std(0) for t in both)
    return (inputs, targets)


def partly_labelled() -> Batch:
    x, y = digits()
    some = torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < 0.6
    return (x, torch.where(some, y, -100), y)


def distributions() -> Batch:
    """Soft targets that depend on the class and on the image, as a teacher's do."""
    x, y = digits()
    mix = torch.randn(64, 10, generator=torch.Generator().manual_seed(1)) / 8
    return (x, torch.softmax(4 * F.one_hot(y, 10) + x @ mix, 1), y)


def attributes() -> Batch:
    """Of a digit: even, greater than four, prime, with a loop."""
    x, y = digits()
    sets = ((0, 2, 4, 6, 8), (5, 6, 7, 8, 9), (2, 3, 5, 7), (0, 6, 8, 9))
    return (x, torch.stack([torch.isin(y, torch.tensor(one)) for one in sets], 1).float())


def next_rows() -> Batch:
    """Tokens: for each row of an image, and the one before, the brightest place of the next row."""
    x = _digits()[0].view(-1, 8, 8)
    before = torch.cat([torch.zeros(len(x), 1, 8), x[:, :6]], 1)
    return (torch.cat([before, x[:, :7]], 2), x[:, 1:].argmax(2))


def lower_halves(scale: float = 1.0, threshold: float | None = None) -> Batch:
    """The lower half of an image from its upper half: intensities, or whether a pixel is lit."""
    x = _digits()[0]
    lower = scale * x[:, 32:] if threshold is None else (x[:, 32:] > threshold).float()
    return (2 * x[:, :32] - 1, lower)


def lower_halves_with_gaps() -> Batch:
    x, t = lower_halves()
    return (x, t, (torch.rand(t.shape, generator=torch.Generator().manual_seed(1)) < 0.3).float())


def halves_and_classes() -> Batch:
    return (*lower_halves(), _digits()[1])


def pairs() -> Batch:
    """Two images, and 1 if they show the same digit, else -1."""
    x, y = digits()
    by_class = torch.argsort(y, stable=True)
    same = by_class[torch.arange(len(y)).roll(1)]
    other = by_class[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))]
    alike = torch.rand(len(y), generator=torch.Generator().manual_seed(2)) < 0.5
    partner = torch.where(alike, same, other)
    return (x[by_class], x[partner], torch.where(y[by_class] == y[partner], 1, -1))


def triplets() -> Batch:
    x, y = digits()
    by_class = torch.argsort(y, stable=True)
    other = by_class.roll(len(y) // 2)
    return (x[by_class], x[by_class.roll(1)], x[other])


def views() -> Batch:
    """Two noisy views of each image."""
    x, _ = digits()
    noise = 0.5 * torch.randn(2, *x.shape, generator=torch.Generator().manual_seed(1))
    return (x + noise[0], x + noise[1])


def strips() -> Batch:
    """Three digits in a row: 24 columns of eight pixels, and the three labels."""
    x, y = _digits()
    n = len(x) // 3 * 3
    images = x[:n].view(-1, 3, 8, 8).permute(0, 2, 1, 3).reshape(-1, 8, 24)
    return (2 * images - 1, y[:n].view(-1, 3) + 1)


# -- networks --------------------------------------------------------------------------------------------------------


def mlp(inputs: int, outputs: int, *ends: Callable[[], nn.Module], width: int = 48) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs),
        *(end() for end in ends),
    )  # fmt: skip


class Columns(nn.Module):
    """Class scores for each column of a strip."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(8, 48, 5, padding=2), nn.ReLU(), nn.Conv1d(48, 48, 5, padding=2), nn.ReLU())
        self.head = nn.Linear(48, 11)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).transpose(1, 2))
        return out


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.pixels, self.scores = mlp(32, 48), nn.Linear(48, 32), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).relu()
        return self.pixels(h), self.scores(h)


# -- losses ----------------------------------------------------------------------------------------------------------


def at_outputs(loss: Callable[..., Tensor]) -> Loss:
    """A loss of the model's outputs and the second tensor of the batch."""
    return lambda model, batch: loss(model(batch[0]), batch[1])


def focal(z: Tensor, y: Tensor) -> Tensor:
    log_p = -F.cross_entropy(z, y, reduction="none")
    return (-((1 - log_p.exp()) ** 2) * log_p).mean()


def gaussian(z: Tensor, t: Tensor) -> Tensor:
    return F.gaussian_nll_loss(z[:, :1], t, F.softplus(z[:, 1:]) + 1e-3)


def masked(model: nn.Module, batch: Batch) -> Tensor:
    x, t, mask = batch
    return ((model(x) - t).square() * mask).sum() / mask.sum()


def dice(z: Tensor, t: Tensor) -> Tensor:
    p = torch.sigmoid(z)
    return 1 - ((2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


def same_or_not(model: nn.Module, batch: Batch) -> Tensor:
    return F.cosine_embedding_loss(model(batch[0]), model(batch[1]), batch[2], margin=0.2)


def triplet(model: nn.Module, batch: Batch) -> Tensor:
    return F.triplet_margin_loss(*(model(x) for x in batch))


def info_nce(model: nn.Module, batch: Batch) -> Tensor:
    a, b = (F.normalize(model(x)) for x in batch)
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


def ctc(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    log_p = F.log_softmax(model(x), -1).transpose(0, 1)
    lengths = [torch.full((len(x),), n) for n in (x.shape[2], y.shape[1])]
    return F.ctc_loss(log_p, y, lengths[0], lengths[1])


def several(model: nn.Module, batch: Batch) -> Tensor:
    x, t, y = batch
    pixels, scores = model(x)
    return F.cross_entropy(scores, y) + 5 * F.mse_loss(pixels, t) + 0.1 * F.l1_loss(pixels, t)


def penalised(model: nn.Module, batch: Batch, *, absolute: float = 0.0, square: float = 0.0) -> Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    for p in model.parameters():
        loss = loss + absolute * p.abs().sum() + square * p.square().sum()
    return loss


WEIGHTS, POSITIVES = torch.tensor([0.5, 1.0, 3.0]), torch.tensor([1.0, 2.0, 3.0, 5.0])
ten, few = partial(mlp, 64, 10), partial(mlp, 10, 1)
to_half = partial(mlp, 32, 32)

TASKS: dict[str, LossTask] = {
    "cross-entropy": LossTask(digits, ten, at_outputs(F.cross_entropy), classes=True),
    "nll of log_softmax": LossTask(
        digits, partial(ten, partial(nn.LogSoftmax, 1)), at_outputs(F.nll_loss), classes=True
    ),
    "cross-entropy, temperature 2.5": LossTask(
        digits, ten, at_outputs(lambda z, y: F.cross_entropy(z / 2.5, y)), classes=True
    ),
    "cross-entropy, class weights": LossTask(
        wine, partial(mlp, 13, 3), at_outputs(partial(F.cross_entropy, weight=WEIGHTS)), classes=True, batch=32
    ),
    "cross-entropy, label smoothing": LossTask(
        digits, ten, at_outputs(partial(F.cross_entropy, label_smoothing=0.1)), classes=True
    ),
    "cross-entropy, ignored labels": LossTask(partly_labelled, ten, at_outputs(F.cross_entropy), classes=True),
    "cross-entropy, soft targets": LossTask(distributions, ten, at_outputs(F.cross_entropy), classes=True),
    "cross-entropy of tokens": LossTask(
        next_rows, partial(mlp, 16, 8), at_outputs(lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()))
    ),
    "binary cross-entropy with logits": LossTask(
        attributes, partial(mlp, 64, 4), at_outputs(F.binary_cross_entropy_with_logits)
    ),
    "binary cross-entropy of probabilities": LossTask(
        attributes, partial(mlp, 64, 4, nn.Sigmoid), at_outputs(F.binary_cross_entropy)
    ),
    "binary cross-entropy, pos_weight": LossTask(
        attributes, partial(mlp, 64, 4), at_outputs(partial(F.binary_cross_entropy_with_logits, pos_weight=POSITIVES))
    ),
    "binary cross-entropy, soft targets": LossTask(
        lower_halves, to_half, at_outputs(F.binary_cross_entropy_with_logits)
    ),
    "mean squared error": LossTask(diabetes, few, at_outputs(F.mse_loss), batch=32),
    "mean squared error, masked": LossTask(lower_halves_with_gaps, to_half, masked),
    "squared error, sum": LossTask(lower_halves, to_half, at_outputs(partial(F.mse_loss, reduction="sum"))),
    "Huber": LossTask(diabetes, few, at_outputs(partial(F.huber_loss, delta=0.5)), batch=32),
    "absolute error": LossTask(lower_halves, to_half, at_outputs(F.l1_loss)),
    "hinge, several classes": LossTask(digits, ten, at_outputs(F.multi_margin_loss), classes=True),
    "focal": LossTask(digits, ten, at_outputs(focal), classes=True),
    "Gaussian likelihood": LossTask(diabetes, partial(mlp, 10, 2), at_outputs(gaussian), batch=32),
    "Poisson likelihood": LossTask(partial(lower_halves, 16.0), to_half, at_outputs(F.poisson_nll_loss)),
    "Kullback-Leibler": LossTask(
        distributions,
        partial(ten, partial(nn.LogSoftmax, 1)),
        at_outputs(partial(F.kl_div, reduction="batchmean")),
        classes=True,
    ),
    "cosine embedding": LossTask(pairs, partial(mlp, 64, 16), same_or_not),
    "triplet margin": LossTask(triplets, partial(mlp, 64, 16), triplet),
    "contrastive, InfoNCE": LossTask(views, partial(mlp, 64, 16), info_nce),
    "Dice": LossTask(partial(lower_halves, threshold=0.4), to_half, at_outputs(dice)),
    "CTC": LossTask(strips, Columns, ctc),
    "sum of three": LossTask(halves_and_classes, TwoHeads, several),
    "cross-entropy + 0.001 sum |w|": LossTask(digits, ten, partial(penalised, absolute=0.001), classes=True),
    "cross-entropy + 0.001 sum w^2": LossTask(digits, ten, partial(penalised, square=0.001), classes=True),
}
