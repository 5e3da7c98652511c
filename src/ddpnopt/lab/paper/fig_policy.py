"""`fig-policy`: the direction that the feedback policy responds to most, seen as an image (Algorithm 4).

For an image, K of each layer of the CNN is decomposed; the right singular vector of the largest singular value, a
displacement of that layer's input, is projected back to the pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from ddpnopt._value import ValueForm
from ddpnopt.lab import style
from ddpnopt.lab.data import Dataset, load
from ddpnopt.lab.methods.registry import make_optimizer
from ddpnopt.lab.networks import build
from ddpnopt.lab.paper.captions import caption, finish
from ddpnopt.lab.paper.deconvolution import project_back
from ddpnopt.lab.paper.feedback_gains import Gain, feedback_gains
from ddpnopt.lab.paper.item import Claim, Context, Item, Picture, Result, Table
from ddpnopt.lab.paper.verdicts import RULE, Estimate, all_of
from ddpnopt.lab.runs.classification import evaluate
from ddpnopt.lab.runs.training import fit

SHOWN_PAIRS = ((8, 3), (7, 1), (4, 9), (5, 3))
"""The first two are the paper's examples of classes alike in space."""
LR = 0.03
BATCH_SIZE = 128
# The exact Hessian of cross-entropy; for one image the batch-coupled form carries it in columns, not as n x n matrix.
METHOD = ValueForm("batch", "cross_entropy", order=1, vxx_reg=0.0, guard=True, mean=True)


@dataclass(frozen=True)
class PolicyEffort:
    """How thorough to be."""

    n_train: int
    epochs: int
    images: int
    """Test images over which the figures are taken."""


FULL, QUICK = PolicyEffort(10_000, 1, 200), PolicyEffort(1_500, 1, 60)
SEEDS, QUICK_SEEDS = 3, 1
FIRST_SEED = 1
"""Seed 0, its network and its test images served to choose the measure."""


@dataclass(frozen=True, eq=False)
class Response:
    """What one layer's policy responds to most, for one image."""

    layer: str
    image: Tensor
    label: int
    rival: int
    """The most probable of the other classes."""
    singular_values: Tensor
    pattern: Tensor
    """The leading direction, projected back to the pixels: (H, W)."""

    @property
    def leading_share(self) -> float:
        """Of the squared singular values."""
        squares = self.singular_values.square()
        return float(squares[0] / squares.sum())


def leading_direction(gain: Gain) -> tuple[Tensor, Tensor]:
    """Singular values of K and the right singular vector of the largest, for a batch of one image.

    The rows of K lie in the span of the back-propagated columns p_x: K is applied to an orthonormal basis of it.
    """
    columns = torch.stack([p.flatten() for p in gain.stage.p_x if p is not None], 1)  # (n, R)
    U, s, _ = torch.linalg.svd(columns.double(), full_matrices=False)
    basis = U[:, s > 1e-6 * s[0]].T.to(columns.dtype)
    small = gain.matrix(basis.view(-1, *gain.x.shape[1:]))  # (m, r)
    _, values, right = torch.linalg.svd(small, full_matrices=False)
    direction = right[0] @ basis
    # The ReLU on the way to the image distinguishes v from -v: take the one along which the loss of the image grows.
    return values, direction if float(direction @ columns[:, 0]) >= 0 else -direction


def respond(model: nn.Sequential, image: Tensor, label: int) -> list[Response]:
    """All layers that have one before them, for one image (1, C, H, W)."""
    target = torch.tensor([label])
    gains = feedback_gains(model, METHOD, LR, image, lambda z: F.cross_entropy(z, target))
    with torch.no_grad():
        outputs = model(image)[0]
    outputs[label] = -torch.inf
    found = []
    for gain in gains[1:]:
        values, direction = leading_direction(gain)
        pattern = project_back(model, model.get_submodule(gain.name), image, direction)
        found.append(Response(gain.name, image[0].mean(0), label, int(outputs.argmax()), values, pattern[0].mean(0)))
    return found


def class_means(dataset: Dataset) -> Tensor:
    """The mean image of each class: (classes, H, W)."""
    return torch.stack([dataset.x_train[dataset.y_train == k].mean((0, 1)) for k in range(dataset.classes)])


def likeness(response: Response, rival: int, means: Tensor) -> float:
    """The correlation of the pattern with what the mean image of `rival` has more than that of the image's class."""
    difference = _normed((means[rival] - means[response.label]).flatten())
    return float(_normed(response.pattern.flatten()) @ difference)


