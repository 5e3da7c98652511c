"""DDPNOpt in common training loops, each a short function on the same small task.

python examples/loops/loops.py              # all of them
python examples/loops/loops.py swa compile  # a selection
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from ddpnopt import DDPNOpt
from ddpnopt.checkpoint import load, save
from ddpnopt.logging import Printer

Batch = tuple[Tensor, Tensor]


def loader(batches: int, seed: int = 0) -> Iterator[Batch]:
    """Two spirals, 64 points at a time."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        y = torch.randint(2, (64,), generator=g)
        r = torch.rand(64, generator=g)
        angle = 5 * r + 3.1416 * y
        noise = 0.02 * torch.randn(64, 2, generator=g)
        yield torch.stack([r * angle.cos(), r * angle.sin()], 1) + noise, y


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))


def plain(batches: int) -> nn.Module:
    """The standard loop."""
    model = network()
    opt = DDPNOpt(model)
    for x, y in loader(batches):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return model


def closure(batches: int) -> nn.Module:
    """With a closure, which is called once per step."""
    model = network()
    opt = DDPNOpt(model)
    for x, y in loader(batches):

        def compute(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(compute)
    return model


def autocast(batches: int) -> nn.Module:
    """Mixed precision: the second forward pass runs under the same autocast."""
    model = network()
    opt = DDPNOpt(model)
    for x, y in loader(batches):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(x)
        F.cross_entropy(outputs.float(), y).backward()
        opt.step()
    return model


def scheduler(batches: int) -> nn.Module:
    """A schedule: it acts on a factor of the steps that starts at 1."""
    model = network()
    opt = DDPNOpt(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, batches)
    for x, y in loader(batches):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        schedule.step()
    return model


def ema(batches: int) -> nn.Module:
    """An exponential moving average of the weights."""
    model = network()
    opt = DDPNOpt(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for x, y in loader(batches):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        average.update_parameters(model)
    return average


def swa(batches: int) -> nn.Module:
    """Stochastic weight averaging over the second half, with its own learning rate."""
    model = network()
    opt = DDPNOpt(model)
    average = AveragedModel(model)
    schedule = SWALR(opt, swa_lr=1.0, anneal_epochs=5)
    for step, (x, y) in enumerate(loader(batches)):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        if step >= batches // 2:
            average.update_parameters(model)
            schedule.step()
    return average


def compile(batches: int) -> nn.Module:
    """`torch.compile` compiles the code between hooked layers; create DDPNOpt from the original model."""
    model = network()
    opt = DDPNOpt(model)
    fast = torch.compile(model, backend="eager")  # "inductor" requires a C++ compiler
    for x, y in loader(batches):
        opt.zero_grad()
        F.cross_entropy(fast(x), y).backward()
        opt.step()
    return model


class Recomputed(nn.Module):
    """Recomputes the inner layers in the backward pass instead of storing their activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = network()[:2], network()[2:4], network()[4]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=False))


def activation_checkpointing(batches: int) -> nn.Module:
    """Less memory for more time."""
    model = Recomputed()
    opt = DDPNOpt(model)
    for x, y in loader(batches):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return model


def resume(batches: int) -> nn.Module:
    """Interrupted and resumed: the same weights, bit for bit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"

        def run(until: int) -> nn.Module:
            model = network()
            opt = DDPNOpt(model)
            done = 0
            if path.exists():
                saved = load(path)
                model.load_state_dict(saved["model"])
                opt.load_state_dict(saved["opt"])
                done = saved["step"]
            for step, (x, y) in enumerate(loader(batches), start=1):
                if not done < step <= until:
                    continue
                opt.zero_grad()
                F.cross_entropy(model(x), y).backward()
                opt.step()
                if step % 5 == 0:
                    save(path, {"model": model.state_dict(), "opt": opt.state_dict(), "step": step})
            return model

        run(until=batches // 2)
        return run(until=batches)


def diagnostics(batches: int) -> nn.Module:
    """Prints the statistics of each layer at intervals."""
    model = network()
    opt = DDPNOpt(model, diagnostics=True)
    show = Printer(opt, every=max(1, batches // 3))
    for x, y in loader(batches):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        show()
    return model


LOOPS: dict[str, Callable[[int], nn.Module]] = {
    f.__name__: f
    for f in (
        plain, closure, autocast, scheduler, ema, swa, compile, activation_checkpointing, resume, diagnostics
    )
}  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """On new points, in percent."""
    pairs = [(model(x).argmax(1), y) for x, y in loader(10, seed=1)]
    return 100 * float(torch.cat([guess == y for guess, y in pairs]).float().mean())


if __name__ == "__main__":
    for name in sys.argv[1:] or LOOPS:
        print(f"{name}: accuracy {accuracy(LOOPS[name](200)):.1f} %")
