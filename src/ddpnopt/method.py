"""Which method: the settings of the value function, and line 6 of Algorithm 3, the value at the outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddpnopt._distributed import ALONE, Peers
from ddpnopt.curvature.base import require
from ddpnopt.ddp import terminal as forms
from ddpnopt.ddp.loss import Loss, recognise
from ddpnopt.ddp.segment import Pullback, Segment
from ddpnopt.ddp.value import Batch, Blocks, Displacement, Factored, Full, Outer, ValueFunction
from ddpnopt.ddp.value.blocks import LARGEST
from ddpnopt.errors import ModelError, OptionError
from ddpnopt.trace.hooks import Capture
from ddpnopt.trace.micro_batches import JointSegment, probes, pull_back
from ddpnopt.trace.recording import Recording

VALUES = ("batch", "outer", "full")
Columns = tuple[list[list[Tensor]], list[list[Tensor | None]]]
"""p_h and p_x of each column (the gradient first) at each stage."""


@dataclass(frozen=True)
class Method:
    """Form of the value function and its terminal curvature."""

    value: str
    terminal: forms.TerminalOption
    order: int
    vxx_reg: float
    guard: bool
    mean: bool
    dof: float = 1.0  # of value="batch"

    def __post_init__(self) -> None:
        require(self.value in VALUES, "value", self.value, f"one of {', '.join(VALUES)}")
        require(self.order in (1, 2), "order", self.order, "1 or 2")
        require(self.vxx_reg >= 0, "vxx_reg", self.vxx_reg, "zero or positive")
        require(0 < self.dof <= 1, "dof", self.dof, "in (0, 1]")
        if isinstance(self.terminal, str):
            require(self.terminal in forms.NAMES, "terminal", self.terminal, f"one of {', '.join(forms.NAMES)}")
        else:
            require(callable(self.terminal), "terminal", self.terminal, "a name or a callable of the outputs")
        for option, given in (("order=2", self.order == 2), ("vxx_reg", self.vxx_reg > 0)):
            if given and self.value != "full":
                raise OptionError(f"{option} needs value='full': V_xx of value='{self.value}' has no room for it.")
        if self.value == "outer" and self.terminal in ("cross_entropy", "mse"):
            raise OptionError(
                f"terminal='{self.terminal}' has more than one column a sample and value='outer' carries one: use "
                "'gn', 'sqrt', 'sampled' or a callable that returns one factor, or value='full' or 'batch'."
            )

    @property
    def along_gradient(self) -> bool:
        return isinstance(self.terminal, str) and self.terminal in forms.FROM_GRADIENT

    def share(self, recording: Recording, peers: Peers) -> float:
        """Of our samples in the whole batch's loss, where each process has taken the mean of its own."""
        return peers.share(recording.batch_size) if self.mean else 1.0

    @property
    def looks_at_losses(self) -> bool:
        return self.value == "batch" or self.terminal == "sqrt"

    def start(
        self, capture: Capture, recording: Recording, displacement: Displacement, relax: float, peers: Peers = ALONE
    ) -> tuple[Columns, ValueFunction]:
        """V_x and V_xx at the outputs (line 6), and the cotangents that the recursion runs along."""
        p_h = [[s.p_h for s in recording.stages if s.p_h is not None]]
        p_x = [[s.p_x for s in recording.stages]]
        if self.value == "full":
            return (p_h, p_x), self._full(capture, recording, displacement.chain, peers)
        if self.along_gradient:
            L = self._lambda(recording, p_h[0][-1], peers)
            if self.value == "outer":
                return (p_h, p_x), Outer(L, along_gradient=True, guard=self.guard, displacement=displacement)
            return (p_h, p_x), self._joint(L, torch.full_like(L, relax), displacement, 1, peers)
        k, z, _ = single_output(recording)
        F = forms.factor(self.terminal, z, self.mean) * self.share(recording, peers) ** 0.5  # (R, B, n)
        pulled_h, pulled_x = pull_back(capture, recording, k, F.reshape(len(F), *z.shape))
        columns = ([*p_h, *pulled_h], [*p_x, *pulled_x])
        ones = F.new_ones(F.shape[1])
        if self.value == "outer":
            if len(F) > 1:
                raise OptionError(
                    f"terminal: the callable returned {len(F)} columns a sample; value='outer' carries one. Use "
                    "value='batch' or 'full'."
                )
            return columns, Outer(ones, along_gradient=False, guard=self.guard, displacement=displacement)
        # the gradient itself is a column without curvature
        L = torch.cat([torch.zeros_like(ones), ones.repeat(len(F))])
        v = torch.cat([relax * ones, torch.zeros_like(ones).repeat(len(F))])
        return columns, self._joint(L, v, displacement, 1 + len(F), peers)

    def _joint(self, L: Tensor, v: Tensor, displacement: Displacement, columns: int, peers: Peers) -> Batch | Blocks:
        """The joint form, for a large batch in blocks; shared with others it is coupled whole, whatever its size."""
        if peers.alone and len(L) // columns > LARGEST:
            return Blocks(L, v, displacement, columns, self.dof)
        return Batch(L, v, displacement, columns, peers, self.dof)

    def _lambda(self, recording: Recording, q: Tensor, peers: Peers) -> Tensor:
        """Curvature along the gradient: (B,)."""
        if self.terminal == "sqrt":
            return forms.sqrt_curvature(shares(recording, self.mean))
        # the paper's factored form is (grad/B)(grad/B)', the joint Hessian of the batch is grad grad'/B
        joint = self.value == "batch" and self.mean
        return q.new_full((len(q),), float(peers.batch(len(q))) if joint else 1.0)

    def _full(self, capture: Capture, recording: Recording, chain: bool, peers: Peers) -> Full | Factored:
        for stage in recording.stages:
            if stage.recomputed:
                raise ModelError(
                    f"value='full' needs a graph that is cut at each layer, but layer '{stage.name}' is run again in "
                    "the backward pass by activation checkpointing: use value='batch' or 'outer', or do not checkpoint."
                )
        cut = probes(capture, recording)
        t = None if chain else cut[0].off_chain(recording)
        if t is not None:
            at = f"layer '{recording.stages[t].name}'" if t < len(recording.stages) else "the output"
            raise ModelError(
                f"value='full' needs a chain of layers, but {at} reads more (or less) than the layer before it: use "
                "value='batch' or 'outer' for networks with branches or skip connections."
            )
        for name, module in capture.batch_norms:
            if module.training:
                raise ModelError(
                    f"value='full' takes the samples one by one, but '{name}' couples them: use value='batch', or "
                    "put the batch norm into eval mode."
                )
        k, z, q = single_output(recording)
        of_parts = [Segment.chain(p.leaves, [*p.inputs[1:], p.outputs[k]], self.order) for p in cut]
        segments: list[Pullback] = list(of_parts[0])
        if len(cut) > 1:
            segments = [JointSegment(list(parts)) for parts in zip(*of_parts, strict=True)]
        V_x = q.flatten(1)
        low_rank = self.guard and self.order == 1 and not self.vxx_reg and not callable(self.terminal)
        Z = self._rows(recording, z, q, peers) if low_rank or self.along_gradient else None
        if Z is None:
            V_xx = forms.hessian(self.terminal, z, self.mean) * self.share(recording, peers)
        elif low_rank and Z.shape[1] <= min(leaf[0].numel() for leaf in cut[0].leaves):
            return Factored(V_x, Z, segments)
        else:  # V_xx itself is the smaller, or has more added to it
            V_xx = Z.mT @ Z
        return Full(V_x, V_xx, segments, order=self.order, guard=self.guard, vxx_reg=self.vxx_reg)

    def _rows(self, recording: Recording, z: Tensor, q: Tensor, peers: Peers) -> Tensor:
        """A factor of the terminal Hessian, V_xx = Z' Z: (B, r, n)."""
        if self.along_gradient:
            return self._lambda(recording, q, peers).sqrt()[:, None, None] * q.flatten(1)[:, None]
        return forms.factor(self.terminal, z, self.mean).transpose(0, 1) * self.share(recording, peers) ** 0.5


