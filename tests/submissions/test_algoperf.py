"""The AlgoPerf submission on a stand-in of the benchmark's interface: a workload in memory, trained and evaluated."""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scripts import script
from torch import Tensor, nn

FOLDER = Path(__file__).parents[2] / "submissions" / "self_tuning" / "ddpnopt"

ARGUMENTS = {
    "init_optimizer_state": "workload model_params model_state hyperparameters rng",
    "update_params": "workload current_param_container current_params_types model_state hyperparameters batch "
    "loss_type optimizer_state eval_results global_step rng train_state",
    "prepare_for_eval": "workload current_param_container current_params_types model_state hyperparameters loss_type "
    "optimizer_state eval_results global_step rng",
    "data_selection": "workload input_queue optimizer_state current_param_container model_state hyperparameters "
    "global_step rng",
    "get_batch_size": "workload_name",
}


class ForwardPassMode(enum.Enum):
    TRAIN = 0
    EVAL = 1


class Blobs:
    """A workload with the parts that a submission may use: three clouds of points, a third of each batch padding."""

    metrics_logger = None

    def __init__(self) -> None:
        self.centres = 2 * torch.randn(3, 10)

    def init_model_fn(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))

    def model_fn(
        self, params: nn.Module, augmented_and_preprocessed_input_batch: dict[str, Tensor], model_state: Any,
        mode: ForwardPassMode, rng: Any, update_batch_norm: bool, dropout_rate: float = 0.0,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        assert params.training == (mode is ForwardPassMode.TRAIN)
        return params(augmented_and_preprocessed_input_batch["inputs"]), model_state

    def loss_fn(
        self, label_batch: Tensor, logits_batch: Tensor, mask_batch: Tensor | None = None, label_smoothing: float = 0.0
    ) -> dict[str, Tensor]:
        each = F.cross_entropy(logits_batch, label_batch, reduction="none")
        each = each if mask_batch is None else each * mask_batch
        valid = torch.tensor(len(each)) if mask_batch is None else mask_batch.sum()
        return {"summed": each.sum(), "n_valid_examples": valid, "per_example": each}

    def queue(self, size: int) -> Iterator[dict[str, Tensor]]:
        while True:
            y = torch.randint(3, (size,))
            weights = torch.ones(size)
            weights[: size // 3] = 0
            yield {"inputs": self.centres[y] + torch.randn(size, 10), "targets": y, "weights": weights}

    def error(self, model: nn.Module) -> float:
        model.eval()
        batch = next(self.queue(300))
        with torch.no_grad():
            return (model(batch["inputs"]).argmax(1) != batch["targets"]).float().mean().item()


@pytest.fixture
def submission(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package, spec = ModuleType("algoperf"), ModuleType("algoperf.spec")
    spec.ForwardPassMode, spec.Workload = ForwardPassMode, Blobs  # type: ignore[attr-defined]
    package.spec = spec  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "algoperf", package)
    monkeypatch.setitem(sys.modules, "algoperf.spec", spec)
    return script(str(FOLDER / "submission.py"), "submission")


def test_the_folder_has_the_form_that_the_self_tuning_rules_ask_for(submission: ModuleType) -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} == {"submission.py", "requirements.txt"}
    for name, arguments in ARGUMENTS.items():
        assert list(inspect.signature(getattr(submission, name)).parameters) == arguments.split(), name


def test_it_trains_a_workload_and_is_evaluated_with_the_averaged_weights(submission: ModuleType) -> None:
    workload = Blobs()
    model = workload.init_model_fn()
    state = submission.init_optimizer_state(workload, model, None, None, None)
    queue = workload.queue(submission.get_batch_size("mnist") // 4)
    before = workload.error(model)
    common: dict[str, Any] = {"hyperparameters": None, "rng": None, "model_state": None}
    for step in range(25):
        batch = submission.data_selection(workload, queue, state, model, global_step=step, **common)
        state, model, _ = submission.update_params(
            workload, model, None, batch=batch, loss_type=None, optimizer_state=state, eval_results=[],
            global_step=step, **common,
        )  # fmt: skip
        if step in (15, 24):
            trained = model[0].weight.detach().clone()
            state, model, _ = submission.prepare_for_eval(
                workload,
                model,
                None,
                loss_type=None,
                optimizer_state=state,
                eval_results=[],
                global_step=step,
                **common,
            )
            assert not torch.equal(trained, model[0].weight), "the average differs from the training weights"
    assert workload.error(model) < 0.1 < before


def test_variants_of_a_workload_have_its_batch_size_and_others_are_refused(submission: ModuleType) -> None:
    assert submission.get_batch_size("imagenet_resnet_silu") == submission.get_batch_size("imagenet_resnet")
    with pytest.raises(ValueError, match="unsupported workload 'chess'"):
        submission.get_batch_size("chess")
