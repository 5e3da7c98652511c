"""A word when something is wrong: each trouble is reported once, with what to do about it."""

from __future__ import annotations

from collections import deque

from ddpnopt._checks import listed, warn_user
from ddpnopt.errors import TrainingWarning
from ddpnopt.report import Report

WINDOW = 20  # steps that are looked at
MANY = 0.5  # of them
DEAD_EVERY = 25  # steps from one look for layers without gradient to the next


class Troubles:
    """What has gone wrong in the last steps, and what the user has been told."""

    def __init__(self) -> None:
        self._warned_of_loss = False
        self._known_loss = ""  # what was recognised for certain the last time
        self._told: set[str] = set()
        self._counts: deque[tuple[int, int]] = deque([(0, 0)], maxlen=WINDOW + 1)  # shortened and undone, running

    def is_new_guess(self, loss: str, certain: bool, unknown: bool) -> bool:
        """Once: whether the loss, whose value is `unknown`, is a guess; one that is fitted well says little."""
        if certain:
            self._known_loss = loss
        if certain or not unknown or self._warned_of_loss or loss == self._known_loss:
            return False
        self._warned_of_loss = True
        return True

    def after_step(self, report: Report, *, seen: bool = False) -> None:
        """Look at the counters of a step that has been taken or given up; `seen`: whether its loss's value is known."""
        self._counts.append((report.shortened, report.undone))
        if len(self._counts) <= WINDOW:
            return
        (shortened, undone), (now_shortened, now_undone) = self._counts[0], self._counts[-1]
        way_out = (
            "Hand the loss over with opt.step(loss=loss)"
            if not seen and report.loss in (None, "unknown", "squared_error")
            else "Check that the pass is repeatable (no random numbers of your own), or take larger batches"
        )
        if now_undone - undone >= MANY * WINDOW:
            self._tell(
                "undone",
                f"Training stands still: {now_undone - undone} of the last {WINDOW} steps were undone, because the "
                f"loss of their own batch (recognised as '{report.loss}') would have risen. {way_out}, or set a fixed "
                "learning rate, lr=3 or less.",
            )
        elif now_shortened - shortened >= MANY * WINDOW:
            self._tell(
                "shortened",
                f"{now_shortened - shortened} of the last {WINDOW} steps were taken twice or more, because the loss of "
                f"their own batch (recognised as '{report.loss}') would have risen or a layer would have changed too "
                f"much, which costs time. {way_out}.",
            )

    def without_gradient(self, names: list[str]) -> None:
        """Layers at whose output no sample has a gradient, although the loss has one."""
        self._tell(
            "dead",
            f"No gradient reaches {listed(names)}: all units behind are dead (ReLU with negative inputs, saturated "
            "functions), or the output is not used. Such layers do not change. Start again with another "
            "initialisation, a norm, or an activation such as GELU.",
        )

    def _tell(self, trouble: str, message: str) -> None:
        if trouble not in self._told:
            self._told.add(trouble)
            warn_user(message, TrainingWarning)
