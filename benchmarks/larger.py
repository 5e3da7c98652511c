"""Time to a result on larger networks: `python benchmarks/larger.py --data FOLDER`.

A character GPT of 3.3 million parameters on Python's standard library and a vision transformer of 1.2 million on
augmented CIFAR-10 images, a few hundred steps each: `DDPNOpt(model)` without any option beside AdamW with warm-up and a
cosine schedule at three rates. All of them train in one process, in turn for a few steps each, so that other load on
the machine slows all of them. Validation is not in the seconds. Writes curves.csv, larger.md and larger.svg.
"""

from __future__ import annotations

import argparse
import csv
import math
import shlex
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.lab import style
from ddpnopt.lab.data import load
from ddpnopt.lab.tables import markdown_table
from ddpnopt.lab.timing.machine import facts

RATES = (3e-4, 1e-3, 3e-3)
WARM_UP = 0.05  # of the steps
PIECES = 20  # turns of each method, with a validation after each

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Pre-norm attention and a GELU network."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, characters: int, context: int, width: int = 256, blocks: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, width), nn.Embedding(context, width)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, 4, causal=True) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        found: Tensor = self.head(self.norm(self.blocks(x)))
        return found.flatten(0, 1)


class ViT(nn.Module):
    """Patches of 4 x 4 pixels, the mean over all places."""

    def __init__(self, side: int, width: int = 128, blocks: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // 4) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, 4, causal=False) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT + self.places
        found: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return found


@dataclass(frozen=True)
class Task:
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    validation: Batch
    steps: int


def gpt(data: Path | None) -> Task:
    """Windows of 128 characters, twelve in a batch; the last files of the library are the validation data."""
    del data
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    text = "".join(character for character in text if ord(character) < 128)
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[character] for character in text])
    context, first = 128, int(0.9 * len(codes))
    held = codes[first:].unfold(0, context + 1, 4001)

    def batch(generator: torch.Generator) -> Batch:
        starts = torch.randint(first - context - 1, (12, 1), generator=generator)
        windows = codes[starts + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:].flatten()

    return Task(lambda: GPT(len(alphabet), context), batch, (held[:, :-1], held[:, 1:].flatten()), 600)


def vit(data: Path | None) -> Task:
    """20,000 CIFAR-10 images with shifts and mirror images, 128 in a batch; 1,000 others are the validation data."""
    found = load("cifar10", data_dir=data)
    x, y = found.x_train, found.y_train
    side = x.shape[-1]

    def batch(generator: torch.Generator) -> Batch:
        rows = torch.randint(20_000, (128,), generator=generator)
        images = F.pad(x[rows], (4, 4, 4, 4))
        images = torch.where(torch.rand(128, 1, 1, 1, generator=generator) < 0.5, images.flip(3), images)
        top, left = torch.randint(9, (2,), generator=generator).tolist()
        return images[..., top : top + side, left : left + side], y[rows]

    return Task(lambda: ViT(side), batch, (x[20_000:21_000], y[20_000:21_000]), 600)


TASKS: dict[str, Callable[[Path | None], Task]] = {"gpt": gpt, "vit": vit}


@dataclass
class Run:
    """One method on one task; `advance` trains it for some steps."""

    name: str
    task: Task
    seed: int
    rate: float | None = None
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)  # of the training, at each step
    curve: list[tuple[int, float, float]] = field(default_factory=list)  # steps, seconds, validation loss

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = self.task.model()
        self.generator = torch.Generator().manual_seed(self.seed)
        self.optimizer: torch.optim.Optimizer
        if self.rate is None:
            self.optimizer = DDPNOpt(self.model)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), self.rate)

    def _set_rate(self, step: int) -> None:
        assert self.rate is not None
        warm = WARM_UP * self.task.steps
        share = min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(0.0, step - warm) / (self.task.steps - warm)))
        for group in self.optimizer.param_groups:
            group["lr"] = share * self.rate

    def advance(self, steps: int) -> None:
        batches = [self.task.batch(self.generator) for _ in range(steps)]
        start = time.perf_counter()
        for x, y in batches:
            if self.rate is not None:
                self._set_rate(len(self.losses))
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
        self.seconds += time.perf_counter() - start
        self.curve.append((len(self.losses), self.seconds, self._validate()))

    @torch.no_grad()
    def _validate(self) -> float:
        x, y = self.task.validation
        self.model.eval()
        if isinstance(self.optimizer, DDPNOpt):
            self.optimizer.eval()
        parts = [F.cross_entropy(self.model(part), y.view(len(x), -1)[at : at + 100].flatten()) * len(part)
                 for at, part in zip(range(0, len(x), 100), x.split(100), strict=True)]  # fmt: skip
        if isinstance(self.optimizer, DDPNOpt):
            self.optimizer.train()
        self.model.train()
        return float(sum(parts)) / len(x)

    def seconds_to(self, loss: float) -> float:
        """When the validation loss first comes down to `loss`, between two looks at it in proportion."""
        before = (0, 0.0, math.inf)
        for point in self.curve:
            if point[2] <= loss:
                share = 1.0 if not math.isfinite(before[2]) else (before[2] - loss) / (before[2] - point[2])
                return before[1] + share * (point[1] - before[1])
            before = point
        return math.inf


