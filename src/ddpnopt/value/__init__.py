"""The value functions: what form V has, and its recursion backward through the layers."""

from ddpnopt.value.base import Direction, Displacement, Policy, Problem, ValueFunction
from ddpnopt.value.batch import Batch
from ddpnopt.value.blocks import Blocks
from ddpnopt.value.factored import Factored
from ddpnopt.value.full import Full
from ddpnopt.value.outer import Outer

__all__ = [
    "Batch",
    "Blocks",
    "Direction",
    "Displacement",
    "Factored",
    "Full",
    "Outer",
    "Policy",
    "Problem",
    "ValueFunction",
]
