"""Run as a script by torchrun: trains each case on this process's share of the batch and saves the weights.

One start of the processes serves all cases, because importing torch takes longer than the training.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpnopt import EKFAC, DDPNOpt
from ddpnopt.ddp import sketched
from ddpnopt.trace import arrangement

sys.path.insert(0, str(Path(__file__).parent.parent / "optimizer"))

from optimizer_networks import Residual, cnn, fcn, images, vectors

BATCHES = (12, 12, 7)  # of the whole group; the last is uneven for two, three and four


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def tokens(n: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, 5, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)


def attentive() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3))


class Words(nn.Module):
    """Rows of ids, positions that all samples share, and a cell that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.positions, self.norm = nn.Embedding(7, 4), nn.Embedding(5, 4), nn.LayerNorm(4)
        self.cell, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.rows(x) + self.positions(torch.arange(x.shape[1])))
        return self.out(torch.tanh(self.cell(torch.tanh(self.cell(h)))).mean(1))


def ids(n: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(7, (n, 5), generator=g), torch.randint(3, (n,), generator=g)


class Large(nn.Module):
    """Tokens and vectors through layers with so many features that combinations of them are coupled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.skipped = nn.Linear(5, 48), nn.Linear(48, 40), nn.Linear(48, 40)
        self.wide, self.out = nn.Linear(40, 36), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.inside(h)) + self.skipped(h)
        return self.out(torch.tanh(self.wide(h.mean(1))))


class Sentences(nn.Module):
    """Tokens, of which each share of a batch has as many as its longest sample, through a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.out = nn.Linear(5, 30), nn.Linear(30, 30), nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        there = x.any(2, keepdim=True)
        n = int(there.sum(1).max())
        x, there = x[:, :n], there[:, :n]
        h = torch.tanh(self.first(x)) * there
        h = torch.tanh(self.inside(h)) * there
        return self.out((torch.tanh(self.inside(h)) * there).sum(1))


def sentences(n: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, lengths = torch.randn(n, 9, 5, generator=g, dtype=torch.float64), torch.randint(1, 10, (n,), generator=g)
    return x * (torch.arange(9) < lengths[:, None])[..., None], torch.randint(3, (n,), generator=g)


@dataclass
class Clouds:
    """Unequal numbers of points, one cloud behind the other."""

    points: Tensor
    cloud: Tensor
    count: int

    def tensor_split(self, size: int) -> list[Clouds]:
        parts = torch.arange(self.count).tensor_split(size)
        return [
            Clouds(self.points[here], self.cloud[here] - int(part[0]), len(part))
            for part in parts
            for here in [(self.cloud >= part[0]) & (self.cloud <= part[-1])]
        ]

    def __len__(self) -> int:
        return self.count


class Pooled(Sentences):
    """The sum over the points of each cloud."""

    def forward(self, x: Clouds) -> Tensor:  # type: ignore[override]
        h = torch.tanh(self.inside(torch.tanh(self.first(x.points))))
        return self.out(h.new_zeros(x.count, 30).index_add(0, x.cloud, h))


def clouds(n: int = 8, seed: int = 0) -> tuple[Clouds, Tensor]:
    g = torch.Generator().manual_seed(seed)
    cloud = torch.arange(n).repeat_interleave(torch.randint(2, 10, (n,), generator=g))
    points = torch.randn(len(cloud), 5, generator=g, dtype=torch.float64)
    return Clouds(points, cloud, n), torch.randint(3, (n,), generator=g)


NETS: dict[str, Any] = {
    "fcn": (fcn, vectors), "cnn": (cnn, images), "residual": (Residual, vectors), "normed": (normed, vectors),
    "tokens": (attentive, tokens), "words": (Words, ids), "large": (Large, tokens),
    "sentences": (Sentences, sentences), "clouds": (Pooled, clouds),
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any], bool]] = {  # network, options, whether in DistributedDataParallel
    "outer": ("fcn", {"value": "outer", "lr": 0.5}, False),
    "outer in ddp": ("fcn", {"value": "outer", "lr": 0.5}, True),
    "outer decay": ("fcn", {"value": "outer", "lr": 0.5, "weight_decay": 0.1, "momentum": 0.5}, False),
    "outer sqrt": ("cnn", {"value": "outer", "lr": 0.3, "terminal": "sqrt"}, False),
    "outer one column": ("fcn", {"value": "outer", "lr": 0.3, "terminal": lambda z: torch.tanh(z)}, False),
    "outer sum": ("fcn", {"value": "outer", "lr": 0.05, "reduction": "sum"}, False),
    "outer residual in ddp": ("residual", {"value": "outer", "lr": 0.5}, True),
    "full": ("fcn", {"value": "full", "lr": 0.5}, False),
    "full decay": ("fcn", {"value": "full", "lr": 0.5, "weight_decay": 0.1, "terminal": "cross_entropy"}, False),
    "full order 2 in ddp": ("cnn", {"value": "full", "lr": 0.1, "order": 2}, True),
    "batch": ("fcn", {}, False),
    "batch in ddp": ("fcn", {}, True),
    "batch decay": ("fcn", {"weight_decay": 0.1}, False),
    "batch columns": ("fcn", {"terminal": "cross_entropy"}, False),
    "batch gn": ("fcn", {"terminal": "gn", "relax": 1.0}, False),
    "batch cnn": ("cnn", {}, False),
    "batch cnn in ddp": ("cnn", {}, True),
    "batch residual": ("residual", {}, False),
    "batch tokens": ("tokens", {}, False),
    "batch large": ("large", {}, False),
    "batch large in ddp": ("large", {}, True),
    "batch sum": ("fcn", {"reduction": "sum"}, False),
    "batch norm layers": ("normed", {}, False),
    "batch norm layers in ddp": ("normed", {}, True),
    "batch and parameters without feedback": ("normed", {"exclude": ["1"]}, False),
    "batch words": ("words", {}, False),
    "batch words in ddp": ("words", {}, True),
    "batch sentences": ("sentences", {}, False),
    "batch sentences in ddp": ("sentences", {}, True),
    "batch sentences columns": ("sentences", {"terminal": "cross_entropy"}, False),
    "batch sentences, closed loop": ("sentences", {"closed_loop": True}, False),
    "batch clouds": ("clouds", {}, False),
    "batch clouds in ddp": ("clouds", {"closed_loop": True}, True),
    "outer words, adam": ("words", {"value": "outer", "lr": 0.01, "curvature": "adam"}, False),
    "base optimizer": ("normed", {"value": "outer", "lr": 0.3, "feedback": False, "momentum": 0.9}, False),
    "base kfac": ("fcn", {"value": "outer", "lr": 0.05, "feedback": False, "curvature": "kfac"}, False),
    "base kfac in ddp": ("fcn", {"value": "outer", "lr": 0.05, "feedback": False, "curvature": "kfac"}, True),
    "weight grads in ddp": ("fcn", {"value": "outer", "lr": 0.3, "weight_grads": True}, True),
}  # fmt: skip
for _value, _lr in (("outer", 0.05), ("full", 0.05), ("batch", 1.0)):
    for _curvature in ("rmsprop", "adam", "kfac", "ekfac"):
        CASES[f"{_value} {_curvature}"] = ("fcn", {"value": _value, "lr": _lr, "curvature": _curvature}, False)
