"""The backward passes that have arrived since the last step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ddpnopt.errors import StepError
from ddpnopt.trace.backward_root import backward_root
from ddpnopt.trace.compiled import compiler_is_loaded, let_compiled_code_see_hooks
from ddpnopt.trace.layer_uses import settle
from ddpnopt.trace.recording import Recording


class Arrivals:
    """The recordings that gradients have arrived at since the last step, one entry per backward pass."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.seen_forward = False
        self.differentiated = False  # whether a derivative of a pass since the last step may be part of the loss
        self.incomplete = False  # … of one whose weight gradients were skipped
        self.arrange: Callable[[Recording], None] | None = None  # finds the batch where it is not in dimension 0
        self._roots: list[Tensor | None] = []  # the losses of these backward passes, each once
        self._task = -1  # the backward pass that the last of them is from

    def forget(self) -> None:
        """Forget all backward passes; one that has differentiated a pass may still become part of a loss."""
        self.recordings.clear()
        self._roots.clear()
        self._task = -1

    def clear(self) -> None:
        """After a step."""
        self.forget()
        self.differentiated = self.incomplete = False

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
            if compiler_is_loaded() and not self.seen_forward:
                let_compiled_code_see_hooks()
                raise StepError(
                    "step() found no forward pass of the model. If the model is compiled, code that was compiled for "
                    "another instance of its class has run, without hooks: from now on it is compiled again; run the "
                    "pass again. Otherwise call model(inputs) with gradients enabled, then loss.backward()."
                )
            raise StepError(
                "step() without a backward pass since the last step: run a forward pass, model(inputs), and call "
                "loss.backward() first."
                if self.seen_forward
                else "step() found no forward pass of the model. Call model(inputs) with gradients enabled, then "
                "loss.backward(), before step(); layers called outside model(...) are not seen."
            )
        if len({id(recording) for recording in found}) < len(found):
            raise StepError(
                f"step() after {len(found)} backward passes of which two went through one forward pass: add the losses "
                "and call backward() once, or run the forward pass again for the second; zero_grad() drops what has "
                "arrived so far."
            )
        for recording in found:
            recording.add_loose()
            recording.layers = [r for r in recording.layers if r.p_h is not None]
            if self.arrange is not None:
                self.arrange(recording)
            recording.layers = settle(recording.layers)
            recording.check()
            recording.finish()
        return found
