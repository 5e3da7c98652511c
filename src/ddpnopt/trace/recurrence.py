"""The recurrences of LSTM, GRU and RNN over given input gates, and their backward pass through time.

All tensors are time-major: gates of the inputs gx and of the states gh (T, B, gates x H), states (T, B, H). The
backward pass returns the gradients at the gates of all times at once, which is what the per-sample gradients of the
weights need, and takes a few small products per time step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Gates = tuple[Tensor, Tensor]
"""Gradients at gx and gh."""


@dataclass
class Unrolled:
    """A recurrence that has run without a graph."""

    h: Tensor  # (T + 1, B, H), from the initial state on
    c: Tensor | None  # (T + 1, B, H), of an LSTM
    kept: list[Tensor]  # for the backward pass


class Cell(ABC):
    """How one time step follows from the one before it."""

    gates: int

    def kept_where(self, padding: Tensor, gx: Tensor) -> Tensor:
        """Input gates, (T, B, gates x H), with which the memory c stays as it is where there is no input, (T, B)."""
        return gx

    @abstractmethod
    def run(self, gx: Tensor, h0: Tensor, c0: Tensor | None, weight: Tensor, bias: Tensor | None) -> Unrolled:
        """All time steps."""

    @abstractmethod
    def back(self, run: Unrolled, weight: Tensor, dh: Tensor, dc: Tensor | None) -> tuple[Gates, Tensor, Tensor | None]:
        """From gradients at h[1:] and at the last c to those at the gates and at the initial states."""


def _states(h0: Tensor, T: int) -> Tensor:
    states = h0.new_empty(T + 1, *h0.shape)
    states[0] = h0
    return states


class LSTM(Cell):
    """c' = f c + i g, h' = o tanh(c'); gates i, f, g, o."""

    gates = 4

    def kept_where(self, padding: Tensor, gx: Tensor) -> Tensor:
        H = gx.shape[-1] // self.gates
        closed = gx.new_tensor([-torch.inf, torch.inf, 0, 0]).repeat_interleave(H)  # i = 0, f = 1
        return torch.where(padding[..., None], closed, gx)

    def run(self, gx: Tensor, h0: Tensor, c0: Tensor | None, weight: Tensor, bias: Tensor | None) -> Unrolled:
        assert c0 is not None
        T, H = len(gx), h0.shape[-1]
        h, c, W = _states(h0, T), _states(c0, T), weight.T
        acts = gx.clone() if bias is None else gx + bias
        for t in range(T):
            now = acts[t].addmm_(h[t], W)
            now[:, : 2 * H].sigmoid_()
            now[:, 2 * H : 3 * H].tanh_()
            now[:, 3 * H :].sigmoid_()
            i, f, g, o = now.chunk(4, 1)
            torch.mul(f, c[t], out=c[t + 1]).addcmul_(i, g)
            torch.tanh(c[t + 1], out=h[t + 1]).mul_(o)
        return Unrolled(h, c, [acts])

    def back(self, run: Unrolled, weight: Tensor, dh: Tensor, dc: Tensor | None) -> tuple[Gates, Tensor, Tensor | None]:
        assert run.c is not None
        (acts,) = run.kept
        i, f, g, o = acts.chunk(4, -1)
        tanh_c = run.c[1:].tanh()
        through_c = o * (1 - tanh_c.square())
        slopes = torch.stack(
            [g * i * (1 - i), run.c[:-1] * f * (1 - f), i * (1 - g.square()), tanh_c * o * (1 - o)], -2
        )  # (T, B, 4, H)
        found = torch.empty_like(slopes)
        flat = found.flatten(-2)
        at_h, at_c = dh[-1], torch.zeros_like(dh[-1]) if dc is None else dc
        for t in range(len(acts) - 1, -1, -1):
            at_c = torch.addcmul(at_c, at_h, through_c[t])
            torch.mul(slopes[t, :, :3], at_c[:, None], out=found[t, :, :3])
            torch.mul(slopes[t, :, 3], at_h, out=found[t, :, 3])
            at_c = at_c * f[t]
            at_h = torch.addmm(dh[t - 1], flat[t], weight) if t else flat[t] @ weight
        return (flat, flat), at_h, at_c


class GRU(Cell):
    """h' = (1 - z) n + z h, n = tanh(gx_n + r gh_n); gates r, z, n."""

    gates = 3

    def run(self, gx: Tensor, h0: Tensor, c0: Tensor | None, weight: Tensor, bias: Tensor | None) -> Unrolled:
        T, H = len(gx), h0.shape[-1]
        h, W = _states(h0, T), weight.T
        acts, from_h = torch.empty_like(gx), gx.new_empty(*gx.shape[:-1], H)
        for t in range(T):
            gh = h[t] @ W if bias is None else torch.addmm(bias, h[t], W)
            rz = torch.add(gx[t, :, : 2 * H], gh[:, : 2 * H], out=acts[t, :, : 2 * H]).sigmoid_()
            from_h[t] = gh[:, 2 * H :]
            n = torch.addcmul(gx[t, :, 2 * H :], rz[:, :H], from_h[t], out=acts[t, :, 2 * H :]).tanh_()
            torch.lerp(n, h[t], rz[:, H:], out=h[t + 1])
        return Unrolled(h, None, [acts, from_h])

    def back(self, run: Unrolled, weight: Tensor, dh: Tensor, dc: Tensor | None) -> tuple[Gates, Tensor, Tensor | None]:
        acts, from_h = run.kept
        r, z, n = acts.chunk(3, -1)
        at_n = (1 - z) * (1 - n.square())
        # with respect to gh: r, z and n times r; with respect to gx the last is n alone
        slopes = torch.stack([at_n * from_h * r * (1 - r), (run.h[:-1] - n) * z * (1 - z), at_n * r], -2)
        found = torch.empty_like(slopes)  # (T, B, 3, H)
        flat = found.flatten(-2)
        at_h = dh[-1]
        of_inputs = torch.empty_like(flat)
        for t in range(len(acts) - 1, -1, -1):
            torch.mul(slopes[t], at_h[:, None], out=found[t])
            torch.mul(at_n[t], at_h, out=of_inputs[t, :, -at_n.shape[-1] :])
            before = torch.addmm(dh[t - 1], flat[t], weight) if t else flat[t] @ weight
            at_h = before.addcmul_(at_h, z[t])
        H = at_n.shape[-1]
        of_inputs[..., : 2 * H] = flat[..., : 2 * H]
        return (of_inputs, flat), at_h, None


@dataclass(frozen=True)
class RNN(Cell):
    """h' = tanh(gx + gh), or relu."""

    relu: bool = False
    gates = 1

    def run(self, gx: Tensor, h0: Tensor, c0: Tensor | None, weight: Tensor, bias: Tensor | None) -> Unrolled:
        h, W = _states(h0, len(gx)), weight.T
        if bias is not None:
            gx = gx + bias
        for t in range(len(gx)):
            now = torch.addmm(gx[t], h[t], W, out=h[t + 1])
            _ = now.relu_() if self.relu else now.tanh_()
        return Unrolled(h, None, [])

    def back(self, run: Unrolled, weight: Tensor, dh: Tensor, dc: Tensor | None) -> tuple[Gates, Tensor, Tensor | None]:
        h = run.h[1:]
        slopes = (h > 0).to(h.dtype) if self.relu else 1 - h.square()
        found, at_h = torch.empty_like(slopes), dh[-1]
        for t in range(len(h) - 1, -1, -1):
            torch.mul(slopes[t], at_h, out=found[t])
            at_h = torch.addmm(dh[t - 1], found[t], weight) if t else found[t] @ weight
        return (found, found), at_h, None


class Recurrence(torch.autograd.Function):
    """A recurrence that has run as a function of its gates gx and gh at all times, and of its initial states.

    The gates gh are those of constant states: what they pass on from time to time is part of the backward pass here.
    """

    @staticmethod
    def forward(
        ctx: Any, cell: Cell, run: Unrolled, weight: Tensor, gx: Tensor, gh: Tensor, h0: Tensor, c0: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.cell, ctx.run, ctx.has_c = cell, run, c0 is not None
        ctx.save_for_backward(weight)  # which must not change before the backward pass
        out = run.h[1:].clone()  # what the user does to it in place must not reach the states kept here
        return (out,) if run.c is None else (out, run.c[-1].clone())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dh: Tensor, dc: Tensor | None = None) -> tuple[Any, ...]:
        (weight,) = ctx.saved_tensors
        (at_gx, at_gh), at_h0, at_c0 = ctx.cell.back(ctx.run, weight, dh, dc)
        return None, None, None, at_gx, at_gh, at_h0, at_c0 if ctx.has_c else None
