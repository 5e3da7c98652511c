"""Why a claim of the paper does not hold here, in one sentence each; the figures are in the claim itself."""

from __future__ import annotations

import re

SCALE = (
    "At the paper's large rates the feedback overshoots with this M; the paper leaves the scale of V_xx open, and our "
    "reading makes the feedback stronger than the paper's gains suggest."
)
GUARD = (
    "The guard that keeps the recursion stable also keeps the gradient from being amplified; without it the networks "
    "leave the plateau, but unstably."
)
SHORT = "EKFAC is ahead on these short runs on a part of the images; the paper trains on all of them, and longer."
NOISE = "The difference is smaller than a standard deviation over the seeds."

REASONS: dict[str, list[tuple[str, str]]] = {
    "fig-dynamics": [("RMSprop|EKFAC", SCALE)],
    "fig-grid": [("RMSprop|EKFAC", SCALE)],
    "fig-policy": [("visual features", "The paper shows pictures and no measure; no threshold decides between ours.")],
    "fig-runtime": [
        ("nearly as fast", "On a CPU with small networks the second forward pass and Python weigh more than on the "
         "paper's GPU."),
    ],
    "fig-spectrum": [
        ("number of nontrivial", "The gradient of the cross-entropy adds up to zero over the classes, which leaves one "
         "direction fewer than there are classes."),
        ("increase", "A network that fits its data has little gradient left, and the eigenvalues shrink with it."),
    ],
    "fig-vanishing": [
        ("make no progress", "SGD-VGR leaves the plateau slowly here; not every setting that decides this is in the "
         "paper."),
        ("escape from vanishing|second order", GUARD),
        ("whatever the learning rate", "Some of the larger rates do leave the plateau, or diverge."),
        ("5 to 10 times", "Only the update of the second-order form is that much larger here."),
        ("cross-entropy none", "SGD-VGR escapes: its penalty acts on the norm of the gradient, whatever the loss."),
        ("ReLU", "The gradients do not vanish, but at these rates some methods diverge on the large targets of the MMC "
         "loss."),
        ("adaptive diagonal", "The three methods end close to each other."),
    ],
    "ours": [
        ("MNIST, CNN", "One fixed damping serves all data sets; EKFAC was tuned for this one."),
    ],
    "table3": [
        ("WINE", "The test set is so small that a single sample is more than two points."),
        ("DIGITS", NOISE),
        ("F-MNIST, FCN|MNIST, CNN", SHORT),
        ("MNIST, FCN", "At the rate that tuning chose, a seed fails to train, as the deviation shows."),
    ],
    "table4": [("Vanilla DDP", "The sizes that fit here are too small for the cubic terms to dominate.")],
    "tables6-8": [("Table", NOISE)],
}  # fmt: skip
"""By item: a pattern of the claim's text, and the sentence; the first that matches counts."""


def reason(item: str, claim: str) -> str:
    """The sentence for a claim that does not hold; empty where none is known."""
    return next((why for pattern, why in REASONS.get(item, []) if re.search(pattern, claim)), "")
