"""The value functions: what form V has, and its recursion backward through the layers."""

from ddpnopt.ddp.value.base import ValueFunction
from ddpnopt.ddp.value.batch import Batch
from ddpnopt.ddp.value.blocks import Blocks
from ddpnopt.ddp.value.factored import Factored
from ddpnopt.ddp.value.full import Full
from ddpnopt.ddp.value.outer import Outer
from ddpnopt.ddp.value.scale_free import ScaleFree

__all__ = ["Batch", "Blocks", "Factored", "Full", "Outer", "ScaleFree", "ValueFunction"]
