"""What a run looks like it suffers from: each symptom in a sentence, with what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

from ddpnopt.lab.view.run_log import RunLog

LATE = 0.5  # the part of the run that is judged: the beginning is always different
MANY_REPEATED, MANY_UNDONE = 0.1, 0.02  # of the steps
LARGE_KAPPA = 30.0
SMALL_FRACTION = 3e-3
POOR_MODEL = 0.5  # actual over predicted change
STILL = 1e-3  # update of a layer over the median of all layers
FLAT = 0.02  # relative fall of the loss over the later half
ENOUGH = 20  # recorded steps, to say anything


@dataclass(frozen=True)
class Symptom:
    """A heading of the page on training that goes wrong, and what was seen."""

    name: str
    text: str


def symptoms(log: RunLog) -> list[Symptom]:
    """The most serious first; none for a run that looks well or has hardly begun."""
    found = [*_counters(log)]
    if len(log.steps) >= ENOUGH:
        found += [*_length(log), *_layers(log)]
    if log.kind == "unknown":
        found.append(
            Symptom("Loss not recognised", "the scale of the loss is assumed; pass it with opt.step(loss=loss).")
        )
    if log.open_loop:
        some = ", ".join(log.open_loop[:3]) + (", …" if len(log.open_loop) > 3 else "")
        found.append(Symptom("Parameters without feedback", f"{len(log.open_loop)} of them: {some}"))
    return found


def _counters(log: RunLog) -> list[Symptom]:
    steps = max(log.steps)
    found = []
    skipped, undone, repeated = (log.final(name) for name in ("skipped", "undone", "shortened"))
    if skipped:
        found.append(
            Symptom("Skipped steps", f"{skipped:.0f} steps met numbers that are not finite: look at the data.")
        )
    if undone > MANY_UNDONE * steps:
        found.append(
            Symptom("Undone steps", f"{undone:.0f} of {steps} steps were given up: the loss of their own batch rose.")
        )
    elif repeated > MANY_REPEATED * steps:
        found.append(Symptom("Repeated steps", f"{repeated:.0f} of {steps} steps were made again, shorter."))
    return found


def _length(log: RunLog) -> list[Symptom]:
    found = []
    kappa, fraction = log.known("kappa", LATE), log.known("fraction", LATE)
    if kappa and median(kappa) > LARGE_KAPPA:
        found.append(
            Symptom(
                "Strongly curved",
                f"kappa is {median(kappa):.0f}: the network bends along the steps, and they are that much shorter.",
            )
        )
    elif fraction and median(fraction) < SMALL_FRACTION:
        found.append(
            Symptom(
                "Small steps",
                f"a step asks for {median(fraction):.1g} of the loss: noise, or a scheduler that shortens steps.",
            )
        )
    elif _share_kept(log) < POOR_MODEL:
        found.append(
            Symptom(
                "Promises not kept", f"steps do {100 * _share_kept(log):.0f} % of what the model of the loss predicts."
            )
        )
    loss = log.known("loss", LATE)
    if len(loss) >= ENOUGH:
        quarter = len(loss) // 4
        first, last = fmean(loss[:quarter]), fmean(loss[-quarter:])
        if first > 0 and last > (1 - FLAT) * first:
            found.append(Symptom("Loss does not fall", "over the later half of the run it has stayed where it was."))
    return found


def _share_kept(log: RunLog) -> float:
    """Actual over predicted change; 1 where it is not known."""
    predicted, actual = sum(log.known("predicted", LATE)), sum(log.known("actual", LATE))
    return actual / predicted if predicted < 0 and log.column("actual") else 1.0


def _layers(log: RunLog) -> list[Symptom]:
    sizes = {name: log.known(f"layers/{name}/update", LATE) for name in log.layers}
    means = {name: fmean(values) for name, values in sizes.items() if values}
    if len(means) < 3:
        return []
    usual = median(means.values())
    still = [name for name, size in means.items() if size < STILL * usual]
    if not still:
        return []
    return [Symptom("Layers that stand still", f"{', '.join(still[:4])}: their updates are far below the others'.")]
