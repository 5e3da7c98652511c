"""What is timed: the forms of DDPNOpt, and the optimizers of torch beside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ddpnopt import DDPNOpt
from ddpnopt.bench.networks import Network
from ddpnopt.errors import ModelError, OptionError
from ddpnopt.experiments.errors import UnknownNameError

UNIT = "sgd"
# Small enough that hundreds of steps on random labels stay finite; the time of a step does not depend on it.
LR = 1e-3


@dataclass(frozen=True)
class Form:
    """One way to make a step."""

    name: str
    label: str
    build: Callable[[nn.Module], Optimizer]


def _torch(kind: Callable[..., Optimizer]) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind(model.parameters(), lr=LR)


def _ddpnopt(**options: Any) -> Callable[[nn.Module], Optimizer]:
    # Random labels may make a step non-finite at some setting; the clock does not care.
    return lambda model: DDPNOpt(model, **{"on_nonfinite": "skip", **options})


def _outer(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return _ddpnopt(**{"lr": LR, "value": "outer", "terminal": "gn", **options})


def _batch(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return _ddpnopt(**{"lr": LR, "value": "batch", **options})


FORMS = {
    each.name: each
    for each in (
        Form(UNIT, "SGD", _torch(torch.optim.SGD)),
        Form("sgd-again", "SGD again", _torch(torch.optim.SGD)),
        Form("adam", "Adam", _torch(torch.optim.Adam)),
        Form("ddpnopt", "DDPNOpt(model)", _ddpnopt()),
        Form("no-feedback", "feedback=False", _outer(feedback=False)),
        Form("batch", "batch", _batch()),
        Form("batch-open", "batch, open loop", _batch(closed_loop=False)),
        Form("outer", "outer", _outer()),
        Form("outer-open", "outer, open loop", _outer(closed_loop=False)),
        Form("full", "full", _outer(value="full", terminal="cross_entropy")),
        Form("full-open", "full, open loop", _outer(value="full", terminal="cross_entropy", closed_loop=False)),
        Form("batch-rmsprop", "batch, RMSprop", _batch(curvature="rmsprop")),
        Form("batch-adam", "batch, Adam", _batch(curvature="adam")),
        Form("batch-kfac", "batch, KFAC", _batch(curvature="kfac")),
        Form("batch-ekfac", "batch, EKFAC", _batch(curvature="ekfac")),
        Form("outer-adam", "outer, Adam", _outer(curvature="adam")),
        Form("outer-ekfac", "outer, EKFAC", _outer(curvature="ekfac")),
    )
}


def forms(names: Iterable[str]) -> list[Form]:
    """The forms of these names, each once, SGD first; an error lists the known ones."""
    chosen = [FORMS[UNIT]]
    for name in dict.fromkeys(names):
        if name not in FORMS:
            raise UnknownNameError("method", name, FORMS)
        if name != UNIT:
            chosen.append(FORMS[name])
    return chosen


# One batch again and again would soon be fitted to the last bit, and a method that checks its steps would spend its
# time on steps that nobody takes in training.
BATCHES = 8


class Stepper:
    """A network, an optimizer and some batches, ready to step."""

    def __init__(self, form: Form, network: Network, batch_size: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = network.build()
            self.batches = cycle([network.batch(batch_size) for _ in range(BATCHES)])
        self.x, self.y = next(self.batches)
        self.form = form
        self.optimizer = form.build(self.model)
        self.start = [p.detach().clone() for p in self.model.parameters()]

    def reset(self) -> None:
        """The weights as they were at first."""
        with torch.no_grad():
            for p, start in zip(self.model.parameters(), self.start, strict=True):
                p.copy_(start)

    def forward(self) -> Tensor:
        return F.cross_entropy(self.model(self.x), self.y)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()

    def step(self) -> None:
        """What a training loop does with a batch."""
        self.x, self.y = next(self.batches)
        self.optimizer.zero_grad()
        loss = self.forward()
        self.backward(loss)
        self.update()


def ready(form: Form, network: Network, batch_size: int) -> Stepper | None:
    """A stepper that has made two steps (the first finds out about the network), or None where a form cannot be had."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which parameters go without feedback is no news here
            stepper = Stepper(form, network, batch_size)
            for _ in range(2):
                stepper.step()
    except (OptionError, ModelError, NotImplementedError):
        return None
    return stepper
