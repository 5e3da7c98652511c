"""Small networks and batches, and a plain reference of the outer-product form for any network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt._collect import one_recording

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Loss = Callable[[nn.Module], Tensor]


def fcn() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip


class Residual(nn.Module):
    """x + b(tanh(a(x))) between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = nn.Linear(5, 4), nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + self.b(torch.tanh(self.a(x)))
        return self.last(x)


def vectors(n: int = 8, inputs: int = 5, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, inputs, generator=g, dtype=torch.float64), torch.randint(classes, (n,), generator=g)


def images(n: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 6, 6, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)


def batches(data: Callable[..., tuple[Tensor, Tensor]], steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    for seed in range(steps):
        yield data(seed=seed)


def train(model: nn.Module, opt: torch.optim.Optimizer, data: Callable[..., tuple[Tensor, Tensor]], steps: int) -> None:
    dtype = next(model.parameters()).dtype
    for x, y in batches(data, steps):
        opt.zero_grad()
        F.cross_entropy(model(x.to(dtype)), y).backward()
        opt.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: nn.Module | list[Tensor], b: nn.Module | list[Tensor]) -> bool:
    """Bit for bit."""
    a, b = (weights(m) if isinstance(m, nn.Module) else m for m in (a, b))
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def distance(a: nn.Module | list[Tensor], b: nn.Module | list[Tensor]) -> float:
    a, b = (weights(m) if isinstance(m, nn.Module) else m for m in (a, b))
    return max(float((p - q).abs().max()) for p, q in zip(a, b, strict=True))


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)


def snapshot(value: object) -> object:
    """A copy of nested optimizer state that can be compared with `equal`."""
    return copy.deepcopy(value)


def equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(equal, a, b))
    return a == b


def outer_step(model: nn.Module, loss: Loss, lr: float, *, chain: bool) -> None:
    """One closed-loop step of the outer-product form with Gauss-Newton terminal, identity and guard.

    One sample and one layer at a time, all gradients by autograd.
    """
    order: list[nn.Module] = []
    xs: list[Tensor] = []
    hs: list[Tensor] = []
    x_old: list[Tensor] = []

    def remember(module: nn.Module, args: tuple[Tensor, ...], h: Tensor) -> None:
        order.append(module)
        xs.append(args[0])
        x_old.append(args[0].detach().clone())
        hs.append(h)

    rng = torch.get_rng_state()
    handles = [m.register_forward_hook(remember) for m in model.modules() if isinstance(m, LAYERS)]
    value = loss(model)
    P = torch.autograd.grad(value, hs, retain_graph=True)
    readers = [x if x.requires_grad else None for x in xs]
    P_x = [None if x is None else torch.autograd.grad(value, x, retain_graph=True)[0] for x in readers]
    for handle in handles:
        handle.remove()

    B = len(x_old[0])
    per_sample = []
    for module, x, p in zip(order, x_old, P, strict=True):
        own = [
            torch.autograd.grad((module(x[i : i + 1]) * p[i : i + 1]).sum(), list(module.parameters()))
            for i in range(B)
        ]
        per_sample.append(own)
    v, L = torch.ones(B), torch.ones(B)
    values = []
    for own in reversed(per_sample):
        s = lr * L * torch.stack([sum(g.square().sum() for g in gradients) for gradients in own])
        values.append((v, L / (1 + s)))  # the guard is in the feedback gain, too
        v, L = v / (1 + s), L / (1 + s)
    values.reverse()

    ledger = torch.zeros(B)
    before: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def control(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        t = order.index(module)
        c = ledger
        if chain:
            c = torch.zeros(B) if P_x[t] is None else (P_x[t] * (args[0] - x_old[t])).flatten(1).sum(1)
        v, L = values[t]
        before[t] = [p.detach().clone() for p in module.parameters()]
        for k, p in enumerate(module.parameters()):
            p -= lr * sum((v[i] + L[i] * c[i]) * per_sample[t][i][k] for i in range(B))

    @torch.no_grad()
    def enter(module: nn.Module, args: tuple[Tensor, ...], h: Tensor) -> None:
        nonlocal ledger
        t = order.index(module)
        new = [p.detach().clone() for p in module.parameters()]
        for p, u in zip(module.parameters(), before[t], strict=True):
            p.copy_(u)
        ledger = ledger + (P[t] * (h - module.forward(args[0]))).flatten(1).sum(1)
        for p, u in zip(module.parameters(), new, strict=True):
            p.copy_(u)

    handles = []
    for module in order:
        handles.append(module.register_forward_pre_hook(control))
        if not chain:
            handles.append(module.register_forward_hook(enter))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.set_rng_state(rng)
        loss(model)
    for handle in handles:
        handle.remove()


def check_sample_gradients(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The recorded gradient of each sample is that of autograd, parameter by parameter."""
    parameters = list(model.parameters())
    each = F.cross_entropy(model(x), y, reduction="none") / len(x)
    wanted = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in each]
    opt = DDPNOpt(model)
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        recording, _ = one_recording(opt)
    assert recording is not None
    for i, expected in enumerate(wanted):
        found = {p: torch.zeros_like(p) for p in parameters}
        for record in recording.layers:
            assert record.p_h is not None
            parts = record.layer.grad(record.x[i : i + 1], record.p_h[i : i + 1])
            for p, part in zip(record.parameters, parts, strict=True):
                found[p] += part
        for p, g in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found[p], g, rtol=1e-9, atol=1e-9)
