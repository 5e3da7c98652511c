"""Which modules of a model are layers with feedback, and the affine map that each of them is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddpnopt._checks import listed
from ddpnopt.errors import ModelError, OptionError
from ddpnopt.linear.convolution import Conv
from ddpnopt.linear.elementwise import ScaleShift
from ddpnopt.linear.given import Given
from ddpnopt.linear.layer import Layer
from ddpnopt.linear.linear import Linear
from ddpnopt.linear.lookup import Lookup
from ddpnopt.linear.transposed import TransposedLinear
from ddpnopt.trace.attention import Attention
from ddpnopt.trace.bags import Bag
from ddpnopt.trace.fused import Fused, Holder, Piece
from ddpnopt.trace.norms import Statistics, describe_norm, normalised, normalised_by
from ddpnopt.trace.recurrent import Recurrent, RecurrentCell

MOST_DIMS = 64  # of a tensor
_CONVOLUTIONS: dict[Any, int] = {nn.Conv1d.forward: 1, nn.Conv2d.forward: 2, nn.Conv3d.forward: 3}


Describe = Callable[[nn.Module], Layer | None]
_REGISTERED: dict[type[nn.Module], Describe] = {}


def register_layer(kind: type[nn.Module], describe: Describe) -> None:
    """Give a module class of your own feedback like a layer of `torch.nn`.

    Args:
        kind: the class; subclasses with a forward of their own are not included. It takes one tensor, (B, …), and has
            a parameter `weight`, and perhaps `bias`, which nothing but its forward uses.
        describe: from a module of this class to its map, for example `Linear(tuple(m.weight.shape), bias=True)`, or
            None for a module that is not to have feedback.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise OptionError(f"register_layer takes a subclass of nn.Module, not {kind!r}.")
    _REGISTERED[kind] = describe


def _registered(module: nn.Module) -> Describe | None:
    """What was registered for the class that the module's forward comes from."""
    return next((_REGISTERED[k] for k in type(module).__mro__ if k in _REGISTERED and _same_forward(module, k)), None)


def _same_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    return type(module).forward is kind.forward


def _from_libraries(module: nn.Module, shape: tuple[int, ...], has_bias: bool) -> Layer | None:
    """Linear layers of other libraries, which need not be installed."""
    forward = type(module).forward
    name = f"{forward.__module__}.{forward.__qualname__}"
    if name in ("transformers.pytorch_utils.Conv1D.forward", "transformers.modeling_utils.Conv1D.forward"):
        return TransposedLinear(shape, has_bias)
    if name == "torch_geometric.nn.dense.linear.Linear.forward":
        return Linear(shape, has_bias)
    return None


def describe(module: nn.Module) -> Layer | None:
    """The affine map of a module, or None if it is not a supported layer with a trainable weight."""
    weight = module._parameters.get("weight")
    if weight is None or not weight.requires_grad or nn.parameter.is_lazy(weight) or weight.is_complex():
        return None
    bias = module._parameters.get("bias")
    has_bias = bias is not None and bias.requires_grad
    shape = tuple(weight.shape)
    registered = _registered(module) if _REGISTERED else None
    if registered is not None:
        return registered(module)
    forward = type(module).forward  # a subclass with a forward of its own may do anything
    if forward in (nn.Linear.forward, Piece.forward):
        return Linear(shape, has_bias)
    if forward is nn.Embedding.forward:
        assert isinstance(module, nn.Embedding)
        return Lookup(shape, module.padding_idx) if _is_plain(module) else None
    if forward not in _CONVOLUTIONS:
        return describe_norm(module, weight, has_bias) or _from_libraries(module, shape, has_bias)
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    ends: list[int] = module._reversed_padding_repeated_twice  # F.pad's order
    symmetric = all(lo == hi for lo, hi in zip(ends[::2], ends[1::2], strict=True))
    inside = module.padding_mode == "zeros" and symmetric
    return Conv(
        shape,
        has_bias,
        module.groups,
        tuple(module.stride),
        tuple(module.dilation),
        padding=tuple(ends[::-2]) if inside else (0,) * len(module.stride),
        pad_first=() if inside else tuple(ends),
        pad_mode="constant" if module.padding_mode == "zeros" else module.padding_mode,
    )


