"""The paper's tables behind Fig. 4a: training loss and accuracy on DIGITS over learning rate and eps, ten seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Rows = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Grid:
    """One curvature: the baseline and its DDPNOpt variant over learning rates (rows) and eps on V_xx (columns)."""

    base: str
    ours: str
    label: str
    lrs: Sequence[float]
    eps: Sequence[float]
    loss: Rows = ()
    """Of the paper: one row per learning rate, the baseline first; empty where the paper gives no numbers."""
    accuracy: Rows = ()


SGD = Grid(
    "sgd", "ddpnopt-sgd", "SGD", (0.4, 0.6, 0.7, 0.8), (5e-5, 1e-4, 5e-4, 1e-3),
    loss=(
        (0.1974, 0.1662, 0.1444, 0.1322, 0.1067),
        (0.5809, 0.4989, 0.4867, 0.3263, 0.2764),
        (1.0493, 0.9034, 0.8240, 0.6592, 0.5381),
        (1.7801, 1.6898, 1.4597, 1.1784, 1.3166),
    ),
    accuracy=(
        (91.46, 91.98, 92.71, 92.90, 93.12),
        (81.73, 83.64, 84.09, 88.39, 89.39),
        (70.48, 73.42, 75.44, 80.62, 82.87),
        (55.76, 57.70, 62.82, 70.23, 65.01),
    ),
)  # fmt: skip
RMSPROP = Grid(
    "rmsprop", "ddpnopt-rmsprop", "RMSprop", (0.01, 0.02, 0.03, 0.045), (1e-9, 1e-8, 5e-6, 1e-5),
    loss=(
        (0.1949, 0.1638, 0.1714, 0.1746, 0.1588),
        (0.4691, 0.4559, 0.4489, 0.4390, 0.4773),
        (0.8156, 0.7675, 0.7736, 0.7790, 0.7893),
        (1.3103, 1.2740, 1.2956, 1.2568, 1.2758),
    ),
    accuracy=(
        (91.48, 92.14, 91.80, 91.73, 92.52),
        (84.15, 84.82, 85.02, 85.23, 83.00),
        (73.07, 75.24, 75.73, 74.29, 74.16),
        (59.80, 59.16, 60.98, 61.75, 59.87),
    ),
)  # fmt: skip
EKFAC = Grid(
    "ekfac", "ddpnopt-ekfac", "EKFAC", (0.05, 0.09, 0.1, 0.3), (1e-7, 5e-7, 5e-6, 1e-5),
    loss=(
        (0.0757, 0.0636, 0.0659, 0.0691, 0.0717),
        (0.2274, 0.2087, 0.2164, 0.2091, 0.2223),
        (0.3260, 0.2771, 0.3003, 0.2543, 0.2510),
        (0.5959, 0.5462, 0.5282, 0.5299, 0.5858),
    ),
    accuracy=(
        (93.70, 93.84, 93.88, 94.31, 94.06),
        (90.84, 91.13, 91.45, 91.23, 91.24),
        (88.88, 89.69, 89.89, 90.18, 90.94),
        (81.82, 83.79, 84.09, 84.15, 82.55),
    ),
)  # fmt: skip
# The paper shows Adam as a picture alone: the axes of RMSprop, whose curvature is the same.
ADAM = Grid("adam", "ddpnopt-adam", "Adam", RMSPROP.lrs, RMSPROP.eps)
GRIDS = (SGD, RMSPROP, EKFAC)
