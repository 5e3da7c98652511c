"""Several processes whose samples have sequences, images or graphs of different sizes.

The layers get further places behind the last ones, at which inputs and gradients are zero, as if all samples had been
padded to the same size: then all processes choose the same forms, and what they exchange has one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt._distributed import Together
from ddpnopt._value import Columns, Passes
from ddpnopt.errors import ModelError
from ddpnopt.linear.convolution import Conv
from ddpnopt.trace.probes import Paths, Probe
from ddpnopt.trace.recording import LayerRecord, Recording
from ddpnopt.trace.replay import AtLayer

Size = tuple[int, ...]


def described(records: Sequence[LayerRecord], *, coupled: bool) -> tuple[str, str]:
    """What all processes must have in common to take a step, and what they exchange where it differs.

    These are the layers with the dimensions of what they read and return, and the sizes of one sample there.
    """
    sizes = _sizes_of(records) if coupled else []
    return ",".join([*(record.name for record in records), *(str(len(size)) for size in sizes)]), str(sizes)


class CommonSizes:
    """The replays of a recording whose layers have been extended to the sizes of all processes."""

    def __init__(self, passes: Passes, recording: Recording, sizes: list[Size]) -> None:
        self.passes, self.inputs, self.outputs = passes, sizes[::2], sizes[1::2]
        self.several = [record.later is not None for record in recording.layers]  # uses, of which the first is shown
        self.batch_norms: list[tuple[str, nn.Module]] = passes.batch_norms
        self._extend(recording.layers)

    @staticmethod
    def of(passes: Passes, recording: Recording | None, peers: Together) -> Passes:
        """The passes themselves where all processes have the same sizes."""
        if recording is None or peers.alike:
            return passes
        own = _sizes_of(recording.layers)
        least, most = peers.extent([n for size in own for n in size], recording.device)
        sizes, small = _like(own, most), _like(own, least)
        for t, record in enumerate(recording.layers):
            of_layer = slice(2 * t, 2 * t + 2)
            if sizes[of_layer] != small[of_layer] and not _may_be_extended(record, sizes[2 * t], small[2 * t]):
                raise ModelError(
                    f"Layer '{record.name}' ran on inputs of different sizes in the processes of this step, up to "
                    f"{tuple(record.x.shape[:1] + sizes[2 * t])}: there they may differ in dimension 0 only, so pad "
                    "them to the same size."
                )
        return CommonSizes(passes, recording, sizes)

    def _extend(self, records: Sequence[LayerRecord]) -> None:
        for record, x, h in zip(records, self.inputs, self.outputs, strict=True):
            if record.later is not None:
                record.later = _padded(record.later, (record.later.shape[1] + x[0] - record.x.shape[1], *x[1:]))
            record.x, record.p_h, record.p_x = _padded(record.x, x), _padded(record.p_h, h), _padded(record.p_x, x)
            record.x_version, record.h_shape = record.x._version, record.h_shape[:1] + h

    def replay(self, recording: Recording, control: AtLayer, observe: AtLayer | None = None) -> list[Tensor]:
        def at_input(t: int, x: Tensor) -> None:
            control(t, x if self.several[t] else _padded(x, self.inputs[t]))

        def at_output(t: int, h: Tensor) -> None:
            assert observe is not None
            observe(t, h if self.several[t] else _padded(h, self.outputs[t]))

        return self.passes.replay(recording, at_input, None if observe is None else at_output)

    def retrace(self, recording: Recording) -> None:
        self.passes.retrace(recording)
        self._extend(recording.layers)

    def probes(self, recording: Recording) -> list[Probe]:
        return self.passes.probes(recording)

    def paths(self, recording: Recording, *, mixing: bool) -> list[Paths]:
        return self.passes.paths(recording, mixing=mixing)

    def pull_back(self, recording: Recording, index: int, columns: Tensor) -> Columns:
        p_h, p_x = self.passes.pull_back(recording, index, columns)
        return (
            [[_padded(p, size) for p, size in zip(column, self.outputs, strict=True)] for column in p_h],
            [[_padded(p, size) for p, size in zip(column, self.inputs, strict=True)] for column in p_x],
        )


def _sizes_of(records: Sequence[LayerRecord]) -> list[Size]:
    return [tuple(t.shape[1:]) for record in records for t in (record.x, record.p_h) if t is not None]


def _may_be_extended(record: LayerRecord, most: Size, least: Size) -> bool:
    """The uses of a layer are places of one: behind the last of them there may be more, but each has its own size."""
    if isinstance(record.layer, Conv):
        return record.layer.takes_any_size and record.later is None
    return record.later is None or most[1:] == least[1:]


def _like(sizes: list[Size], numbers: list[int]) -> list[Size]:
    """These numbers, as many for each layer as there."""
    each = iter(numbers)
    return [tuple(next(each) for _ in size) for size in sizes]


@overload
def _padded(a: Tensor, size: Size) -> Tensor: ...


@overload
def _padded(a: Tensor | None, size: Size) -> Tensor | None: ...


def _padded(a: Tensor | None, size: Size) -> Tensor | None:
    """A sample's numbers with zeros behind them, up to this size."""
    if a is None or a.shape[1:] == size:
        return a
    return F.pad(a, [n for here, all_ in zip(a.shape[:0:-1], size[::-1], strict=True) for n in (0, all_ - here)])
