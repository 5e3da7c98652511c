"""The ladders of `table4`: which methods are measured at which sizes, and what the paper's table says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ddpnopt.lab.methods.method import Method
from ddpnopt.lab.methods.registry import METHODS
from ddpnopt.lab.timing.growth import exponent as fitted_exponent
from ddpnopt.lab.timing.speed import Cost

WHAT = ("batch", "width", "depth")


@dataclass(frozen=True)
class ComplexityRow:
    """A method of the table with its analytic exponents in B, X and L."""

    method: Method
    label: str
    time: tuple[float, float, float]
    memory: tuple[float, float, float]
    formulas: tuple[str, str]
    in_paper: bool = True


ADAM = ComplexityRow(METHODS["adam"], "Adam", (1, 2, 1), (0, 2, 1), ("B X^2 L", "X^2 L"))
DDPNOPT = ComplexityRow(METHODS["outer"], "DDPNOpt", (1, 2, 1), (1, 2, 1), ("B X^2 L", "X^2 L + B X"))
_DENSE = replace(METHODS["vanilla-ddp"], name="vanilla-ddp-dense", options={"dense": True})
DDP = ComplexityRow(_DENSE, "vanilla DDP", (3, 3, 1), (1, 3, 1), ("B^3 X^3 L", "B X^3 L"))
# The same numbers by products with inputs and weights, without Jacobians of the whole batch.
FACTORED_DDP = ComplexityRow(
    METHODS["vanilla-ddp"],
    "vanilla DDP, no Jacobians",
    (2, 4, 1),
    (2, 3, 1),
    ("B^2 X^4 L", "B^2 X^2 + B X^3 L"),
    False,
)
BATCH = ComplexityRow(
    METHODS["ddpnopt"],
    "DDPNOpt(model)",
    (2, 2, 1),
    (2, 2, 1),
    ("(B X^2 + B^2 X) L + B^3", "X^2 L + B X L + B^2"),
    False,
)
WHOLE = ComplexityRow(METHODS["full"], "DDPNOpt, value='full'", (1, 3, 1), (1, 2, 1), ("B X^3 L", "B X^2 L"), False)


@dataclass(frozen=True)
class Ladder:
    """Methods that can be measured at the same sizes: one thing grows, the others stay."""

    name: str
    rows: tuple[ComplexityRow, ...]
    sizes: Mapping[str, tuple[int, ...]]
    fixed: Mapping[str, int]
    rounds: int = 7

    def cases(self, what: str) -> list[dict[str, int]]:
        return [{**self.fixed, what: size} for size in self.sizes[what]]


LARGE = Ladder(
    "large networks",
    (ADAM, DDPNOPT, BATCH),
    {"batch": (64, 128, 256, 512, 1024), "width": (128, 256, 512, 1024, 2048), "depth": (2, 4, 8, 16, 32)},
    {"batch": 256, "width": 512, "depth": 4},
)
# Where vanilla DDP is still possible: its matrices have the size of the batch times the width and of all the weights.
SMALL = Ladder(
    "small networks",
    (DDPNOPT, WHOLE, FACTORED_DDP),
    {"batch": (16, 32, 64, 128, 256, 512), "width": (4, 8, 16, 24, 32), "depth": (2, 4, 8, 16)},
    {"batch": 32, "width": 8, "depth": 3},
)
# As Algorithm 1 is written: batches larger than the width, or Q_uu, with X^2 rows, outgrows what the table is about.
DENSE = Ladder(
    "small networks, large batches",
    (DDPNOPT, DDP),
    {"batch": (32, 64, 96, 128, 192, 256), "width": (4, 6, 8, 12, 16), "depth": (2, 4, 6, 8)},
    {"batch": 128, "width": 8, "depth": 3},
    rounds=3,
)
LADDERS = (LARGE, SMALL, DENSE)


@dataclass(frozen=True, eq=False)
class Measured:
    """A method on a ladder: sizes and costs of everything that grew."""

    ladder: Ladder
    row: ComplexityRow
    costs: dict[str, list[Cost]]

    def sizes(self, what: str) -> tuple[int, ...]:
        return self.ladder.sizes[what][: len(self.costs[what])]

    def values(self, what: str, memory: bool) -> list[float]:
        return [cost.bytes / 1e6 if memory else cost.milliseconds for cost in self.costs[what]]

    def exponent(self, what: str, memory: bool) -> float:
        """Over the upper half of the sizes."""
        return fitted_exponent(self.sizes(what), self.values(what, memory))
