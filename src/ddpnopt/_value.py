"""Line 6 of Algorithm 3: from a recorded pass to the value function at the outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from ddpnopt._checks import require
from ddpnopt._distributed import ALONE, Peers
from ddpnopt._losses import outputs_with_gradient, per_sample, recognised_losses
from ddpnopt.ddp import terminal as terminals
from ddpnopt.ddp.loss import sqrt_curvature
from ddpnopt.ddp.segment import JointSegment, Pullback, Segment
from ddpnopt.ddp.stage import Displacement
from ddpnopt.ddp.value import Batch, Blocks, Factored, Full, Outer, ScaleFree, ValueFunction
from ddpnopt.ddp.value.blocks import LARGEST
from ddpnopt.errors import ModelError, OptionError
from ddpnopt.trace.probes import Paths, Probe
from ddpnopt.trace.recording import Recording
from ddpnopt.trace.replay import AtLayer

VALUES = ("batch", "outer", "full")
Columns = tuple[list[list[Tensor]], list[list[Tensor | None]]]
"""p_h and p_x of each column (the gradient first) at each layer."""


class Passes(Protocol):
    """The replays of a recording: `Capture`, or `MicroBatches` for a joint one."""

    batch_norms: list[tuple[str, nn.Module]]

    def replay(self, recording: Recording, control: AtLayer, observe: AtLayer | None = None) -> list[Tensor]: ...

    def retrace(self, recording: Recording) -> None: ...

    def probes(self, recording: Recording) -> list[Probe]: ...

    def paths(self, recording: Recording, *, mixing: bool) -> list[Paths]: ...

    def pull_back(self, recording: Recording, index: int, columns: Tensor) -> Columns: ...


@dataclass(frozen=True)
class ValueForm:
    """The form of the value function and its terminal curvature."""

    value: str
    terminal: terminals.TerminalOption
    order: int = 1
    vxx_reg: float = 0.0
    guard: bool = True
    mean: bool = True  # whether the loss is a mean over the batch
    vxx_power: int | None = None  # of 1 / B in V_xx; None leaves each terminal curvature as it is
    dof: float = 1.0  # of value="batch"
    scale_free: bool = False  # value="batch" without a learning rate
    along_gradient: bool = field(init=False)  # whether the terminal curvature has rank one, along the gradient

    def __post_init__(self) -> None:
        require(self.value in VALUES, "value", self.value, f"one of {', '.join(VALUES)}")
        require(self.order in (1, 2), "order", self.order, "1 or 2")
        require(self.vxx_reg >= 0, "vxx_reg", self.vxx_reg, "zero or positive")
        require(0 < self.dof <= 1, "dof", self.dof, "in (0, 1]")
        if self.vxx_power is not None:
            whole = isinstance(self.vxx_power, int) and self.vxx_power >= 0
            require(whole, "vxx_power", self.vxx_power, "an integer, zero or positive")
            require(self.mean, "vxx_power", self.vxx_power, "left out with reduction='sum'")
        named = isinstance(self.terminal, str)
        if named:
            names = terminals.NAMES
            require(self.terminal in names, "terminal", self.terminal, f"one of {', '.join(names)}")
        else:
            require(callable(self.terminal), "terminal", self.terminal, "a name or a callable of the outputs")
        object.__setattr__(self, "along_gradient", named and self.terminal in terminals.FROM_GRADIENT)
        if self.value == "outer" and self.terminal in ("cross_entropy", "mse"):
            raise OptionError(
                f"terminal='{self.terminal}' has more than one column per sample, but value='outer' supports one: use "
                "'gn', 'sqrt', 'sampled' or a callable that returns one factor, or value='full' or 'batch'."
            )

    def planned_share(self, batch: int) -> float:
        """eta of the recursion over that of the update: B if each sample plans as if the step were its own."""
        return float(batch) if self.vxx_power == 0 else 1.0

    def _rescaled(self, batch: int) -> float:
        """What `vxx_power` multiplies V_xx at the outputs by: of itself it has B^-2 for "gn" and B^-1 for the others.

        V_x and V_xx are always those of a mean loss: where each sample plans for itself both have been divided by B.
        """
        if self.vxx_power is None:
            return 1.0
        return float(batch) ** ((2 if self.terminal == "gn" else 1) - max(self.vxx_power, 1))

    @property
    def uses_losses(self) -> bool:
        """Whether a step needs the loss of each sample."""
        return self.value == "batch" or self.terminal == "sqrt"

    def start(
        self,
        passes: Passes,
        recording: Recording,
        displacement: Displacement,
        fraction: float = 1.0,
        losses: Tensor | None = None,
        peers: Peers = ALONE,
        memory: tuple[float, float, float, float] | None = None,
    ) -> tuple[Columns, ValueFunction]:
        """V_x and V_xx at the outputs, and the cotangents that the recursion runs along.

        `fraction` of each sample's loss is to be removed; `losses` are the samples' losses, where known; `memory` is
        that of `ScaleFree`: the factor of the last update, stage cost, penalty, the sum of the losses.
        """
        p_h = [[r.p_h for r in recording.layers if r.p_h is not None]]
        p_x = [[r.p_x for r in recording.layers]]
        if self.value == "full":
            return (p_h, p_x), self._full(passes, recording, displacement.chain, losses, peers)
        if self.along_gradient:
            if self.scale_free:
                if losses is None:
                    losses = per_sample(recognised_losses(recording, self.mean))
                return (p_h, p_x), ScaleFree(losses, displacement, peers, *(memory or ()))
            L = self._curvature(recording, p_h[0][-1], losses, peers)
            if self.value == "outer":
                return (p_h, p_x), self._outer(L, recording, displacement, peers)
            return (p_h, p_x), self._joint(L, torch.full_like(L, fraction), displacement, 1, peers)
        k, z, _ = single_output(recording)
        F = terminals.factor(self.terminal, z, self.mean) * self._share(recording, peers) ** 0.5  # (R, B, n)
        pulled_h, pulled_x = passes.pull_back(recording, k, F.reshape(len(F), *z.shape))
        columns = ([*p_h, *pulled_h], [*p_x, *pulled_x])
        ones = F.new_ones(F.shape[1])
        if self.value == "outer":
            if len(F) > 1:
                raise OptionError(
                    f"terminal: the callable returned {len(F)} columns per sample, but value='outer' supports one. Use "
                    "value='batch' or 'full'."
                )
            return columns, self._outer(ones, recording, displacement, peers)
        # the gradient itself is a column without curvature
        L = torch.cat([torch.zeros_like(ones), ones.repeat(len(F))])
        v = torch.cat([fraction * ones, torch.zeros_like(ones).repeat(len(F))])
        return columns, self._joint(L, v, displacement, 1 + len(F), peers)

    def _outer(self, L: Tensor, recording: Recording, displacement: Displacement, peers: Peers) -> Outer:
        B = peers.batch(recording.batch_size)
        return Outer(
            L * self._rescaled(B), along_gradient=self.along_gradient, guard=self.guard, displacement=displacement,
            planned=self.planned_share(B),
        )  # fmt: skip

    def _share(self, recording: Recording, peers: Peers) -> float:
        """This process's share of the batch loss, where each process has computed the mean over its own samples."""
        return peers.share(recording.batch_size) if self.mean else 1.0

    def _joint(self, L: Tensor, v: Tensor, displacement: Displacement, columns: int, peers: Peers) -> Batch | Blocks:
        """The joint form, for a large batch in blocks; over several processes always coupled as a whole."""
        if peers.alone and len(L) // columns > LARGEST:
            return Blocks(L, v, displacement, columns, self.dof)
        return Batch(L, v, displacement, columns, peers, self.dof)

    def _curvature(self, recording: Recording, q: Tensor, losses: Tensor | None, peers: Peers) -> Tensor:
        """Curvature along the gradient: (B,)."""
        if self.terminal == "sqrt":
            if losses is None:
                losses = per_sample(recognised_losses(recording, self.mean))
            return sqrt_curvature(losses)
        # the paper's factored form is (grad/B)(grad/B)', the joint Hessian of the batch is grad grad'/B
        joint = self.value == "batch" and self.mean
        return q.new_full((len(q),), float(peers.batch(len(q))) if joint else 1.0)

    def _full(
        self, passes: Passes, recording: Recording, chain: bool, losses: Tensor | None, peers: Peers
    ) -> Full | Factored:
        for record in recording.layers:
            if record.recomputed:
                raise ModelError(
                    f"value='full' needs a graph that is cut at each layer, but activation checkpointing runs layer "
                    f"'{record.name}' again in the backward pass: use value='batch' or 'outer', or do not checkpoint."
                )
        cut = passes.probes(recording)
        t = None if chain else cut[0].off_chain(recording)
        if t is not None:
            at = f"layer '{recording.layers[t].name}'" if t < len(recording.layers) else "the output"
            raise ModelError(
                f"value='full' needs a chain of layers, but {at} reads more (or less) than the layer before it: use "
                "value='batch' or 'outer' for networks with branches or skip connections."
            )
        for name, module in passes.batch_norms:
            if module.training:
                raise ModelError(
                    f"value='full' treats the samples independently, but '{name}' couples them: use value='batch', or "
                    "put the batch norm into eval mode."
                )
        k, z, q = single_output(recording)
        per_part = [Segment.chain(p.leaves, [*p.inputs[1:], p.outputs[k]], self.order) for p in cut]
        segments: list[Pullback] = list(per_part[0])
        if len(cut) > 1:
            segments = [JointSegment(list(parts)) for parts in zip(*per_part, strict=True)]
        V_x = q.flatten(1)
        B = peers.batch(recording.batch_size)
        planned, scale = self.planned_share(B), self._rescaled(B)
        low_rank = self.guard and self.order == 1 and not self.vxx_reg and not callable(self.terminal)
        Z = self._rows(recording, z, q, losses, peers) if low_rank or self.along_gradient else None
        if Z is None:
            V_xx = terminals.hessian(self.terminal, z, self.mean) * (self._share(recording, peers) * scale)
        elif low_rank and Z.shape[1] <= min(leaf[0].numel() for leaf in cut[0].leaves):
            return Factored(V_x, scale**0.5 * Z, segments, planned)
        else:  # V_xx itself is smaller, or more is added to it
            V_xx = scale * (Z.mT @ Z)
        return Full(V_x, V_xx, segments, order=self.order, guard=self.guard, vxx_reg=self.vxx_reg, planned=planned)

    def _rows(self, recording: Recording, z: Tensor, q: Tensor, losses: Tensor | None, peers: Peers) -> Tensor:
        """A factor of the terminal Hessian, V_xx = Z' Z: (B, r, n)."""
        if self.along_gradient:
            return self._curvature(recording, q, losses, peers).sqrt()[:, None, None] * q.flatten(1)[:, None]
        return terminals.factor(self.terminal, z, self.mean).transpose(0, 1) * self._share(recording, peers) ** 0.5


def single_output(recording: Recording) -> tuple[int, Tensor, Tensor]:
    found = outputs_with_gradient(recording)
    if len(found) != 1:
        raise ModelError(
            f"This terminal curvature needs one output of the model with a gradient and the batch in dimension 0, but "
            f"there are {len(found)}. Use terminal='sqrt' or 'gn', which do not use the outputs."
        )
    return found[0]
