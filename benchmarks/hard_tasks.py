"""Six tasks on which fixed settings fail: `python benchmarks/hard_tasks.py --data FOLDER`.

A residual network with batch norm on SVHN, twenty tanh layers, a wavy function, a deep autoencoder, a character GPT and
a residual network on augmented CIFAR-10. `DDPNOpt(model)` without any option, compared with baselines at several rates,
of which the best *on the test set* is shown: the baselines are favoured. Each finished run is a line in `runs.jsonl`,
and is not computed again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.lab.data import load
from ddpnopt.lab.suite.data import flat_digits
from ddpnopt.lab.suite.tokens import CharacterGPT, source_text

RATES = {
    "adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "adamw-cosine": (1e-3, 3e-3, 1e-2),
    "sgd-one-cycle": (0.03, 0.1, 0.3),
}


@dataclass(frozen=True)
class Task:
    """A model, batches for one epoch, a loss and a test metric."""

    model: Callable[[], nn.Module]
    epoch: Callable[[torch.Generator], Iterator[tuple[Tensor, Tensor]]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    measure: Callable[[nn.Module], float]
    epochs: int
    baselines: tuple[str, ...]
    higher_is_better: bool = True


class Block(nn.Module):
    """conv-norm-relu-conv-norm and a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(h + self.skip(x))


def resnet() -> nn.Module:
    """Three stages of one block each."""
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(stem, Block(16, 16), Block(16, 32, 2), Block(32, 64, 2), *head)


def plain_resnet() -> nn.Module:
    """Two stages with pooling in between and a linear head on all places."""
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    head = (nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 7 * 7, 10))
    return nn.Sequential(stem, Block(16, 16), Block(16, 32), *head)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    found = torch.cat([model(part).argmax(1) for part in x.split(500)])
    return 100 * (found == y).double().mean().item()


def minibatches(
    x: Tensor, y: Tensor, size: int, augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
) -> Callable[[torch.Generator], Iterator[tuple[Tensor, Tensor]]]:
    def epoch(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(x), generator=generator).split(size):
            if len(rows) == size:
                yield (x[rows] if augment is None else augment(x[rows], generator)), y[rows]

    return epoch


def shift_and_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """A random shift by up to four pixels and a mirror image, one draw per sample."""
    n, side = len(x), x.shape[-1]
    x = torch.where(torch.rand(n, 1, 1, 1, generator=generator) < 0.5, x.flip(3), x)
    padded = F.pad(x, (4, 4, 4, 4))
    rows = torch.randint(9, (n, 1), generator=generator) + torch.arange(side)
    columns = torch.randint(9, (n, 1), generator=generator) + torch.arange(side)
    return padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def svhn(data: Path | None) -> Task:
    """6,000 images, three epochs, batch 100."""
    found = load("svhn", data_dir=data)
    x, y = found.x_train[:6000], found.y_train[:6000]
    xt, yt = found.x_test[:6000], found.y_test[:6000]
    return Task(plain_resnet, minibatches(x, y, 100), cross_entropy, lambda m: accuracy(m, xt, yt), 3, ("adam",))


def cifar10(data: Path | None) -> Task:
    """20,000 images with shifts and mirror images, six epochs, batch 128."""
    found = load("cifar10", data_dir=data)
    x, y = found.x_train[:20000], found.y_train[:20000]
    batches = minibatches(x, y, 128, shift_and_flip)
    return Task(
        resnet, batches, cross_entropy, lambda m: accuracy(m, found.x_test, found.y_test), 6, ("sgd-one-cycle",)
    )


def tanh20(data: Path | None) -> Task:
    """DIGITS, twenty tanh layers of 32 with PyTorch's own initialisation, ten epochs, batch 16."""
    splits = flat_digits()
    (x, y), (xt, yt) = splits.train, splits.test

    def model() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(64, 32), nn.Tanh()]
        for _ in range(19):
            layers += [nn.Linear(32, 32), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(32, 10))

    return Task(model, minibatches(x, y, 16), cross_entropy, lambda m: accuracy(m, xt, yt), 10, ("adam",))


def wavy(data: Path | None) -> Task:
    """A function of one variable, 1,000 points, 40 epochs, batch 50: the mean squared error."""

    def function(x: Tensor) -> Tensor:
        return torch.sin(9 * x) + 0.5 * torch.sin(4 * x + 1) * x

    x = torch.linspace(-1, 1, 1000)[:, None]
    xt = torch.linspace(-1, 1, 1777)[:, None]

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(m(x), y)

    def measure(m: nn.Module) -> float:
        return F.mse_loss(m(xt), function(xt)).item()

    return Task(model, minibatches(x, function(x), 50), loss, measure, 40, ("adam",), False)


def autoencoder(data: Path | None) -> Task:
    """MNIST, 784-400-100-20-100-400-784, 10,000 images, five epochs, batch 100: nats per picture."""
    found = load("mnist", data_dir=data)

    def pixels(x: Tensor) -> Tensor:  # back to [0, 1]
        flat = x.flatten(1)
        return (flat - flat.min()) / (flat.max() - flat.min())

    x, xt = pixels(found.x_train[:10000]), pixels(found.x_test[:2000])

    def model() -> nn.Module:
        sizes, layers = (784, 400, 100, 20, 100, 400, 784), []
        for a, b in itertools.pairwise(sizes):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(m(x), y, reduction="sum") / len(x)

    return Task(model, minibatches(x, x, 100), loss, lambda m: loss(m, xt, xt).item(), 5, ("adam",), False)


