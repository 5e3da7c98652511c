"""The one registry of methods, and which of them each command takes by default.

Default rates of the torch baselines: the best accuracy over the grid on a fifth of the training data held out, never
on the test set (see `runs/search.py`). For fully connected networks: DIGITS, 15 epochs of batches of 16, mean of three
seeds. For convolutional ones: CIFAR-10, 8,000 images, three epochs of batches of 128, one seed, four to six rates of
about the same grid; AdamW takes Adam's rate there. KFAC and EKFAC were tuned in the same way with two seeds: KFAC
96.0, 96.9, 89.9 and 53.8 % at 0.01, 0.02, 0.03 and 0.07 and less above; EKFAC 96.0, 95.7, 96.0 and 93.1 %, where the
tie goes to the lower training loss, that of 0.03. For convolutional networks both have the rate of the paper's Table 8.
SGD-VGR keeps the rate of the vanishing-gradient experiment: 95.0 %, and 95.1 and 94.4 % at 0.2 and 0.3. Every
`ddpnopt-` variant has the rate of the method it extends: only the feedback differs. SOAP, Muon, Schedule-Free and
Prodigy have the defaults of their packages.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from ddpnopt import EKFAC, KFAC, DDPNOpt
from ddpnopt._options import DEFAULTS
from ddpnopt.ddp.balance import EVERY_STEP
from ddpnopt.ddp.balance import LONGEST as LOOKS
from ddpnopt.ddp.value.damping import EARLY
from ddpnopt.errors import OptionError
from ddpnopt.lab.baselines import SGDVGR, EKFACOptimizer, KFACOptimizer, VanillaDDP
from ddpnopt.lab.errors import ExperimentError, NoDefaultRateError, NotApplicableError, UnknownNameError
from ddpnopt.lab.methods.factories import (
    FACTORED_FORM,
    FULL_FORM,
    ddpnopt,
    emsa,
    from_package,
    from_torch,
    muon,
    paper_form,
    singd,
)
from ddpnopt.lab.methods.imported import imported_method
from ddpnopt.lab.methods.method import UNIT, Method, Timing
from ddpnopt.lab.timing.peers import DAMPING, REFRESH, BackpackStepper, CurvlinopsStepper, SharpnessAwareStepper

# The paper's Table 5 gives ranges; the grids lie in them, about evenly in the logarithm.
SGD_GRID = (0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
ADAPTIVE_GRID = (7e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2)
EKFAC_GRID = (0.01, 0.02, 0.03, 0.07, 0.1, 0.2, 0.3)
# Momentum 0.9 multiplies the step by up to ten: the same range of steps lies a factor of ten lower.
MOMENTUM_GRID = (0.007, 0.01, 0.02, 0.03, 0.05, 0.1)
# "SGD with tuned momentum" (Table 3)
MOMENTA = (0.0, 0.5, 0.9)

# Random labels may make a step non-finite at some setting; that does not matter for its time.
SKIP = {"on_nonfinite": "skip"}
KRONECKER = {"refresh": REFRESH, **SKIP}
# Methods without a learning rate that keeps random labels finite: timed at their defaults.
OWN_RATE = Timing(lr=None)

TRAINED = (
    Method("ddpnopt", "DDPNOpt", ddpnopt, is_ddpnopt=True,
           timing=Timing("DDPNOpt(model)", None, SKIP, "no-feedback", period=LOOKS, warm_up=EVERY_STEP)),
    Method("sgd", "SGD", from_torch(SGD), 0.2, grid=SGD_GRID),
    Method("sgd-m", "SGD-m", from_torch(SGD, momentum=0.9), 0.03, 0.05, MOMENTUM_GRID, MOMENTA,
           (SGD_GRID[0], SGD_GRID[-1]), lowest_decade=-5),
    Method("rmsprop", "RMSprop", from_torch(torch.optim.RMSprop), 2e-3, 7e-4, ADAPTIVE_GRID, lowest_decade=-6),
    Method("adam", "Adam", from_torch(torch.optim.Adam), 3e-3, grid=ADAPTIVE_GRID, lowest_decade=-6),
    Method("adamw", "AdamW", from_torch(torch.optim.AdamW), 1e-2, 3e-3, ADAPTIVE_GRID),
    Method("kfac", "KFAC", KFACOptimizer, 0.02, 0.03, EKFAC_GRID,
           timing=Timing("KFAC, no feedback", options=KRONECKER, period=REFRESH)),
    Method("ekfac", "EKFAC", EKFACOptimizer, 0.03, grid=EKFAC_GRID, lowest_decade=-5,
           timing=Timing("EKFAC, no feedback", options=KRONECKER, period=REFRESH)),
    # the step sizes of L-BFGS and of DDP's line search: nothing to tune
    Method("emsa", "E-MSA", emsa, 1.0, timing=OWN_RATE),
    Method("vanilla-ddp", "vanilla DDP", VanillaDDP, 1.0, timing=OWN_RATE),
    Method("sgd-vgr", "SGD-VGR", SGDVGR, 0.1, grid=SGD_GRID),
    Method("ddpnopt-sgd", "DDPNOpt (SGD)", paper_form, 0.2, grid=SGD_GRID, options={"curvature": "identity"}),
    Method("ddpnopt-rmsprop", "DDPNOpt (RMSprop)", paper_form, 2e-3, 7e-4, ADAPTIVE_GRID,
           options={"curvature": "rmsprop"}),
    Method("ddpnopt-adam", "DDPNOpt (Adam)", paper_form, 3e-3, grid=ADAPTIVE_GRID, options={"curvature": "adam"}),
    Method("ddpnopt-kfac", "DDPNOpt (KFAC)", paper_form, 0.02, 0.03, EKFAC_GRID, options={"curvature": "kfac"}),
    Method("ddpnopt-ekfac", "DDPNOpt (EKFAC)", paper_form, 0.03, grid=EKFAC_GRID, options={"curvature": "ekfac"}),
)  # fmt: skip
"""The methods of the paper: `ddpnopt compare`, `train` and `reproduce`."""

NEWER = (
    Method("soap", "SOAP", from_package("pytorch_optimizer", "SOAP"), lowest_decade=-6, package="pytorch_optimizer",
           timing=Timing("SOAP (pytorch_optimizer)", options={"precondition_frequency": REFRESH}, period=REFRESH)),
    Method("muon", "Muon", muon, lowest_decade=-6, needs_bfloat16=True),
    Method("schedule-free", "SF-AdamW", from_package("schedulefree", "AdamWScheduleFree"), lowest_decade=-6,
           package="schedulefree"),
    Method("prodigy", "Prodigy", from_package("prodigyopt", "Prodigy"), lowest_decade=-3.5, package="prodigyopt"),
)  # fmt: skip
"""Optimizers that are newer than the paper."""


FIXED_LR = 3.0
"""The default of version 0.1.0, whose steps all had a given rate."""


def _fixed(name: str, label: str, lr: float | None = FIXED_LR, **options: Any) -> Method:
    return Method(name, label, ddpnopt, lr, lowest_decade=-3, options=options, is_ddpnopt=True)


FIXED = (
    _fixed("given-lr", "DDPNOpt, lr given"),
    _fixed("open-loop", "coupled, open loop", value="batch", closed_loop=False),
    _fixed("uncoupled", "not coupled", None, value="outer", terminal="sqrt"),
    _fixed("sqrt", "coupled, sqrt", value="batch", terminal="sqrt"),
    _fixed("gn", "coupled, gn", value="batch", terminal="gn"),
    _fixed("cross-entropy", "coupled, cross_entropy", value="batch", terminal="cross_entropy"),
    _fixed("sampled", "coupled, sampled", value="batch", terminal="sampled"),
)
"""DDPNOpt with a given rate, and the same with one part changed: `ddpnopt bench lr-window --ablations`."""


def _form(name: str, label: str, base: str | None = "no-feedback", period: int = 1, **options: Any) -> Method:
    """A form of DDPNOpt that is timed."""
    square = options.get("value") == "full"
    warm_up = EARLY if options.get("value") == "batch" else 2
    timing = Timing("", options=SKIP, without_feedback=base, period=period, square=square, warm_up=warm_up)
    return Method(name, label, ddpnopt, options=options, is_ddpnopt=True, timing=timing)


_BATCH: dict[str, Any] = {"value": "batch"}
_OUTER: dict[str, Any] = FACTORED_FORM
_FULL: dict[str, Any] = FULL_FORM
_ELEMENTWISE = {"rmsprop": "RMSprop", "adam": "Adam"}
_KFAC, _EKFAC = KFAC(refresh=REFRESH), EKFAC(refresh=REFRESH)

FORMS = (
    _form("no-feedback", "feedback=False", None, feedback=False),
    _form("batch", "batch", **_BATCH),
    _form("recompute", "batch, recompute", **_BATCH, recompute=True, average=False),
    _form("batch-open", "batch, open loop", **_BATCH, closed_loop=False),
    _form("outer", "outer", **_OUTER),
    _form("outer-open", "outer, open loop", **_OUTER, closed_loop=False),
    _form("full", "full", **_FULL),
    _form("full-open", "full, open loop", **_FULL, closed_loop=False),
    *(_form(f"{c}-no-feedback", f"{label}, no feedback", None, curvature=c, feedback=False)
      for c, label in _ELEMENTWISE.items()),
    *(_form(f"batch-{c}", f"batch, {label}", f"{c}-no-feedback", **_BATCH, curvature=c)
      for c, label in _ELEMENTWISE.items()),
    *(_form(f"outer-{c}", f"outer, {label}", f"{c}-no-feedback", **_OUTER, curvature=c)
      for c, label in _ELEMENTWISE.items()),
    _form("batch-kfac", "batch, KFAC", "kfac", REFRESH, **_BATCH, curvature=_KFAC),
    _form("outer-kfac", "outer, KFAC", "kfac", REFRESH, **_OUTER, curvature=_KFAC),
    _form("batch-ekfac", "batch, EKFAC", "ekfac", REFRESH, **_BATCH, curvature=_EKFAC),
    _form("outer-ekfac", "outer, EKFAC", "ekfac", REFRESH, **_OUTER, curvature=_EKFAC),
)  # fmt: skip
"""Forms of DDPNOpt whose steps are timed: `ddpnopt bench speed`."""

PEERS = (
    Method("singd", "SINGD (singd)", singd, package="singd", options={"damping": DAMPING, "T": REFRESH},
           timing=Timing(period=REFRESH)),
    Method("singd-kfac", "inverse-free KFAC (singd)", singd, package="singd",
           options={"damping": DAMPING, "T": REFRESH, "kfac_like": True, "alpha1": 0.0},
           timing=Timing(period=REFRESH)),
    Method("curvlinops-kfac", "KFAC (curvlinops)", from_torch(SGD), package="curvlinops",
           install="curvlinops-for-pytorch", timing=Timing(period=REFRESH, stepper=CurvlinopsStepper)),
    Method("backpack-kfac", "KFAC (backpack)", from_torch(SGD), package="backpack", install="backpack-for-pytorch",
           timing=Timing(period=REFRESH, stepper=BackpackStepper)),
    Method("shampoo", "Shampoo (pytorch_optimizer)", from_package("pytorch_optimizer", "Shampoo"),
           package="pytorch_optimizer", options={"preconditioning_compute_steps": REFRESH},
           timing=Timing(period=REFRESH)),
    Method("sam", "SAM (pytorch_optimizer)", from_package("pytorch_optimizer", "SAM"), package="pytorch_optimizer",
           options={"base_optimizer": SGD}, timing=Timing(stepper=SharpnessAwareStepper)),
)  # fmt: skip
"""Second-order methods of other packages, used as their documentation says, with factors refreshed as often as ours."""

# A second SGD shows how much two measurements of the same thing differ.
CONTROL = Method("sgd-again", "SGD again", from_torch(SGD))

METHODS: dict[str, Method] = {each.name: each for each in (*TRAINED, *NEWER, *FIXED, *FORMS, *PEERS, CONTROL)}

TRAINED_METHODS = tuple(each.name for each in TRAINED)
WINDOW_METHODS = ("ddpnopt", "given-lr", "sgd-m", "rmsprop", "adam", "ekfac", *(each.name for each in NEWER))
ABLATIONS = tuple(each.name for each in FIXED)
PEER_METHODS = ("singd", "singd-kfac", "curvlinops-kfac", "backpack-kfac", "soap", "shampoo", "sam")


def _timed() -> tuple[str, ...]:
    """The order of the tables of speed: each Kronecker method directly before the forms with its curvature."""
    ours = [each.name for each in FORMS]
    for name in ("kfac", "ekfac"):
        ours.insert(ours.index(f"batch-{name}"), name)
    return (UNIT, "sgd-again", "rmsprop", "adam", "muon", "ddpnopt", *ours, *PEER_METHODS)


TIMED_METHODS = _timed()
GROWING = (UNIT, "adam", "ddpnopt", "no-feedback", "outer", "outer-open", "batch", "batch-open")
"""The methods whose growth is measured: elementwise curvatures grow as these do."""
PROFILED = (UNIT, "ddpnopt", "outer", "batch", "kfac", "outer-kfac", "batch-kfac", "outer-ekfac", "batch-ekfac")
"""The methods whose time is broken down by function."""


def method(name: str, known: Iterable[str] | None = None) -> Method:
    """The method called `name`, or an error that lists the `known` names; `module:function` is imported."""
    if ":" in name:
        return imported_method(name)
    names = METHODS if known is None else list(known)
    if name not in names:
        raise UnknownNameError("method", name, names)
    return METHODS[name]


def select(names: Iterable[str], known: Iterable[str]) -> list[Method]:
    """The methods with these names, each once; an error lists the known ones."""
    listed = list(known)
    return [method(name, listed) for name in dict.fromkeys(names)]


def require_installed(methods: Iterable[Method]) -> None:
    """An error that says what to install, where a method's package is missing."""
    for each in methods:
        if each.missing is not None:
            raise ExperimentError(f"{each.name} needs {each.package}: pip install 'ddpnopt[bench]'")


def make_optimizer(name: str, model: nn.Module, lr: float | None = None, **options: Any) -> Optimizer:
    """The optimizer called `name` on all parameters of `model`, at its default learning rate unless given."""
    chosen = method(name)
    try:
        return chosen.build(model, lr, **options)
    except OptionError as wrong:
        if lr is None and chosen.is_ddpnopt and not options:
            raise NoDefaultRateError(f"{name}: {wrong}") from wrong
        raise ExperimentError(f"{name}: {wrong}") from wrong
    except NotApplicableError:
        raise
    except (TypeError, ValueError) as wrong:  # an option the optimizer does not take, or a value out of range
        raise ExperimentError(f"{name}: {wrong}") from wrong


def ddpnopt_defaults() -> dict[str, Any]:
    """The defaults of DDPNOpt's options: runs with other defaults are other runs."""
    parameters = inspect.signature(DDPNOpt.__init__).parameters.values()
    # recompute only changes memory and time; vxx_power, not given, changes nothing
    decisive = (p for p in parameters if p.name not in ("recompute", "vxx_power"))
    return {p.name: p.default for p in decisive if p.default is not inspect.Parameter.empty} | DEFAULTS
