"""Training loops as people write them, around small networks of their own."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from data import images, split, tokens, vectors
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from trial import Trial, case

LOOPS = "loops"


def mlp(inputs: int = 10, outputs: int = 4, width: int = 32, activation: Any = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, outputs)
    )


def classification(model: nn.Module) -> Trial:
    return Trial(model, lambda x, y: F.cross_entropy(model(x), y), split(16, *vectors()))


@case("an MLP", LOOPS)
def plain() -> Trial:
    return classification(mlp())


@case("a small batch left over", LOOPS)
def left_over() -> Trial:
    model = mlp()
    x, y = vectors(50)
    batches = [(x[a : a + 16], y[a : a + 16]) for a in range(0, 50, 16)]
    return Trial(model, lambda x, y: F.cross_entropy(model(x), y), batches)


@case("gradient accumulation", LOOPS)
def accumulation() -> Trial:
    trial = classification(mlp())

    def step(trial: Trial, opt: torch.optim.Optimizer, batch: tuple[Any, ...]) -> None:
        opt.zero_grad()
        for part in split(4, *batch):
            (trial.loss(*part) / 4).backward()
        opt.step()

    trial.step = step
    return trial


@case("bfloat16 autocast", LOOPS)
def autocast() -> Trial:
    model = mlp()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(x), y)

    return Trial(model, loss, split(16, *vectors()))


@case("float16 autocast with a GradScaler and clipping", LOOPS)
def scaler() -> Trial:
    model = mlp()
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return F.cross_entropy(model(x).float(), y)

    def step(trial: Trial, opt: torch.optim.Optimizer, batch: tuple[Any, ...]) -> None:
        opt.zero_grad()
        grad_scaler.scale(trial.loss(*batch)).backward()
        grad_scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(opt)
        grad_scaler.update()

    return Trial(model, loss, split(16, *vectors()), step)


@case("clip_grad_norm_", LOOPS)
def clipping() -> Trial:
    trial = classification(mlp())

    def step(trial: Trial, opt: torch.optim.Optimizer, batch: tuple[Any, ...]) -> None:
        opt.zero_grad()
        trial.loss(*batch).backward()
        nn.utils.clip_grad_norm_(trial.model.parameters(), 1.0)
        opt.step()

    trial.step = step
    return trial


@case("torch.compile", LOOPS)
def compiled() -> Trial:
    torch._dynamo.reset()
    model = torch.compile(mlp(), backend="eager")
    return classification(model)  # type: ignore[arg-type]


@case("torch.compile after another instance of the class was trained without us", LOOPS)
def compiled_twice() -> Trial:
    torch._dynamo.reset()
    other = mlp()
    run = torch.compile(other, backend="eager")
    x, y = vectors()
    opt = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        F.cross_entropy(run(x), y).backward()
        opt.step()
    return classification(torch.compile(mlp(), backend="eager"))  # type: ignore[arg-type]


@case("spectral norm on all layers", LOOPS)
def spectral_norm() -> Trial:
    model = mlp()
    for module in model:
        if isinstance(module, nn.Linear):
            parametrizations.spectral_norm(module)
    return classification(model)


@case("weight norm on the first layer", LOOPS)
def weight_norm() -> Trial:
    model = mlp()
    parametrizations.weight_norm(model[0])
    return classification(model)


@case("cross-entropy + 0.1 * sum |w|", LOOPS)
def penalty() -> Trial:
    model = mlp()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + 0.1 * sum(p.abs().sum() for p in model.parameters())

    return Trial(model, loss, split(16, *vectors()))


@case("cross-entropy + 1e-3 * sum w^2", LOOPS)
def small_penalty() -> Trial:
    model = mlp()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + 1e-3 * sum(p.square().sum() for p in model.parameters())

    return Trial(model, loss, split(16, *vectors()))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.mean, self.logvar = nn.Linear(64, 48), nn.Linear(48, 4), nn.Linear(48, 4)
        self.out = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.into(x).relu()
        mean, logvar = self.mean(h), self.logvar(h)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        return torch.sigmoid(self.out(z)), mean, logvar


@case("VAE, sum over pixels + KL", LOOPS, steps=60)
def vae() -> Trial:
    model = VAE()
    x, _ = images(64, channels=1, size=8)
    pixels = (x.flatten(1) > 0).float()

    def loss(x: Tensor) -> Tensor:
        again, mean, logvar = model(x)
        kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum()
        return (F.binary_cross_entropy(again, x, reduction="sum") + kl) / len(x)

    return Trial(model, loss, split(16, pixels))


@case("VAE, sum over pixels, samples and KL", LOOPS, steps=60)
def vae_sum() -> Trial:
    trial = vae()
    per_sample = trial.loss
    trial.loss = lambda x: per_sample(x) * len(x)
    return trial


class Recurrent(nn.Module):
    """A cell of its own, applied step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(40, 16), nn.Linear(48, 32), nn.Linear(32, 40)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.zeros(len(ids), 32)
        found = []
        for word in self.words(ids).unbind(1):
            h = torch.tanh(self.cell(torch.cat([word, h], 1)))
            found.append(self.out(h))
        return torch.stack(found, 1)