@dataclass(frozen=True, eq=False)
class Likeness:
    """Of one layer's patterns to the difference between an image's class and its rival.

    Any pattern of an eight looks somewhat like the difference of the means of threes and eights. So the control is the
    same difference compared with the patterns of other images of the class, those whose rival is another.
    """

    own: list[float]
    control: list[float]

    @classmethod
    def of(cls, responses: Sequence[Response], means: Tensor) -> Likeness:
        own, control = [], []
        for response in responses:
            others = [r for r in responses if r.label == response.label and r.rival != response.rival]
            if others:
                own.append(likeness(response, response.rival, means))
                control.append(mean(likeness(other, response.rival, means) for other in others))
        return cls(own, control)

    @property
    def excess(self) -> tuple[float, float]:
        """Of the own over the control, and the standard error."""
        found = np.subtract(self.own, self.control)
        if len(found) < 2:
            return math.nan, math.nan
        return float(found.mean()), float(found.std(ddof=1)) / math.sqrt(len(found))


def _normed(values: Tensor) -> Tensor:
    centred = values - values.mean()
    return centred / centred.norm().clamp_min(1e-30)


def run(context: Context) -> Result:
    effort = QUICK if context.quick else FULL
    dataset = load("mnist", data_dir=context.data_dir)
    means = class_means(dataset)
    count = context.seeds or (QUICK_SEEDS if context.quick else SEEDS)
    by_seed: list[list[Likeness]] = []
    responses: list[list[Response]] = []
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        done = (seed - FIRST_SEED) * effort.images
        context.on_progress("policies", done, count * effort.images)
        model, accuracy = trained(dataset.subset(min(effort.n_train, len(dataset.y_train)), seed), effort, seed)
        responses = []
        for number, index in enumerate(fresh_images(dataset, seed, effort.images)):
            context.on_progress("policies", done + number, count * effort.images)
            responses.append(respond(model, dataset.x_test[index : index + 1], int(dataset.y_test[index])))
        by_seed.append([Likeness.of(found, means) for found in zip(*responses, strict=True)])
    context.on_progress("policies", count * effort.images, count * effort.images)
    likenesses = by_seed[-1]
    claims = judge(by_seed)
    shown = examples(dataset, model)
    text = (
        "Columns: MNIST images, each above what the policies of the CNN's layers answer to most, back "
        "in the pixels; at the bottom the mean image of the most probable other class less that of the own one. Test "
        f"accuracy {accuracy:.1f} %."
    )
    words = caption(text, claims)
    return Result(
        claims,
        [Table("policy", "Leading direction of the feedback, layer by layer.", table(likenesses, responses))],
        [Picture("policy", words, draw(shown, means, words))],
        [
            "The paper shows pictures alone, the measure is ours: the correlation, over all pixels and with "
            "its sign, of the pattern with the mean image of the most probable other class less that of the own one, "
            "against the same "
            "for the patterns of other images of the class, whose most probable other class is another.",
            "It is the fourth measure that was tried, and it was chosen after looking, on another network and on test "
            "images that are left out here. By the rank of the true pair among all 45 pairs of classes the "
            "convolutions did no better than chance; by the rank on the image's own ink all layers did worse than "
            "chance (5.7 to 6.2, chance 5); without the sign the relation was there for the convolutions alone. The "
            "claim is judged with this measure, fixed, on networks, training images and test images of fresh seeds: it "
            f"holds where the excess of every layer exceeds {RULE}.",
            "K is that of the exact Hessian of cross-entropy. With the factor z z' of Proposition 2 K has rank one and "
            "its direction is the back-propagated gradient, whatever the curvature.",
            f"CNN trained by DDPNOpt with the Kronecker curvature, {effort.epochs} epoch(s) of {effort.n_train} images "
            f"in batches of {BATCH_SIZE}, {count} seed(s) from {FIRST_SEED} on, {effort.images} test images each; "
            "table and picture show the last.",
            *([dataset.note] if dataset.note else []),
        ],
    )


def fresh_images(dataset: Dataset, seed: int, count: int) -> list[int]:
    """Test images drawn by the seed, none of those on which the measure was chosen."""
    looked_at = torch.randperm(len(dataset.y_test), generator=torch.Generator().manual_seed(0))[:300]
    drawn = torch.randperm(len(dataset.y_test), generator=torch.Generator().manual_seed(seed))
    used = set(looked_at.tolist()) if len(dataset.y_test) > 300 + count else set()
    return [index for index in drawn.tolist() if index not in used][:count]


