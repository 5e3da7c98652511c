"""`fig-spectrum`: the eigenvalues of the feedback in the prediction layer, on Gaussian clusters in R^30.

K of the last layer is seen as one map of a displacement that all samples of a batch share. It is not square, so its
"eigenvalues" are those of (K'K)^(1/2), its singular values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ddpnopt import DDPNOpt
from ddpnopt._value import ValueForm
from ddpnopt.ddp.terminal import TerminalOption
from ddpnopt.lab import style
from ddpnopt.lab.baselines import MMCLoss, mmc_terminal
from ddpnopt.lab.data import Dataset, gaussian_clusters
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.networks import build
from ddpnopt.lab.paper.captions import caption, compact, finish, spread
from ddpnopt.lab.paper.feedback_gains import feedback_gains
from ddpnopt.lab.paper.item import Claim, Context, Item, Picture, Result, Table
from ddpnopt.lab.paper.verdicts import Estimate, all_of
from ddpnopt.lab.runs.classification import LossFunction
from ddpnopt.lab.runs.training import fit, one_thread_for_small

CLUSTERS = (5, 8, 12, 15)
BATCH_SIZE = 16
SHOWN = 20
"""Eigenvalues in the figure; the last layer has 32 inputs."""
NONTRIVIAL = 1e-4
"""Of the largest: what is smaller counts as zero. In float32 rounding is at 1e-7."""
PROBE = 256
"""Samples whose joint policy is looked at."""


@dataclass(frozen=True)
class SpectrumObjective:
    """A loss, the Hessian that DDPNOpt starts from, and a learning rate that trains."""

    label: str
    loss: Callable[[int], LossFunction]
    terminal: TerminalOption
    lr: float
    rank: Callable[[int], int]
    """Of that Hessian, for so many classes."""
    why_not_exact: str = ""
    why_no_increase: str = ""


OBJECTIVES = (
    SpectrumObjective(
        "cross-entropy", lambda _: F.cross_entropy, "cross_entropy", 0.4, lambda k: k - 1,
        "The Hessian of the cross-entropy has rank k - 1, since softmax does not feel a shift of all its inputs.",
        "The Hessian of the cross-entropy fades as the network becomes certain: the eigenvalues rise and fall again.",
    ),
    SpectrumObjective("squared distance (MMC)", MMCLoss, mmc_terminal, 0.02, lambda k: k),
)  # fmt: skip


@dataclass(frozen=True)
class SpectrumEffort:
    """How thorough to be."""

    seeds: int
    epochs: int
    per_class: int


FULL, QUICK = SpectrumEffort(3, 4, 250), SpectrumEffort(1, 2, 60)


@dataclass(frozen=True, eq=False)
class Spectra:
    """One objective on a number of clusters."""

    objective: SpectrumObjective
    classes: int
    values: NDArray[np.float64]
    """seeds x (epochs + 1) x eigenvalues, descending."""

    @property
    def counts(self) -> list[int]:
        """Nontrivial eigenvalues after training, seed by seed."""
        last = self.values[:, -1]
        return [int(n) for n in (last > NONTRIVIAL * last[:, :1]).sum(1)]

    @property
    def growth(self) -> list[float]:
        """How much larger they have become by training, on average over those that are nontrivial."""
        rank = self.objective.rank(self.classes)
        means = self.values[:, :, :rank].mean(2)
        return [float(ratio) for ratio in means[:, -1] / means[:, 0]]


def eigenvalues(model: torch.nn.Module, objective: SpectrumObjective, dataset: Dataset) -> Tensor:
    """Of the feedback of the last layer for a batch of training samples, descending."""
    x, y = dataset.x_train[:PROBE], dataset.y_train[:PROBE]
    method = ValueForm("full", objective.terminal, order=1, vxx_reg=0.0, guard=False, mean=True)
    loss = objective.loss(dataset.classes)
    gains = feedback_gains(model, method, objective.lr, x, lambda z: loss(z, y))
    return torch.linalg.svdvals(gains[-1].dense())


def run_one(objective: SpectrumObjective, classes: int, seed: int, effort: SpectrumEffort) -> NDArray[np.float64]:
    """The eigenvalues before training and after each epoch."""
    dataset = gaussian_clusters(classes, seed, per_class=effort.per_class)
    model = build("fcn", dataset, seed)
    optimizer = DDPNOpt(model, objective.lr, value="full", terminal=objective.terminal)
    train = partial(
        fit, model, optimizer, dataset, epochs=1, batch_size=BATCH_SIZE,
        generator=torch.Generator().manual_seed(seed), loss_function=objective.loss(classes),
    )  # fmt: skip
    found = [eigenvalues(model, objective, dataset)]
    with one_thread_for_small(model):
        for _ in range(effort.epochs):
            if train().diverged:
                raise ExperimentError(
                    f"fig-spectrum: training on {classes} clusters with {objective.label} diverged (seed {seed}): take "
                    "other seeds"
                )
            found.append(eigenvalues(model, objective, dataset))
    return torch.stack(found).double().numpy()


def run(context: Context) -> Result:
    effort = QUICK if context.quick else FULL
    seeds = context.seeds or effort.seeds
    total, done = len(OBJECTIVES) * len(CLUSTERS) * seeds, 0
    spectra = []
    for objective in OBJECTIVES:
        for classes in CLUSTERS:
            values = []
            for seed in range(seeds):
                context.on_progress(f"{classes} clusters, {objective.label}, seed {seed}", done, total)
                values.append(run_one(objective, classes, seed, effort))
                done += 1
            spectra.append(Spectra(objective, classes, np.stack(values)))
    context.on_progress("done", total, total)
    claims = judge(spectra)
    text = (
        "Eigenvalues of the feedback in the prediction layer, before training and after each epoch, on k Gaussian "
        f"clusters in R^30 (dashed: k); mean of {seeds} seed{'s' if seeds > 1 else ''}. What lies below the axis is "
        "rounding."
    )
    words = caption(text, claims)
    series = [line for each in spectra for line in _series(each)]
    return Result(
        claims,
        [Table("spectrum", "Nontrivial eigenvalues of the feedback in the prediction layer.", table(spectra))],
        [Picture("spectrum", words, draw(spectra, words), series)],
        _notes(effort, seeds),
    )


def judge(spectra: Sequence[Spectra]) -> list[Claim]:
    """The paper's two statements, for each objective, since the paper does not name its own."""
    claims = []
    for objective in OBJECTIVES:
        mine = [each for each in spectra if each.objective is objective]
        found = {each.classes: sorted(set(each.counts)) for each in mine}
        grown = [ratio for each in mine for ratio in each.growth]
        exact = all(counts == [k] for k, counts in found.items())
        # exactly zero: the Hessian of a network that is certain underflows
        increased = all_of(Estimate.of(math.log(max(r, 1e-30)) for r in each.growth).positive for each in mine)
        claims += [
            Claim(
                f"The number of nontrivial eigenvalues matches exactly the number of classes ({objective.label}).",
                exact,
                "5, 8, 12, 15",
                ", ".join(f"k = {k}: {'/'.join(map(str, counts))}" for k, counts in found.items()),
                "" if exact else objective.why_not_exact,
            ),
            Claim(
                f"The eigenvalues increase through training ({objective.label}).",
                increased,
                "increase",
                f"{min(grown):.1f} to {max(grown):.1f} times as large after training as before",
                ""
                if increased
                else "Not on every number of clusters beyond the margin of error."
                if increased is None
                else objective.why_no_increase,
            ),
        ]
    return claims


