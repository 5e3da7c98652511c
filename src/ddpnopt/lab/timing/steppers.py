"""A network, an optimizer and batches, ready to step: what is timed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpnopt.errors import ModelError, OptionError
from ddpnopt.lab.methods.method import Method
from ddpnopt.lab.timing.networks import Network

MEMORY_LIMIT = 1_000_000_000
"""Bytes that the matrices of `value="full"` may take, of which a step holds several at a time."""


class DoesNotApplyError(Exception):
    """A method cannot train a network; the message is the reason, in one line."""


# A single batch would soon be fitted exactly, and a method that checks its steps would spend its time on steps that do
# not occur in training.
BATCHES = 32


class Stepper:
    """A network, an optimizer and some batches, ready to step."""

    def __init__(self, method: Method, network: Network, batch_size: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = network.build()
            self.batches = cycle([network.batch(batch_size) for _ in range(BATCHES)])
        self.x, self.y = next(self.batches)
        self.method = method
        self.optimizer = method.build_timed(self.model)

    @property
    def repeated(self) -> int:
        """Steps so far whose forward sweep ran more than once."""
        return getattr(getattr(self.optimizer, "report", None), "shortened", 0)

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


def ready(method: Method, network: Network, batch_size: int, *, warm: bool = True) -> Stepper:
    """A stepper after its warm-up, or at its first step; `DoesNotApplyError` where there is none."""
    if method.missing is not None:
        raise DoesNotApplyError(method.missing)
    if method.timing.square:
        _require_memory(network, batch_size)
    with warnings.catch_warnings(), reasons(method):
        warnings.simplefilter("ignore")  # which parameters go without feedback does not matter here
        stepper = (method.timing.stepper or Stepper)(method, network, batch_size)
        for _ in range(method.timing.warm_up if warm else 0):
            stepper.step()
    return stepper


def _require_memory(network: Network, batch_size: int) -> None:
    """Check before anything is allocated: running out of memory would also end other programs."""
    needed = batch_size * widest(network) ** 2 * torch.finfo(torch.float32).bits // 8
    if needed > MEMORY_LIMIT:
        raise DoesNotApplyError(
            f"needs {needed / 1e9:.3g} GB for its per-sample matrices, more than {MEMORY_LIMIT / 1e9:g}"
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
def reasons(method: Method) -> Iterator[None]:
    """Errors that mean that a method does not apply: ours by their types, and any error of another package."""
    kinds = Exception if method.package is not None else (OptionError, ModelError, NotImplementedError)
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):  # how torch says it on the processor
            raise DoesNotApplyError("out of memory") from error
        if not isinstance(error, kinds):
            raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise DoesNotApplyError(f"{type(error).__name__}: {first}" if method.package else first) from error
