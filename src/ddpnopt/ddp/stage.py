"""A stage of the control problem on plain tensors, how far its input has moved, and the direction of its update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddpnopt._distributed import ALONE, Peers
from ddpnopt.ddp.balance import Balance
from ddpnopt.ddp.balanced import BalancedGradients, OneGradient, OuterProducts, Stored, SummedUp
from ddpnopt.ddp.balanced_forms import balanced_gradients, sketched
from ddpnopt.ddp.sketched import Sketch, Sketched, SketchedProducts
from ddpnopt.linear.given import Given, without_held
from ddpnopt.linear.layer import Layer, Parts, add, in_precision, per_sample_dot, stacked
from ddpnopt.linear.metric import Metric
from ddpnopt.linear.sample_gradients import Explicit, SampleGradients, Sums

EMPTY = torch.empty(0)
COPIED = 2**14  # weights up to which a layer keeps a copy of them during a step
REVERSIBLE = 0.01  # factor of the prior from which on dividing by it gives back what was multiplied, but for rounding


@dataclass(eq=False)
class Stage:
    """Stage t: one layer, its recorded input and gradients, and its weights."""

    name: str
    layer: Layer
    x: Tensor  # (B, …)
    u: Parts  # nominal weights; where `kept` a copy of them, otherwise they change with `weights`
    eta: float  # Q_uu = M / eta
    p_h: list[Tensor]  # per column (the gradient of the batch loss first): cotangents at the output
    p_x: list[Tensor | None]  # … and at the input, through this layer; None where it was not recorded
    l_u: Parts | None = None  # gradient of the stage cost (weight decay)
    p_h_dot_h: Tensor | None = None  # <p_h, h> of the gradient, where known
    peers: Peers = ALONE  # the processes with the rest of the batch
    recompute: bool | None = None  # whether per-sample gradients are computed twice rather than stored
    moves: bool = True  # whether x depends on the layers before
    state: dict[str, Any] = field(default_factory=dict)  # of curvature, momentum and damping, from step to step
    weights: list[Tensor] = field(default_factory=list)  # the model's own, which the forward sweep changes
    momentum: float = 0.0
    later: Tensor | None = None  # the part of x of later uses, of a layer that runs several times in one pass
    balance: Balance | None = None  # the variables that the per-sample gradients and d are in, if not u itself
    prior: list[tuple[float, Parts]] = field(default_factory=list)  # factors and steps (with the sign of a gradient)
    decay: Parts | None = None  # the one of them that goes down the stage cost alone
    fraction: float = 1.0  # of the prior that the step takes
    size: float = 1.0  # root mean square of the weights, where eta is relative to it
    changed: bool = field(default=False, init=False)  # whether `weights` differ from the nominal ones
    update: Parts | None = field(default=None, init=False)  # old minus new weights, where they are known
    combined: Tensor | None = field(default=None, init=False)  # its combinations, in a large layer
    norms: list[float] | None = field(default=None, init=False)  # of its parts, where they are known
    kept: bool = field(default=False, init=False)  # whether u is a copy of the nominal weights
    put_back: Callable[[], None] | None = field(default=None, init=False)  # gives the prior step its values again
    _gradients: SampleGradients | None = field(default=None, init=False)
    _balanced: BalancedGradients | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        held = self.state.get("held")
        if held is not None and isinstance(self.layer, Given):
            self.p_h, self.p_h_dot_h = [without_held(p, held) for p in self.p_h], None

    @property
    def batch(self) -> int:
        """Samples in the whole batch."""
        samples = self.x.shape[0]
        return samples if self.peers.alone else self.peers.batch(samples)

    def free(self) -> None:
        """Drop the tensors of the size of the activations."""
        self.x, self.p_h, self.p_x, self.later = EMPTY, [], [], None
        self._gradients = self._balanced = None

    def recall(self, last: Parts | None) -> None:
        """Take up the combinations of the last update, where they are known from the step before."""
        combined = self.state.pop("combined_update", None)
        if combined is not None and last is not None and self.sketched is not None:
            self.sketched.know(last, combined)

    def keep_weights(self) -> None:
        """Copy the nominal weights before they are changed, unless that has been done."""
        if not self.kept:
            self.u = [w.clone() for w in self.weights]
        self.kept = self.changed = True

    @property
    def is_precise(self) -> bool:
        """Whether the weights change by what is subtracted from them, up to rounding."""
        return self.weights[0].dtype.itemsize >= 4

    def _is_small(self) -> bool:
        """Whether the layer changes by no more than its size, so that adding the update gives back what was there."""
        return self.norms is not None and math.hypot(*self.norms) <= self.size * self.weights[0].numel() ** 0.5

    def restore(self) -> None:
        """Give the weights their nominal values again, and the prior step its own where the update has its place."""
        if self.changed and self.kept:
            torch._foreach_copy_(self.weights, self.u)
        elif self.changed and self.update is not None:
            torch._foreach_add_(self.weights, self.update)
        if self.put_back is not None:
            self.put_back()
            self.put_back = None

    @property
    def has_input_gradients(self) -> bool:
        """Whether <p_x, dx> can be computed without p_h."""
        return not self.moves or all(p is not None for p in self.p_x)

    def free_recorded(self, displacement: Displacement) -> None:
        """Drop p_h, or x, where the forward sweep needs only the per-sample gradients, which do without it."""
        stored, products = type(self._balanced) is Stored, isinstance(self._balanced, OuterProducts)
        if not stored and not products and (self._gradients is None or not isinstance(self._gradients, Explicit)):
            return
        if displacement.chain:
            if self.has_input_gradients:
                self.p_h = []
                if type(self._balanced) is OuterProducts:
                    self._balanced.p = EMPTY
        elif stored and (not self.moves or self.p_x[0] is None):  # the ledger needs p_h alone
            self.x = self.x.new_empty(len(self.x), 0)

    @property
    def sketched(self) -> Sketch | None:
        """The per-sample gradients, if these are combinations: then so is the effect of the update at new inputs."""
        if self._balanced is None and not self.peers.alone and self.p_h:
            self._balanced = sketched(self.layer, self.x, self.p_h[0], self.balance, self.batch, sent=True)
        return self._balanced if isinstance(self._balanced, (Sketched, SketchedProducts)) else None

    def gradients(self, *, coupled: bool) -> SampleGradients:
        """P_u of all columns, column r of sample i in row r B + i; coupled: each is multiplied with all others."""
        if self._gradients is None:
            R = len(self.p_h)
            x, p = (self.x, self.p_h[0]) if R == 1 else (torch.cat([self.x] * R), torch.cat(self.p_h))
            layer = self.layer
            if self.balance is not None:
                layer, x, p = self.balance.of(layer), self.balance.inputs(x), self.balance.outputs(p)
            others = R * self.batch if coupled else 1
            self._gradients = layer.sample_gradients(x, p, others=others, recompute=self.recompute)
        return self._gradients

    def balanced_gradients(self) -> BalancedGradients:
        """P_u of one column with the factors of `balance`, which sums have twice; one process has the whole batch."""
        assert self.balance is not None
        if self._balanced is None:
            self._balanced = balanced_gradients(
                self.layer, self.x, self.p_h[0], self.balance, others=self.batch, recompute=self.recompute
            )
        return self._balanced


def change(stages: list[Stage], updates: list[Parts]) -> None:
    """weights <- weights - update. A large layer has no copy of the old ones if adding the update gives them back.

    Such a copy would take as much memory as the weights, and as long as the subtraction. (An accelerator would have to
    be waited for to know.)
    """
    parts = [part for update in updates for part in update]
    # those of all stages take one call; that of a single small one would be no use here
    if parts[0].device.type == "cpu" and (len(stages) > 1 or stages[0].weights[0].numel() >= COPIED):
        norms = iter(stacked(torch._foreach_norm(parts)).tolist())
        for stage, update in zip(stages, updates, strict=True):
            stage.norms = [next(norms) for _ in update] if stage.is_precise else None
    for stage in stages:
        if stage.weights[0].numel() < COPIED or not stage._is_small():
            stage.keep_weights()
    torch._foreach_sub_([weight for stage in stages for weight in stage.weights], parts)
    for stage, update in zip(stages, updates, strict=True):
        # in half precision what rounding leaves of it
        stage.update = update if stage.is_precise else list(torch._foreach_sub(stage.u, stage.weights))
        stage.changed = True


@dataclass(eq=False)
class Direction:
    """d = l_u + sum over the batch of g_u' V_h + Q_ux dx: an explicit sum, or weights w of per-sample gradients."""

    summed: Parts | None = None  # over the samples of this process
    gradients: Sums | None = None
    w: Tensor | None = None
    l_u: Parts | None = None
    peers: Peers = ALONE
    _explicit: Parts | None = None

    def parts(self) -> Parts:
        """d, explicitly."""
        if self._explicit is None:
            if self.summed is None:
                assert self.gradients is not None
                assert self.w is not None
                self.summed = self.gradients.combine(self.w)
            self._explicit = add(self.peers.sum(self.summed), self.l_u)
        return self._explicit

    def solved(self, layer: Layer, metric: Metric) -> Parts:
        """M^-1 d."""
        if self.gradients is not None and self.w is not None and self._explicit is None and self.peers.alone:
            solved = self.gradients.solved(self.w, metric)
            return solved if self.l_u is None else add(solved, metric.solve(layer, self.l_u))
        return metric.solve(layer, self.parts())

    def add_to(self, u: list[Tensor], alpha: float) -> None:
        """u <- u + alpha d, without materialising d where that can be avoided."""
        rest = self.l_u
        if self.gradients is not None and self.w is not None and self._explicit is None and self.peers.alone:
            self.gradients.add_to(u, self.w, alpha)
        else:
            rest = self.parts()
        if rest is not None:
            for weight, part in zip(u, rest, strict=True):
                weight.add_(part, alpha=alpha)

    def times(self, alpha: float) -> Parts:
        """alpha d, as new tensors."""
        if self.gradients is not None and self.w is not None and self._is_sum:
            return self.gradients.combine(self.w * alpha)
        return list(torch._foreach_mul(self.parts(), alpha))

    @property
    def _is_sum(self) -> bool:
        """Whether d is a sum over the samples of this process alone, which is not there yet."""
        return self._explicit is None and self.l_u is None and self.peers.alone

    def fits(self, step: Parts) -> bool:
        """Whether to write d into this step: it has a large weight, and the way back needs less memory than another."""
        gradients, weight = self.gradients, step[0]
        if not isinstance(gradients, (OuterProducts, OneGradient)) or not self._is_sum or weight.dtype.itemsize < 4:
            return False
        return weight.numel() >= max(COPIED, 2 * gradients.x.numel())

    def write_into(self, step: Parts, share: float, alpha: float) -> Callable[[], None]:
        """step <- share step + alpha d; what undoes it, for which the gradients are kept."""
        if isinstance(self.gradients, OuterProducts) and self.w is not None:
            self.gradients.add_to(step, self.w, alpha, share)
        else:
            torch._foreach_mul_(step, share)
            self.add_to(step, alpha)

        def put_back() -> None:
            self.add_to(step, -alpha)
            torch._foreach_mul_(step, 1 / share)

        return put_back

    def plus(self, step: Parts, share: float, alpha: float) -> Parts:
        """share step + alpha d, as new tensors, with as few calls and passes over the weights as there are."""
        gradients, w = self.gradients, self.w
        if gradients is not None and w is not None and self.l_u is None and self.peers.alone:
            if isinstance(gradients, OuterProducts) and step[0].numel() < COPIED:
                return gradients.plus(step, share, w, alpha)
            if isinstance(gradients, SummedUp):
                own = gradients.combine(w * alpha)
                if _are_alike(own, step):
                    torch._foreach_add_(own, step, alpha=share)
                    return own
                found = list(torch._foreach_mul(step, share))
                torch._foreach_add_(found, own)
                return found
        found = list(torch._foreach_mul(step, share))
        self.add_to(found, alpha)
        return found