for _curvature in ("adam", "kfac", "ekfac"):
    _c: Any = EKFAC(refresh=1) if _curvature == "ekfac" else _curvature  # else its basis is free where A has no rank
    CASES[f"batch cnn {_curvature}"] = ("cnn", {"lr": 0.3, "curvature": _c}, False)
    CASES[f"batch tokens {_curvature}"] = ("tokens", {"lr": 0.3, "curvature": _c}, False)
EVEN_ONLY = {"outer residual in ddp", "base kfac in ddp", "weight grads in ddp", "batch words in ddp"}
SOME = ("outer", "outer in ddp", "full", "full decay", "batch", "batch in ddp", "batch decay", "batch cnn",
        "batch kfac", "batch columns", "outer adam", "full ekfac", "batch rmsprop")  # fmt: skip


def of(size: int) -> list[str]:
    """The cases for so many processes."""
    return list(CASES) if size == 4 else list(SOME)


@contextmanager
def counting_as_large(net: str, size: int) -> Iterator[None]:
    """Let layers of this network count as large by their features alone, and any batch that several processes share.

    One process would take the latter in groups; several do not.
    """
    usual = sketched.WORK, arrangement.MOST, sketched.NUMBERS
    if net == "large":
        sketched.WORK, sketched.NUMBERS = (0, 0), sketched.SENT  # one process would have more combinations
    if size > 1:
        arrangement.MOST = 2
    try:
        yield
    finally:
        sketched.WORK, arrangement.MOST, sketched.NUMBERS = usual


