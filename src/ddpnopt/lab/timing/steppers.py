"""A network, an optimizer and batches, ready to step: what is timed."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ddpnopt.errors import ModelError, OptionError
from ddpnopt.lab.timing.networks import Network

UNIT = "sgd"
# Small enough that hundreds of steps on random labels stay finite; the time of a step does not depend on it.
LR = 1e-3
ROOM = 1_000_000_000
"""Bytes that the matrices of `value="full"` may take, of which a step holds several at a time."""


@dataclass(frozen=True)
class Form:
    """One way to make a step."""

    name: str
    label: str
    build: Callable[[nn.Module], Optimizer]
    base: str | None = None
    """The form that does the same without feedback."""
    period: int = 1
    """After how many steps the work repeats: with factors refreshed every ten, only ten steps tell what one costs."""
    package: str | None = None
    """What has to be importable."""
    install: str | None = None
    """The package's name for pip, where it is another."""
    square: bool = False
    """Whether it keeps a matrix of the size of the widest state for each sample: gigabytes on images."""
    stepper: Callable[[Form, Network, int], Stepper] | None = None
    """For methods that need more than forward, backward and `step()`."""
    settles: int = 2
    """Steps until it is in its stride: the first finds out about the network, and a start may take more care."""

    @property
    def missing(self) -> str | None:
        """What to install, where a package is missing."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"not installed: pip install {self.install or self.package}"


class DoesNotApplyError(Exception):
    """A form cannot be had on a network; the message is the reason, in one line."""


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


def ready(form: Form, network: Network, batch_size: int) -> Stepper:
    """A stepper that is in its stride, or `DoesNotApplyError`."""
    if form.missing is not None:
        raise DoesNotApplyError(form.missing)
    if form.square:
        _require_room(network, batch_size)
    with warnings.catch_warnings(), reasons(form):
        warnings.simplefilter("ignore")  # which parameters go without feedback is no news here
        stepper = (form.stepper or Stepper)(form, network, batch_size)
        for _ in range(form.settles):
            stepper.step()
    return stepper


def _require_room(network: Network, batch_size: int) -> None:
    """Before anything is allocated: a machine that runs out of memory takes other programs with it."""
    needed = batch_size * widest(network) ** 2 * torch.finfo(torch.float32).bits // 8
    if needed > ROOM:
        raise DoesNotApplyError(
            f"needs {needed / 1e9:.3g} GB for its matrices of each sample, more than {ROOM / 1e9:g}"
        )


def widest(network: Network) -> int:
    """The size of a sample's largest state, from one pass of one sample."""
    sizes: list[int] = []

    def see(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        sizes.extend(each[0].numel() for each in (*inputs, output))

    model = network.build().eval()
    for module in model.modules():
        module.register_forward_hook(see)
    with torch.no_grad():
        model(network.inputs(1))
    return max(sizes)


@contextmanager
def reasons(form: Form) -> Iterator[None]:
    """Errors that mean that a form does not apply: ours by their kinds, and whatever comes out of another package."""
    kinds = Exception if form.package is not None else (OptionError, ModelError, NotImplementedError)
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):  # how torch says it on the processor
            raise DoesNotApplyError("out of memory") from error
        if not isinstance(error, kinds):
            raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise DoesNotApplyError(f"{type(error).__name__}: {first}" if form.package else first) from error