@case("a recurrent cell in a loop", LOOPS)
def recurrent() -> Trial:
    model = Recurrent()
    return Trial(
        model, lambda ids: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()), split(8, tokens())
    )


class OneStep(nn.Module):
    """One step of a recurrent network: the loop is in the training code."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(40, 16), nn.Linear(48, 32), nn.Linear(32, 40)

    def forward(self, ids: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.cell(torch.cat([self.words(ids), h], 1)))
        return self.out(h), h


@case("a model of one time step, called in a loop", LOOPS)
def outer_loop() -> Trial:
    model = OneStep()

    def loss(ids: Tensor) -> Tensor:
        h, total = torch.zeros(len(ids), 32), torch.zeros(())
        for now, following in zip(ids[:, :-1].unbind(1), ids[:, 1:].unbind(1), strict=True):
            z, h = model(now, h)
            total = total + F.cross_entropy(z, following)
        return total / (ids.shape[1] - 1)

    return Trial(model, loss, split(8, tokens()))


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = mlp(10, 16), nn.Linear(16, 4), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).relu()
        return {"kind": self.kind(h), "size": self.size(h)}


@case("two tasks, weighted losses", LOOPS)
def two_tasks() -> Trial:
    model = TwoTasks()
    x, y = vectors()
    sizes = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1)

    def loss(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
        out = model(x)
        return F.cross_entropy(out["kind"], y) + 0.5 * F.mse_loss(out["size"], s)

    return Trial(model, loss, split(16, x, y, sizes))


@case("two tasks, a batch of each", LOOPS)
def alternating_heads() -> Trial:
    model = TwoTasks()
    x, y = vectors()
    sizes = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1)

    def loss(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
        return F.cross_entropy(model(x)["kind"], y) + 0.5 * F.mse_loss(model(x + 0.1)["size"], s)

    return Trial(model, loss, split(16, x, y, sizes))


@case("regression, reduction='sum'", LOOPS)
def regression_sum() -> Trial:
    model = mlp(10, 2)
    x, _ = vectors()
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1)
    return Trial(model, lambda x, y: F.mse_loss(model(x), y, reduction="sum"), split(16, x, y))


@case("mean teacher", LOOPS)
def mean_teacher() -> Trial:
    model = mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)
    x, y = vectors()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        half = len(x) // 2
        known = F.cross_entropy(model(x[:half]), y[:half])
        return known + F.mse_loss(model(x).softmax(1), teacher(x + 0.1).softmax(1))

    def follow() -> None:
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    trial = Trial(model, loss, split(16, x, y), after_step=follow)
    trial.measure = lambda: float(F.cross_entropy(model(x), y).detach())
    return trial
