"""One step of `DDPNOpt(model)` with dense matrices, on any graph whose samples do not see each other.

Per-sample gradients are those that autograd finds for each sample's own loss, through all uses of a weight. Hooks of
this file's own see the inputs of layers and the gradients at their outputs. What is taken from the optimizer are two
numbers, the fraction of the loss that the step asks for and the factor of the last update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.ddp.balance import DECAY, FLOOR, LOW, STEADY
from ddpnopt.ddp.covariance import CHANGED
from ddpnopt.ddp.value import shares
from ddpnopt.ddp.value.scale_free import DAMPING, LEAST_LOSS

Shares = Callable[[Tensor], Tensor]
"""Each sample's share of the batch loss, from the model's output."""


@dataclass(eq=False)
class Running:
    """The running average of a matrix, or of a profile, and of the logarithm of the scale."""

    floor: float = FLOOR  # of its root
    total: Any = 0.0
    weight: float = 0.0
    log_scale: float = 0.0
    used: Tensor | None = None
    change: float = math.inf  # of the root's square, by the last look

    def see(self, new: Tensor, since: int = 1) -> None:
        mean, decay = new.diagonal().mean() if new.dim() == 2 else new.mean(), DECAY**since
        self.total = decay * self.total + (1 - decay) * new / mean
        self.weight = decay * self.weight + 1 - decay
        self.log_scale = decay * self.log_scale + (1 - decay) * float(mean.log())

    @property
    def scale(self) -> float:
        return float(torch.tensor(0.5 * self.log_scale / self.weight).exp())

    def root(self) -> Tensor:
        """(C + floor)^-1/4 of the matrix; one that has hardly changed keeps its root."""
        C = self.total / self.weight
        change = math.inf if self.used is None else float((C - self.used).norm()) / float(self.used.norm())
        self.change = 0.5 * change if change > CHANGED else 0.0
        if change > CHANGED:
            self.used = C
        values, Q = torch.linalg.eigh(self.used)
        return Q @ torch.diag((values.clamp_min(0) + self.floor) ** -0.25) @ Q.T

    def factors(self) -> Tensor:
        return (self.total / self.weight + FLOOR) ** -0.25


@dataclass(eq=False)
class Control:
    """The weights that one stage updates: of a module, or a parameter that belongs to no layer."""

    module: nn.Module  # before whose first call they are updated
    parameters: list[nn.Parameter]
    loose: bool = False
    inputs: Running = field(default_factory=Running)
    outputs: Running = field(default_factory=lambda: Running(LOW))
    kernel: Running = field(default_factory=Running)
    least: float = 0.0
    last: list[Tensor] | None = None  # old minus new weights of the last step
    promised: tuple[float, float] = (0.0, 0.0)  # the decrease by it, and that of unseen samples
    bend: tuple[float, float] = (0.0, 0.0)  # running sum of the change of the slope along it, and of the weights
    every: int = 1  # steps from one look at the second moments to the next, in the first steps
    wait: int = 0  # steps until then
    roots: list[Tensor] = field(default_factory=list)
    # of one step
    uses: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # input, and output with its graph
    p: list[Tensor] = field(default_factory=list)  # gradients at the outputs
    P: list[Tensor] = field(default_factory=list)  # of each sample by each parameter, (B, …)

    def state(self, x: Tensor) -> Tensor:
        """What the weights act on."""
        if isinstance(self.module, nn.LayerNorm):
            return F.layer_norm(x, self.module.normalized_shape, eps=self.module.eps)
        return x

    def apply(self, x: Tensor, u: list[Tensor]) -> Tensor:
        """The layer with other weights, on a state."""
        if isinstance(self.module, nn.LayerNorm):
            return x * u[0] + u[1]
        if isinstance(self.module, nn.Conv2d):
            return F.conv2d(x, *u, padding=self.module.padding)
        return F.embedding(x, u[0]) if isinstance(self.module, nn.Embedding) else F.linear(x, *u)

    def effect(self, x_hat: Tensor, du: list[Tensor]) -> Tensor:
        """What du does to each sample's loss, to first order: the first use on its new input, others on the old."""
        if self.loose:
            return self.P[0].flatten(1) @ du[0].flatten()
        inputs = [x_hat, *(self.state(x) for x, _ in self.uses[1:])]
        return sum((p * self.apply(x, du)).flatten(1).sum(1) for x, p in zip(inputs, self.p, strict=True))

    def balance(self) -> Callable[[list[Tensor]], list[Tensor]]:
        """From gradients in the weights to gradients in balanced variables, and from steps there to steps."""
        if isinstance(self.module, nn.Conv2d):
            return self._of_convolution(self.module)
        rows = torch.cat([p.reshape(-1, p.shape[-1]) for p in self.p]) if self.p else None
        if self.loose:
            self.outputs.see(self.P[0].flatten(1).square().mean(0))
            psi = self.outputs.factors().view_as(self.parameters[0])
            return lambda parts: [parts[0] * psi]
        assert rows is not None
        if isinstance(self.module, nn.LayerNorm):
            return lambda parts: parts
        if isinstance(self.module, nn.Embedding):
            self.outputs.see(rows.square().mean(0))
            psi = self.outputs.factors()
            return lambda parts: [parts[0] * psi]
        A, G = self._look({"inputs": torch.cat([x.reshape(-1, x.shape[-1]) for x, _ in self.uses]), "outputs": rows})
        column = self.inputs.scale
        return lambda parts: [G @ parts[0] @ A, *(column * b @ G for b in parts[1:])]

    def _of_convolution(self, module: nn.Conv2d) -> Callable[[list[Tensor]], list[Tensor]]:
        """A matrix each for channels, outputs and the places of the kernel."""
        [(x, _)], [p] = self.uses, self.p
        seen = F.unfold(x.flatten(0, 1)[:, None], module.kernel_size, padding=module.padding).mT.flatten(0, 1)
        rows = {"inputs": _channels(x), "outputs": _channels(p)}
        A, G, *kernel = self._look(rows | {"kernel": seen} if seen.shape[1] > 1 else rows)
        R = kernel[0] if kernel else torch.ones(1, 1)
        column, k = self.inputs.scale, module.kernel_size

        def scale(parts: list[Tensor]) -> list[Tensor]:
            weight = torch.einsum("ab,...bck,cd,kl->...adl", G, parts[0].flatten(-2), A, R).unflatten(-1, k)
            return [weight, *(column * b @ G for b in parts[1:])]

        return scale

    def _look(self, rows: dict[str, Tensor]) -> list[Tensor]:
        """The roots of the second moments of each, after a look at their rows where one is due."""
        running = [getattr(self, name) for name in rows]
        if self.wait == 0 or not self.roots:
            for each, seen in zip(running, rows.values(), strict=True):
                each.see(seen.T @ seen / len(seen), self.every)
            self.roots = [each.root() for each in running]
            change = max(1e-9, *(each.change for each in running))
            self.every = self.wait = max(1, int(self.every * min(2.0, STEADY / change)))
        self.wait -= 1
        return self.roots


