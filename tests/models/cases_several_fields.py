"""Likelihoods and models of several fields (survival, ranks, tags, speech, flows), and weights kept in a set."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from data import split, tokens, vectors
from torch import Tensor, nn
from trial import Trial, case, plain_step

FIELDS = "likelihoods and models of several fields"


def mlp(inputs: int, outputs: int, width: int = 32, kind: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), kind(), nn.Linear(width, width), kind(), nn.Linear(width, outputs))


def curve(count: int = 96, features: int = 8) -> tuple[Tensor, Tensor]:
    """A smooth function of the features, with little noise."""
    x = torch.randn(count, features)
    t = torch.sin(x @ torch.randn(features, 1)) + 0.3 * x[:, :1] * x[:, 1:2]
    return x, t + 0.1 * torch.randn_like(t)


class Ranks(nn.Module):
    """CORAL: one score for all ranks, and a bias for each."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.score = mlp(8, 16), nn.Linear(16, 1, bias=False)
        self.biases = nn.Parameter(torch.arange(4, 0, -1) / 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.score(self.body(x).relu()) + self.biases
        return found


@case("ordinal regression, CORAL", FIELDS, steps=60)
def ranks() -> Trial:
    model = Ranks()
    x, t = curve()
    above = (torch.bucketize(t, torch.tensor([-0.8, -0.2, 0.3, 0.8])) > torch.arange(4)).float()

    def loss(x: Tensor, above: Tensor) -> Tensor:
        z = model(x)
        return -(F.logsigmoid(z) * above + (F.logsigmoid(z) - z) * (1 - above)).sum(1).mean()

    return Trial(model, loss, split(16, x, above))


@case("survival times, Cox's partial likelihood", FIELDS)
def survival() -> Trial:
    model = mlp(6, 1)
    x = torch.randn(96, 6)
    times = torch.empty(96).exponential_() * torch.exp(-x[:, 0] + 0.5 * x[:, 1] ** 2)
    seen = (torch.rand(96) < 0.7).float()

    def loss(x: Tensor, times: Tensor, seen: Tensor) -> Tensor:
        order = times.argsort(descending=True)
        risk = model(x)[order, 0]
        return -((risk - risk.logcumsumexp(0)) * seen[order]).sum() / seen.sum().clamp(min=1)

    return Trial(model, loss, split(32, x, times, seen))


class RandomField(nn.Module):
    """A BiLSTM and a linear chain over the tags: minus the log-likelihood of each sequence."""

    def __init__(self, tags: int = 5) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(40, 16), nn.Linear(32, tags)
        self.recur = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.follow, self.start = nn.Parameter(torch.zeros(tags, tags)), nn.Parameter(torch.zeros(tags))

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        z = self.out(self.recur(self.words(ids))[0])
        score = self.start[y[:, 0]] + z[:, 0].gather(1, y[:, :1])[:, 0]
        total = self.start + z[:, 0]
        for t in range(1, z.shape[1]):
            score = score + self.follow[y[:, t - 1], y[:, t]] + z[:, t].gather(1, y[:, t : t + 1])[:, 0]
            total = torch.logsumexp(total[:, :, None] + self.follow, 1) + z[:, t]
        return torch.logsumexp(total, 1) - score


@case("tags, a conditional random field on a BiLSTM", FIELDS)
def random_field() -> Trial:
    model = RandomField()
    ids = tokens(48, 8)
    return Trial(model, lambda ids, y: model(ids, y).mean(), split(16, ids, (ids + ids.roll(1, 1)) % 5))


class Recogniser(nn.Module):
    """Convolutions over the samples' frames, a recurrent layer with the time first, as `ctc_loss` takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Sequential(nn.Conv1d(8, 24, 5, 2, 2), nn.BatchNorm1d(24), nn.ReLU())
        self.recur, self.out = nn.GRU(24, 24, bidirectional=True), nn.Linear(48, 9)

    def forward(self, x: Tensor) -> Tensor:
        h = self.frames(x).permute(2, 0, 1)
        return self.out(self.recur(h)[0]).log_softmax(-1)


@case("speech, CTC with the time first", FIELDS)
def speech() -> Trial:
    model = Recogniser()
    y = torch.randint(1, 9, (32, 4))
    x = 0.3 * torch.randn(32, 8, 32)
    for i in range(32):
        for k in range(4):
            x[i, int(y[i, k]) - 1, 8 * k : 8 * k + 6] += 2
    times, lengths = torch.full((8,), 16), torch.full((8,), 4)
    return Trial(model, lambda x, y: F.ctc_loss(model(x), y, times, lengths), split(8, x, y))


class Actor(nn.Module):
    """A policy as a distribution, and the value of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.value = mlp(3, 32, kind=nn.Tanh), nn.Linear(32, 1), nn.Linear(32, 1)
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[torch.distributions.Normal, Tensor]:
        h = torch.tanh(self.body(x))
        return torch.distributions.Normal(self.mean(h)[:, 0], self.log_scale.exp()), self.value(h)[:, 0]


@case("actor and critic, a policy that is a distribution", FIELDS, steps=80)
def actor() -> Trial:
    model = Actor()
    test = torch.randn(256, 3)

    def best(x: Tensor) -> Tensor:
        return x[:, 0] * x[:, 1] + 0.5 * x[:, 2]

    def step(trial: Trial, opt: torch.optim.Optimizer, batch: tuple[Any, ...]) -> None:
        x = torch.randn(64, 3)
        policy, value = model(x)
        action = policy.sample()
        reward = -(action - best(x)).square()
        gain = (reward - value).detach()
        opt.zero_grad()
        loss = -(policy.log_prob(action) * gain).mean() + 0.5 * F.mse_loss(value, reward)
        (loss - 1e-3 * policy.entropy().mean()).backward()
        opt.step()

    @torch.no_grad()
    def distance() -> float:
        return float((model(test)[0].mean - best(test)).square().mean())

    return Trial(model, lambda x: x, [()], step, distance)


class Couplings(nn.Module):
    """RealNVP: half of the numbers scale and shift the other half, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList([mlp(2, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = torch.zeros(len(x))
        for net in self.each:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            x, volume = torch.cat([b * scale.exp() + shift, a], 1), volume + scale.sum(1)
        return x, volume


@case("a normalising flow, RealNVP", FIELDS, steps=60)
def flow() -> Trial:
    model = Couplings()
    x = torch.randn(128, 4)
    x = 2 * torch.stack([x[:, 0], x[:, 1] + x[:, 0] ** 2, x[:, 2], 0.3 * x[:, 3] + torch.sin(2 * x[:, 2])], 1) + 1

    def loss(x: Tensor) -> Tensor:
        z, volume = model(x)
        return (0.5 * z.square().sum(1) + 2 * math.log(2 * math.pi) - volume).mean()

    return Trial(model, loss, split(32, x))


class Hamiltonian(nn.Module):
    """The field of an energy, which the forward pass differentiates."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp(2, 1, kind=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return torch.stack([slope[:, 1], -slope[:, 0]], 1)


@case("a Hamiltonian network, differentiated in its forward pass", FIELDS)
def pendulum() -> Trial:
    model = Hamiltonian()
    x = torch.randn(96, 2)
    field = torch.stack([x[:, 1], -torch.sin(x[:, 0])], 1)
    return Trial(model, lambda x, t: F.mse_loss(model(x), t), split(32, x, field))


class Splines(nn.Module):
    """A Kolmogorov-Arnold layer: a B-spline and a SiLU for each pair of an input and an output."""

    def __init__(self, inputs: int, outputs: int, cells: int = 5, order: int = 3) -> None:
        super().__init__()
        self.order = order
        self.register_buffer("grid", torch.arange(-order, cells + order + 1) * 2 / cells - 1)
        self.base = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.spline = nn.Parameter(0.1 * torch.randn(outputs, inputs, cells + order))

    def forward(self, x: Tensor) -> Tensor:
        u, grid = x[..., None], self.get_buffer("grid")
        found = ((u >= grid[:-1]) & (u < grid[1:])).to(x)
        for k in range(1, self.order + 1):
            rising = (u - grid[: -(k + 1)]) / (grid[k:-1] - grid[: -(k + 1)]) * found[..., :-1]
            found = rising + (grid[k + 1 :] - u) / (grid[k + 1 :] - grid[1:-k]) * found[..., 1:]
        return F.linear(F.silu(x), self.base) + torch.einsum("big,oig->bo", found, self.spline)


@case("Kolmogorov-Arnold layers", FIELDS, steps=60)
def splines() -> Trial:
    model = nn.Sequential(Splines(8, 8), Splines(8, 1))
    x, t = curve()
    return Trial(model, lambda x, t: F.mse_loss(model(x), t), split(16, x / 3, t))


class Quantised(nn.Module):
    """Weights and inputs rounded to steps that are learnt; the gradient goes through as if they were not."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self.steps = nn.ParameterList([self.layer.weight.detach().abs().amax() / 7, torch.tensor(0.3)])

    def forward(self, x: Tensor) -> Tensor:
        weight, x = (
            (v + (v.round() - v).detach()) * step
            for step, v in (
                (self.steps[0], (self.layer.weight / self.steps[0]).clamp(-7, 7)),
                (self.steps[1], (x / self.steps[1]).clamp(-15, 15)),
            )
        )
        return F.linear(x, weight, self.layer.bias)


@case("quantised weights and activations with learnt steps", FIELDS, steps=60)
def quantised() -> Trial:
    model = nn.Sequential(Quantised(10, 32), nn.ReLU(), Quantised(32, 32), nn.ReLU(), Quantised(32, 4))
    return Trial(model, lambda x, y: F.cross_entropy(model(x), y), split(16, *vectors()))


@case("weights kept above zero, clamped after each step", FIELDS, steps=60)
def clamped() -> Trial:
    model = nn.Sequential(nn.Linear(10, 32), nn.Softplus(), nn.Linear(32, 1))
    x = torch.rand(96, 10)

    @torch.no_grad()
    def clamp() -> None:
        for layer in (model[0], model[2]):
            layer.weight.data.clamp_(min=0)

    clamp()
    t = x[:, :3].square().sum(1, keepdim=True)
    return Trial(model, lambda x, t: F.mse_loss(model(x), t), split(16, x, t), after_step=clamp)


@case("pruned weights, masked after each step", FIELDS, steps=60)
def pruned() -> Trial:
    model = mlp(10, 4, 48)
    masks = [(p, (torch.rand_like(p) < 0.2).float()) for p in model.parameters() if p.dim() > 1]

    @torch.no_grad()
    def mask() -> None:
        for p, kept in masks:
            p.mul_(kept)

    mask()
    return Trial(model, lambda x, y: F.cross_entropy(model(x), y), split(16, *vectors()), after_step=mask)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.ModuleList([nn.Linear(10, 32)]), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = layer(x).relu()
        found: Tensor = self.out(x)
        return found


@case("a layer that is added in the middle of training", FIELDS)
def growing() -> Trial:
    model = Growing()
    taken = [0]

    def step(trial: Trial, opt: torch.optim.Optimizer, batch: tuple[Any, ...]) -> None:
        taken[0] += 1
        if taken[0] == 15:
            model.inner.append(nn.Linear(32, 32))
            opt.add_param_group({"params": list(model.inner[-1].parameters())})
        plain_step(trial, opt, batch)

    return Trial(model, lambda x, y: F.cross_entropy(model(x), y), split(16, *vectors()), step)


class Remembering(nn.Module):
    """Attention to the states of the segment before, as in Transformer-XL."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(40, width), nn.Linear(width, 40)
        self.query, self.pair, self.mix = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm, self.far = nn.LayerNorm(width), nn.Parameter(torch.zeros(24))

    def forward(self, ids: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.words(ids)
        seen = x if before is None else torch.cat([before, x], 1)
        k, v = self.pair(seen).chunk(2, -1)
        back = torch.arange(ids.shape[1])[:, None] + seen.shape[1] - ids.shape[1] - torch.arange(seen.shape[1])
        scores = self.query(x) @ k.mT / x.shape[-1] ** 0.5 + self.far[back.clamp(min=0)]
        h = scores.masked_fill(back < 0, -1e9).softmax(-1) @ v
        return self.out(self.norm(x + self.mix(h))), x[:, -6:].detach()


@case("a memory of the segment before, as in Transformer-XL", FIELDS, steps=60)
def remembering() -> Trial:
    model = Remembering()
    ids = tokens(16, 25)
    kept: dict[str, Any] = {"segment": 0, "memory": None}

    def step(trial: Trial, opt: torch.optim.Optimizer, batch: tuple[Any, ...]) -> None:
        k = 6 * kept["segment"]
        z, memory = model(ids[:, k : k + 6], kept["memory"])
        opt.zero_grad()
        F.cross_entropy(z.flatten(0, 1), ids[:, k + 1 : k + 7].flatten()).backward()
        opt.step()
        kept["segment"] = (kept["segment"] + 1) % 4
        kept["memory"] = memory if kept["segment"] else None

    whole = [(ids,)]
    return Trial(
        model, lambda ids: F.cross_entropy(model(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten()), whole, step
    )
