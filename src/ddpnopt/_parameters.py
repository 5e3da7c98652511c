"""Parameter groups as the layers see them, and the base optimizer: what is updated without feedback (Proposition 1)."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddpnopt._checks import listed, require, warn_user
from ddpnopt._distributed import Peers
from ddpnopt.curvature.base import Curvature, Seen
from ddpnopt.curvature.diagonal import Adam
from ddpnopt.ddp.distance import Distance
from ddpnopt.ddp.sweep import descend
from ddpnopt.errors import OpenLoopWarning, OptionError
from ddpnopt.linear.layer import Layer, Parts
from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.recording import LayerRecord

GroupDict = dict[str, Any]
OPEN_LOOP_LR = 1e-3  # of Adam, for parameters without feedback next to value="batch"


class LayerSettings(NamedTuple):
    """What the groups and the state say of one layer in one step."""

    lr: float
    momentum: float
    l_u: Parts | None  # gradient of the stage cost: weight decay
    state: dict[str, Any]


class Parameters:
    """The parameter groups and the state of an optimizer.

    It holds no reference to the optimizer, which would keep both, and the hooks, alive after their last use.
    """

    def __init__(
        self,
        groups: list[GroupDict],
        state: MutableMapping[Any, dict[str, Any]],
        names: dict[nn.Parameter, str],
        curvature: Curvature,
        *,
        feedback: bool,
        coupled: bool,
    ) -> None:
        self.groups, self.state, self.names, self.curvature = groups, state, names, curvature
        self.feedback = feedback
        self.coupled = coupled  # value="batch": its learning rate is an inverse damping
        self._warned: set[str] = set()
        for group in groups:
            self.check(group)

    def check(self, group: GroupDict) -> None:
        """Raise an error for invalid settings, and for parameters that do not belong to the model."""
        for option in ("lr", "momentum", "weight_decay"):
            require(float(group[option]) >= 0, option, group[option], "zero or positive")
        self._check_momentum(group)
        for p in group["params"]:
            if p not in self.names:
                raise OptionError(f"params: a parameter of shape {tuple(p.shape)} does not belong to the model.")

    def _check_momentum(self, group: GroupDict) -> None:  # in each step, too: a scheduler may have set it
        if group["momentum"] and isinstance(self.curvature, Adam):
            raise OptionError(
                f"momentum={group['momentum']} cannot be combined with curvature='adam', which has its own: set "
                "Adam(betas=…), and cycle_momentum=False in OneCycleLR."
            )

    def __iter__(self) -> Any:
        return (p for group in self.groups for p in group["params"])

    def of_layers(self, layers: Sequence[LayerRecord | ModelLayer]) -> list[LayerSettings]:
        """Learning rate, momentum, stage cost and state of each layer."""
        several = len(self.groups) > 1
        group_of = {p: group for group in self.groups for p in group["params"]} if several else {}
        first = last = self.groups[0]
        found = []
        for layer in layers:
            parameters = layer.parameters
            if several:
                first, last = group_of[parameters[0]], group_of[parameters[-1]]
            if first["momentum"]:
                self._check_momentum(first)
            if first is not last:
                _check_alike(layer.name, first, last)
            l_u = None
            if first["weight_decay"] or last["weight_decay"]:  # of weight and bias
                decays = first["weight_decay"], last["weight_decay"]
                l_u = [p.detach() * decay for p, decay in zip(parameters, decays, strict=False)]
            parts = 0 if (layer if isinstance(layer, ModelLayer) else layer.model_layer).loosened else len(parameters)
            state = self._state_of(parameters, parts)
            state["parts"] = parts
            found.append(LayerSettings(float(first["lr"]), first["momentum"], l_u, state))
        return found

    def _state_of(self, parameters: list[nn.Parameter], parts: int = 1) -> dict[str, Any]:
        """The state of parameters that are updated together, kept with the first; none: one on its own.

        It starts again when others take part than before: a bias has been frozen or unfrozen, a layer that was left
        to the base optimizer has feedback now, or a weight of a layer has turned out to have other uses.
        """
        state = self.state[parameters[0]]
        if state.get("parts", 1) != parts:
            for name in [name for name in state if name != "average"]:
                del state[name]
        return state

    def stage_cost(self) -> float:
        """Weight decay as a cost, lambda |u|^2 / 2."""
        decayed = [g for g in self.groups if g["weight_decay"]]
        if not decayed:
            return 0.0
        return float(sum(0.5 * g["weight_decay"] * p.square().sum() for g in decayed for p in g["params"]))

    def warn_open_loop(self, names: list[str], why: str = "") -> None:
        """Warn once about parameters without feedback."""
        new = [name for name in names if name not in self._warned]
        if new:
            self._warned.update(new)
            warn_user(
                f"Updated by the base optimizer, without feedback: {listed(new)}."
                + (
                    why
                    or " The gradients of the samples could not be found in model(...): 'Architectures' in the docs "
                    "says what is supported."
                ),
                OpenLoopWarning,
            )

    # -- the base optimizer ------------------------------------------------------------------------------------------

    def update_open_loop(self, parameters: list[nn.Parameter]) -> None:
        """Update parameters that belong to no recorded layer."""
        adam = self.feedback and self.coupled  # the learning rate of value="batch" means nothing to another optimizer
        curvature = Adam() if adam else self.curvature.open_loop
        group_of = {p: group for group in self.groups for p in group["params"]}
        for p in parameters:
            group = group_of[p]
            self._check_momentum(group)
            l_u = [p.detach() * group["weight_decay"]] if group["weight_decay"] else None
            lr, momentum = float(group["lr"]), group["momentum"]
            if self.feedback and group["open_loop_lr"] is not None:
                lr = float(group["open_loop_lr"])
            elif adam:
                lr, momentum = OPEN_LOOP_LR, 0.0
            self._update([p], LayerSettings(lr, momentum, l_u, self._state_of([p])), curvature, None, {})

    def update_by_distance(self, parameters: list[nn.Parameter], distance: Distance, share: float = math.inf) -> None:
        """Update parameters without feedback, each by no more than a share of its size."""
        group_of = {p: group for group in self.groups for p in group["params"]}
        gradients = []
        for p in parameters:
            assert p.grad is not None
            for kept in ("update", "combined_update"):  # of an earlier step with feedback: no prior for a later one
                self.state[p].pop(kept, None)
            decay = group_of[p]["weight_decay"]
            gradients.append(p.grad + decay * p.detach() if decay else p.grad)
        factors = [float(group_of[p]["lr"]) for p in parameters]
        values, gradients = _as_real([p.detach() for p in parameters]), _as_real(gradients)
        distance.step(values, gradients, [self.state[p] for p in parameters], factors, share)

    def update_all(
        self,
        rest: list[nn.Parameter],
        records: list[LayerRecord],
        known: list[ModelLayer],
        peers: Peers,
        *,
        mean: bool,
    ) -> None:
        """All without feedback."""
        self.update_open_loop(rest)
        for record in records:
            self._update_recorded(record, peers, mean)
        for layer in known:
            self._update_known(layer)

    def _update_recorded(self, record: LayerRecord, peers: Peers, mean: bool) -> None:
        """Q_ux = 0 (Proposition 1) for a curvature that uses inputs and output gradients: KFAC or EKFAC on `.grad`."""
        scale = float(peers.batch(len(record.x))) if mean else 1.0
        dtype = record.parameters[0].dtype  # autocast may have recorded smaller ones
        assert record.p_h is not None
        v_h = record.p_h.to(dtype)
        watched = {"x": record.x.to(dtype), "v_h": lambda: v_h, "scale": scale, "peers": peers, "solve_only": True}
        (settings,) = self.of_layers([record])
        self._update(record.parameters, settings, self.curvature, record.layer, watched)

    def _update_known(self, layer: ModelLayer) -> None:
        """The same, with the curvature of an earlier step."""
        (settings,) = self.of_layers([layer])
        self._update(layer.parameters, settings, self.curvature, layer.layer, {"solve_only": True})

    def known_layers(self, layers: list[ModelLayer]) -> list[ModelLayer]:
        """Layers whose curvature is known from an earlier step, in a step that records none."""
        known = []
        for layer in layers:
            layer.refresh()
            if all(p.grad is not None for p in layer.parameters) and "step" in self.of_layers([layer])[0].state:
                known.append(layer)
        return known

    def _update(
        self,
        parameters: list[nn.Parameter],
        settings: LayerSettings,
        curvature: Curvature,
        layer: Layer | None,
        watched: dict[str, Any],
    ) -> None:
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        seen = Seen(lambda: gradient, settings.l_u, layer, **watched)
        metric = curvature.observe(settings.state, seen)
        weights: list[Tensor] = list(parameters)
        descend(weights, settings.state, seen.q_u(), settings.lr, settings.momentum, curvature, metric, layer)


def _as_real(tensors: list[Tensor]) -> list[Tensor]:
    """Complex numbers as pairs of real ones, in the same memory."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


def _check_alike(name: str, first: GroupDict, last: GroupDict) -> None:
    for option in ("lr", "momentum"):
        if first[option] != last[option]:
            raise OptionError(
                f"Weight and bias of layer '{name}' are in parameter groups with {option}={first[option]} and "
                f"{last[option]}: a layer is one control and needs one {option}. Groups may differ in weight_decay."
            )