def trained(dataset: Dataset, effort: PolicyEffort, seed: int = 0) -> tuple[nn.Sequential, float]:
    """The paper's CNN after some steps of DDPNOpt, and its accuracy on the test set."""
    model = build("cnn", dataset, seed=seed)
    assert isinstance(model, nn.Sequential)
    optimizer = make_optimizer("ddpnopt-ekfac", model, LR)
    generator = torch.Generator().manual_seed(seed)
    fit(model, optimizer, dataset, epochs=effort.epochs, batch_size=BATCH_SIZE, generator=generator)
    return model, evaluate(model, dataset.x_test[:2000], dataset.y_test[:2000]).metric


def judge(by_seed: Sequence[Sequence[Likeness]]) -> list[Claim]:
    """Of several seeds: every layer better than the control, beyond the error over the seeds."""
    layers = [Estimate.of(each.excess[0] for each in found) for found in zip(*by_seed, strict=True)]
    holds = all_of(each.positive for each in layers)
    found_text = ", ".join(f"{name_of(t)} {each.text(2)}" for t, each in enumerate(layers))
    whys = {
        True: "",
        None: "Not beyond the margin of error for every layer.",
        False: "It is the other way round.",
    }
    return [
        Claim(
            "The feedback captures visual features related to the pixel-wise difference between similar classes.",
            holds,
            "pictures",
            "its patterns are more like that difference than those of other images of the class by a "
            f"correlation of {found_text}",
            whys[holds],
        )
    ]


def table(likenesses: Sequence[Likeness], responses: Sequence[Sequence[Response]]) -> pd.DataFrame:
    rows = []
    for t, (alike, found) in enumerate(zip(likenesses, zip(*responses, strict=True), strict=True)):
        nontrivial = [int((r.singular_values > 1e-4 * r.singular_values[0]).sum()) for r in found]
        excess, error = alike.excess
        rows.append(
            {
                "layer": name_of(t),
                "images": len(alike.own),
                "rank of K": f"{median(nontrivial):.0f}",
                "share of the leading direction": f"{100 * mean(r.leading_share for r in found):.0f} %",
                "likeness to the difference": f"{mean(alike.own):.2f}" if alike.own else "",
                "control": f"{mean(alike.control):.2f}" if alike.own else "",
                "excess": f"{excess:.2f} ± {error:.2f}",
            }
        )
    return pd.DataFrame(rows)


def name_of(position: int) -> str:
    """Of the layers behind the first of the paper's CNN."""
    return ("conv 2", "conv 3", "conv 4", "fc 1", "fc 2")[position]


def examples(dataset: Dataset, model: nn.Sequential) -> list[list[Response]]:
    """For each pair a test image of the first class that the network confuses most with the second."""
    with torch.no_grad():
        outputs = model(dataset.x_test[:2000])
    found = []
    for label, rival in SHOWN_PAIRS:
        candidates = (dataset.y_test[:2000] == label).nonzero()[:, 0]
        margin = outputs[candidates, rival] - outputs[candidates].scatter(
            1, _column(candidates, label), -torch.inf
        ).amax(1)
        index = int(candidates[margin.argmax()])
        found.append(respond(model, dataset.x_test[index : index + 1], label))
    return found


def _column(like: Tensor, value: int) -> Tensor:
    return torch.full((len(like), 1), value)


def draw(shown: Sequence[Sequence[Response]], means: Tensor, words: str) -> Figure:
    """One column per image; the layers from the first to the last, and the difference of the classes."""
    rows = ["image", *(name_of(t) for t in range(len(shown[0]))), "difference"]
    with style.style():
        made, axes = style.figure(len(shown), len(rows), width=1.75, height=1.45)
        for column, found in enumerate(shown):
            label, rival = found[0].label, found[0].rival
            pictures = [found[0].image, *(response.pattern for response in found), means[rival] - means[label]]
            for row, picture in enumerate(pictures):
                where = axes[row * len(shown) + column]
                signed = row > 0
                limit = float(picture.abs().quantile(0.995)) or 1.0
                low, high = (-limit, limit) if signed else (None, None)
                where.imshow(np.asarray(picture), cmap="RdBu_r" if signed else "Greys", vmin=low, vmax=high)
                where.set_xticks([])
                where.set_yticks([])
                where.grid(visible=False)
                if row == 0:
                    where.set_title(f"{label}, then {rival}")
                if column == 0:
                    where.set_ylabel(rows[row], rotation=0, ha="right", va="center")
        return finish(made, "What the feedback answers to", words)


ITEM = Item("fig-policy", "The feedback policies, seen as images", "Figure 5, section 5.2; Algorithm 4", run)
