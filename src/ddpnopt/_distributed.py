"""Data-parallel training: the batch is distributed over several processes, and each knows its own samples only.

Only this module uses `torch.distributed`. A step needs sums over all samples (directions of the update, curvature
statistics, losses) and the concatenated rows of all samples (the small matrices of the batch-coupled form). `Peers`
itself is one process with the whole batch, for which all of these are trivial.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpnopt.errors import ModelError, NonFiniteError, OptionError, PeerError, StepError

Parts = list[Tensor]
READY, OVERFLOW, FAILED = 0, 1, 2
MARKS = 2**21  # of sizes; with one of 32 bits beside it they fill a number of double precision


class Peers:
    """The processes that have the batch of one step: here, a single one."""

    alone = True

    def batch(self, mine: int) -> int:
        """Samples in the whole batch, of which `mine` are here."""
        return mine

    def share(self, mine: int) -> float:
        """The share of this process in the batch."""
        return mine / self.batch(mine)

    def sum(self, parts: Parts) -> Parts:
        """The sum over all processes."""
        return parts

    def gather(self, rows: Tensor, columns: int = 1) -> Tensor:
        """Rows of all samples, from the rows of those here; for R columns per sample, row r B + i is sample i of r."""
        return self.gather_later(rows, columns)()

    def gather_later(self, rows: Tensor, columns: int = 1) -> Callable[[], Tensor]:
        """`gather` in the background; calling the result waits for it."""
        return lambda: rows

    def mine(self, rows: Tensor, columns: int = 1) -> Tensor:
        """The rows of the samples here, from those of all."""
        return rows

    def total(self, value: float) -> float:
        """The sum of a number."""
        return value

    def mean(self, value: float) -> float:
        """A number on which all processes agree."""
        return value


ALONE = Peers()


@dataclass(eq=False)
class Group:
    """The processes of a process group, from step to step."""

    process_group: Any = None  # of torch.distributed; None is the group of all
    averaged: bool = False  # whether DistributedDataParallel averages .grad
    calls: Counter[str] = field(default_factory=Counter)  # collectives so far, by kind
    payload: Counter[str] = field(default_factory=Counter)  # … and the bytes that this process has sent

    def __post_init__(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise OptionError(
                "data_parallel: torch.distributed is not running. Call torch.distributed.init_process_group() first, "
                "and start the script with torchrun."
            )
        self.rank, self.size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)

    @contextmanager
    def collective(self, kind: str, sent: Tensor) -> Iterator[None]:
        """Count a collective, and explain its failure."""
        self.calls[kind] += 1
        self.payload[kind] += sent.numel() * sent.element_size()
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"Rank {self.rank} of {self.size} lost contact with the others in {kind}: a process has died or has "
                "left the training loop (each must take the same number of steps); see that rank's log. Weights are as "
                "before this step; restart from the last checkpoint."
            ) from error

    def broadcast(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of the first process to all."""
        first = 0 if self.process_group is None else dist.get_global_rank(self.process_group, 0)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                with self.collective("broadcast", tensor):
                    dist.broadcast(tensor.detach(), first, group=self.process_group)

    def reduce(self, flat: Tensor) -> None:
        """The sum over all processes, in place."""
        with self.collective("all_reduce", flat):
            dist.all_reduce(flat, group=self.process_group)

    def gather_later(self, tensor: Tensor) -> Callable[[], list[Tensor]]:
        """The tensors of all processes, which must have one shape."""
        tensor = tensor.contiguous()
        places = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.collective("all_gather", tensor):
            work = dist.all_gather(places, tensor, group=self.process_group, async_op=True)

        def wait() -> list[Tensor]:
            self.calls["all_gather"] -= 1  # the same one, not a new one
            with self.collective("all_gather", tensor[:0]):
                work.wait()
            return places

        return wait

    def begin(
        self,
        device: torch.device,
        status: int,
        samples: int = 0,
        total: float = 0.0,
        path: str = "",
        extra: bool = False,
        sizes: str = "",
    ) -> Together | None:
        """Synchronise before a step: raises on all ranks if one cannot take it; None if any has overflowed."""
        mark = float(zlib.crc32(path.encode()) * MARKS + zlib.crc32(sizes.encode()) % MARKS)
        own = torch.tensor([status, samples, total, mark, float(extra)], dtype=torch.float64, device=device)
        rows = torch.stack(self.gather_later(own)()).tolist()
        failed = [rank for rank, row in enumerate(rows) if row[0] == FAILED]
        if status == READY:
            if failed:
                raise StepError(f"Rank {failed[0]} could not take this step; see that rank's log.")
            if any(row[0] == OVERFLOW for row in rows):
                return None
            if not all(math.isfinite(row[2]) for row in rows):
                where = ", ".join(str(rank) for rank, row in enumerate(rows) if not math.isfinite(row[2]))
                raise NonFiniteError(
                    f"the gradient of the loss is not finite (rank {where}). Weights and state are as they were before "
                    "this step."
                )
            if any(row[3] // MARKS != mark // MARKS for row in rows):
                raise ModelError(
                    "The processes ran different layers in this step: in data-parallel training all must take the same "
                    "path through the same model."
                )
        alike = all(row[3] == mark for row in rows)
        return Together(self, [int(row[1]) for row in rows], any(row[4] for row in rows), alike=alike)


class Together(Peers):
    """The processes of a group in one step, each with its own number of samples."""

    alone = False

    def __init__(self, group: Group, sizes: list[int], extra: bool = False, *, alike: bool = True) -> None:
        self.group, self.sizes = group, sizes
        self.alike = alike  # whether the samples of all have the same sizes at all layers
        self.extra = extra  # whether the loss of any of them has a penalty on the weights
        self.before = sum(sizes[: group.rank])

    def batch(self, mine: int) -> int:
        return sum(self.sizes)

    def sum(self, parts: Parts) -> Parts:
        flat = torch.cat([p.flatten() for p in parts])
        self.group.reduce(flat)
        pieces = flat.split([p.numel() for p in parts])
        return [piece.view(p.shape) for piece, p in zip(pieces, parts, strict=True)]

    def gather_later(self, rows: Tensor, columns: int = 1) -> Callable[[], Tensor]:
        most = max(self.sizes)
        R, rest = columns, rows.shape[1:]
        if len(set(self.sizes)) > 1:  # collectives need one shape
            padded = rows.new_zeros(R, most, *rest)
            padded[:, : len(rows) // R] = rows.view(R, -1, *rest)
            rows = padded
        wait = self.group.gather_later(rows.view(R, most, *rest))

        def gathered() -> Tensor:
            parts = [part[:, :size] for part, size in zip(wait(), self.sizes, strict=True)]
            return torch.cat(parts, 1).flatten(0, 1)

        return gathered

    def mine(self, rows: Tensor, columns: int = 1) -> Tensor:
        own = self.sizes[self.group.rank]
        return rows.view(columns, -1, *rows.shape[1:])[:, self.before : self.before + own].flatten(0, 1)

    def extent(self, numbers: list[int], device: torch.device) -> tuple[list[int], list[int]]:
        """The least and the largest of each number in all processes."""
        found = torch.stack(self.group.gather_later(torch.tensor(numbers, device=device))())
        return found.amin(0).tolist(), found.amax(0).tolist()

    def average(self, parts: Parts) -> Parts:
        """The mean over the processes, as DistributedDataParallel takes it."""
        return [p / self.group.size for p in self.sum(parts)]

    def total(self, value: float) -> float:
        flat = torch.tensor([value], dtype=torch.float64, device=self.device)
        self.group.reduce(flat)
        return float(flat)

    def mean(self, value: float) -> float:
        return self.total(value) / self.group.size

    @property
    def device(self) -> torch.device:
        backend = dist.get_backend(self.group.process_group)
        return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def combine_gradients(peers: Together, parameters: list[nn.Parameter], *, mean: bool) -> list[nn.Parameter]:
    """Replace `.grad` of our own samples by that of the whole batch; the parameters for which any process has one."""
    if peers.group.averaged:
        there = [p for p in parameters if p.grad is not None]
        if not mean:
            for p in there:
                assert p.grad is not None
                p.grad = p.grad * peers.group.size
        return there
    if not parameters:
        return []
    share = peers.sizes[peers.group.rank] / sum(peers.sizes) if mean else 1.0
    own = [torch.zeros_like(p) if p.grad is None else p.grad * share for p in parameters]
    have = own[0].new_tensor([float(p.grad is not None) for p in parameters])
    *grads, have = peers.sum([*own, have])
    there = [p for p, some in zip(parameters, have.tolist(), strict=True) if some]
    used = set(there)
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad if p in used else None
    return there


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `DistributedDataParallel`, which is what runs and is replayed."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def active_wrapper() -> DistributedDataParallel | None:
    """The `DistributedDataParallel` whose forward pass is running, if any."""
    return DistributedDataParallel._active_ddp_module
