"""Who takes part: DDPNOpt, the baselines of the experiments, and newer optimizers from other packages.

Every method has a range of seven decades around its usual learning rate. The default setting of SGD, RMSprop, Adam
and EKFAC is the one of `ddpnopt compare`, chosen on held-out data, which is kinder to them than torch's own defaults;
the newer ones are taken at the defaults of their packages.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddpnopt import DDPNOpt
from ddpnopt.lab.errors import ExperimentError, UnknownNameError
from ddpnopt.lab.methods import make_optimizer

Factory = Callable[..., Optimizer]
"""Called with the model and, unless the default setting is wanted, the keyword `lr`."""

POINTS = 15


@dataclass(frozen=True)
class Contender:
    """One method and its range of learning rates."""

    name: str
    label: str
    lowest: float
    """The decimal exponent at which its range of seven decades begins."""
    factory: Factory
    package: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Of DDPNOpt: what differs from its defaults."""

    @property
    def ours(self) -> bool:
        """Whether it is a form of DDPNOpt: its default setting follows the code, and no baseline is among them."""
        return self.factory is ddpnopt

    def __reduce__(self) -> tuple[Callable[..., Contender], tuple[str, bool]]:
        """Factories cannot be pickled: to another process it goes by its name and its list."""
        main_list = CONTENDERS.get(self.name) is self
        if not main_list and ABLATIONS.get(self.name) is not self:
            raise TypeError(f"{self.name} is in no list of methods and cannot be sent to another process")
        return _listed_contender, (self.name, main_list)

    def rates(self, points: int = POINTS) -> list[float]:
        """The learning rates: half decades, or fewer of them, spread evenly over the same range."""
        if not 2 <= points <= POINTS:
            raise ExperimentError(f"--points must be between 2 and {POINTS}, not {points}")
        chosen = sorted({round(i * (POINTS - 1) / (points - 1)) for i in range(points)})
        return [float(f"{10 ** (self.lowest + i / 2):.3g}") for i in chosen]

    def build(self, model: nn.Module, lr: float | None) -> Optimizer:
        """The optimizer, at its default setting where `lr` is None."""
        given = {} if lr is None else {"lr": lr}
        return self.factory(model, **given, **self.options)


class Pair(Optimizer):
    """Two optimizers that share the parameters between them and step together."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        self.both = (first, second)
        super().__init__([*first.param_groups, *second.param_groups], {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.both:
            each.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.both:
            each.step()


def ddpnopt(model: nn.Module, **options: Any) -> Optimizer:
    """DDPNOpt with its defaults, and the options of an ablation."""
    return DDPNOpt(model, **options)


def muon(model: nn.Module, lr: float = 1e-3) -> Optimizer:
    """Muon is for matrices alone; AdamW takes the rest, at the same rate, to which Muon's steps are matched."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    first = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
    return Pair(first, torch.optim.AdamW(rest, lr=lr))


def _listed(name: str) -> Factory:
    return lambda model, lr=None: make_optimizer(name, model, lr)


def _packaged(package: str, name: str) -> Factory:
    def factory(model: nn.Module, **options: Any) -> Optimizer:
        made: Optimizer = getattr(importlib.import_module(package), name)(model.parameters(), **options)
        return made

    return factory


def _registry(*entries: Contender) -> dict[str, Contender]:
    return {entry.name: entry for entry in entries}


CONTENDERS = _registry(
    Contender("ddpnopt", "DDPNOpt", -3, ddpnopt),
    Contender("sgd-m", "SGD-m", -5, _listed("sgd-m")),
    Contender("rmsprop", "RMSprop", -6, _listed("rmsprop")),
    Contender("adam", "Adam", -6, _listed("adam")),
    Contender("ekfac", "EKFAC", -5, _listed("ekfac")),
    Contender("soap", "SOAP", -6, _packaged("pytorch_optimizer", "SOAP"), "pytorch_optimizer"),
    Contender("muon", "Muon", -6, muon),
    Contender("schedule-free", "SF-AdamW", -6, _packaged("schedulefree", "AdamWScheduleFree"), "schedulefree"),
    Contender("prodigy", "Prodigy", -3.5, _packaged("prodigyopt", "Prodigy"), "prodigyopt"),
)


def _ablation(name: str, label: str, **options: Any) -> Contender:
    return Contender(name, label, -3, ddpnopt, None, options)


ABLATIONS = _registry(
    _ablation("ddpnopt", "DDPNOpt"),
    _ablation("open-loop", "coupled, open loop", value="batch", closed_loop=False),
    _ablation("uncoupled", "not coupled", value="outer", terminal="sqrt"),
    _ablation("sqrt", "coupled, sqrt", value="batch", terminal="sqrt"),
    _ablation("gn", "coupled, gn", value="batch", terminal="gn"),
    _ablation("cross-entropy", "coupled, cross_entropy", value="batch", terminal="cross_entropy"),
    _ablation("sampled", "coupled, sampled", value="batch", terminal="sampled"),
)


def _listed_contender(name: str, main_list: bool) -> Contender:
    return (CONTENDERS if main_list else ABLATIONS)[name]


def contenders(names: Iterable[str], known: Mapping[str, Contender] = CONTENDERS) -> list[Contender]:
    """The methods of these names, each once; an error lists the known ones, or tells what to install."""
    chosen = []
    for name in dict.fromkeys(names):
        if name not in known:
            raise UnknownNameError("method", name, known)
        package = known[name].package
        if package is not None and importlib.util.find_spec(package) is None:
            raise ExperimentError(f"{name} needs {package}: pip install 'ddpnopt[bench]'")
        chosen.append(known[name])
    return chosen
