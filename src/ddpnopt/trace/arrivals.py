"""The backward passes that have arrived since the last step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ddpnopt.errors import StepError
from ddpnopt.trace.backward_root import backward_root
from ddpnopt.trace.layer_uses import settle
from ddpnopt.trace.loss_terms import NotATermError, Run, Term, await_loss, stop_waiting, terms_of
from ddpnopt.trace.parts import assign, masked
from ddpnopt.trace.recording import Recording


class Arrivals:
    """The recordings that gradients have arrived at since the last step, one entry per backward pass."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.seen_forward = False
        self.differentiated = False  # whether a derivative of a pass since the last step may be part of the loss
        self.incomplete = False  # … of one whose weight gradients were skipped
        self.transformed = False  # whether a pass inside a transform of torch.func, which is not seen, may be, too
        self.hidden = False  # … by something else than its inputs: not all uses of its weights are noted
        self.arrange: Callable[[list[Recording]], None] | None = None  # finds the batch where it is not in dimension 0
        self.couples = False  # whether steps with derivatives in the loss couple their samples
        self.part = 0  # of the backward pass that is running (`trace.parts`)
        self.noting: list[Recording] = []  # passes in which a use of a weight was noted (`trace.weight_uses`)
        self.terms: list[Term] = []  # of the losses, where they contain derivatives
        self.unjoined = ""  # why the last step with derivatives was one without feedback
        self.not_terms = ""  # a part of them that is no such term
        self._roots: list[Tensor | None] = []  # the losses of these backward passes, each once
        self._task = -1  # the backward pass that the last of them is from

    def forget(self) -> None:
        """Forget all backward passes; one that has differentiated a pass may still become part of a loss."""
        self.recordings.clear()
        self.noting.clear()
        self.terms.clear()
        self.not_terms = ""
        self._roots.clear()
        self._task = -1

    def clear(self) -> None:
        """After a step."""
        self.forget()
        if self.differentiated:
            stop_waiting(self.see_loss)
        self.differentiated = self.incomplete = self.hidden = self.transformed = False
        self.unjoined = ""

    def see_derivative(self, recording: Recording) -> None:
        """A derivative of a pass is being computed that may become part of the loss."""
        recording.differentiated = True
        self.hidden |= not recording.reads_variable
        self.incomplete |= any(record.skipped and record.noted is None for record in recording.layers)
        if not self.differentiated:
            self.differentiated = True
            await_loss(self.see_loss)

    def see_loss(self, root: Tensor, scale: float, run: Run | None) -> bool:
        """Read the terms of a loss that `backward` is called on; True if its backward pass was made here, in parts."""
        try:
            found, strays = terms_of(root, scale)
        except NotATermError as part:
            self.not_terms = str(part)
            return False
        found = [term for term in found if any(recording.arrivals is self for recording, _ in term.rows)]
        self.terms += found
        parts = assign(found) if self.couples and run is not None else 1
        if parts == 1 or run is None:
            return False
        with masked(found, strays, lambda: self.part):
            try:
                for self.part in range(parts):
                    run(again=self.part < parts - 1)
            finally:
                self.part = 0
        return True

    def note_uses(self, recording: Recording) -> None:
        """A use of a weight in this pass, or in its derivatives, has a gradient."""
        if not any(each is recording for each in self.noting):
            self.noting.append(recording)
            self.see_root()

    def take_back(self, recording: Recording) -> None:
        """The backward pass that is running is not that of a loss: forget what it has brought to this recording."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            self._task = -1
            self._roots.pop()
        if task == recording.task:
            self.recordings = [one for one in self.recordings if one is not recording]
            recording.forget_gradients()
        recording.asked = task

    def scale_terms(self, factor: float) -> None:
        """Replace the terms of the losses by those of `factor` times the loss."""
        for term in self.terms:
            term.losses = term.losses * factor

    def passes(self) -> list[Recording]:
        """All passes that gradients have arrived at, each once, in order."""
        found = {id(recording): recording for recording in (*self.recordings, *self.noting)}
        return sorted(found.values(), key=lambda recording: recording.serial)

    def see_root(self) -> None:
        """Note the loss of the backward pass that is running, once: it may go through several forward passes."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        root = backward_root()
        last = self._roots[-1] if self._roots else None
        if root is None or last is None or root.data_ptr() != last.data_ptr():  # checkpointing runs one inside another
            self._roots.append(root)

    def loss_value(self) -> float | None:
        """The sum of the losses that `backward` was called on; None where one is not known or not finite."""
        roots = [root for root in self._roots if root is not None]
        if not roots or len(roots) < len(self._roots):
            return None
        total = sum(float(root) for root in roots)
        return total if math.isfinite(total) else None

    def take(self) -> Recording:
        """The recording of the only backward pass since the last step."""
        if len(self.recordings) > 1:
            raise StepError(
                f"step() after {len(self.recordings)} backward passes: this optimizer takes one per step. Put the "
                "samples into one batch (or add the losses) and call backward() once, or step() after each; "
                "zero_grad() drops what has arrived so far."
            )
        return self.take_all()[0]

    def take_all(self) -> list[Recording]:
        """The recordings of all passes since the last step: the micro-batches of one batch."""
        found = list(self.recordings)
        if not found:
            raise StepError(
                "step() without a backward pass since the last step: run a forward pass, model(inputs), and call "
                "loss.backward() first, without inputs=…, which does not reach the layers."
                if self.seen_forward
                else "step() found no forward pass of the model. Call model(inputs) with gradients enabled, then "
                "loss.backward(), before step(); layers called outside model(...) are not seen."
            )
        for recording in found:
            recording.add_loose()
            recording.layers = [r for r in recording.layers if r.p_h is not None]
        if self.arrange is not None:
            self.arrange(found)
        for recording in found:
            recording.layers = settle(recording.layers)
            recording.check()
            recording.finish()
        return found
