"""Bytes and time that a data-parallel step costs: counted, measured on the network interface, and by the cost model.

    torchrun --nproc-per-node 2 benchmarks/communication.py
    torchrun --nproc-per-node 2 benchmarks/communication.py --delay 20    # milliseconds added to each collective
    python benchmarks/communication.py --paper                           # hundreds of machines, by the model alone

Prints one line a form: collectives a step, payload of one process a step (counted, and by the formulas of
docs/distributed.md), bytes that the loopback interface has carried a step for all processes (Linux), time of a step.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt._distributed import Group

WIDTHS = (64, 256, 256, 10)
FORMS = {"outer": {"value": "outer", "lr": 0.1}, "batch": {}, "full": {"value": "full", "lr": 0.1}}


class SlowGroup(Group):
    """A group whose messages take a while."""

    delay = 0.0

    @contextmanager
    def collective(self, kind: str, sent: Tensor) -> Iterator[None]:
        if kind != "all_gather" or not sent.numel():  # a gather takes its time between its beginning and the wait
            time.sleep(self.delay)
        with super().collective(kind, sent):
            yield


def payload(form: str, widths: tuple[int, ...], b: int, B: int) -> tuple[float, float]:
    """Bytes that one process puts into sums and into gathers in one step; float32, one column a sample."""
    layers = list(pairwise(widths))
    T = len(layers)
    directions = sum(4 * (n + 1) * m for n, m in layers)
    meeting, finite = 5 * 8, 8  # sizes and flags at the beginning, the check for finite numbers at the end
    if form != "batch":
        return directions + finite, meeting
    factors = sum(4 * b * (n + m) for n, m in layers)
    rows = T * 4 * b * B
    displacements = (T - 1) * 8 * b
    terminal, losses = 2 * 8 * b, 2 * 8
    return directions + finite + losses, meeting + factors + rows + displacements + terminal


def collectives(form: str, T: int) -> int:
    return 4 * T + 4 if form == "batch" else T + 2


def sent(form: str, widths: tuple[int, ...], b: int, size: int) -> float:
    """Bytes that one process sends in one step: sums go twice around a ring in pieces, gathers once as a whole."""
    sums, gathers = payload(form, widths, b, b * size)
    return 2 * (size - 1) / size * sums + (size - 1) * gathers


def on_paper() -> None:
    """Time that the network takes a step, for machines on a network of 25 Gbit/s and 20 microseconds a message."""
    bandwidth, latency, flops = 25e9 / 8, 20e-6, 2e12
    widths = (784, 1024, 1024, 10)
    print("form   samples a machine   machines   sent (MB)   messages (ms)   bytes (ms)   factorisation (ms)")
    for form in ("outer", "batch"):
        for b, size in ((32, 8), (32, 64), (32, 256), (4, 256), (1, 256)):
            T = len(widths) - 1
            hops = collectives(form, T) * 2 * math.log2(size)
            there = sent(form, widths, b, size)
            solve = T * (b * size) ** 3 / 3 / flops if form == "batch" else 0.0
            times = (1e3 * latency * hops, 1e3 * there / bandwidth, 1e3 * solve)
            print(f"{form:6} {b:17d} {size:10d} {there / 1e6:11.1f} {times[0]:15.1f} {times[1]:12.1f} {times[2]:19.1f}")


def loopback() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64, help="samples of one process")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds added to each collective")
    parser.add_argument("--paper", action="store_true", help="no run: what the model says for hundreds of machines")
    options = parser.parse_args()
    if options.paper:
        on_paper()
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    SlowGroup.delay = options.delay / 1e3
    for form, settings in FORMS.items():
        torch.manual_seed(0)
        layers = [m for n, k in pairwise(WIDTHS) for m in (nn.Linear(n, k), nn.Tanh())][:-1]
        model = nn.Sequential(*layers)
        opt = DDPNOpt(model, data_parallel=True, **settings)  # type: ignore[arg-type]
        opt._group = group = SlowGroup()

        def step(seed: int, model: nn.Module = model, opt: DDPNOpt = opt) -> None:
            g = torch.Generator().manual_seed(size * seed + rank)
            x, y = torch.randn(options.batch, WIDTHS[0], generator=g), torch.randint(10, (options.batch,), generator=g)
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()

        step(0)
        dist.barrier()
        calls, before, wire, began = group.calls.total(), group.payload.total(), loopback(), time.perf_counter()
        for k in range(options.steps):
            step(k + 1)
        took = (time.perf_counter() - began) / options.steps
        dist.barrier()
        if rank == 0:
            counted = (group.payload.total() - before) / options.steps
            by_model = sum(payload(form, WIDTHS, options.batch, size * options.batch))
            on_wire = size * sent(form, WIDTHS, options.batch, size)
            carried = (loopback() - wire) / options.steps
            print(
                f"{form:6} processes {size}   collectives {(group.calls.total() - calls) / options.steps:5.1f}   "
                f"payload counted {counted:9,.0f}   model {by_model:9,.0f}   "
                f"carried {carried:11,.0f}   model {on_wire:11,.0f}   "
                f"step {1e3 * took:7.1f} ms",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