def table(spectra: Sequence[Spectra]) -> pd.DataFrame:
    rows = []
    for each in spectra:
        rank = each.objective.rank(each.classes)
        first, last = each.values[:, 0].mean(0), each.values[:, -1].mean(0)
        rows.append(
            {
                "loss": each.objective.label,
                "classes k": each.classes,
                "nontrivial eigenvalues": "/".join(str(n) for n in sorted(set(each.counts))),
                "paper": each.classes,
                "smallest nontrivial": compact(last[rank - 1]),
                "next": compact(last[rank]),
                "mean before training": compact(first[:rank].mean()),
                "highest mean": compact(each.values.mean(0)[:, :rank].mean(1).max()),
                "mean after": compact(last[:rank].mean()),
                "growth": spread(each.growth, 1),
            }
        )
    return pd.DataFrame(rows)


def draw(spectra: Sequence[Spectra], words: str) -> Figure:
    """A row of panels for each objective, a column for each number of clusters."""
    with style.style():
        made, axes = style.figure(len(CLUSTERS), len(OBJECTIVES), width=2.9, height=2.7)
        for where, each in zip(axes, spectra, strict=True):
            _panel(where, each)
        for where in axes[:: len(CLUSTERS)]:
            where.set_ylabel("eigenvalue")
        for where in axes[-len(CLUSTERS) :]:
            where.set_xlabel("rank")
        axes[0].legend(loc="upper right", fontsize=7.5, handlelength=1.2)
        return finish(made, "Spectrum of the feedback in the prediction layer", words)


