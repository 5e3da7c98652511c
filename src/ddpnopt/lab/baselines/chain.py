"""A network as the dynamics x_{t+1} = f_t(x_t, u_t) of (OCP): one callable stage per layer.

A stage is a layer with everything that follows it up to the next layer (activation, pooling, flatten), as a function of
its input and of its own parameters. The network is traced once and cut before each layer; what comes before the first
layer has no parameters and is left out, because x_0 is the first layer's input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.passes.split_module import split_module

from ddpnopt.errors import ModelError
from ddpnopt.trace.model_layers import ModelLayer, find_layers


@dataclass(eq=False)
class ChainStage:
    """f_t: the layer `unit` and what follows it."""

    unit: ModelLayer
    module: nn.Module
    names: list[str]  # of the trainable parameters, as `module` calls them
    parameters: list[nn.Parameter]  # u_t

    def __call__(self, x: Tensor, u: Sequence[Tensor]) -> Tensor:
        """f_t(x, u) for a whole batch x, with `u` instead of the parameters."""
        out: Tensor = functional_call(self.module, dict(zip(self.names, u, strict=True)), (x,))
        return out


def chain(model: nn.Module, method: str) -> list[ChainStage]:
    """The stages of `model`, or a `ModelError` that says where it is not a chain; `method` is named in it."""
    trainable = {p for p in model.parameters() if p.requires_grad}
    if not trainable:
        raise ModelError("The model has no trainable parameters.")
    units = find_layers(model, trainable, frozenset())
    alone = any(unit.module is model for unit in units)  # tracing would open the layer itself
    root = nn.Sequential(model) if alone else model
    parts = _cut(root, {unit.module: unit for unit in units}, method)
    stages = []
    for unit, module in parts:
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        stages.append(ChainStage(unit, module, [n for n, _ in named], [p for _, p in named]))
    _check_owners(model, stages, trainable, method)
    return stages


def _cut(root: nn.Module, units: dict[nn.Module, ModelLayer], method: str) -> list[tuple[ModelLayer, nn.Module]]:
    try:
        traced = fx.symbolic_trace(root)
    except Exception as error:  # whatever the model's own code raises when it meets a symbolic tensor
        raise ModelError(
            f"{method} calls the layers one by one and could not take the model apart ({error}). Write forward() "
            "without `if` or loops that depend on tensor values, or as an nn.Sequential."
        ) from error
    number: dict[fx.Node, int] = {}  # the part that a node belongs to; 0 is before the first layer
    order: list[ModelLayer] = []
    for node in traced.graph.nodes:
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if module in units:
            order.append(units[module])
        number[node] = len(order)
    repeated = [name for name, uses in Counter(unit.name for unit in order).items() if uses > 1]
    if repeated:
        raise ModelError(f"{method} needs one time step a layer, but layer '{repeated[0]}' runs more than once.")
    if len(order) < len(units):
        missing = next(u.name for u in units.values() if u not in order)
        raise ModelError(f"{method} needs a chain of layers, but layer '{missing}' is not called in forward().")
    split = split_module(traced, root, lambda node: number[node])
    _check_links(split, order, method)
    parts = [(unit, split.get_submodule(f"submod_{t + 1}")) for t, unit in enumerate(order)]
    for unit, part in parts:
        assert isinstance(part, fx.GraphModule)
        _check_reader(part, unit, method)
    return parts


def _check_links(split: fx.GraphModule, order: list[ModelLayer], method: str) -> None:
    """Each part must read one tensor, the result of the part before it."""
    before: fx.Node | None = None
    inputs = 0
    for node in split.graph.nodes:
        if node.op == "placeholder":
            inputs += 1
            before = node
        elif node.op == "call_module":
            if list(node.all_input_nodes) != [before]:
                t = int(str(node.target).removeprefix("submod_"))
                at = f"layer '{order[max(t, 1) - 1].name}' or what follows it"
                raise ModelError(
                    f"{method} needs a chain of layers, but {at} reads more (or less) than the layer before it: "
                    "networks with branches or skip connections, or with several inputs, are not for it."
                )
            before = node
        elif node.op == "output" and (inputs != 1 or node.args[0] is not before):
            raise ModelError(
                f"{method} needs a model with one input and one output tensor, the last layer's; this one returns "
                "something else or takes more."
            )


def _check_reader(part: fx.GraphModule, unit: ModelLayer, method: str) -> None:
    """The layer alone may read the state: else its gradient through the layer would not be the whole costate."""
    state = next(node for node in part.graph.nodes if node.op == "placeholder")
    readers = [part.get_submodule(str(n.target)) if n.op == "call_module" else None for n in state.users]
    if readers != [unit.module]:
        raise ModelError(
            f"{method} needs a chain of layers, but the input of layer '{unit.name}' is read by something else, too: "
            "networks with branches or skip connections are not for it."
        )


def _check_owners(model: nn.Module, stages: list[ChainStage], trainable: set[nn.Parameter], method: str) -> None:
    owners = Counter(p for stage in stages for p in stage.parameters)
    for name, p in model.named_parameters():
        if p in trainable and owners[p] != 1:
            how = "belongs to no layer's stage" if owners[p] == 0 else "is shared by several stages"
            raise ModelError(
                f"{method} trains one set of weights a time step, but parameter '{name}' {how}: freeze it, or give "
                "each layer weights of its own."
            )


def check_deterministic(model: nn.Module, method: str) -> None:
    """Reject modules that couple the samples or draw random numbers each time a stage is called."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ModelError(
                f"{method} takes each stage as a function of its input and weights, but batch norm '{name}' couples "
                "the samples and updates its statistics: put it into eval mode, or leave it out."
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise ModelError(
                f"{method} takes each stage as a function of its input and weights, but dropout '{name}' draws again "
                "each time: put it into eval mode, or leave it out."
            )


def require_fully_connected(stages: list[ChainStage], method: str) -> None:
    """For methods whose state or penalty is that of a feedforward network."""
    for stage in stages:
        if not isinstance(stage.unit.module, nn.Linear):
            raise ModelError(
                f"{method} is for fully connected networks, but '{stage.unit.name}' is a "
                f"{type(stage.unit.module).__name__}: use a network of nn.Linear layers, or another method."
            )
