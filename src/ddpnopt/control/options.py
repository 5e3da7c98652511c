"""The solver's options, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .backward import Regularize
from .errors import ControlError

Method = Literal["ddp", "ilqr"]


@dataclass(frozen=True)
class Options:
    """See `solve` for the meaning of each."""

    method: Method
    max_iterations: int
    grad_tol: float | None
    cost_tol: float | None
    regularize: Regularize
    reg_init: float
    reg_min: float
    reg_max: float
    reg_factor: float
    backtrack: float
    max_backtracks: int
    sufficient: float

    def __post_init__(self) -> None:
        if self.method not in ("ddp", "ilqr"):
            raise ControlError(f"unknown method {self.method!r}; use 'ddp' or 'ilqr'")
        if self.regularize not in ("uu", "xx", "proximal"):
            raise ControlError(
                f"unknown regularize {self.regularize!r}; use 'uu' (on Q_uu), 'xx' (on V_xx) or 'proximal' (stage cost)"
            )
        for name in ("max_iterations", "max_backtracks"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ControlError(f"{name} is {value!r}; it must be a whole number, zero or more")
        for name in ("grad_tol", "cost_tol", "reg_init"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ControlError(f"{name} is {value!r}; it must be zero or more")
        if not 0 < self.reg_min <= self.reg_max < math.inf:
            raise ControlError(f"reg_min is {self.reg_min!r}, reg_max {self.reg_max!r}; need 0 < reg_min <= reg_max")
        if self.reg_init > self.reg_max:
            raise ControlError(f"reg_init is {self.reg_init!r}, above reg_max {self.reg_max!r}; start below it")
        if not 1 < self.reg_factor < math.inf:
            raise ControlError(f"reg_factor is {self.reg_factor!r}; it must be greater than 1")
        if not 0 < self.backtrack < 1:
            raise ControlError(
                f"backtrack is {self.backtrack!r}; each step size is this times the last, between 0 and 1"
            )
        if not 0 <= self.sufficient < 0.5:
            # The model of a quadratic problem promises exactly what it delivers, so 1/2 is already strict.
            raise ControlError(f"sufficient is {self.sufficient!r}; it must be at least 0 and below 0.5")
