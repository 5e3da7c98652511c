"""How the optimizers of the registry are built: from torch, from this package, and from others."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from ddpnopt import DDPNOpt
from ddpnopt.curvature.names import CURVATURES
from ddpnopt.lab.baselines import EMSA, mmc_terminal
from ddpnopt.lab.errors import NotApplicableError
from ddpnopt.lab.methods.method import Factory, is_convolutional

FULL_FORM: dict[str, Any] = {"value": "full", "terminal": "cross_entropy"}
FACTORED_FORM: dict[str, Any] = {"value": "outer", "terminal": "gn"}
CURVATURE_OPTIONS = ("damping", "refresh", "decay", "whole")


class OptimizerPair(Optimizer):
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


def from_torch(kind: Callable[..., Optimizer], **fixed: Any) -> Factory:
    """An optimizer that takes the parameters of the model."""
    return lambda model, **options: kind(model.parameters(), **{**fixed, **options})


def from_package(package: str, name: str) -> Factory:
    """The same from a package that is imported only when the optimizer is built."""

    def factory(model: nn.Module, **options: Any) -> Optimizer:
        made: Optimizer = getattr(importlib.import_module(package), name)(model.parameters(), **options)
        return made

    return factory


def ddpnopt(model: nn.Module, **options: Any) -> Optimizer:
    """DDPNOpt with its defaults, except for `options`."""
    return DDPNOpt(model, **options)


def paper_form(model: nn.Module, curvature: str = "identity", **options: Any) -> Optimizer:
    """The paper's per-sample forms: the exact loss Hessian for an FCN, Proposition 2's factors for a CNN.

    Options of the curvature (`damping`, `refresh`, `decay`, `whole`) go to it; `terminal="mmc"` is the MMC loss's.
    """
    form = {**(FACTORED_FORM if is_convolutional(model) else FULL_FORM), **options}
    own = {name: form.pop(name) for name in CURVATURE_OPTIONS if name in form}
    if form["terminal"] == "mmc":
        form["terminal"] = mmc_terminal
    return ddpnopt(model, curvature=CURVATURES[curvature](**own) if own else curvature, **form)


def emsa(model: nn.Module, **options: Any) -> Optimizer:
    """Li et al.'s settings: rho 0.03 for images in batches of 128, and their toy problems' 1.0 for an FCN."""
    rho = 0.03 if is_convolutional(model) else 1.0
    return EMSA(model, **{"rho": rho, **options})


def muon(model: nn.Module, lr: float = 1e-3) -> Optimizer:
    """Muon only takes matrices; AdamW takes the rest, at the same rate, to which Muon's steps are matched."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    if not matrices:
        raise NotApplicableError("Muon needs a weight that is a matrix, and this network has none")
    first = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
    return OptimizerPair(first, torch.optim.AdamW(rest, lr=lr)) if rest else first


def singd(model: nn.Module, lr: float, **options: Any) -> Optimizer:
    """SINGD with dense factors; SGD takes the parameters that SINGD does not train."""
    module = importlib.import_module("singd.optim.optimizer")
    mine = module.SINGD(model, lr=lr, momentum=0.0, warn_unsupported=False, **options)
    taken = {id(p) for group in mine.param_groups for p in group["params"]}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return OptimizerPair(mine, SGD(rest, lr=lr)) if rest else mine