def outputs_with_gradient(recording: Recording) -> list[tuple[int, Tensor, Tensor]]:
    """The outputs that the loss was computed from: (index, z, q), in the precision of the weights."""
    dtype = recording.stages[0].unit.parameters[0].dtype
    found = []
    for k in recording.used_outputs():
        q = recording.q[k]
        assert q is not None
        found.append((k, recording.outputs[k].to(dtype), q.to(dtype)))
    return found


def single_output(recording: Recording) -> tuple[int, Tensor, Tensor]:
    found = outputs_with_gradient(recording)
    if len(found) != 1:
        raise ModelError(
            f"This terminal curvature needs one output of the model with a gradient and the batch in dimension 0; "
            f"there are {len(found)}. Use terminal='sqrt' or 'gn', which need none."
        )
    return found[0]


def losses(recording: Recording, mean: bool) -> list[tuple[Tensor, Loss]]:
    """The recognised losses at the outputs, or at the last layer if the model has computed the loss itself."""
    if recording.losses is None:
        found = [(z, q) for _, z, q in outputs_with_gradient(recording)]
        if not found:
            last = recording.stages[-1]
            assert last.p_h is not None
            found = [(last.unit.module.forward(last.x), last.p_h)]
        recording.losses = [(z, recognise(z, q, mean)) for z, q in found]
    return recording.losses


def shares(recording: Recording, mean: bool) -> Tensor:
    """What each sample contributes to the batch loss, above the least possible: (B,)."""
    if recording.shares is None:
        found = [loss.shares(z) for z, loss in losses(recording, mean)]
        recording.shares = found[0] if len(found) == 1 else torch.stack(found).sum(0)
    return recording.shares
