"""The optimal control problem of the paper, (OCP) in the introduction.

    min over u_0 .. u_{T-1} of   J = phi(x_T) + sum_t l_t(x_t, u_t)    subject to  x_{t+1} = f_t(x_t, u_t)

All functions are plain torch functions of one problem: x is (n_t,), u is (m_t,), f_t returns (n_{t+1},),
costs return a scalar. Batches of problems are made from them with `torch.func.vmap`; nobody has to write a
batch dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .errors import ControlError

StageFunction = Callable[[Tensor, Tensor], Tensor]
TerminalFunction = Callable[[Tensor], Tensor]
LimitLike = float | Tensor | Sequence[float] | Sequence[Tensor]


@dataclass(frozen=True)
class Problem:
    """Dynamics, costs, number of stages and control limits.

    Attributes:
        dynamics: f_t(x, u), one function for all stages or a sequence of T of them. State and control sizes
            may change from stage to stage, as they do between the layers of a network.
        stage_cost: l_t(x, u), likewise.
        terminal_cost: phi(x).
        horizon: T. May be left out when `dynamics` or `stage_cost` is a sequence.
        lower: lower limits of the controls: a number, an (m,) or (T, m) tensor, or a sequence of T tensors (m_t,).
        upper: upper limits, likewise.
    """

    dynamics: StageFunction | Sequence[StageFunction]
    stage_cost: StageFunction | Sequence[StageFunction]
    terminal_cost: TerminalFunction
    horizon: int | None = None
    lower: LimitLike | None = None
    upper: LimitLike | None = None

    def __post_init__(self) -> None:
        if self.horizon is not None and self.horizon < 1:
            raise ControlError(f"horizon is {self.horizon}; a problem needs at least one stage")
        lengths = {}
        for name in ("dynamics", "stage_cost"):
            value = getattr(self, name)
            if isinstance(value, Sequence):
                lengths[name] = len(value)
                for t, function in enumerate(value):
                    _require_callable(function, f"{name}[{t}]")
            else:
                _require_callable(value, name)
        _require_callable(self.terminal_cost, "terminal_cost")
        if self.horizon is not None:
            lengths["horizon"] = self.horizon
        if not lengths:
            raise ControlError("horizon is missing: give the number of stages, or one dynamics function per stage")
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{name} says {length}" for name, length in lengths.items())
            raise ControlError(f"the number of stages is not clear: {said}; make them agree")
        if 0 in lengths.values():
            raise ControlError("an empty sequence of stages was given; a problem needs at least one stage")

    @property
    def T(self) -> int:
        """Number of stages."""
        for value in (self.dynamics, self.stage_cost):
            if isinstance(value, Sequence):
                return len(value)
        assert self.horizon is not None  # __post_init__ has seen to it
        return self.horizon

    def f(self, t: int) -> StageFunction:
        """Dynamics of stage t."""
        return self.dynamics[t] if isinstance(self.dynamics, Sequence) else self.dynamics

    def l(self, t: int) -> StageFunction:  # noqa: E743
        """Cost of stage t."""
        return self.stage_cost[t] if isinstance(self.stage_cost, Sequence) else self.stage_cost


def _require_callable(value: object, name: str) -> None:
    if not callable(value):
        raise ControlError(f"{name} must be a function, not {type(value).__name__}")