def compare(name: str, data: Path | None, steps: int | None, seed: int) -> list[Run]:
    task = TASKS[name](data)
    task = task if steps is None else Task(task.model, task.batch, task.validation, steps)
    runs = [Run("DDPNOpt(model)", task, seed), *(Run(f"AdamW, cosine, {rate:g}", task, seed, rate) for rate in RATES)]
    pieces = max(1, min(PIECES, task.steps // 5))
    for piece in range(pieces):
        for run in runs:
            run.advance((piece + 1) * task.steps // pieces - piece * task.steps // pieces)
        print(f"{name}: {runs[0].curve[-1][0]} of {task.steps} steps,", end=" ")
        print(", ".join(f"{run.name} {run.curve[-1][2]:.3f}" for run in runs), flush=True)
    return runs


def rows(name: str, runs: list[Run]) -> list[list[str]]:
    best = min(runs[1:], key=lambda run: run.curve[-1][2])
    target = best.curve[-1][2]
    size = sum(p.numel() for p in runs[0].model.parameters())
    found = []
    for run in runs:
        reached = run.seconds_to(target)
        ratio = f"{reached / best.seconds:.2f}" if math.isfinite(reached) else "–"
        ours = run.optimizer
        counts = f"{ours.report.planned}, {ours.report.shortened}" if isinstance(ours, DDPNOpt) else "–"
        found.append([
            f"{name} ({size / 1e6:.1f} million)", run.name, f"{run.curve[-1][2]:.3f}",
            f"{sum(run.losses[-20:]) / len(run.losses[-20:]):.3f}", f"{run.seconds:.0f}",
            f"{run.seconds / best.seconds:.2f}", ratio, counts,
        ])  # fmt: skip
    return found


def draw(results: dict[str, list[Run]], stem: Path) -> None:
    with style.style():
        figure, axes = style.figure(len(results))
        for axis, (name, runs) in zip(axes, results.items(), strict=True):
            for number, run in enumerate(runs):
                colour = style.colour("ddpnopt" if run.rate is None else "adamw")
                dashes = ("-", "-", "--", ":")[number]
                axis.plot([p[1] for p in run.curve], [p[2] for p in run.curve], dashes, color=colour, label=run.name)
            axis.set(title=name, xlabel="seconds", ylabel="validation loss", yscale="log")
            axis.legend()
        figure.tight_layout()
        style.save(figure, stem, ("svg",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with the image sets")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--steps", type=int, help="for a quick look; the schedule is as long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/larger"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    results = {name: compare(name, options.data, options.steps, options.seed) for name in options.tasks.split(",")}
    with (options.out / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["task", "method", "step", "seconds", "validation"])
        writer.writerows([n, run.name, *p] for n, runs in results.items() for run in runs for p in run.curve)
    head = [
        "network", "method", "validation loss", "training loss", "seconds", "times the best AdamW's",
        "to its final loss", "planned, repeated",
    ]  # fmt: skip
    table = markdown_table(head, [row for name, runs in results.items() for row in rows(name, runs)])
    machine, versions = facts()
    note = f"- machine: {machine}\n- torch threads: {options.threads}\n- versions: {versions}\n"
    arguments = ["FOLDER" if each == str(options.data) else each for each in sys.argv[1:]]
    note += f"- command: `{shlex.join(['python', 'benchmarks/larger.py', *arguments])}`\n"
    (options.out / "larger.md").write_text(f"{note}\nSeconds are those of the training alone.\n\n{table}\n")
    draw(results, options.out / "larger")
    print(table)


if __name__ == "__main__":
    main()