def _panel(axes: Axes, each: Spectra) -> None:
    means = each.values.mean(0)[:, :SHOWN]
    ranks = np.arange(1, means.shape[1] + 1)
    strength = np.linspace(0.25, 1.0, len(means))
    for epoch, (values, alpha) in enumerate(zip(means, strength, strict=True)):
        colour = style.COLOURS["sgd-m"] if epoch == 0 else style.COLOURS["ddpnopt"]
        axes.plot(
            ranks, values, color=colour, alpha=1.0 if epoch == 0 else float(alpha), marker="o", markersize=2.6,
            linewidth=1.2, label=_epoch(epoch),
        )  # fmt: skip
    axes.axvline(each.classes, color=style.INK, linewidth=1.0, linestyle=(0, (4, 3)))
    low = means[:, : each.objective.rank(each.classes)].min()
    axes.set(yscale="log", ylim=(low / 30, means.max() * 2))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_title(f"k = {each.classes}, {each.objective.label.split(' (')[0]}", fontsize=9.5)


def _series(each: Spectra) -> list[dict[str, object]]:
    shown = each.values[:, :, :SHOWN]
    deviations = shown.std(0, ddof=1) if len(shown) > 1 else np.zeros(shown.shape[1:])
    return [
        {
            "panel": f"k = {each.classes}, {each.objective.label}",
            "label": _epoch(epoch),
            "x": list(range(1, shown.shape[2] + 1)),
            "y": [float(f"{v:.4g}") for v in shown[:, epoch].mean(0)],
            "spread": [float(f"{v:.4g}") for v in deviations[epoch]],
        }
        for epoch in range(shown.shape[1])
    ]


def _epoch(number: int) -> str:
    return "before training" if number == 0 else f"epoch {number}"


def _notes(effort: SpectrumEffort, seeds: int) -> list[str]:
    return [
        "The Hessian of cross-entropy has the rank k - 1, because softmax does not feel a shift of all "
        "its inputs: with "
        "it the feedback has one nontrivial eigenvalue less than classes. With a squared distance it has k.",
        "Under cross-entropy the Hessian fades as the network becomes certain: with further epochs the "
        "eigenvalues fall again from their peak. Under a squared distance they go on growing.",
        f"The paper does not say how many samples, epochs and seeds it took: here {effort.per_class} "
        "samples per cluster, "
        f"{effort.epochs} epochs of batches of {BATCH_SIZE}, {seeds} seed(s), the FCN of width 32, DDPNOpt with M = I.",
    ]


ITEM = Item("fig-spectrum", "Spectrum of the feedback in the prediction layer", "Figure 8, appendix A.6.2", run)
