"""What earlier steps tell about the loss of the next one: its form, and whether rare forms are worth trying."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ddpnopt.ddp.loss import AnyLoss, LinearLoss, Loss

NO_FORM = ("unknown", "squared_error")  # what a loss is taken for where nothing fits
TRIES, AGAIN = 5, 16  # attempts without success after which the rare forms are tried so many steps later
LATEST = 256  # … twice as many after each further one, up to so many


@dataclass(frozen=True)
class Form:
    """What a loss has in common with that of the next step, which has other targets."""

    kind: str
    scale: float
    dim: int
    temperature: float
    of_probabilities: bool

    @classmethod
    def of(cls, loss: AnyLoss) -> Form | None:
        """None where the form has more in it than a scale and a temperature."""
        if isinstance(loss, LinearLoss):
            return cls(loss.kind, 1.0, -1, 1.0, of_probabilities=False)
        if not isinstance(loss, Loss):
            return None
        if loss.kind == "cross_entropy" and (loss.label is not None or loss.of_probabilities):
            return None  # found as fast by itself
        if isinstance(loss.weight, Tensor):
            scale = float(loss.weight.max())  # of a squared error: a mask may change from step to step
            if loss.kind != "squared_error" and not bool((loss.weight == scale).all()):
                return None
        else:
            scale = loss.weight
        if not scale > 0:  # a batch without loss
            return None
        return cls(loss.kind, scale, loss.dim, loss.temperature, loss.of_probabilities)


@dataclass
class Search:
    """Whether to try the rare forms of losses, which takes longer than the step where none of them fits."""

    steps: int = 0
    failures: int = 0  # attempts in a row
    again: int = 0  # the step in which they are tried next
    forms: list[Form | None] = field(default_factory=list)  # found in the last step, where they can be tried again
    known: set[int] = field(default_factory=set)  # the outputs whose loss was found in the last step
    apart: bool = False  # whether passes of one backward pass have been found to have losses of their own

    def is_due(self, outputs: int) -> list[bool]:
        """Whether to try them in this step, at each of several outputs."""
        self.steps += 1
        due = self.steps >= self.again
        return [due or k in self.known for k in range(outputs)]

    def last(self, outputs: int) -> list[Form | None]:
        """What was found in the last step at each of several outputs."""
        return self.forms if len(self.forms) == outputs else [None] * outputs

    def note(self, losses: list[AnyLoss]) -> None:
        """What was found in a step."""
        self.known = {k for k, loss in enumerate(losses) if loss.certain or loss.kind not in NO_FORM}
        success = len(self.known) == len(losses)
        if success:  # it may be chance
            self.failures, self.again = max(0, self.failures - 1), 0
        elif self.steps >= self.again:
            later = self.failures - TRIES + 1
            self.failures += 1
            self.again = self.steps + (min(AGAIN * 2**later, LATEST) if later >= 0 else 1)
        self.forms = [Form.of(loss) if k in self.known else None for k, loss in enumerate(losses)]


@dataclass
class Belonging:
    """Whether passes that take the same path belong to the same training examples, as far as earlier steps tell.

    Their losses tell, one by one, which takes longer than the step. After `TRIES` equal answers they are looked at in
    every `AGAIN`th step, or in the next where the losses of a step are not what the answer lets expect.
    """

    answers: dict[object, tuple[bool, int]] = field(default_factory=dict)  # by path: the answer, and how often in a row
    used: set[bool] = field(default_factory=set)  # the answers of this step

    def known(self, path: object) -> bool | None:
        """The answer for passes on this path; None if their losses are to be looked at."""
        answer, count = self.answers.get(path, (False, 0))
        if count < TRIES or count % AGAIN == 0:
            return None
        self._use(path, answer, count)
        return answer

    def note(self, path: object, together: bool) -> None:
        """What the losses of the passes have told."""
        answer, count = self.answers.get(path, (together, 0))
        self._use(path, together, count if answer == together else 0)

    def _use(self, path: object, answer: bool, count: int) -> None:
        self.answers[path] = answer, count + 1
        self.used.add(answer)

    def check(self, losses: list[AnyLoss]) -> None:
        """Forget answers that the losses of the step, with all passes in it, speak against."""
        own = all(loss.certain and loss.kind not in NO_FORM for loss in losses)
        none = any(loss.kind in NO_FORM for loss in losses)
        if (own and True in self.used) or (none and False in self.used):
            self.answers.clear()
        self.used.clear()