def train(case: str, rank: int = 0, size: int = 1, group: Any = None, micro: int = 1) -> tuple[nn.Module, DDPNOpt]:
    net, options, wrapped = CASES[case]
    make, data = NETS[net]
    torch.manual_seed(rank if size > 1 and not wrapped else 0)  # the first process's weights are everybody's
    model = make()
    wrap = wrapped and size > 1
    whole = DistributedDataParallel(model, process_group=group) if wrap else model
    opt = DDPNOpt(whole, **options, **({"data_parallel": group} if size > 1 and not wrap else {}))
    reduction = options.get("reduction", "mean")
    for seed, n in enumerate(BATCHES[:2] if case in EVEN_ONLY else BATCHES):
        x, y = data(n, seed=seed)
        x, y = x.tensor_split(size)[rank], y.tensor_split(size)[rank]
        opt.zero_grad()
        for some, labels in zip(x.tensor_split(micro), y.tensor_split(micro), strict=True):
            weight = 1.0 if reduction == "sum" else len(some) / len(x)
            (F.cross_entropy(whole(some), labels, reduction=reduction) * weight).backward()
        with counting_as_large(net, size):
            opt.step()
    return model, opt


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def trouble(rank: int, group: Any) -> dict[str, tuple[str, str]]:
    """What each process is told when one of them is in trouble."""
    told = {}
    for what in ("error", "nan", "another way"):
        model = fcn()
        opt = DDPNOpt(model, lr=0.5, value="outer", data_parallel=group)
        before = weights(model)
        x, y = vectors(4, seed=rank)
        loss = F.cross_entropy(model(x), y)
        if rank == 1 and what == "another way":
            loss = model[2](torch.tanh(model[0](x))).square().mean() * 0 + F.cross_entropy(model[:3](x), y)
            opt.zero_grad()
        try:
            (loss * (float("nan") if rank == 1 and what == "nan" else 1.0)).backward()
            if rank == 1 and what == "error":
                x += 1
            opt.step()
        except Exception as error:
            told[what] = (type(error).__name__, str(error))
        assert all(map(torch.equal, before, model.parameters())), what
    return told


def disagree(rank: int, group: Any) -> list[Tensor]:
    """The first process sees its loss and recognises it for certain, the second starts `backward` at the outputs."""
    torch.manual_seed(0)
    model = fcn()
    opt = DDPNOpt(model, data_parallel=group)
    for seed in range(8):
        x, _ = vectors(6, seed=10 * seed + rank)
        z = model(x)
        loss = F.mse_loss(z, x[:, :1].expand_as(z))
        opt.zero_grad()
        if rank == 0:
            loss.backward()
        else:
            z.backward(torch.autograd.grad(loss, z, retain_graph=True)[0])
        opt.step()
    return weights(model)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    made: dict[Any, Any] = {}
    for size in (2, 3, 4):
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        for case in of(size):
            model, _ = train(case, rank, size, group)
            made[size, case] = weights(model)
        if size == 2:
            made["micro-batches"] = weights(train("batch", rank, size, group, micro=2)[0])
            made["trouble"] = trouble(rank, group)
            made["disagree"] = disagree(rank, group)
    torch.save(made, Path(sys.argv[1]) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
