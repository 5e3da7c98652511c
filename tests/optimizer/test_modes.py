"""Training steps from passes in evaluation mode, which `from_pretrained` leaves models in."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import fcn, twins, vectors
from torch import Tensor, nn

from ddpnopt import DDPNOpt


def normed() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    value = F.cross_entropy(model(x), y)
    value.backward()
    return value.detach()


OPTIONS = [{}, {"lr": 0.3, "value": "outer"}]


@pytest.mark.parametrize("options", OPTIONS)
def test_modules_without_modes_step_in_eval_mode_as_in_training_mode(options: dict[str, object]) -> None:
    a, b = twins(fcn())
    b.eval()
    for model in (a, b):
        opt = DDPNOpt(model, **options)  # type: ignore[arg-type]
        for seed in range(4):
            loss(model, *vectors(seed=seed))
            opt.step()
            opt.zero_grad()
    assert all(map(torch.equal, a.parameters(), b.parameters()))
    assert not any(module.training for module in b.modules())


def test_a_model_in_eval_mode_trains_with_fixed_statistics_and_without_dropout() -> None:
    model = normed()
    model(vectors(32)[0])
    model.eval()
    statistics, x, y = copy.deepcopy(dict(model.named_buffers())), *vectors(32)
    opt, losses = DDPNOpt(model), []
    for _ in range(30):
        losses.append(float(loss(model, x, y)))
        opt.step()
        opt.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("training", [True, False])
def test_a_step_runs_the_model_in_the_mode_of_its_pass_and_leaves_it_in_its_own(training: bool) -> None:
    a, b = twins(normed())
    for model, at_step in ((a, training), (b, not training)):
        opt = DDPNOpt(model, closed_loop=True)
        for seed in range(4):
            torch.manual_seed(seed)
            model.train(training)
            loss(model, *vectors(seed=seed))
            model.train(at_step)
            opt.step()
            assert all(module.training == at_step for module in model.modules())
            opt.zero_grad()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_micro_batches_in_different_modes_run_in_their_own_and_leave_the_model_as_it_was() -> None:
    a, b = twins(
        nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    )
    for model, order in ((a, (True, False)), (b, (False, True))):
        opt, seen = DDPNOpt(model, closed_loop=True), list[bool]()
        for step in range(3):
            for training in order:
                model.train(training)
                torch.manual_seed(step)
                loss(model, *vectors(seed=2 * step + training))
            handle = model[2].register_forward_pre_hook(lambda m, _, seen=seen: seen.append(m.training))  # type: ignore
            opt.step()
            handle.remove()
            assert sum(seen) * 2 == len(seen) > 0
            assert all(module.training == order[-1] for module in model.modules())
            opt.zero_grad()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def test_a_frozen_norm_stays_in_evaluation_mode_if_the_mode_of_the_model_changes_before_the_step() -> None:
    model = normed().train()
    opt, seen = DDPNOpt(model, closed_loop=True), list[bool]()
    model[1].eval()
    loss(model, *vectors())
    model.eval()
    model[1].register_forward_pre_hook(lambda m, _: seen.append(m.training))  # type: ignore[arg-type]
    model[3].register_forward_pre_hook(lambda m, _: seen.append(not m.training))  # type: ignore[arg-type]
    opt.step()
    assert seen
    assert not any(seen)
    assert not any(module.training for module in model.modules())
