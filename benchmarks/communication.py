"""Bytes and time that a data-parallel step costs: counted, measured on the network interface, and by the cost model.

    torchrun --nproc-per-node 2 benchmarks/communication.py              # results/distributed/processes-2.csv
    torchrun --nproc-per-node 2 benchmarks/communication.py --delay 20   # …/delay.csv: milliseconds for each collective
    python benchmarks/communication.py --paper                           # …/extrapolation.csv, by the model alone

Counts for each form: collectives per step, payload of one process per step (counted, and by the formulas of
docs/distributed.md), and bytes that the loopback interface has carried per step for all processes (Linux).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt._distributed import Group
from ddpnopt.ddp.balance import EVERY_STEP, REFRESH
from ddpnopt.ddp.covariance import DENSE, LEADING, MORE
from ddpnopt.lab.tables import write_csv

OUT = Path(__file__).parents[1] / "results" / "distributed"
Widths = tuple[int, ...]
WIDTHS = (64, 256, 256, 10)
FORMS: dict[str, dict[str, Any]] = {
    "outer": {"value": "outer", "lr": 0.1},
    "full": {"value": "full", "lr": 0.1},
    "batch": {"lr": 3.0},
    "automatic, first steps": {},
    "automatic, later": {},
}
"""`DDPNOpt(model)` looks at its second moments in each of the first steps, and in some of the later ones."""


class SlowGroup(Group):
    """A group whose messages take a while."""

    delay = 0.0

    @contextmanager
    def collective(self, kind: str, sent: Tensor) -> Iterator[None]:
        if kind != "all_gather" or not sent.numel():  # a gather takes its time between its beginning and the wait
            time.sleep(self.delay)
        with super().collective(kind, sent):
            yield


def looks(widths: Widths, looked: Sequence[float] = ()) -> tuple[float, float]:
    """Bytes and collectives of looks at the second moments; `looked` is the share of the steps that have one, by layer.

    There is a count for each side of a layer, and its matrix, and the time of the next look is agreed on.
    """
    followed, size, number = LEADING + MORE, 0.0, 0.0
    for share, layer in zip(looked or [1.0] * (len(widths) - 1), pairwise(widths), strict=True):
        matrices = [n * n if n <= DENSE else n * followed + followed * followed for n in layer]
        size += share * (8 + sum(8 + 4 * numbers for numbers in matrices))
        number += share * (1 + sum(2 if n <= DENSE else 3 for n in layer))
    return size, number


def payload(
    form: str, widths: Widths, b: int, B: int, looked: Sequence[float] = (), planned: float = 0.0
) -> tuple[float, float]:
    """Bytes that one process puts into sums and into gathers in one step; float32, one column per sample.

    `planned` is the share of the steps without a second forward pass: they send no displacements and no loss of it.
    """
    layers = list(pairwise(widths))
    T = len(layers)
    directions = sum(4 * (n + 1) * m for n, m in layers)
    meeting, certain, finite = 5 * 8, 8, 8  # sizes and flags; whether the loss is known; the check for finite numbers
    if form in ("outer", "full"):
        return directions + certain + finite, meeting
    factors = sum(4 * b * (n + m) for n, m in layers)
    rows = T * 4 * b * B
    displacements = (T - 1) * 4 * b
    terminal, losses = 2 * 4 * b, 2 * 8
    sums, gathers = directions + certain + finite + losses, meeting + factors + rows + displacements + terminal
    if form == "batch":
        return sums, gathers
    slopes, prior = 8 + 4 * T, T * 4 * b  # of the last step, and what its memory does to each sample
    judged = 8  # whether the last step has gone wrong
    return sums + slopes + judged - planned * 8 + looks(widths, looked)[0], gathers + prior - planned * displacements


def collectives(form: str, widths: Widths, looked: Sequence[float] = (), planned: float = 0.0) -> float:
    T = len(widths) - 1
    if form in ("outer", "full"):
        return T + 3
    return 4 * T + 5 if form == "batch" else 4 * T + 8 - planned * T + looks(widths, looked)[1]


def sent(form: str, widths: Widths, b: int, size: int, looked: Sequence[float] = (), planned: float = 0.0) -> float:
    """Bytes that one process sends in one step: sums go twice around a ring in pieces, gathers once as a whole."""
    sums, gathers = payload(form, widths, b, b * size, looked, planned)
    return 2 * (size - 1) / size * sums + (size - 1) * gathers


def on_paper(out: Path) -> None:
    """Time that the network takes a step, for machines on a network of 25 Gbit/s and 20 microseconds a message."""
    bandwidth, latency, flops = 25e9 / 8, 20e-6, 2e12
    widths = (784, 1024, 1024, 10)
    rows = []
    for form in ("outer", "batch"):
        for b, size in ((32, 8), (32, 64), (32, 256), (4, 256)):
            hops = collectives(form, widths) * 2 * math.log2(size)
            there = sent(form, widths, b, size)
            solve = (len(widths) - 1) * (b * size) ** 3 / 3 / flops if form == "batch" else 0.0
            times = {"messages": latency * hops, "bytes": there / bandwidth, "factorisation": solve}
            settings = {"form": form, "samples per machine": b, "machines": size, "sent (MB)": f"{there / 1e6:.1f}"}
            rows.append({**settings, **{f"{name} (ms)": f"{1e3 * took:.1f}" for name, took in times.items()}})
            print(*rows[-1].values())
    write_csv(out / "extrapolation.csv", rows)


def loopback() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def stepper(form: str, b: int) -> tuple[DDPNOpt, SlowGroup, Callable[[int], None]]:
    """The optimizer, the group whose messages are counted, and a step on the batch of a number."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*[m for n, k in pairwise(WIDTHS) for m in (nn.Linear(n, k), nn.Tanh())][:-1])
    opt = DDPNOpt(model, data_parallel=True, **FORMS[form])
    opt._group = group = SlowGroup()

    def step(number: int) -> None:
        g = torch.Generator().manual_seed(size * number + rank)
        x, y = torch.randn(b, WIDTHS[0], generator=g), torch.randint(10, (b,), generator=g)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()

    for number in range(EVERY_STEP + REFRESH if form.endswith("later") else 1):
        step(-1 - number)
    return opt, group, step


