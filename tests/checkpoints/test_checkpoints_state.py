"""Checkpoints: whole or not there, loaded without running code, refused with a reason."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import CheckpointError, DDPNOpt
from ddpnopt.checkpoint import load, save
from ddpnopt.lab.data import load as load_data
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.runs.checkpoints import Checkpoints
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.training import train

RUN = RunConfig("ddpnopt", ClassificationTask("wine", epochs=2, batch_size=16))


class StoppedError(Exception):
    pass


def interrupted(config: RunConfig, path: Path, at: int) -> None:
    def on_step(now: Any) -> None:
        if now.step == at:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(config, checkpoints=Checkpoints(path, 1, config.settings), on_step=on_step)


@pytest.mark.parametrize("method", ["ddpnopt", "ddpnopt-kfac", "ddpnopt-adam", "sgd-m"])
@pytest.mark.parametrize("at", [4, 9, 13], ids=["middle of the first epoch", "end of an epoch", "middle of the second"])
def test_a_run_resumes_bit_for_bit_in_the_middle_of_an_epoch(method: str, at: int, tmp_path: Path) -> None:
    config = replace(RUN, method=method)
    whole = train(config)
    assert whole.steps == 18
    interrupted(config, tmp_path / "run.pt", at)
    resumed = train(config, checkpoints=Checkpoints(tmp_path / "run.pt", 5, config.settings))
    assert resumed.details is not None
    assert whole.details is not None
    assert resumed.details.record.losses == whole.details.record.losses
    assert resumed.details.record.epoch_losses == whole.details.record.epoch_losses
    assert all(torch.equal(resumed.details.weights[n], w) for n, w in whole.details.weights.items())


def test_random_numbers_of_the_layers_resume_too(tmp_path: Path) -> None:
    from ddpnopt.lab.runs.training import fit

    data = load_data("wine")

    def run(checkpoints: Checkpoints | None, stop: int = 0) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(13, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 3))
        opt = DDPNOpt(model)
        generator = torch.Generator().manual_seed(1)

        def on_step(now: Any) -> None:
            if now.step == stop:
                raise StoppedError

        record = fit(
            model, opt, data, epochs=2, batch_size=16, generator=generator, on_step=on_step, checkpoints=checkpoints
        )
        return [p.detach() for p in model.parameters()], record.losses

    weights, losses = run(None)
    checkpoints = Checkpoints(tmp_path / "run.pt", 3)
    with pytest.raises(StoppedError):
        run(checkpoints, stop=8)
    again, other = run(checkpoints)
    assert other == losses
    assert all(map(torch.equal, weights, again))


def test_a_checkpoint_of_another_run_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    interrupted(RUN, tmp_path / "run.pt", 3)
    other = RUN.with_task(batch_size=8)
    with pytest.raises(ExperimentError, match="batch_size 16, not 8"):
        train(other, checkpoints=Checkpoints(tmp_path / "run.pt", 1, other.settings))


def test_a_failed_write_leaves_the_checkpoint_of_before(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    save(path, {"step": 1})
    (tmp_path / ".run.pt.partial").mkdir()  # cannot be written
    with pytest.raises(CheckpointError, match="previous one is unchanged"):
        save(path, {"step": 2})
    assert load(path) == {"step": 1}


class Malice:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/ddpnopt-was-here",)


@pytest.mark.parametrize("content", ["empty", "half", "code", "list", "missing"])
def test_what_is_no_checkpoint_is_refused_with_a_reason(content: str, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    if content == "empty":
        path.touch()
    elif content == "half":
        save(path, {"weights": torch.zeros(1000)})
        path.write_bytes(path.read_bytes()[:2000])
    elif content == "code":
        path.write_bytes(pickle.dumps(Malice()))
    elif content == "list":
        torch.save([1], path)
    with pytest.raises(CheckpointError, match="no checkpoint" if content == "missing" else "not a checkpoint"):
        load(path)
    assert not Path("/tmp/ddpnopt-was-here").exists()


# -- states of other versions ------------------------------------------------------------------------------------------


def trained(curvature: str = "adam") -> tuple[nn.Module, DDPNOpt]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    opt = DDPNOpt(model, 0.01, value="outer", curvature=curvature)
    further(model, opt)
    return model, opt


def further(model: nn.Module, opt: DDPNOpt) -> None:
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        opt.zero_grad()
        F.cross_entropy(model(torch.randn(8, 4, generator=g)), torch.arange(8) % 3).backward()
        opt.step()


def test_the_state_says_which_version_has_saved_it_and_loads_safely() -> None:
    import ddpnopt

    file = io.BytesIO()
    torch.save(trained()[1].state_dict(), file)
    file.seek(0)
    header = torch.load(file, weights_only=True)["ddpnopt"]
    known = {"format": 1, "version": ddpnopt.__version__, "curvature": "Adam"}
    assert header == {**known, "steps": 3, "samples": 24, "averages_in_use": False}


def test_a_state_of_before_there_was_a_header_loads() -> None:
    model, opt = trained()
    twin, resumed = trained()
    old = opt.state_dict()
    del old["ddpnopt"]
    resumed.load_state_dict(old)
    further(model, opt)
    further(twin, resumed)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_state_of_a_later_format_is_refused_with_its_version() -> None:
    _, opt = trained()
    state = opt.state_dict()
    state["ddpnopt"] |= {"format": 2, "version": "9.1.0"}
    with pytest.raises(CheckpointError, match=r"saved by ddpnopt 9\.1\.0 in format 2.*update ddpnopt"):
        opt.load_state_dict(state)


def test_a_state_of_another_curvature_is_refused_by_name() -> None:
    _, opt = trained("adam")
    _, other = trained("kfac")
    with pytest.raises(CheckpointError, match="saved with curvature Adam, this optimizer has KFAC"):
        other.load_state_dict(opt.state_dict())


def test_what_is_no_optimizer_state_is_refused() -> None:
    model, opt = trained()
    with pytest.raises(CheckpointError, match="lacks 'state'"):
        opt.load_state_dict(model.state_dict())