def gpt(data: Path | None) -> Task:
    """Two causal blocks on the characters of Python code, windows of 32, batch 32, two epochs: nats per character."""
    splits, characters, _ = source_text()

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(x).flatten(0, 1), y.flatten())

    def measure(m: nn.Module) -> float:
        return loss(m, *splits.test).item()

    batches = minibatches(*splits.train, 32)
    return Task(lambda: CharacterGPT(characters), batches, loss, measure, 2, ("adamw-cosine",), False)


TASKS = {"svhn": svhn, "tanh20": tanh20, "wavy": wavy, "autoencoder": autoencoder, "gpt": gpt, "cifar10": cifar10}


def optimizer(method: str, rate: float, model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, object]:
    if method == "ddpnopt":
        return DDPNOpt(model), None
    if method == "adam":
        return torch.optim.Adam(model.parameters(), rate), None
    if method == "adamw-cosine":
        adamw = torch.optim.AdamW(model.parameters(), rate)
        return adamw, torch.optim.lr_scheduler.CosineAnnealingLR(adamw, steps)
    sgd = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    return sgd, torch.optim.lr_scheduler.OneCycleLR(sgd, rate, steps)


def run(name: str, method: str, rate: float, seed: int, data: Path | None) -> dict[str, object]:
    task = TASKS[name](data)
    torch.manual_seed(seed)
    model = task.model()
    generator = torch.Generator().manual_seed(seed)
    steps = task.epochs * sum(1 for _ in task.epoch(torch.Generator()))
    opt, schedule = optimizer(method, rate, model, steps)
    start, loss = time.perf_counter(), torch.tensor(math.nan)
    for _ in range(task.epochs):
        for x, y in task.epoch(generator):
            opt.zero_grad()
            loss = task.loss(model, x, y)
            loss.backward()
            opt.step()
            if schedule is not None:
                schedule.step()  # type: ignore[attr-defined]
    seconds = time.perf_counter() - start
    outcome: dict[str, object] = {"task": name, "method": method, "rate": rate, "seed": seed, "seconds": seconds}
    model.eval()
    with torch.no_grad():
        outcome["last"] = outcome["metric"] = task.measure(model)
        if isinstance(opt, DDPNOpt):
            outcome["shortened"], outcome["undone"] = opt.report.shortened, opt.report.undone
            opt.eval()
            outcome["metric"] = task.measure(model)
    return {**outcome, "steps": steps, "loss": float(loss)}


def table(runs: list[dict[str, object]]) -> str:
    lines = [
        "| task | method | rate | test metric | last weights | seconds | repeated, undone | seeds |",
        "|" + " --- |" * 8,
    ]
    for name in TASKS:
        for method in ("ddpnopt", *RATES):
            by_rate: dict[float, list[dict[str, object]]] = {}
            for each in runs:
                if each["task"] == name and each["method"] == method:
                    by_rate.setdefault(float(each["rate"]), []).append(each)  # type: ignore[arg-type]
            if not by_rate:
                continue
            means = {rate: sum(float(r["metric"]) for r in found) / len(found) for rate, found in by_rate.items()}  # type: ignore[arg-type]
            finite = {rate: mean for rate, mean in means.items() if math.isfinite(mean)} or means
            best = (max if name in ("svhn", "tanh20", "cifar10") else min)(finite, key=lambda rate: finite[rate])
            found = by_rate[best]
            spread = torch.tensor([float(r["metric"]) for r in found]).std(correction=0)  # type: ignore[arg-type]
            last = sum(float(r["last"]) for r in found) / len(found)  # type: ignore[arg-type]
            seconds = sum(float(r["seconds"]) for r in found) / len(found)  # type: ignore[arg-type]
            repeated = "–"
            if method == "ddpnopt":
                counts = [sum(int(r[key]) for r in found) for key in ("shortened", "undone")]  # type: ignore[call-overload]
                repeated = f"{counts[0]}, {counts[1]} of {sum(int(r['steps']) for r in found)}"  # type: ignore[call-overload]
            rate = "none" if method == "ddpnopt" else f"{best:g} of {len(by_rate)}"
            lines.append(
                f"| {name} | {method} | {rate} | {means[best]:.4g} ± {spread:.2g} | {last:.4g} | {seconds:.0f} | "
                f"{repeated} | {len(found)} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with the image sets")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--methods", default="ddpnopt,baselines")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/hard-tasks"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    store = options.out / "runs.jsonl"
    for name in options.tasks.split(","):
        methods: list[tuple[str, float]] = []
        if "ddpnopt" in options.methods:
            methods.append(("ddpnopt", 0.0))
        if "baselines" in options.methods:
            methods += [(b, rate) for b in TASKS[name](options.data).baselines for rate in RATES[b]]
        for method, rate in methods:
            for seed in range(options.seeds):
                done = [json.loads(line) for line in store.read_text().splitlines()] if store.exists() else []
                key = (name, method, rate, seed)
                if not any((r["task"], r["method"], r["rate"], r["seed"]) == key for r in done):
                    outcome = run(name, method, rate, seed, options.data)
                    with store.open("a") as file:
                        file.write(json.dumps(outcome) + "\n")
                    print(json.dumps(outcome), flush=True)
    done = [json.loads(line) for line in store.read_text().splitlines()]
    (options.out / "hard-tasks.md").write_text(table(done) + "\n")
    print(table(done))


if __name__ == "__main__":
    main()
