"""The list of what is timed: the forms of DDPNOpt, torch's optimizers, and those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddpnopt import EKFAC, KFAC, DDPNOpt
from ddpnopt.ddp.value.damping import EARLY
from ddpnopt.lab import baselines
from ddpnopt.lab.errors import UnknownNameError
from ddpnopt.lab.timing.networks import Network
from ddpnopt.lab.timing.peers import PEERS, REFRESH
from ddpnopt.lab.timing.steppers import LR, UNIT, Form
from ddpnopt.lab.windows.contenders import muon


def _torch(kind: Callable[..., Optimizer]) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind(model.parameters(), lr=LR)


def _ddpnopt(**options: Any) -> Callable[[nn.Module], Optimizer]:
    # Random labels may make a step non-finite at some setting; the clock does not care.
    return lambda model: DDPNOpt(model, **{"on_nonfinite": "skip", **options})


def _outer(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return _ddpnopt(**{"lr": LR, "value": "outer", "terminal": "gn", **options})


def _no_feedback(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return _ddpnopt(**{"lr": LR, "feedback": False, **options})


def _batch(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return _ddpnopt(**{"lr": LR, "value": "batch", **options})


def _kronecker(kind: Callable[..., Optimizer]) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind(model, LR, refresh=REFRESH, on_nonfinite="skip")


_KFAC, _EKFAC = KFAC(refresh=REFRESH), EKFAC(refresh=REFRESH)
_ELEMENTWISE = {"rmsprop": "RMSprop", "adam": "Adam"}

OURS = (
    Form("ddpnopt", "DDPNOpt(model)", _ddpnopt(), "no-feedback", settles=EARLY),
    Form("no-feedback", "feedback=False", _no_feedback()),
    Form("batch", "batch", _batch(), "no-feedback", settles=EARLY),
    Form("recompute", "batch, recompute", _batch(recompute=True, average=False), "no-feedback", settles=EARLY),
    Form("batch-open", "batch, open loop", _batch(closed_loop=False), "no-feedback", settles=EARLY),
    Form("outer", "outer", _outer(), "no-feedback"),
    Form("outer-open", "outer, open loop", _outer(closed_loop=False), "no-feedback"),
    Form("full", "full", _outer(value="full", terminal="cross_entropy"), "no-feedback", square=True),
    Form(
        "full-open",
        "full, open loop",
        _outer(value="full", terminal="cross_entropy", closed_loop=False),
        "no-feedback",
        square=True,
    ),
    *(Form(f"{c}-no-feedback", f"{label}, no feedback", _no_feedback(curvature=c))
      for c, label in _ELEMENTWISE.items()),
    *(Form(f"batch-{c}", f"batch, {label}", _batch(curvature=c), f"{c}-no-feedback", settles=EARLY)
      for c, label in _ELEMENTWISE.items()),
    *(Form(f"outer-{c}", f"outer, {label}", _outer(curvature=c), f"{c}-no-feedback")
      for c, label in _ELEMENTWISE.items()),
    Form("kfac", "KFAC, no feedback", _kronecker(baselines.KFAC), period=REFRESH),
    Form("batch-kfac", "batch, KFAC", _batch(curvature=_KFAC), "kfac", REFRESH, settles=EARLY),
    Form("outer-kfac", "outer, KFAC", _outer(curvature=_KFAC), "kfac", REFRESH),
    Form("ekfac", "EKFAC, no feedback", _kronecker(baselines.EKFAC), period=REFRESH),
    Form("batch-ekfac", "batch, EKFAC", _batch(curvature=_EKFAC), "ekfac", REFRESH, settles=EARLY),
    Form("outer-ekfac", "outer, EKFAC", _outer(curvature=_EKFAC), "ekfac", REFRESH),
)  # fmt: skip

FORMS = {
    each.name: each
    for each in (
        Form(UNIT, "SGD", _torch(torch.optim.SGD)),
        Form("sgd-again", "SGD again", _torch(torch.optim.SGD)),
        Form("rmsprop", "RMSprop", _torch(torch.optim.RMSprop)),
        Form("adam", "Adam", _torch(torch.optim.Adam)),
        Form("muon", "Muon", muon),
        *OURS,
        *PEERS,
    )
}

GROWING = (UNIT, "adam", "no-feedback", "outer", "outer-open", "batch", "batch-open")
"""Whose growth is of interest: elementwise curvatures grow as these do."""
PROFILED = (UNIT, "outer", "batch", "kfac", "outer-kfac", "batch-kfac", "outer-ekfac", "batch-ekfac")
"""Whose time is taken apart."""


def forms(names: Iterable[str]) -> list[Form]:
    """The forms of these names, each once, SGD first; an error lists the known ones."""
    chosen = [FORMS[UNIT]]
    for name in dict.fromkeys(names):
        if name not in FORMS:
            raise UnknownNameError("method", name, FORMS)
        if name != UNIT:
            chosen.append(FORMS[name])
    return chosen


def bearable(chosen: Iterable[Form], network: Network) -> list[Form]:
    """Without those that decompose large matrices, on a network where that takes minutes a step."""
    return [form for form in chosen if not (network.large and form.period > 1)]
