"""Many runs in one program: each is the run that it would be by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpnopt.lab.data import Dataset, load
from ddpnopt.lab.methods.registry import make_optimizer
from ddpnopt.lab.networks import build
from ddpnopt.lab.runs import stacking
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.stacked.training import train
from ddpnopt.lab.runs.stacking import StackedRuns, work_units
from ddpnopt.lab.runs.training import fit, perform

CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("sgd", 0.3, {}),
    ("sgd-m", 0.02, {}),
    ("sgd-vgr", 0.1, {}),
    ("sgd-vgr", 0.1, {"weight": 0.1, "momentum": 0.9}),
    ("rmsprop", 0.003, {}),
    ("adam", 0.003, {}),
    ("kfac", 0.03, {"refresh": 3}),
    ("ekfac", 0.05, {"refresh": 3, "damping": 0.1}),
    ("ddpnopt-sgd", 0.6, {"vxx_reg": 1e-3}),
    ("ddpnopt-rmsprop", 0.0005, {"vxx_reg": 1e-5}),
    ("ddpnopt-adam", 0.002, {}),
    ("ddpnopt-kfac", 0.05, {"vxx_reg": 1e-6}),
    ("ddpnopt-ekfac", 0.05, {"vxx_reg": 1e-6}),
    ("ddpnopt-sgd", 0.3, {"vxx_reg": 1e-3, "guard": False, "vxx_power": 2}),
    ("ddpnopt-sgd", 0.05, {"guard": False, "vxx_power": 0}),
    ("ddpnopt-sgd", 0.1, {"order": 2}),
    ("ddpnopt-sgd", 0.05, {"order": 2, "guard": False, "vxx_power": 0}),
    ("ddpnopt-rmsprop", 0.0005, {"terminal": "gn", "whole": True, "vxx_reg": 1e-5}),
    ("ddpnopt-rmsprop", 0.0005, {"order": 2, "guard": False, "vxx_power": 3}),
    ("ddpnopt-adam", 0.002, {"whole": True}),
    ("ddpnopt-ekfac", 0.05, {"damping": 0.1, "refresh": 3, "terminal": "gn", "vxx_power": 1}),
    ("ddpnopt-ekfac", 0.05, {"damping": 0.1, "order": 2}),
    ("ddpnopt-ekfac", 0.02, {"damping": 0.1, "order": 2, "guard": False, "vxx_power": 0}),
]


def small(seed: int, name: str = "digits", count: int = 110) -> Dataset:
    """A few batches in double precision, the last one smaller."""
    data = load(name, seed=seed)
    return replace(
        data,
        x_train=data.x_train[:count].double(),
        y_train=data.y_train[:count],
        x_test=data.x_test[:50].double(),
        y_test=data.y_test[:50],
    )


def joined(model: nn.Module) -> list[Tensor]:
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return [torch.cat([m.weight, m.bias[:, None]], 1).detach() for m in layers]


@pytest.mark.parametrize(
    ("method", "lr", "options", "dataset"),
    [
        pytest.param(*case, dataset, id=f"{case[0]}-{'-'.join(case[2])}-{dataset}")
        for case in CASES
        for dataset in ("digits", "wine")  # tanh; WINE ends in a sigmoid
        if dataset == "digits" or case[0] in ("adam", "ekfac", "ddpnopt-rmsprop", "ddpnopt-ekfac")
    ],
)
def test_every_run_of_a_stack_has_the_weights_of_the_run_by_itself(
    method: str, lr: float, options: dict[str, Any], dataset: str
) -> None:
    # A batch smaller than a layer leaves EKFAC's eigenbasis free on the directions it lacks, and rounding chooses: for
    # EKFAC all samples at once, so that no step leaves the directions of the first.
    epochs, batch_size = (7, 110) if "ekfac" in method else (1, 16)
    base = RunConfig(method, ClassificationTask(dataset, "fcn", epochs, batch_size), lr, options)
    # other seeds, learning rates and eps side by side
    configs = [replace(base, seed=seed, lr=lr * factor) for seed in (0, 3) for factor in (1.0, 0.5)]
    if "vxx_reg" in options:
        configs.append(replace(base, options={**options, "vxx_reg": 0.0}))
    # RMSprop divides feedback by second moments that are close to zero at first: rounding grows fast, so fewer steps.
    count = 40 if method == "ddpnopt-rmsprop" else 110
    data = [small(config.seed, dataset, count) for config in configs]
    models = [build("fcn", each, c.seed).double() for c, each in zip(configs, data, strict=True)]
    trained = train(configs, models, data)
    for config, each, model, found, losses in zip(configs, data, models, trained.weights, trained.losses, strict=True):
        optimizer = make_optimizer(config.method, model, config.lr, **config.options)
        record = fit(
            model,
            optimizer,
            each,
            epochs=epochs,
            batch_size=batch_size,
            generator=torch.Generator().manual_seed(config.seed),
        )
        assert losses == pytest.approx(record.losses, abs=1e-9)
        assert found is not None
        for ours, theirs in zip(found, joined(model), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["sgd", "ekfac", "ddpnopt-sgd", "ddpnopt-ekfac"])
def test_a_run_that_diverges_is_marked_and_does_not_disturb_the_others(method: str) -> None:
    base = RunConfig(method, ClassificationTask("digits", "fcn", 4, 110), 0.05)
    configs = [base, replace(base, lr=1e307), replace(base, seed=1)]
    data = [small(config.seed) for config in configs]

    def run(chosen: list[int]) -> list[list[Tensor] | None]:
        models = [build("fcn", data[i], configs[i].seed).double() for i in chosen]
        return train([configs[i] for i in chosen], models, [data[i] for i in chosen]).weights

    first, wild, last = run([0, 1, 2])
    assert wild is None
    alone = run([0, 2])
    for with_it, without in zip((first, last), alone, strict=True):
        assert with_it is not None
        assert without is not None
        for a, b in zip(with_it, without, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_stack_gives_the_outcomes_of_the_single_runs() -> None:
    jobs = [
        RunConfig("ddpnopt-rmsprop", ClassificationTask("wine", "fcn", 3, 8), lr, seed=seed)
        for lr in (0.001, 3e38)
        for seed in (0, 1)
    ]
    together = StackedRuns(jobs).perform(None)
    for job, ours in zip(jobs, together, strict=True):
        alone = perform(job)
        assert isinstance(ours, Outcome)
        assert isinstance(alone, Outcome)
        assert ours.diverged == alone.diverged
        assert ours.accuracy == pytest.approx(alone.accuracy, nan_ok=True)
        assert ours.train_loss == pytest.approx(alone.train_loss, abs=1e-3, nan_ok=True)
        assert ours.curve.losses == pytest.approx(alone.curve.losses, abs=1e-3)
        assert (ours.together, alone.together) == (4, 1)


def test_a_stack_trains_the_mmc_loss_and_measures_updates_as_the_single_runs_do() -> None:
    task = ClassificationTask("digits", "sigmoid-9", 2, 64, 192, loss="mmc", measure_updates=True)
    jobs = [
        RunConfig(method, task, lr, {**options, **({"terminal": "mmc"} if "ddpnopt" in method else {})}, seed=1)
        for method, lr, options in (
            ("sgd", 0.1, {}),
            ("ddpnopt-sgd", 0.01, {"order": 2, "guard": False, "vxx_power": 0}),
        )
    ]
    for job in jobs:
        [unit] = work_units([job])
        assert isinstance(unit, StackedRuns)
        [ours] = unit.perform(None)
        alone = perform(job)
        assert ours is not None
        assert alone is not None
        assert ours.train_loss == pytest.approx(alone.train_loss, rel=1e-4)
        assert ours.accuracy == alone.accuracy
        assert len(ours.update_norms) == 9
        assert ours.update_norms == pytest.approx(alone.update_norms, rel=1e-2)
        assert Outcome.from_json(ours.to_json()) == ours


def test_only_runs_that_fit_are_put_together() -> None:
    def jobs(method: str, count: int, **options: Any) -> list[RunConfig]:
        return [RunConfig(method, ClassificationTask("wine"), options=options, seed=seed) for seed in range(count)]

    made = work_units(
        [
            *jobs("adam", 5),
            *jobs("ddpnopt", 2),
            *jobs("ddpnopt-sgd", 2, weight_decay=0.1),
            *jobs("ekfac", 1, refresh=3),
        ],
        largest=3,
    )
    sizes = sorted((type(unit).__name__, len(unit.runs)) for unit in made)
    assert sizes == [*[("SingleRun", 1)] * 4, ("StackedRuns", 1), ("StackedRuns", 2), ("StackedRuns", 3)]
    assert len({job.key for unit in made for job in unit.runs}) == 10


def test_networks_that_are_no_chain_are_trained_one_by_one() -> None:
    job = RunConfig("sgd", ClassificationTask("gaussian-5", "sigmoid-fcn", 1, 250), 0.1)
    [outcome] = StackedRuns([job]).perform(None)
    assert outcome is not None
    assert outcome.together == 1


def test_a_decomposition_that_fails_costs_the_others_of_its_stack_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [RunConfig("sgd", ClassificationTask("wine", "fcn", 1, 32), 0.1, seed=seed) for seed in range(8)]
    real, sizes = stacking.outcomes, []

    def failing(configs: list[RunConfig], *rest: Any) -> list[Outcome]:
        sizes.append(len(configs))
        if any(config.seed == 5 for config in configs):
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return list(real(configs, *rest))

    whole = StackedRuns(jobs).perform(None)
    monkeypatch.setattr(stacking, "outcomes", failing)
    parted = StackedRuns(jobs).perform(None)
    assert [a.accuracy for a in whole if a] == pytest.approx([b.accuracy for b in parted if b])
    assert sorted(sizes) == [1, 1, 2, 2, 4, 4, 8]  # seed 5 alone is trained by itself
