"""Several forward passes before one backward pass as one: Siamese and triplet networks, two views, time steps.

Sample i of each pass belongs to training example i. A layer that runs in several of them is one control that acts at
more places, as if it had run several times in one pass. The second sweep runs all passes, one after the other; where a
pass has read what an earlier one returned (a recurrent state), it reads the new value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ddpnopt.errors import StepError
from ddpnopt.linear.given import Given
from ddpnopt.trace.layer_uses import combine, leave
from ddpnopt.trace.recording import LayerRecord, Recording, leaves

if TYPE_CHECKING:
    from ddpnopt.trace.hooks import Capture


def by_backward_pass(recordings: list[Recording]) -> list[list[Recording]]:
    """Recordings that one backward pass went through, in the order of their forward passes."""
    found: dict[int, list[Recording]] = {}
    for recording in recordings:
        found.setdefault(recording.task, []).append(recording)
    return [sorted(group, key=lambda recording: recording.serial) for group in found.values()]


def are_linked(recordings: list[Recording]) -> bool:
    """Whether a pass has read what an earlier one has computed, as far as autograd knows."""
    return any(recording.reads_computed for recording in recordings[1:])


def may_be_one(recordings: list[Recording]) -> bool:
    """Whether all passes have the same number of samples."""
    return len({recording.sample_count for recording in recordings}) == 1


def take_same_path(recordings: list[Recording]) -> bool:
    """Whether all passes ran the same layers on inputs of the same shape: then they may be micro-batches."""
    paths = {tuple((r.name, r.x.shape[1:], len(r.uses)) for r in one.layers) for one in recordings}
    return len(paths) == 1 and len({len(one.q) for one in recordings}) == 1


def as_one(recordings: list[Recording]) -> Recording:
    """One recording of all passes; the records of a layer become one, as those of several uses in one pass."""
    first = recordings[0]
    one = Recording(
        first.args, first.kwargs, first.modes, first.device, first.rng, first.autocast, first.arrivals,
    )  # fmt: skip
    one.passes, one.links = recordings, _links(recordings)
    one.serial, one.task, one.second = first.serial, first.task, first.second
    one.group = first.group
    one.loose_rows = first.loose_rows if len({each.loose_rows for each in recordings}) == 1 else 0
    records: list[LayerRecord] = []
    for recording in recordings:
        for record in recording.layers:
            if not isinstance(record.layer, Given):  # which acts from its first use on, in whatever pass that is
                record.uses = [use + one.calls.get(record.name, 0) for use in record.uses]
            records.append(record)
        for name, calls in recording.calls.items():
            one.calls[name] = one.calls.get(name, 0) + calls
        for k in range(len(recording.q)):
            one.positions.append(one.floating_outputs + recording.positions[k])
            one.layouts[one.positions[-1]] = recording.layouts.get(recording.positions[k])
        one.outputs += recording.outputs
        one.q += recording.q
        one.floating_outputs += recording.floating_outputs
    one.layers = combine(records)
    one.finish()
    return one


def leave_to_base(recordings: list[Recording], capture: Capture) -> None:
    """The loss contains derivatives of the model: all weights are left to the base optimizer, by their `.grad`.

    A weight has then more paths to the loss than through the output of its layer, and autograd alone knows them all. It
    must not have been taken out of the graph, as it is where the inputs need no gradient.
    """
    if capture.arrivals.incomplete:
        raise StepError(
            "The loss contains a derivative of the model (autograd.grad with create_graph=True) by something else than "
            "its inputs, so that not all gradients of the weights were computed: create the optimizer with "
            "DDPNOpt(model, weight_grads=True)."
        )
    for recording in recordings:
        for record in recording.layers:
            leave(record)
        recording.layers = []


def _links(recordings: list[Recording]) -> list[dict[int, int]]:
    """For each pass, which of its inputs are outputs of earlier passes: from the id of a tensor to the output."""
    found: list[dict[int, int]] = []
    known: dict[int, int] = {}
    offset = 0
    for recording in recordings:
        inputs = [t for t in leaves((recording.args, recording.kwargs)) if isinstance(t, Tensor)]
        found.append({id(t): known[id(t)] for t in inputs if id(t) in known})
        for position, output in zip(recording.positions, recording.returned, strict=True):
            known[id(output())] = offset + position  # one that is gone cannot be read by a later pass
        offset += recording.floating_outputs
    return found
