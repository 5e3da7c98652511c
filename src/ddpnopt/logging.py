"""The diagnostics of `opt.report` as numbers by name: kept in a file, printed, or written to TensorBoard.

Use `DDPNOpt(model, diagnostics=True)` for all of them; without it only the counters are known. After each step::

    log = Recorder(opt, "run.jsonl")            # `ddpnopt view run.jsonl` shows it as curves
    opt.step()
    log(loss)
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor
from torch.optim import Optimizer

from ddpnopt._checks import require
from ddpnopt.errors import OptionError
from ddpnopt.optimizer import DDPNOpt
from ddpnopt.report import Report


def numbers(report: Report) -> dict[str, float]:
    """What a report holds, flat: "predicted", "actual", …, "layers/NAME/feedback"; what is not known is left out."""
    found: dict[str, float] = {}
    for name in ("predicted", "actual", "fraction", "kappa", "guarded", "shortened", "undone", "planned", "skipped"):
        value = getattr(report, name)
        if value is not None:
            found[name] = float(value)
    for layer, part in report.layers.items():
        for name in ("open_loop", "feedback", "update"):
            found[f"layers/{layer}/{name}"] = getattr(part, name)
    return found


class Printer:
    """Prints a line after every so many steps."""

    def __init__(self, opt: DDPNOpt, every: int = 1, file: TextIO | None = None) -> None:
        require(every >= 1, "every", every, "at least 1")
        self.opt, self.every, self.file = opt, every, file

    def __call__(self) -> None:
        report = self.opt.report
        if report.step % self.every:
            return
        found = numbers(report)
        whole = " ".join(f"{name}={value:.4g}" for name, value in found.items() if not name.startswith("layers/"))
        print(f"step {report.step}: {whole}", file=self.file or sys.stdout)
        for layer, part in report.layers.items():
            text = (
                f"  {layer}: update {part.update:.3g} = open loop {part.open_loop:.3g} + feedback {part.feedback:.3g}"
            )
            print(text, file=self.file or sys.stdout)


class Recorder:
    """Appends a line of JSON after every so many steps: what `ddpnopt view` shows, live or later.

    A line holds the step, the seconds since the start and the numbers of the report. A training that is continued may
    write to the same file: of a step that is there twice, the later line counts. Other optimizers can be recorded, too;
    of those only the loss is known.
    """

    def __init__(self, opt: Optimizer, path: str | os.PathLike[str], every: int = 1) -> None:
        require(every >= 1, "every", every, "at least 1")
        self.opt, self.every = opt, every
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)  # each line is there for a live view
        self._start, self._steps = time.perf_counter(), 0
        self._said: dict[str, Any] = {}

    def __call__(self, loss: float | Tensor | None = None) -> None:
        """Call it after `step()`, with the loss of the batch."""
        report = self.opt.report if isinstance(self.opt, DDPNOpt) else None
        self._steps = self.opt.steps if isinstance(self.opt, DDPNOpt) else self._steps + 1
        if self._steps % self.every:
            return
        line: dict[str, Any] = {"step": self._steps, "seconds": round(time.perf_counter() - self._start, 4)}
        if loss is not None:
            line["loss"] = float(loss.detach() if isinstance(loss, Tensor) else loss)
        if report is not None:
            line |= numbers(report)
            about = {"kind": report.loss, "open_loop": report.open_loop}
            if about != self._said:  # names are long: only when they change
                line["about"] = self._said = {"kind": report.loss, "open_loop": list(report.open_loop)}
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}
        self._file.write(json.dumps(finite) + "\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorBoard:
    """Writes the numbers to an event file after every so many steps, under `tag`."""

    def __init__(self, opt: DDPNOpt, folder: str | os.PathLike[str], every: int = 1, tag: str = "ddpnopt") -> None:
        require(every >= 1, "every", every, "at least 1")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as missing:
            raise OptionError("TensorBoard logging needs the package tensorboard: pip install tensorboard") from missing
        self.opt, self.every, self.tag = opt, every, tag
        self.writer: Any = SummaryWriter(os.fspath(folder))

    def __call__(self) -> None:
        report = self.opt.report
        if report.step % self.every == 0:
            for name, value in numbers(report).items():
                self.writer.add_scalar(f"{self.tag}/{name}", value, report.step)

    def close(self) -> None:
        self.writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
