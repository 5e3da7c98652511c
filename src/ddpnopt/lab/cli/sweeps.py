"""Runs from the store and the rest computed now, with a progress bar or with lines in a log file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddpnopt.lab.cli.progress import bar, status_console
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.store import Store, code_state

LOG_EVERY = 20


def collect_showing_progress(
    wanted: Sequence[RunConfig], path: Path, jobs: int, data_dir: Path | None = None, *, what: str = "runs"
) -> dict[RunConfig, Outcome]:
    """The outcomes of the runs that are there in the end; with 0 `jobs` nothing is computed."""
    from ddpnopt.lab.runs.sweep import collect

    status = status_console()
    store = Store(path)
    if store.codes(run.key for run in wanted) - {code_state()}:
        status.print("[dim]some results in the store come from another state of the optimizer's code")
    with bar() as progress:
        row = progress.add_task(what, total=None, detail="")
        start = 0

        def on_run(done: int, total: int, run: RunConfig | None, outcome: Outcome | None) -> None:
            nonlocal start
            if run is None:
                start = done  # runs from the store would make the estimate of the time left too short
                progress.update(row, total=total - start)
                return
            progress.update(row, completed=done - start, detail=_detail(run, outcome))
            if progress.disable and ((done - start) % LOG_EVERY == 0 or done == total):
                text = f"{done - start}/{total - start} {what}; {_detail(run, outcome)}"
                status.print(text, soft_wrap=True, highlight=False)

        try:
            # each run by itself: the time to reach a loss is part of the result
            return collect(wanted, store, jobs=jobs, data_dir=data_dir, stacked=False, on_run=on_run)
        finally:
            store.close()


def _detail(run: RunConfig, outcome: Outcome | None) -> str:
    if outcome is None:
        return f"{run}: the method does not apply or has no default learning rate"
    return f"{run}: {'diverged' if outcome.diverged else f'{outcome.metric:.4g}'}, {outcome.seconds:.0f} s"