def last_looks(opt: DDPNOpt) -> list[int]:
    """The step at which each layer has last looked at its second moments."""
    states = [opt.state.get(p, {}) for group in opt.param_groups for p in group["params"] if p.dim() > 1]
    return [state.get("last_look", 0) for state in states]


def count(form: str, b: int, steps: int) -> dict[str, object]:
    """Of one process and step, on average over steps whose first sweep was accepted."""
    size = dist.get_world_size()
    opt, group, step = stepper(form, b)
    found: list[tuple[float, ...]] = []
    number, looks_of, without = 0, [[0.0] for _ in pairwise(WIDTHS)], 0
    while len(found) < steps:
        dist.barrier()
        calls, before, wire = group.calls.total(), group.payload.total(), loopback()
        repeated, planned_before, last = opt.report.shortened, opt.report.planned, last_looks(opt)
        step(number)
        number += 1
        dist.barrier()
        if opt.report.shortened == repeated:
            found.append((group.calls.total() - calls, group.payload.total() - before, loopback() - wire))
            without += opt.report.planned - planned_before
            for seen, old, new in zip(looks_of, last, last_looks(opt), strict=True):
                seen.append(float(new != old))
    counted, sent_by_one, carried = (sum(column) / len(found) for column in zip(*found, strict=True))
    looked = [sum(seen) / len(found) for seen in looks_of] if form.startswith("automatic") else []
    planned = without / len(found) if looked else 0.0
    numbers = {
        "collectives": counted,
        "collectives, model": collectives(form, WIDTHS, looked, planned),
        "payload": sent_by_one,
        "payload, model": sum(payload(form, WIDTHS, b, size * b, looked, planned)),
        "carried": carried,
        "carried, model": size * sent(form, WIDTHS, b, size, looked, planned),
    }
    return {"form": form, **{name: f"{value:,.0f}" for name, value in numbers.items()}}


def delayed(form: str, b: int, steps: int, milliseconds: float) -> dict[str, object]:
    """What a delay adds to a step: medians of steps with and without it in turn, so that other load concerns both."""
    _, _, step = stepper(form, b)
    took: dict[float, list[float]] = {0.0: [], milliseconds / 1e3: []}
    for number in range(2 * steps):
        SlowGroup.delay = list(took)[number % 2]
        dist.barrier()
        began = time.perf_counter()
        step(number)
        took[SlowGroup.delay].append(time.perf_counter() - began)
    SlowGroup.delay = 0.0
    added = 1e3 * (median(took[milliseconds / 1e3]) - median(took[0.0]))
    expected = collectives(form, WIDTHS) * milliseconds
    return {"form": form, "added (ms)": f"{added:.0f}", "collectives times delay (ms)": f"{expected:.0f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="samples of one process")
    parser.add_argument("--steps", type=int, default=4 * REFRESH)
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds added to each collective")
    parser.add_argument("--paper", action="store_true", help="no run: what the model says for hundreds of machines")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.paper:
        on_paper(options.out)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for form in ("outer", "batch") if options.delay else FORMS:
        if options.delay:
            rows.append(delayed(form, options.batch, options.steps, options.delay))
        else:
            rows.append(count(form, options.batch, options.steps))
        if dist.get_rank() == 0:
            print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="   ", flush=True)
    if dist.get_rank() == 0:
        name = "delay" if options.delay else f"processes-{dist.get_world_size()}"
        write_csv(options.out / f"{name}.csv", rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