def _is_plain(embedding: nn.Embedding) -> bool:
    """Whether the gradient of a row is the sum of those at its uses, and nothing else changes the rows."""
    return embedding.max_norm is None and not embedding.scale_grad_by_freq


@dataclass(eq=False)
class ModelLayer:
    """A supported layer of the model: what stays the same from step to step."""

    name: str
    module: nn.Module
    layer: Layer
    part_of: Fused | None = None  # the fused module that this is a piece of
    loosened: bool = False  # whether the parameter was taken from a layer whose weight has other uses
    compiled: bool = False  # whether it has run as compiled code, which knows its forward

    def __post_init__(self) -> None:
        weight = self.module._parameters["weight"]
        assert weight is not None
        self.weight = weight  # functional_call may temporarily replace it in the module
        self._bias = self._trained_bias()
        # whether it has feedback in every pass; norms, embeddings and pieces may be left to the base optimizer
        self.required = self.part_of is None and isinstance(self.layer, (Linear, Conv))
        # whether its input at one time depends on its output at the time before
        self.recurrent = isinstance(self.module, Piece) and self.module.recurrent
        self.looks_up = isinstance(self.layer, Lookup)  # whether its inputs are ids
        n = len(self.layer.weight_shape)
        # dimensions that an input with a batch may have
        self.dims = range(n, n + 2) if isinstance(self.layer, Conv) else range(2 - self.looks_up, MOST_DIMS)
        self.least_dims = n if isinstance(self.layer, Conv) else 2 * self.required  # of one; fewer have no batch
        self.normalises = isinstance(self.layer, ScaleShift)  # whether it is linear in a normalised input
        self.parameters = self._trained()  # [weight] or [weight, bias]

    def _trained_bias(self) -> nn.Parameter | None:
        bias = self.module._parameters.get("bias")
        return bias if bias is not None and bias.requires_grad else None

    def _trained(self) -> list[nn.Parameter]:
        return [self.weight] if self._bias is None else [self.weight, self._bias]

    def state_of(self, x: Tensor, known: Statistics | None = None) -> Tensor:
        """What the layer is linear in, for an input of the module: the input itself, or for a norm x^."""
        if not self.normalises:
            return x
        if known is not None and x.dtype == self.weight.dtype == known[0].dtype:
            return normalised_by(known, x.detach())
        return normalised(self.module, x.detach().to(self.weight.dtype))

    def is_faster_from_state(self, x: Tensor) -> bool:
        """Whether `output` of the state of x is what the module computes from x, in less time: a norm's."""
        plain = self.normalises and x.dtype == self.weight.dtype
        return plain and not torch.is_autocast_enabled(x.device.type)

    @property
    def has_own_forward(self) -> bool:
        """Whether the module runs the forward of its class."""
        return "forward" not in vars(self.module)

    def output(self, state: Tensor) -> Tensor:
        """h for such a state."""
        bias = self.module._parameters.get("bias")  # which may be frozen
        return self.layer.apply(state, [self.weight] if bias is None else [self.weight, bias])

    def refresh(self) -> None:
        """Follow a bias that has been frozen or unfrozen."""
        bias = self.module._parameters.get("bias")
        if (bias if bias is None or bias.requires_grad else None) is not self._bias:
            layer = describe(self.module)
            assert layer is not None
            self.layer, self._bias = layer, self._trained_bias()
            self.parameters = self._trained()


