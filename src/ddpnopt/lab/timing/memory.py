"""Peak memory of a step, exactly: what torch's allocator on the processor was asked for, event by event."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from ddpnopt.lab.timing.steppers import Stepper

SECOND = "second half"


def peak_bytes(stepper: Stepper) -> int:
    """Weights, buffers and optimizer state, and the most that a step has allocated on top at any moment.

    The second of two steps counts: the profiler knows the size of what it frees only if it has seen it allocated. Where
    something is refreshed every few steps, the second of two periods.
    """
    period = range(stepper.method.timing.period)
    with _silence(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in period:
            stepper.step()
        stepper.optimizer.zero_grad()  # or the gradients of the first step would be freed on the second's account
        with record_function(SECOND):
            for _ in period:
                stepper.step()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == SECOND)
    changes = [event for event in events if event.name() == "[memory]" and event.start_ns() >= start]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak + _persistent(stepper)


@contextmanager
def _silence() -> Iterator[None]:
    """The profiler writes remarks straight to the process's standard error, bypassing Python."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 (a descriptor is wanted)
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _persistent(stepper: Stepper) -> int:
    tensors = [*stepper.model.parameters(), *stepper.model.buffers()]
    tensors += _tensors(vars(stepper.optimizer), set())
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that an optimizer holds on to: not every package keeps them in `state`."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    within: Iterable[Any] = ()
    if isinstance(value, dict):
        within = value.values()
    elif isinstance(value, (list, tuple)):
        within = value
    elif hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType, ModuleType, nn.Module)):
        within = vars(value).values()
    for each in within:
        yield from _tensors(each, seen)
