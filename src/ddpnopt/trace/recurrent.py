"""`nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells made of linear pieces: one for the inputs and one for the states."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.trace.fused import Fused, Piece, Replacement
from ddpnopt.trace.packed import Packing
from ddpnopt.trace.recurrence import GRU, LSTM, RNN, Cell, Recurrence

_SEQUENCES: dict[Any, Cell] = {
    torch.lstm: LSTM(), torch.gru: GRU(), torch.rnn_tanh: RNN(), torch.rnn_relu: RNN(relu=True),
}  # fmt: skip
_MODES = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}


class Recurrent(Fused):
    """Replaces the call that runs all layers, directions and times of a recurrent module."""

    module: nn.RNNBase

    def __init__(self, name: str, module: nn.RNNBase) -> None:
        super().__init__(name, module)
        self._weights: list[nn.Parameter] = []  # in the order of the fused call
        for end in self._ends():
            self._weights += [getattr(module, f"weight_{kind}{end}") for kind in ("ih", "hh")]
            biases = [getattr(module, f"bias_{kind}{end}") for kind in ("ih", "hh")] if module.bias else [None, None]
            self._weights += [b for b in biases if b is not None]
            for kind, bias in zip(("ih", "hh"), biases, strict=True):
                weight = getattr(module, f"weight_{kind}{end}")
                self.pieces[f"{kind}{end}"] = Piece(weight, bias, recurrent=kind == "hh")

    def _ends(self) -> list[str]:
        directions = ("", "_reverse") if self.module.bidirectional else ("",)
        return [f"_l{k}{direction}" for k in range(self.module.num_layers) for direction in directions]

    def replacements(self, args: tuple[Any, ...]) -> dict[Any, Replacement]:
        packing = Packing.of(args)
        forward = self._forward if packing is None else partial(self._packed_forward, packing)
        return {_MODES[self.module.mode]: forward}

    def _forward(self, input: Tensor, hx: Any, weights: Any, *settings: Any) -> Any:
        if not isinstance(settings[-1], bool) or len(settings) != 6 or not self._mine(weights):
            return NotImplemented
        batch_first = settings[-1]
        h0, c0 = hx if isinstance(hx, (list, tuple)) else (hx, None)
        x = input if batch_first else input.transpose(0, 1)  # (B, T, n)
        out, h_n, c_n = self._layers(x, h0, c0, None)
        out = out.transpose(0, 1) if batch_first else out
        return (out, h_n) if c_n is None else (out, h_n, c_n)

    def _packed_forward(
        self, packing: Packing, input: Tensor, sizes: Tensor, hx: Any, weights: Any, *settings: Any
    ) -> Any:
        if len(settings) != 5 or not self._mine(weights):
            return NotImplemented
        states = hx if isinstance(hx, (list, tuple)) else (hx, None)
        h0, c0 = (None if state is None else packing.of_batch(state) for state in states)
        assert h0 is not None
        out, h_n, c_n = self._layers(input, h0, c0, packing)
        h_n = packing.by_length(h_n)
        return (out, h_n) if c_n is None else (out, h_n, packing.by_length(c_n))

    def _mine(self, weights: Any) -> bool:
        if not isinstance(weights, (list, tuple)) or len(weights) != len(self._weights):
            return False
        return all(a is b for a, b in zip(weights, self._weights, strict=True))

    def _layers(
        self, x: Tensor, h0: Tensor, c0: Tensor | None, packing: Packing | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """All layers and directions: (B, T, n) -> (T, B, n), or rows to rows where they are packed; the last states."""
        dropout = self.module.dropout if self.module.training else 0.0
        directions = 2 if self.module.bidirectional else 1
        last_h, last_c = [], []
        for k, end in enumerate(self._ends()):
            reverse = k % directions == 1
            if not reverse:
                outs: list[Tensor] = []
            c = None if c0 is None else c0[k]
            if packing is not None:
                out, h_n, c_n = self._layer(end, packing.pad(x, reverse=reverse), h0[k], c, packing)
                outs.append(packing.pack(out, reverse=reverse))
            else:
                out, h_n, c_n = self._layer(end, x.flip(1) if reverse else x, h0[k], c)
                outs.append(out.flip(0) if reverse else out)
            last_h.append(h_n)
            last_c.append(c_n)
            if k % directions == directions - 1:
                joined = torch.cat(outs, -1) if directions > 1 else outs[0]
                if k < len(self._ends()) - 1:
                    joined = F.dropout(joined, dropout) if dropout else joined
                    x = joined if packing is not None else joined.transpose(0, 1)
        return joined, torch.stack(last_h), None if c0 is None else torch.stack(last_c)

    def _layer(
        self, end: str, x: Tensor, h0: Tensor, c0: Tensor | None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        """One layer in one direction: (B, T, n) -> (T, B, H), and the last states."""
        cell = _SEQUENCES[_MODES[self.module.mode]]
        of_inputs, of_states = self.pieces[f"ih{end}"], self.pieces[f"hh{end}"]
        assert isinstance(of_states, Piece)
        weight, bias = of_states.weight, of_states.bias
        gx = of_inputs(x).transpose(0, 1).contiguous()
        if packing is not None:
            gx = cell.kept_where(packing.padding, gx)
        if not torch.is_grad_enabled():  # a forward sweep: the weights are updated before their first use
            of_states(h0[:, None])
            run = cell.run(gx, h0, c0, weight, bias)
            out, c_n = run.h[1:], None if run.c is None else run.c[-1]
        else:
            with torch.no_grad():
                run = cell.run(gx, h0, c0, weight, bias)
            gh = of_states(run.h[:-1].transpose(0, 1)).transpose(0, 1)
            found = Recurrence.apply(cell, run, weight.detach(), gx, gh, h0, c0)  # type: ignore[no-untyped-call]
            out, c_n = found[0], None if c0 is None else found[1]
        return out, out[-1] if packing is None else packing.last(out), c_n


class RecurrentCell(Fused):
    """Replaces the call of `nn.LSTMCell`, `nn.GRUCell` or `nn.RNNCell`: one time step."""

    def __init__(self, name: str, module: nn.RNNCellBase) -> None:
        super().__init__(name, module)
        for kind in ("ih", "hh"):
            weight, bias = getattr(module, f"weight_{kind}"), getattr(module, f"bias_{kind}")
            self.pieces[kind] = Piece(weight, bias)

    def replacements(self, args: tuple[Any, ...]) -> dict[Any, Replacement]:
        return {
            torch.lstm_cell: self._lstm, torch.gru_cell: self._gru,
            torch.rnn_tanh_cell: self._tanh, torch.rnn_relu_cell: self._relu,
        }  # fmt: skip

    def _mine(self, weights: tuple[Tensor, ...]) -> bool:
        return weights[0] is self.pieces["ih"].weight and weights[1] is self.pieces["hh"].weight

    def _lstm(self, x: Tensor, hx: tuple[Tensor, Tensor], *weights: Tensor) -> Any:
        if not self._mine(weights):
            return NotImplemented
        i, f, g, o = (self.pieces["ih"](x) + self.pieces["hh"](hx[0])).chunk(4, 1)
        c = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def _gru(self, x: Tensor, h: Tensor, *weights: Tensor) -> Any:
        if not self._mine(weights):
            return NotImplemented
        H = h.shape[1]
        gx, gh = self.pieces["ih"](x), self.pieces["hh"](h)
        r, z = (gx[:, : 2 * H] + gh[:, : 2 * H]).sigmoid().chunk(2, 1)
        n = torch.tanh(gx[:, 2 * H :] + r * gh[:, 2 * H :])
        return (h - n) * z + n

    def _tanh(self, x: Tensor, h: Tensor, *weights: Tensor) -> Any:
        return (self.pieces["ih"](x) + self.pieces["hh"](h)).tanh() if self._mine(weights) else NotImplemented

    def _relu(self, x: Tensor, h: Tensor, *weights: Tensor) -> Any:
        return (self.pieces["ih"](x) + self.pieces["hh"](h)).relu() if self._mine(weights) else NotImplemented
