"""How long until it moves, and what happens on tiny data: `python examples/first_steps/measure.py results/first-steps`.

Two small tasks of scikit-learn, three seeds each: digits with a thousand training images, and diabetes with sixty
patients, on which any optimizer that gets far overfits.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn

from ddpnopt import DDPNOpt

SEEDS = 3
SHOWN = (1, 10, 20, 40, 80, 160, 320)
Make = Callable[[nn.Module], torch.optim.Optimizer]
METHODS: dict[str, Make] = {
    "DDPNOpt": DDPNOpt,
    "DDPNOpt, weight decay 0.0001": lambda model: DDPNOpt(model, weight_decay=1e-4),
    "DDPNOpt, weight decay 0.001": lambda model: DDPNOpt(model, weight_decay=1e-3),
    "DDPNOpt, weight decay 0.01": lambda model: DDPNOpt(model, weight_decay=1e-2),
    "Adam, lr 0.001": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    "Adam, lr 0.001, weight decay 0.01": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-2),
    "Adam, lr 0.01": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
}

ON_DIGITS_ONLY = ("DDPNOpt, weight decay 0.001", "Adam, lr 0.001, weight decay 0.01")


def digits() -> tuple[Tensor, Tensor, int]:
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target), 1000


def diabetes() -> tuple[Tensor, Tensor, int]:
    data = load_diabetes()
    x, y = (torch.tensor(part, dtype=torch.float32) for part in (data.data, data.target))
    return x / x.std(0), ((y - y.mean()) / y.std())[:, None], 60


def run(task: str, make: Make, seed: int) -> list[dict[str, float]]:
    """Training and validation loss after the steps that are shown."""
    torch.manual_seed(seed)
    x, y, count = {"digits": digits, "diabetes": diabetes}[task]()
    train, held_out = torch.randperm(len(x)).tensor_split([count])
    loss_of, outputs = (F.cross_entropy, 10) if task == "digits" else (F.mse_loss, 1)
    model = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))
    opt = make(model)
    rows = []
    for step in range(1, SHOWN[-1] + 1):
        batch = train[torch.randperm(count)[: min(64, count // 2)]]
        opt.zero_grad()
        loss_of(model(x[batch]), y[batch]).backward()
        opt.step()
        if step in SHOWN:
            rows.append(losses(opt, model, lambda part: loss_of(model(x[part]), y[part]).item(), train, held_out))
            rows[-1] |= {"step": step, "fraction": opt.report.fraction if isinstance(opt, DDPNOpt) else float("nan")}
    return rows


def losses(
    opt: torch.optim.Optimizer, model: nn.Module, loss: Callable[[Tensor], float], train: Tensor, held_out: Tensor
) -> dict[str, float]:
    """Of the weights that one would test: the average, where there is one."""
    if isinstance(opt, DDPNOpt):
        opt.eval()
    with torch.no_grad():
        found = {"train": loss(train), "validation": loss(held_out)}
    if isinstance(opt, DDPNOpt):
        opt.train()
    return found


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "first-steps.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["task", "method", "step", "train", "validation", "fraction"])
        for task in ("digits", "diabetes"):
            for name, make in METHODS.items():
                if task != "digits" and name in ON_DIGITS_ONLY:
                    continue
                runs = [run(task, make, seed) for seed in range(SEEDS)]
                for rows in zip(*runs, strict=True):
                    means = [fmean(row[key] for row in rows) for key in ("train", "validation", "fraction")]
                    line = [task, name, int(rows[0]["step"]), *(f"{mean:.3g}" for mean in means)]
                    table.writerow(line)
                    print(*line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
