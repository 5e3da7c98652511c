"""The diagnostics of `opt.report` as numbers by name: printed, or written to TensorBoard.

Use `DDPNOpt(model, diagnostics=True)` for all of them; without it only the counters are known. After each step::

    log = TensorBoard(opt, "runs/first")        # needs the package tensorboard
    opt.step()
    log()
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from ddpnopt._checks import require
from ddpnopt.errors import OptionError
from ddpnopt.optimizer import DDPNOpt
from ddpnopt.report import Report


def numbers(report: Report) -> dict[str, float]:
    """What a report holds, flat: "predicted", "actual", …, "layers/NAME/feedback"; what is not known is left out."""
    found: dict[str, float] = {}
    for name in ("predicted", "actual", "guarded", "shortened", "undone", "skipped"):
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