def _are_alike(a: Parts, b: Parts) -> bool:
    """Whether the parts have the same precision and the same order in memory."""
    return all(p.dtype == q.dtype and p.stride() == q.stride() for p, q in zip(a, b, strict=True))


Policy = Callable[[Tensor | None], Direction]
"""d(x^), so that du = -eta M^-1 d; None stands for dx = 0."""


@dataclass(eq=False)
class Displacement:
    """c_t = <p_x, dx>: what the layers before t have done to the predicted loss, for each column and sample.

    In a chain it is computed at the input of layer t, exactly. In any other graph the state has parts that no layer's
    input shows (skip connections), and c_t is kept as a ledger: each layer adds the effect of its own update,
    <p_h, h^ - h> - <p_x, x^ - x>. Where p_x was not recorded, the layer is applied to dx instead:
    <p_x, dx> = <p_h, g_x dx>, and the entry of the ledger is <p_h, g(x^, du)>; in a large layer of combinations of all.
    """

    chain: bool
    once: bool = False  # whether a stage is visited only once, so that its tensors can be freed
    _ledger: list[Tensor] | None = None

    def at(self, stage: Stage, x_hat: Tensor | None) -> Tensor | None:
        """c_t as (R B,); None for zero."""
        if x_hat is None:
            return None
        if not self.chain:
            return None if self._ledger is None else _cat(self._ledger)
        if not stage.moves:
            return None
        x_hat = in_precision(x_hat, stage.x.dtype)
        if stage.p_x[0] is None or any(p is None for p in stage.p_x):
            dh = stage.layer.apply(x_hat - stage.x, stage.u[:1])
            if len(stage.p_h) == 1:
                return per_sample_dot(stage.p_h[0], dh)
            columns = [per_sample_dot(p, dh) for p in stage.p_h]
        else:
            columns = [per_sample_dot(p, x_hat, stage.x) for p in stage.p_x if p is not None]
            if self.once:
                stage.p_x = []
        return _cat(columns)

    def after(self, stage: Stage, x_hat: Tensor, h_hat: Tensor) -> None:
        """Add the effect of stage t's update to the ledger."""
        if stage.sketched is None and stage.p_h_dot_h is not None and len(stage.p_h) == 1 and stage.has_input_gradients:
            own = per_sample_dot(stage.p_h[0], h_hat.to(stage.p_h[0].dtype)) - stage.p_h_dot_h
            if stage.moves and stage.p_x[0] is not None:
                own = own - per_sample_dot(stage.p_x[0], x_hat.to(stage.x.dtype), stage.x)
            entries = [own]
        else:
            if stage.update is None:
                stage.update = list(torch._foreach_sub(stage.u, stage.weights))
            update = stage.update
            x_hat = x_hat.to(stage.x.dtype)
            if stage.later is not None:  # which have not run yet: the new weights on the recorded inputs
                x_hat = stage.layer.together([x_hat, stage.later])
            if stage.sketched is not None:
                entries = [stage.sketched.effect_at(x_hat, update).neg_()]
            else:
                dh = stage.layer.apply(x_hat, update)
                entries = [per_sample_dot(p, dh).neg_() for p in stage.p_h]
        before = self._ledger
        self._ledger = entries if before is None else [a + b for a, b in zip(before, entries, strict=True)]


def _cat(columns: list[Tensor]) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(columns)
