"""`ddpnopt bench speed`: what a step costs, how that grows, and where the time goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ddpnopt.lab.cli.options import split_names, writable_folder
from ddpnopt.lab.cli.progress import bar, console
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods.method import Method
from ddpnopt.lab.methods.registry import GROWING, PROFILED, TIMED_METHODS
from ddpnopt.lab.timing.networks import NETWORKS, Network, networks
from ddpnopt.lab.timing.selection import affordable, timed_methods
from ddpnopt.lab.timing.speed import Cost

PARTS = ("batch", "width", "depth")


@dataclass(frozen=True)
class SpeedOptions:
    """What all parts of a measurement have in common."""

    repeats: int
    threads: int
    folder: Path
    suffix: str = ""  # of the names of files


TimedCase = tuple[Network, int, list[Method]]


def speed(
    network_names: Annotated[str, typer.Option("--networks", help="Comma separated.")] = ",".join(NETWORKS),
    method_names: Annotated[
        str | None,
        typer.Option(
            "--methods",
            help=f"Comma separated, SGD always takes part; of {', '.join(TIMED_METHODS)}. By default all, without "
            f"the Kronecker methods on ResNet-18; for --growth {', '.join(GROWING)}, "
            f"for --profile {', '.join(PROFILED)}.",
            show_default=False,
        ),
    ] = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Whether other packages take part.")] = True,
    batch_sizes: Annotated[
        str | None,
        typer.Option(help="Comma separated; by default one that is usual for the network.", show_default=False),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; in each every method has its turn.")] = 15,
    threads: Annotated[
        str, typer.Option(help="Torch threads; several numbers, comma separated, are measured one after the other.")
    ] = "1",
    growth: Annotated[
        str | None,
        typer.Option(
            help="Fit exponents on fully connected networks: batch, width, depth, comma separated.", show_default=False
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where the time of a step goes instead of measuring ratios.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="The ratios, the growth with batch, width and depth, and the profile.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of tables and pictures.")] = Path("results/speed"),
) -> None:
    """Time and peak memory of a step as ratios to SGD, measured side by side."""
    from ddpnopt.lab.timing.growth import cases

    growing = list(PARTS) if everything else [] if growth is None else split_names("--growth", growth)
    sizes = None if batch_sizes is None else _sizes("--batch-sizes", batch_sizes)
    nets = networks(split_names("--networks", network_names))
    at = [(net, size or net.batch_size) for net in nets for size in sizes or [0]]

    def chosen(default: Sequence[str], net: Network) -> list[Method]:
        if method_names is not None:
            return timed_methods(split_names("--methods", method_names))
        return affordable([each for each in timed_methods(default) if peers or each.package is None], net)

    grown = {what: [(net, size, chosen(GROWING, net)) for net, size in cases(what)] for what in growing}
    ratios = [(net, size, chosen(TIMED_METHODS, net)) for net, size in at]
    profiled = [(net, size, chosen(PROFILED, net)) for net, size in at]
    numbers = _sizes("--threads", threads)
    for number in numbers:
        with _threads(number):
            suffix = f"-{number}-threads" if len(numbers) > 1 else ""
            job = SpeedOptions(repeats, number, writable_folder(out), suffix)
            if everything or not (growing or profile):
                _ratios(ratios, job)
            for what, wanted in grown.items():
                _growth(what, wanted, job)
            if everything or profile:
                _profile(profiled, job)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ratios(wanted: Sequence[TimedCase], job: SpeedOptions) -> None:
    from ddpnopt.lab.timing import speed_figures, speed_report
    from ddpnopt.lab.timing.machine import heading

    costs: list[Cost] = []
    saved: list[Path] = []

    def keep(found: list[Cost]) -> None:  # at once: a large network may take long
        costs.extend(found)
        saved[:] = speed_report.write(costs, job.folder, f"speed{job.suffix}", heading(job.threads))

    _measure(wanted, job.repeats, keep)
    _announce(saved + speed_figures.draw(costs, job.folder / f"speed{job.suffix}"))


def _growth(what: str, wanted: Sequence[TimedCase], job: SpeedOptions) -> None:
    from ddpnopt.lab.timing import speed_figures, speed_report
    from ddpnopt.lab.timing.growth import exponents
    from ddpnopt.lab.timing.machine import heading

    by_case = _measure(wanted, job.repeats)
    fits = exponents(what, by_case)
    console().print(speed_report.growth_table(what, fits))
    stem = f"growth-{what}{job.suffix}"
    costs = [cost for case in by_case for cost in case]
    saved = speed_report.write(costs, job.folder, stem, heading(job.threads), fits)
    _announce(saved + speed_figures.draw_growth(what, fits, job.folder / stem))


def _measure(
    wanted: Sequence[TimedCase], repeats: int, keep: Callable[[list[Cost]], None] | None = None
) -> list[list[Cost]]:
    """Case after case, each shown and kept as soon as it is done."""
    from ddpnopt.lab.timing import speed_report
    from ddpnopt.lab.timing.speed import measure

    by_case: list[list[Cost]] = []
    out = console()
    done = 0
    with bar() as progress:
        row = progress.add_task("blocks", total=sum(len(chosen) for _, _, chosen in wanted) * repeats, detail="")
        for network, size, chosen in wanted:

            def on_block(method: Method, network: Network = network, size: int = size) -> None:
                progress.update(row, advance=1, detail=f"{network.label}, batch size {size}, {method.timing_label}")

            by_case.append(measure(network, size, chosen, repeats, on_block, start=keep is not None))
            done += len(chosen) * repeats
            progress.update(row, completed=done)
            for title, found in speed_report.groups(by_case[-1]).items():
                progress.console.print(f"[dim]{title}: measured", highlight=False)
                out.print(speed_report.cost_table(title, found))
                for reason in speed_report.reasons(found):
                    out.print(reason, style="dim", markup=False, highlight=False)
                if keep is not None and speed_report.base_rows(found):
                    out.print(speed_report.base_table(title, found))
            if keep is not None:
                keep(by_case[-1])
    return by_case


def _profile(wanted: Sequence[TimedCase], job: SpeedOptions) -> None:
    from ddpnopt.lab.timing.machine import heading
    from ddpnopt.lab.timing.profiles import Place, profile
    from ddpnopt.lab.timing.speed_report import profile_table, write_profiles
    from ddpnopt.lab.timing.steppers import DoesNotApplyError, ready

    found: dict[str, dict[Place, float]] = {}
    for network, size, chosen in wanted:
        for method in chosen:
            title = f"{method.timing_label} on {network.label}, batch size {size}"
            try:
                stepper = ready(method, network, size)
            except DoesNotApplyError as error:
                console().print(f"{title}: {error}", style="dim", markup=False, highlight=False)
                continue
            found[title] = profile(stepper, method.timing.period * math.ceil(job.repeats / method.timing.period))
            console().print(profile_table(title, found[title]))
    _announce(write_profiles(found, job.folder, heading(job.threads)))


def _announce(saved: Sequence[Path]) -> None:
    for path in saved:
        console().print(f"[dim]saved[/] {path}", soft_wrap=True)


def _sizes(option: str, text: str) -> list[int]:
    parts = split_names(option, text)
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ExperimentError(f"{option} must be positive numbers separated by commas, not {text!r}")
    return [int(part) for part in parts]
