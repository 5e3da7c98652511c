"""A trial: a model and a loop as people write them, trained by DDPNOpt and by AdamW on the same small data."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.errors import DDPNOptError

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
WITHIN = 0.9  # of AdamW's decrease of the training loss
RATES = (1e-3, 3e-3, 1e-2)
USUAL_RATE = 3e-3


@dataclass
class Trial:
    """A fresh model, its fixed data, and how to train it.

    The default loop takes one batch after the other; `step` replaces it.
    """

    model: nn.Module
    loss: Callable[..., Tensor]  # of one batch: what backward() is called on
    batches: Sequence[tuple[Any, ...]]
    step: Callable[[Trial, torch.optim.Optimizer, tuple[Any, ...]], None] | None = None
    measure: Callable[[], float] | None = None  # what is to decrease; by default the mean loss of all batches
    others: list[nn.Module] = field(default_factory=list)  # further models, each with an optimizer of the same kind
    after_step: Callable[[], None] | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)  # of `others`

    def train(self, make: MakeOptimizer, steps: int) -> torch.optim.Optimizer:
        opt = make(self.model)
        self.optimizers = [make(other) for other in self.others]
        for k in range(steps):
            (self.step or plain_step)(self, opt, self.batches[k % len(self.batches)])
            if self.after_step is not None:
                self.after_step()
        return opt

    def training_loss(self) -> float:
        """On all of the data, in training mode; what the pass changes (statistics of norms) is restored."""
        if self.measure is not None:
            return self.measure()
        buffers = copy.deepcopy(dict(self.model.named_buffers()))
        with torch.random.fork_rng():
            torch.manual_seed(1)
            total = sum(float(self.loss(*batch).detach()) for batch in self.batches)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        return total / len(self.batches)


def plain_step(trial: Trial, opt: torch.optim.Optimizer, batch: tuple[Any, ...]) -> None:
    opt.zero_grad()
    trial.loss(*batch).backward()
    opt.step()


@dataclass(frozen=True)
class Case:
    """One entry of the registry."""

    name: str
    make: Callable[[], Trial]
    group: str
    steps: int = 40
    needs: tuple[str, ...] = ()  # packages
    fails: str | None = None  # why it does not pass yet
    options: dict[str, Any] = field(default_factory=dict)  # of DDPNOpt, where the documentation asks for them
    refused: str | None = None  # the way out that the message has to name, where no step can be right


CASES: dict[str, Case] = {}


def case(name: str, group: str, **settings: Any) -> Callable[[Callable[[], Trial]], Callable[[], Trial]]:
    """Enter a function that makes a trial into the registry."""

    def enter(make: Callable[[], Trial]) -> Callable[[], Trial]:
        assert name not in CASES, name
        CASES[name] = Case(name, make, group, **settings)
        return make

    return enter


@dataclass(frozen=True)
class Result:
    """How far one optimizer came, or why it refused."""

    before: float
    after: float
    refusal: str | None = None
    messages: tuple[str, ...] = ()  # warnings of DDPNOpt
    shortened: int = 0
    undone: int = 0

    @property
    def decrease(self) -> float:
        return self.before - self.after if math.isfinite(self.after) else -math.inf


def run(entry: Case, make: MakeOptimizer, steps: int | None = None) -> Result:
    """Train from the same start with one optimizer."""
    torch.manual_seed(0)
    trial = entry.make()
    before = trial.training_loss()
    torch.manual_seed(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            opt = trial.train(make, entry.steps if steps is None else steps)
        except DDPNOptError as error:
            return Result(before, math.nan, refusal=str(error))
    messages = tuple(str(w.message) for w in caught if w.category.__module__.startswith("ddpnopt"))
    report = getattr(opt, "report", None)
    counts = (0, 0) if report is None else (report.shortened, report.undone)
    return Result(before, trial.training_loss(), None, messages, *counts)


def ddpnopt(entry: Case) -> Result:
    return run(entry, lambda model: DDPNOpt(model, **entry.options))


def adamw(entry: Case, rate: float = USUAL_RATE) -> Result:
    return run(entry, lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate))


def passes(ours: Result, theirs: Result) -> bool:
    """Whether the training loss fell about as far as AdamW's, or further."""
    return ours.decrease >= WITHIN * theirs.decrease
