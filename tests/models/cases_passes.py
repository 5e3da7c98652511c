"""Loops with several passes before one backward pass, several models, or derivatives inside the loss."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from cases_loops import mlp
from data import images, split, vectors
from torch import Tensor, nn
from trial import Trial, case

PASSES = "several passes before one backward pass"
GAMES = "several models"
DERIVATIVES = "derivatives inside the loss"


@case("triplet loss, three passes", PASSES)
def triplet() -> Trial:
    model = mlp(10, 8)
    x, y = vectors(64, classes=4)
    positive = torch.stack([x[(y == c).nonzero()[k % 16, 0]] for k, c in enumerate(y)])
    negative = torch.stack([x[(y != c).nonzero()[k % 48, 0]] for k, c in enumerate(y)])
    distance = nn.TripletMarginLoss(1.0)
    return Trial(model, lambda a, p, n: distance(model(a), model(p), model(n)), split(16, x, positive, negative))


class Embedder(nn.Module):
    """Convolutions, called twice by the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def contrastive(a: Tensor, b: Tensor, same: Tensor) -> Tensor:
    distance = (a - b).square().sum(1).add(1e-6).sqrt()
    return torch.where(same, distance.square(), (1 - distance).clamp_min(0).square()).mean()


@case(
    "Siamese convolutional network, two passes",
    PASSES,
)
def siamese() -> Trial:
    model = Embedder()
    x, y = images()
    other = torch.randperm(len(x))
    return Trial(model, lambda a, b, same: contrastive(model(a), model(b), same), split(16, x, x[other], y == y[other]))


class Pair(nn.Module):
    """Both passes inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Embedder()

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(a), self.net(b)


@case(
    "Siamese convolutional network, one pass",
    PASSES,
)
def siamese_inside() -> Trial:
    model = Pair()
    x, y = images()
    other = torch.randperm(len(x))
    return Trial(model, lambda a, b, same: contrastive(*model(a, b), same), split(16, x, x[other], y == y[other]))


def nt_xent(a: Tensor, b: Tensor, temperature: float = 0.5) -> Tensor:
    z = F.normalize(torch.cat([a, b]), dim=1)
    likeness = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    n = len(a)
    return F.cross_entropy(likeness, torch.arange(2 * n).roll(n))


@case("SimCLR, two views", PASSES)
def simclr() -> Trial:
    model = mlp(10, 16)
    x, _ = vectors(64, classes=16)
    return Trial(
        model,
        lambda a, b: nt_xent(model(a), model(b)),
        split(16, x + 0.3 * torch.randn_like(x), x + 0.3 * torch.randn_like(x)),
    )


def transitions() -> tuple[Tensor, ...]:
    x, y = vectors(64, 6, 3)
    return x, y, (x[:, 0] > 0).float() + (y == 0).float(), torch.roll(x, 1, 0)


@case("DQN, frozen target network", PASSES)
def dqn() -> Trial:
    model = mlp(6, 3)
    target = copy.deepcopy(model).requires_grad_(False)

    def loss(s: Tensor, a: Tensor, r: Tensor, s2: Tensor) -> Tensor:
        goal = r + 0.5 * target(s2).amax(1)
        return F.smooth_l1_loss(model(s).gather(1, a[:, None])[:, 0], goal)

    return Trial(model, loss, split(16, *transitions()))


@case("Bellman residual, through both passes", PASSES)
def bellman() -> Trial:
    model = mlp(6, 3)

    def loss(s: Tensor, a: Tensor, r: Tensor, s2: Tensor) -> Tensor:
        return F.mse_loss(model(s).gather(1, a[:, None])[:, 0], r + 0.5 * model(s2).amax(1))

    return Trial(model, loss, split(16, *transitions()))


@case("consistency of two passes with dropout", PASSES)
def consistency() -> Trial:
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        a, b = model(x), model(x)
        apart = F.kl_div(a.log_softmax(1), b.log_softmax(1), log_target=True, reduction="batchmean")
        return F.cross_entropy(a, y) + F.cross_entropy(b, y) + apart

    return Trial(model, loss, split(16, *vectors()))


@case("two passes of unequal size", PASSES)
def unequal() -> Trial:
    model = mlp()
    x, y = vectors(96)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        guess = model(x[8:]).log_softmax(1)
        return F.cross_entropy(model(x[:8]), y[:8]) + 0.1 * -(guess.exp() * guess).sum(1).mean()

    return Trial(model, loss, split(24, x, y))


def apart(fake: Tensor, real: Tensor) -> float:
    """How far the first two moments of generated points are from those of the data."""
    means = (fake.mean(0) - real.mean(0)).square().sum()
    return float(means + (torch.cov(fake.T) - torch.cov(real.T)).square().sum())


@case("GAN", GAMES, steps=200)
def gan() -> Trial:
    maker, judge = mlp(4, 2), mlp(2, 1)
    real = torch.randn(64, 2) @ torch.tensor([[0.5, 0.2], [0.0, 0.3]]) + torch.tensor([1.5, -1.0])
    fixed = torch.randn(256, 4)
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
    bce = F.binary_cross_entropy_with_logits

    def step(trial: Trial, opt: torch.optim.Optimizer, batch: tuple[Any, ...]) -> None:
        (x,), judge_opt = batch, trial.optimizers[0]
        judge_opt.zero_grad()
        fake = maker(torch.randn(16, 4))
        (bce(judge(x), ones) + bce(judge(fake.detach()), zeros)).backward()
        judge_opt.step()
        opt.zero_grad()
        bce(judge(fake), ones).backward()
        opt.step()
        seen.append(now())

    def now() -> float:
        return apart(maker(fixed).detach(), real)

    seen: list[float] = []

    def measure() -> float:
        """The mean of the last quarter: a game goes around its solution, and where it is at the end is chance."""
        return sum(seen[-50:]) / len(seen[-50:]) if seen else now()

    return Trial(maker, lambda x: x.sum(), split(16, real), step, measure=measure, others=[judge])


def penalised(judge: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """The critic's loss with a gradient penalty."""
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return judge(fake).mean() - judge(real).mean() + 10 * penalty