def find_layers(
    model: nn.Module, mine: set[nn.Parameter], exclude: frozenset[str], *, every_kind: bool = False
) -> list[ModelLayer]:
    """The layers that get feedback: supported, not excluded, and the only user of weights that are to be trained.

    Linear layers and convolutions, and with `every_kind` also norms, embeddings and the pieces of fused modules.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "A scripted model has no hooks, which DDPNOpt sees the layers by: give it the nn.Module itself, without "
            "torch.jit.script, or compiled by torch.compile."
        )
    modules = dict(model.named_modules())
    unknown = exclude - modules.keys()
    if unknown:
        raise OptionError(f"exclude: the model has no module {', '.join(sorted(unknown))}.")
    lazy = [name for name, p in model.named_parameters() if p in mine and nn.parameter.is_lazy(p)]
    if lazy:
        raise ModelError(
            f"{listed(lazy)} of lazy modules have no shape yet: run one batch through the model, model(inputs), before "
            "DDPNOpt(model)."
        )
    uses = Counter(p for m in modules.values() for p in m._parameters.values() if p is not None)
    layers: list[ModelLayer] = []
    inside: set[nn.Module] = set()  # layers that are pieces of a fused module around them
    for name, module in modules.items():
        if module in inside or any(name == e or name.startswith(f"{e}.") for e in exclude):
            continue
        if isinstance(module, torch.jit.ScriptModule):  # which runs without hooks
            continue
        name = name or type(module).__name__
        whole = fuse(name, module) if every_kind else None
        if whole is not None:
            pieces = _pieces(whole)
            if pieces and all(p in mine and uses[p] == 1 for each in pieces for p in each.parameters):
                layers += pieces
                inside.update(whole.pieces.values())
        layer = describe(module)
        if layer is not None:
            found = ModelLayer(name, module, layer)
            if (every_kind or found.required) and all(p in mine and uses[p] == 1 for p in found.parameters):
                layers.append(found)
    loose = _loose(modules, layers, mine, exclude) if every_kind else []
    if not layers and not loose:
        raise ModelError(
            "The model has no layer that DDPNOpt can control: it needs at least one nn.Linear or nn.Conv1d/2d/3d with "
            "a trainable weight of its own (not shared, parametrised, excluded or complex), or value='batch' or "
            "'outer' and any other trainable parameter that is not complex. Leave one layer without spectral_norm or "
            "weight_norm, or use torch.optim.AdamW for this model."
        )
    return [*layers, *loose]


def _loose(
    modules: dict[str, nn.Module], layers: list[ModelLayer], mine: set[nn.Parameter], exclude: frozenset[str]
) -> list[ModelLayer]:
    """The parameters that belong to no layer, each as a control of its own."""
    done = {p for layer in layers for p in layer.parameters}
    found = []
    for name, module in modules.items():
        special = isinstance(module, nn.EmbeddingBag) or (isinstance(module, nn.Embedding) and not _is_plain(module))
        excluded = any(name == e or name.startswith(f"{e}.") for e in exclude)
        for own, p in module._parameters.items():
            if p is None or p in done or p not in mine or not p.requires_grad:
                continue
            done.add(p)
            if not special and not excluded and p.numel() and not p.is_complex():
                full = f"{name}.{own}" if name else own
                found.append(ModelLayer(full, Holder(p), Given(tuple(p.shape))))
    return found


def fuse(name: str, module: nn.Module) -> Fused | None:
    """A module that makes a fused call, with its pieces; None for any other."""
    forward = type(module).forward
    if forward is nn.MultiheadAttention.forward and isinstance(module, nn.MultiheadAttention):
        return Attention(name, module)
    if forward in (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward) and isinstance(module, nn.RNNBase):
        plain = not module.proj_size and "weight_hh_l0" in module._parameters  # not parametrised
        return Recurrent(name, module) if plain else None
    if forward in (nn.LSTMCell.forward, nn.GRUCell.forward, nn.RNNCell.forward):
        assert isinstance(module, nn.RNNCellBase)
        return RecurrentCell(name, module) if "weight_hh" in module._parameters else None
    if forward is nn.EmbeddingBag.forward and isinstance(module, nn.EmbeddingBag):
        return Bag.of(name, module) if "weight" in module._parameters else None
    return None


def _pieces(whole: Fused) -> list[ModelLayer]:
    """The pieces of a fused module as layers; none if one of them is frozen or parametrised."""
    found = []
    for name, piece in whole.pieces.items():
        layer = describe(piece)
        if layer is None:
            return []
        found.append(ModelLayer(f"{whole.name}.{name}", piece, layer, whole))
    return found


def check_devices(model: nn.Module) -> None:
    """Raise an error for a model on several devices."""
    first: tuple[str, torch.device] | None = None
    for name, p in model.named_parameters():
        first = first or (name, p.device)
        if p.device != first[1]:
            raise ModelError(
                f"The model is on more than one device ('{first[0]}' on {first[1]}, '{name}' on {p.device}): DDPNOpt "
                "couples all layers in one step and needs them on one. Use several processes, each with the whole "
                "model on its own device (data_parallel=True)."
            )
