"""What follows the layer of a stage, where it acts on each number alone."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import fx, nn

from ddpnopt.lab.baselines.chain import ChainStage

# Dropout is here because it is refused wherever it is not the identity (`chain.check_deterministic`).
MODULES = (
    nn.Identity, nn.Dropout, nn.Tanh, nn.Sigmoid, nn.ReLU, nn.Softplus, nn.SiLU, nn.GELU, nn.ELU, nn.CELU, nn.SELU,
    nn.LeakyReLU, nn.LogSigmoid, nn.Softsign, nn.Mish, nn.Tanhshrink,
)  # fmt: skip
FUNCTIONS = {
    torch.tanh, torch.sigmoid, torch.relu, torch.sin, torch.cos, torch.exp, F.tanh, F.sigmoid, F.relu, F.softplus,
    F.silu, F.gelu, F.elu, F.leaky_relu, F.logsigmoid, F.softsign, F.mish,
}  # fmt: skip
METHODS = {"tanh", "sigmoid", "relu", "sin", "cos", "exp"}


def elementwise_tail(stage: ChainStage) -> nn.Module | None:
    """sigma of x_{t+1} = sigma(W x_t + b) as a module, or None where the stage is not known to be of this form."""
    layer, part = stage.unit.module, stage.module
    if not isinstance(layer, nn.Linear) or not isinstance(part, fx.GraphModule):
        return None
    own = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    if len(own) != len(stage.parameters) or any(a is not b for a, b in zip(own, stage.parameters, strict=True)):
        return None  # frozen in part, or trainable in the tail
    tail = fx.GraphModule(part, copy.deepcopy(part.graph))
    for node in list(tail.graph.nodes):
        module = tail.get_submodule(str(node.target)) if node.op == "call_module" else None
        if module is layer:
            node.replace_all_uses_with(node.args[0])
            tail.graph.erase_node(node)
        elif node.op not in ("placeholder", "output") and not _is_elementwise(node, module):
            return None
    tail.recompile()
    return tail


def _is_elementwise(node: fx.Node, module: nn.Module | None) -> bool:
    if len(node.all_input_nodes) != 1:
        return False
    if module is not None:
        return type(module) in MODULES
    return node.target in (FUNCTIONS if node.op == "call_function" else METHODS)