def _channels(a: Tensor) -> Tensor:
    """(places of all samples, channels)."""
    return a.movedim(1, -1).flatten(0, -2)


class DenseStep:
    """Steps of a model; `chain` says whether each layer reads the layer before it and nothing else."""

    def __init__(self, model: nn.Module, controls: list[Control], *, chain: bool = False) -> None:
        self.model, self.controls, self.chain = model, controls, chain

    def step(self, x: Tensor, shares_of: Shares, fraction: float, memory: float) -> None:
        for control in self.controls:
            control.uses, control.p = [], []
        phi = self._record(x, shares_of)
        phi = phi.clamp_min(LEAST_LOSS * phi.mean())
        r, root = (2 * phi).sqrt(), (2 * phi).rsqrt()
        balances = [control.balance() for control in self.controls]
        insides = []
        for control, balance in zip(self.controls, balances, strict=True):
            each = [torch.cat([part.flatten() for part in balance(list(P))]) for P in zip(*control.P, strict=True)]
            insides.append(torch.stack(each))
        slopes = [float((0.5 / phi * (J @ J.T).diagonal()).mean() * J.shape[1]) ** 0.5 for J in insides]
        etas, grams = [], []
        for J, slope, size, correction in zip(insides, slopes, self._sizes(slopes), self._corrections(), strict=True):
            etas.append(correction * size * J.shape[1] / slope)
            grams.append(etas[-1] * torch.outer(root, root) * (J @ J.T))
        damping = DAMPING * torch.stack(grams).sum(0).diagonal().mean() * torch.eye(len(r))
        prior = [
            memory * _inner(control.P, control.last) if memory else torch.zeros_like(r) for control in self.controls
        ]

        y = torch.linalg.solve(torch.stack(grams).sum(0) + damping, r - root * torch.stack(prior).sum(0))
        for control, gram, m in zip(self.controls, grams, prior, strict=True):
            of_all, of_itself = (gram @ y / root + m).sum(), (gram.diagonal() * y / root).sum()
            control.promised = fraction * float(of_all), fraction * max(0.0, float(of_all - of_itself))

        def update(t: int, c: Tensor) -> list[Tensor]:
            A, m = torch.stack(grams[t:]).sum(0), torch.stack(prior[t:]).sum(0)
            w = root * torch.linalg.solve(A + damping, fraction * (r - root * m) + root * c)
            control, balance = self.controls[t], balances[t]
            d = balance(balance([torch.tensordot(w, P, 1) for P in control.P]))
            du = [-etas[t] * part for part in d]
            if memory and control.last is not None:
                du = [a - fraction * memory * b for a, b in zip(du, control.last, strict=True)]
            return du

        self._sweep(x, update)

    def _sizes(self, slopes: list[float]) -> list[float]:
        """Those that the layers count as, from how much a change of each does to the loss."""
        sizes = [float(control.parameters[0].detach().square().mean().sqrt()) for control in self.controls]
        if not self.controls[0].least:
            linear = [isinstance(c.module, nn.Linear | nn.Conv2d) and not c.loose for c in self.controls]
            usual = [(3 * max(1, c.parameters[0][:1].numel())) ** -0.5 for c in self.controls]
            gains = [size / u for size, u, mixes in zip(sizes, usual, linear, strict=True) if mixes]
            total = self.controls[linear.index(True)].inputs.scale * math.prod(gains) if gains else 1.0
            larger = max(1.0, total ** (-1 / max(1, len(gains))))
            mean = sum(size * slope for size, slope in zip(sizes, slopes, strict=True)) / len(sizes)
            for control, size, slope in zip(self.controls, sizes, slopes, strict=True):
                control.least = max(size, min(larger * size, mean / slope))
        return [max(size, control.least) for size, control in zip(sizes, self.controls, strict=True)]

    def _corrections(self) -> list[float]:
        """Those of the layers' shares, by how much the slope along the last update of each has changed."""
        if self.controls[0].last is None:
            return [1.0] * len(self.controls)
        bends: list[float | None] = []
        for control in self.controls:
            promised, unseen = control.promised
            (total, weight), kept = control.bend, shares.DECAY
            if promised > 0:  # else the others take it uphill
                bend = (unseen - float(_inner(control.P, control.last).sum())) / promised
                total, weight = kept * total + (1 - kept) * max(0.0, min(1.0, bend)), kept * weight + 1 - kept
            control.bend = total, weight
            bends.append(total / weight if weight else None)
        known = [bend for bend in bends if bend is not None]
        middle = sum(known) / len(known)
        return [1.0 if bend is None else math.exp(-shares.GAIN * (bend - middle)) for bend in bends]

    def _record(self, x: Tensor, shares_of: Shares) -> Tensor:
        """The ordinary pass: what layers read and return, and the gradients of each sample; its losses."""
        by_module = {control.module: control for control in self.controls}

        def remember(module: nn.Module, args: tuple[Tensor, ...], h: Tensor) -> None:
            by_module[module].uses.append((args[0].detach(), h))

        with _hooks(self.controls, after=remember):
            phi = shares_of(self.model(x))
        for control in self.controls:
            control.P = [torch.zeros(len(phi), *p.shape) for p in control.parameters]
            for i, share in enumerate(phi):
                found = torch.autograd.grad(share, control.parameters, retain_graph=True)
                for P, own in zip(control.P, found, strict=True):
                    P[i] = own
            if not control.loose:
                control.p = list(torch.autograd.grad(phi.sum(), [h for _, h in control.uses], retain_graph=True))
        return phi.detach()

    @torch.no_grad()
    def _sweep(self, x: Tensor, update: Callable[[int, Tensor], list[Tensor]]) -> None:
        """The second forward pass, in which each layer is updated before its first use."""
        ledger = torch.zeros(len(x))
        done: set[int] = set()
        at = {control.module: t for t, control in enumerate(self.controls)}

        def change(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            nonlocal ledger
            t = at[module]
            if t in done:
                return
            done.add(t)
            control, c = self.controls[t], ledger
            x_hat = control.state(args[0])
            if self.chain:
                c = torch.zeros(len(x))
                if args[0].is_floating_point():
                    moved = control.apply(x_hat, control.parameters) - control.apply(
                        control.state(control.uses[0][0]), control.parameters
                    )
                    c = (control.p[0] * moved).flatten(1).sum(1)
            du = update(t, c)
            ledger = ledger + control.effect(x_hat, du)
            control.last = [-part for part in du]
            for p, part in zip(control.parameters, du, strict=True):
                p.add_(part)

        with _hooks(self.controls, before=change):
            self.model(x)


@contextmanager
def _hooks(controls: list[Control], before: Any = None, after: Any = None) -> Iterator[None]:
    handles = [control.module.register_forward_pre_hook(before) for control in controls if before is not None]
    handles += [control.module.register_forward_hook(after) for control in controls if after is not None]
    yield
    for handle in handles:
        handle.remove()


def _inner(P: list[Tensor], step: list[Tensor] | None) -> Tensor:
    assert step is not None
    return sum(each.flatten(1) @ part.flatten() for each, part in zip(P, step, strict=True))
