"""What a training method is: how to build it, which learning rates it is tried at, and how it is timed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from ddpnopt.lab.errors import ExperimentError

if TYPE_CHECKING:
    from ddpnopt.lab.timing.networks import Network
    from ddpnopt.lab.timing.steppers import Stepper

Factory = Callable[..., Optimizer]
"""Called with the model, the keyword `lr` unless the optimizer's own default is wanted, and further options."""

UNIT = "sgd"
"""The method whose time and memory are the unit of those of all others."""
WINDOW_POINTS = 15
"""Half decades from one end of seven decades to the other."""
TIMED_LR = 1e-3
"""Small enough that hundreds of steps on random labels stay finite; the time of a step does not depend on it."""


@dataclass(frozen=True)
class Timing:
    """How `ddpnopt bench speed` measures a method."""

    label: str = ""
    """In tables of speed, where many forms of one method appear; the method's own label if empty."""
    lr: float | None = TIMED_LR
    """None leaves it to the method's default."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Passed in addition to the method's own options."""
    without_feedback: str | None = None
    """The name of the method that does the same without feedback."""
    period: int = 1
    """The work repeats after this many steps: with factors refreshed every ten steps, ten steps have to be timed."""
    square: bool = False
    """Whether it keeps a matrix of the size of the widest state for each sample: gigabytes on images."""
    warm_up: int = 2
    """Steps before the cost of a step is steady."""
    stepper: Callable[[Method, Network, int], Stepper] | None = None
    """For methods that need more than forward, backward and `step()`."""


@dataclass(frozen=True)
class Method:
    """One way to train."""

    name: str
    label: str
    factory: Factory
    lr: float | None = None
    """The default learning rate; None leaves it to the optimizer."""
    convolutional_lr: float | None = None
    """The default for networks with convolutions, where it differs."""
    grid: tuple[float, ...] = ()
    """The learning rates to search, in ascending order; empty where there is nothing to tune."""
    momenta: tuple[float, ...] = ()
    """Values of momentum to search together with the learning rate."""
    step_range: tuple[float, float] | None = None
    """With `momenta`: the range of lr / (1 - momentum), the length of a whole step."""
    lowest_decade: float | None = None
    """The decimal exponent at which its seven decades of learning rates begin; None: no rate is varied."""
    package: str | None = None
    """What has to be importable."""
    install: str | None = None
    """The package's name for pip, where it differs."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Options that define the method; options of a run override them."""
    is_ddpnopt: bool = False
    """Whether it is `DDPNOpt(model)` with `options`: what is not in `options` follows the defaults of the code."""
    needs_bfloat16: bool = False
    """Whether its steps multiply matrices in bfloat16, which some machines announce and do not allow."""
    source: str = ""
    """A digest of its source, for a method from outside the registry: an edited one makes another run."""
    timing: Timing = field(default_factory=Timing)

    @property
    def missing(self) -> str | None:
        """What to install, where a package is missing."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"not installed: pip install {self.install or self.package}"

    @property
    def timing_label(self) -> str:
        """The label in tables of speed."""
        return self.timing.label or self.label

    @property
    def search_range(self) -> tuple[float, float] | None:
        """The smallest and the largest learning rate of a search; None where there is nothing to tune."""
        if self.step_range is not None:
            return self.step_range
        return (self.grid[0], self.grid[-1]) if self.grid else None

    def default_lr(self, model: nn.Module) -> float | None:
        """The learning rate to use when none is given."""
        return self.convolutional_lr if self.convolutional_lr and is_convolutional(model) else self.lr

    def window_rates(self, points: int = WINDOW_POINTS) -> list[float]:
        """Seven decades of learning rates: half decades, or fewer points spread evenly over the same range.

        Empty for a method that has only its default.
        """
        if not 2 <= points <= WINDOW_POINTS:
            raise ExperimentError(f"--points must be between 2 and {WINDOW_POINTS}, not {points}")
        if self.lowest_decade is None:
            return []
        chosen = sorted({round(i * (WINDOW_POINTS - 1) / (points - 1)) for i in range(points)})
        return [float(f"{10 ** (self.lowest_decade + i / 2):.3g}") for i in chosen]

    def build(self, model: nn.Module, lr: float | None = None, **options: Any) -> Optimizer:
        """The optimizer on all parameters of `model`, at the default learning rate if `lr` is None."""
        rate = self.default_lr(model) if lr is None else lr
        keywords = {} if rate is None else {"lr": rate}
        return self.factory(model, **{**self.options, **keywords, **options})

    def build_timed(self, model: nn.Module) -> Optimizer:
        """The optimizer as it is timed."""
        return self.build(model, self.timing.lr, **self.timing.options)


def is_convolutional(model: nn.Module) -> bool:
    """Whether any layer is a convolution."""
    return any(isinstance(module, nn.Conv2d) for module in model.modules())
