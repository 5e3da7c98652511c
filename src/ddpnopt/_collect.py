"""What the passes since the last step have recorded, as one recording of one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpnopt._checks import listed
from ddpnopt._losses import Losses, are_certain, recognised_losses
from ddpnopt._repeatable import look_at_repetition
from ddpnopt._value import Passes, ValueForm
from ddpnopt.ddp.loss_search import NO_FORM, Belonging, Search
from ddpnopt.errors import ModelError
from ddpnopt.linear.given import Given
from ddpnopt.trace.derivatives import leave_noted
from ddpnopt.trace.hooks import Capture
from ddpnopt.trace.layer_uses import even_out
from ddpnopt.trace.micro_batches import MicroBatches, join, obstacle
from ddpnopt.trace.passes import are_linked, as_one, by_backward_pass, leave_to_base, may_be_one, take_same_path
from ddpnopt.trace.recording import LayerRecord, Recording
from ddpnopt.trace.rescaling import penalty
from ddpnopt.trace.scalar_outputs import true_loss

if TYPE_CHECKING:
    from ddpnopt.optimizer import DDPNOpt

INSIDE = 0.1  # of the loss: what the outputs leave over is looked at from here on
LOOKED_AT = 2  # passes whose losses are looked at, once all of them were found to have their own
OUTSIDE = (
    " No pass of model(...) was seen in this step: its layers were called one by one, or .grad was set by hand. Call "
    "the model itself, model(inputs), for steps with feedback."
)


def one_recording(opt: DDPNOpt, *, alone: bool = True) -> tuple[Recording | None, Passes]:
    """All passes as one: those of one backward pass that belong together, and the others as micro-batches.

    Without layers, or None, if the loss contains derivatives of the model. `alone`: this process has the whole batch.
    """
    capture, form, feedback = opt._capture, opt.form, opt.feedback
    arrivals = capture.arrivals
    capture.arrangement.groups = form.scale_free and alone  # the shares of several processes count samples, not groups
    opt._belonging.used.clear()
    if feedback and arrivals.differentiated:
        leave_noted(arrivals)
    only_derivatives = arrivals.differentiated and not arrivals.recordings
    recordings = [] if only_derivatives else arrivals.take_all()
    if len(recordings) > 1:  # otherwise a layer has one record
        even_out([one.layers for one in recordings])
    if feedback and (arrivals.differentiated or (arrivals.transformed and _have_other_gradients(recordings))):
        leave_to_base(recordings, capture)
        return (recordings[0] if recordings else None), capture
    if form.scale_free:
        _suspect_uncalled(capture, recordings)
    if len(recordings) > 1:
        recordings = [
            one
            for group in by_backward_pass(recordings)
            for one in ([as_one(group)] if _belong_together(group, form, opt._pass_search, opt._belonging) else group)
        ]
    if len(recordings) > 1:
        why = obstacle(recordings)
        if why and not (form.scale_free and alone):
            raise ModelError(f"{why[0].upper()}{why[1:]}.")
        if why:
            arrivals.unjoined = why
            leave_to_base(recordings, capture)
            return recordings[0], capture
        return join(recordings), MicroBatches(capture)
    return recordings[0], capture


def _have_other_gradients(recordings: list[Recording]) -> bool:
    """Whether weights of layers have gradients that did not come through these passes."""
    return any(penalty(record) is not None for one in recordings for record in one.layers)


def _suspect_uncalled(capture: Capture, recordings: list[Recording]) -> None:
    """A layer that was never called, but whose weight has a gradient, may have lent it to a function."""
    called = recordings[0].calls.keys() if len(recordings) == 1 else {name for one in recordings for name in one.calls}
    missing = [each for each in capture.layers if each.name not in called and not isinstance(each.layer, Given)]
    if missing:
        capture.suspect(each for each in missing if each.weight.grad is not None)


def dead_layers(layers: list[LayerRecord]) -> list[str]:
    """Layers at whose output no sample has a gradient, while it reaches others; none where it reaches no layer."""
    wide = [record for record in layers if len(record.layer.weight_shape) > 1]  # that of a bias may cancel (two passes)
    dead = [record.name for record in wide if record.p_h is not None and not record.p_h.any()]
    return dead if len(dead) < len(wide) else []


def _belong_together(recordings: list[Recording], form: ValueForm, search: Search, belonging: Belonging) -> bool:
    """Whether forward passes before one backward pass have the same training examples.

    They are separate samples if each has a loss of its own, which is recognised for certain, or if their sizes differ.
    `search` and `belonging` know of such passes in earlier steps.
    """
    if len(recordings) < 2 or form.value == "full" or not may_be_one(recordings):
        return False
    if are_linked(recordings) or not take_same_path(recordings):
        return True
    path = len(recordings), *(one.signature for one in recordings)
    answer = belonging.known(path)
    if answer is None:
        answer = not _have_own_losses(recordings, form, search)
        belonging.note(path, answer)
    return answer


def _have_own_losses(recordings: list[Recording], form: ValueForm, search: Search) -> bool:
    """Whether each pass has a loss of its own; where a sample is fitted well, its gradient says little."""
    certain = seems = True
    for one in recordings[:LOOKED_AT] if search.apart else recordings:  # of many passes, some tell if all have told
        if true_loss(one) is None:
            losses = recognised_losses(one, form.mean, search=search) if one.used_outputs else []
            certain &= bool(losses) and are_certain(losses)
            seems &= bool(losses) and not any(loss.kind in NO_FORM for _, loss in losses)
    search.apart |= certain
    return certain or (search.apart and seems)


def ran_unseen(opt: DDPNOpt) -> bool:
    """Whether there are gradients of passes that went past model(...): all parameters are updated by them."""
    arrivals = opt._capture.arrivals
    if not opt.form.scale_free or arrivals.recordings or arrivals.differentiated:
        return False
    return opt._capture.unseen.has_new(opt._parameters)


def is_chain(opt: DDPNOpt, passes: Passes, recording: Recording) -> bool:
    """Whether each layer reads only the layer before it; found out once for each sequence of layers.

    Where it reads other samples there, too, its inputs do not show which sample's loss the layers before have changed.
    """
    chains, key = opt._chains, recording.signature
    if key not in chains:
        look_at_repetition(opt, passes, recording)
        several = bool(recording.passes) or any(
            len(r.uses) > 1 or r.later is not None or isinstance(r.layer, Given) for r in recording.layers
        )
        parts = recording.parts or [recording]
        first = all(r.layouts[0] is None or part.group is not None for part in parts for r in part.layers)
        plain = first and not any(r.recomputed for r in recording.layers)  # a checkpoint recomputes without our hooks
        mixing = plain and not passes.batch_norms  # with samples in dimension 0; the norms mix little
        found = [] if several else passes.paths(recording, mixing=mixing)
        chains[key] = not several and all(each.is_chain(recording) and not each.mixed for each in found)
        opt._capture.keep_outputs = not all(chains.values())
    return chains[key]


def not_at_outputs(losses: Losses, found: float, total: float | None, capture: Capture, recording: Recording) -> float:
    """The part of the loss that belongs to activations inside the model; zero where it is small or not known.

    What the outputs leave over of the samples' losses, `found` in all, may also be a constant, or the loss of another
    model: the gradients tell.
    """
    if total is None or recording.parts or not recording.used_outputs or not are_certain(losses):
        return 0.0
    rest = total - found - sum(loss.minimum() for _, loss in losses)
    if not rest > INSIDE * total:
        return 0.0
    if capture.from_outputs is None:
        capture.from_outputs = capture.come_from_outputs(recording)
    return 0.0 if capture.from_outputs else rest


def why_open_loop(capture: Capture) -> str:
    """What to do about parameters without feedback that might have it."""
    if capture.arrivals.differentiated:
        if not capture.arrivals.unjoined:
            return " The loss contains derivatives of the model: there, only nn.Linear takes part in the joint step."
        return f" The loss contains derivatives of the model, and {capture.arrivals.unjoined}: there is nothing to do."
    if capture.arrivals.transformed:
        return (
            " A part of the loss was computed inside a transform of torch.func (vmap, jacrev, …), where passes are not "
            "seen: use torch.autograd.grad(…, create_graph=True) for steps with feedback."
        )
    if capture.arrivals.unjoined:
        return f" In this step {capture.arrivals.unjoined}."
    left = sorted(capture.arrangement.left)
    if not left:
        return ""
    return (
        f" In {listed(left)} the samples were not found: keep them in dimension 0, or say where they are in the "
        "inputs with batch_dim=1."
    )
