"""State: saved, loaded, copied, moved, deleted, and left in order after an exception."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import Residual, cnn, distance, fcn, images, same, train, vectors, weights
from torch import Tensor, nn

from ddpnopt import EKFAC, KFAC, DDPNOpt

CURVATURES: dict[str, dict[str, Any]] = {
    "identity": {"lr": 0.2, "momentum": 0.9, "weight_decay": 1e-3},
    "rmsprop": {"lr": 0.01, "momentum": 0.5},
    "adam": {"lr": 0.01, "weight_decay": 1e-3},
    "kfac": {"lr": 0.05, "momentum": 0.9},
    "ekfac": {"lr": 0.05, "weight_decay": 1e-3},
}


def curvature_of(name: str) -> Any:
    # a refresh of 3: the factors are neither fresh nor final when the state is saved
    return {"kfac": KFAC(refresh=3), "ekfac": EKFAC(refresh=3)}.get(name, name)


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_resume(
    build: Callable[[], nn.Module], data: Callable[..., tuple[Tensor, Tensor]], options: dict[str, Any], dtype: Any
) -> None:
    model = build().to(dtype)
    opt = DDPNOpt(model, **options)
    train(model, opt, data, 4)
    saved = through_a_file({"model": model.state_dict(), "opt": opt.state_dict()})
    train(model, opt, data, 4)

    torch.manual_seed(99)
    other = build().to(dtype)
    resumed = DDPNOpt(other, **{**options, "lr": 123.0})
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["opt"])
    train(other, resumed, data, 4)
    assert same(model, other)


@pytest.mark.parametrize("value", ["outer", "full", "batch"])
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_saved_state_resumes_bit_for_bit(curvature: str, value: str, dtype: torch.dtype) -> None:
    options = {**CURVATURES[curvature], "curvature": curvature_of(curvature), "value": value}
    check_resume(fcn, vectors, options, dtype)


@pytest.mark.parametrize("value", ["outer", "full", "batch"])
def test_a_saved_state_of_a_convolutional_network_resumes_bit_for_bit(value: str) -> None:
    check_resume(cnn, images, {"lr": 0.05, "curvature": KFAC(refresh=3), "value": value}, torch.float32)


@pytest.mark.parametrize("value", ["outer", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_saved_state_of_a_residual_network_resumes_bit_for_bit(value: str, dtype: torch.dtype) -> None:
    check_resume(Residual, vectors, {"lr": 0.2, "momentum": 0.9, "value": value}, dtype)


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")
@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_saved_state_with_open_loop_parameters_resumes_bit_for_bit(curvature: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))

    options = {**CURVATURES[curvature], "curvature": curvature_of(curvature)}
    check_resume(build, vectors, options, torch.float64)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_without_feedback_a_saved_state_resumes_bit_for_bit(curvature: str) -> None:
    options = {**CURVATURES[curvature], "curvature": curvature_of(curvature), "feedback": False}
    check_resume(fcn, vectors, options, torch.float64)


def test_a_scheduler_resumes_with_its_optimizer() -> None:
    results = []
    for interrupt in (False, True):
        torch.manual_seed(0)
        model = fcn()
        opt = DDPNOpt(model, lr=0.4, value="outer")
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        for step in range(4):
            if interrupt and step == 2:
                saved = through_a_file([model.state_dict(), opt.state_dict(), schedule.state_dict()])
                model = fcn()
                opt = DDPNOpt(model, lr=1.0, value="outer")
                schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
                for target, source in zip((model, opt, schedule), saved, strict=True):
                    target.load_state_dict(source)
            train(model, opt, vectors, 1)
            schedule.step()
        results.append(weights(model))
    assert same(*results)


@pytest.mark.parametrize("value", ["outer", "full", "batch"])
def test_a_model_made_double_before_construction_trains_in_double(value: str) -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model = fcn().double()
    opt = DDPNOpt(model, lr=0.2, value=value, curvature=KFAC(refresh=2), momentum=0.9)
    train(model, opt, vectors, 3)
    assert all(p.dtype == torch.float64 for p in model.parameters())

    def dtypes(entry: Any) -> set[torch.dtype]:
        if isinstance(entry, Tensor):
            return {entry.dtype}
        items = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else []
        return set().union(*map(dtypes, items))

    assert dtypes(opt.state_dict()["state"]) == {torch.float64}
    # nothing on the way has been rounded to float32
    reference = fcn().double()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    reference.load_state_dict(fcn().double().state_dict())
    torch.set_default_dtype(torch.float64)
    train(reference, DDPNOpt(reference, lr=0.2, value=value, curvature=KFAC(refresh=2), momentum=0.9), vectors, 3)
    assert same(reference, model)


# -- copies ------------------------------------------------------------------------------------------------------------


def hooks(model: nn.Module) -> list[Any]:
    return [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def saved_whole(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "averaged model": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
    "saved whole": saved_whole,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copied_model_works_and_has_no_live_hooks(how: str) -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    train(model, opt, vectors, 1)
    twin = COPIES[how](model)
    x, y = vectors()
    assert torch.equal(twin(x), model(x))
    before = weights(twin)
    assert all(getattr(h, "capture", None) is None for h in hooks(twin))
    F.cross_entropy(twin(x), y).backward()
    assert all(p.grad is not None for p in twin.parameters())  # no hook has kept autograd from it
    train(model, opt, vectors, 2)
    assert same(before, twin)
    # and the copy can be trained by an optimizer of its own
    train(twin, DDPNOpt(twin, lr=0.1, value="outer"), vectors, 2)
    assert same(model, twin)


def test_a_copy_made_between_forward_and_backward_pass_can_be_trained() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    x, y = vectors()
    loss = F.cross_entropy(model(x), y)
    twin = copy.deepcopy(model)
    loss.backward()
    opt.step()
    assert all(p.requires_grad for p in twin.parameters())
    train(twin, DDPNOpt(twin, lr=0.1, value="outer"), vectors, 1)
    assert same(model, twin)


def test_weight_averaging_follows_the_model() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    seen = []
    for _ in range(3):
        train(model, opt, vectors, 1)
        averaged.update_parameters(model)
        seen.append(weights(model))
    mean = [torch.stack(p).mean(0) for p in zip(*seen, strict=True)]
    assert distance(weights(averaged.module), mean) < 1e-14


def test_a_deleted_optimizer_leaves_a_plain_model() -> None:
    model = fcn()
    plain = copy.deepcopy(model)
    x, y = vectors()
    opt = DDPNOpt(model, lr=0.0, value="outer")
    train(model, opt, vectors, 1)
    del opt
    gc.collect()
    assert all(p.requires_grad for p in model.parameters())
    for net in (model, plain):
        F.cross_entropy(net(x), y).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_an_optimizer_deleted_after_the_forward_pass_leaves_a_plain_model() -> None:
    model = fcn()
    x, y = vectors()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    loss = F.cross_entropy(model(x), y)
    del opt
    gc.collect()
    loss.backward()
    assert all(p.requires_grad for p in model.parameters())
    train(model, torch.optim.SGD(model.parameters(), 0.1), vectors, 1)


def test_a_second_optimizer_in_place_of_the_first_takes_over() -> None:
    model = fcn()
    fresh = copy.deepcopy(model)
    opt = DDPNOpt(model, lr=0.3, value="outer")
    keeps_it_alive = opt
    opt = DDPNOpt(model, lr=0.1, value="outer")
    train(model, opt, vectors, 2)
    train(fresh, DDPNOpt(fresh, lr=0.1, value="outer"), vectors, 2)
    assert same(model, fresh)
    assert keeps_it_alive.report.step == 0


def test_the_optimizer_itself_is_not_pickled_and_says_what_to_save() -> None:
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        copy.deepcopy(DDPNOpt(fcn(), lr=0.1, value="outer"))


# -- exceptions --------------------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.broken: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.broken is not None:
            raise self.broken
        return torch.tanh(x)


class FragileLinear(nn.Linear):
    """The forward of nn.Linear, with a hook in the middle of its call that may raise."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.broken: BaseException | None = None

    def arm(self) -> None:
        self.register_forward_pre_hook(self._maybe)

    def _maybe(self, *_: Any) -> None:
        if self.broken is not None:
            raise self.broken


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("inside", ["between layers", "in a layer"])
def test_after_an_exception_in_the_forward_pass_flags_are_restored_and_training_goes_on(
    inside: str, error: BaseException
) -> None:
    model = nn.Sequential(nn.Linear(5, 4), Fragile(), FragileLinear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    untroubled = copy.deepcopy(model)
    opt = DDPNOpt(model, lr=0.1, value="outer")
    model[2].arm()  # after the optimizer's own hook
    troubled = model[1] if inside == "between layers" else model[2]
    train(model, opt, vectors, 1)
    troubled.broken = error
    with pytest.raises(type(error)):
        model(vectors()[0])
    troubled.broken = None
    if not (inside == "in a layer" and isinstance(error, KeyboardInterrupt)):  # torch calls no hook then
        assert all(p.requires_grad for p in model.parameters())
    train(model, opt, vectors, 2)
    assert all(p.requires_grad for p in model.parameters())
    other = DDPNOpt(untroubled, lr=0.1, value="outer")
    train(untroubled, other, vectors, 1)
    train(untroubled, other, vectors, 2)
    assert same(model, untroubled)


def test_an_exception_in_the_second_pass_takes_the_step_back() -> None:
    class FailsSecond(nn.Module):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            if self.passes == 5:
                raise ValueError("out of luck")
            return torch.tanh(x)

    model = nn.Sequential(nn.Linear(5, 4), FailsSecond(), nn.Linear(4, 3), nn.BatchNorm1d(3))
    opt = DDPNOpt(model, lr=0.1, momentum=0.9, exclude=[], value="outer")
    train(model, opt, vectors, 1)  # forward, chain or not, sweep
    x, y = vectors()
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    before, buffers = weights(model), [b.clone() for b in model.buffers()]
    state = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match="out of luck"):
        opt.step()
    assert same(before, model)
    assert all(map(torch.equal, buffers, model.buffers()))
    assert str(state) == str(opt.state_dict())
    train(model, opt, vectors, 1)