@case("WGAN-GP, the critic", DERIVATIVES)
def critic() -> Trial:
    judge = mlp(2, 1)
    real = torch.randn(64, 2) * 0.5 + torch.tensor([1.5, -1.0])
    fake, mix = torch.randn(64, 2), torch.rand(64, 1)
    return Trial(judge, lambda x, f, m: penalised(judge, x, f, m), split(16, real, fake, mix))


@case("physics-informed network, u'' = -u", DERIVATIVES, steps=60)
def pinn() -> Trial:
    model = mlp(1, 1, activation=nn.Tanh)
    x = torch.linspace(0, 3, 48)[:, None]

    def loss(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        u = model(x)
        (u_x,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        ends = model(torch.zeros(1, 1)).square().mean() + (model(torch.full((1, 1), 1.5708)) - 1).square().mean()
        return (u_xx + u).square().mean() + 10 * ends

    return Trial(model, loss, [(x,)])


@case("forces as derivatives of an energy", DERIVATIVES, steps=60)
def forces() -> Trial:
    model = mlp(3, 1, activation=nn.SiLU)
    x = torch.randn(64, 3)

    def loss(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = model(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return F.mse_loss(energy[:, 0], 0.5 * x.square().sum(1)) + F.mse_loss(slope, x)

    return Trial(model, loss, split(16, x))


@case("adversarial examples by autograd.grad", DERIVATIVES)
def adversarial() -> Trial:
    model = mlp()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        return F.cross_entropy(model((x + 0.1 * slope.sign()).detach()), y)

    return Trial(model, loss, split(16, *vectors()))
