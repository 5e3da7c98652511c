"""The examples for the frameworks train, each in small form; `dev` installs all of them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpnopt import DDPNOpt

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float32)  # as users have it; the folder's other tests are in float64
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("digits", *(p.stem for p in FOLDER.glob("*.py"))):
        sys.modules.pop(name, None)


def example(name: str, package: str) -> Any:
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'ddpnopt[frameworks]'")
    return importlib.import_module(name)


def test_skorch_trains_through_its_closure() -> None:
    skorch_digits = example("skorch_digits", "skorch")
    assert skorch_digits.main(epochs=3) > 90
    assert skorch_digits.main(epochs=3, optimizer__value="outer", optimizer__lr=0.5) > 60  # options reach the optimizer


def test_lightning_trains_through_its_closure() -> None:
    assert example("lightning_digits", "lightning").main(epochs=3, enable_progress_bar=False) > 90


def test_lightning_with_clipped_gradients_trains_all_the_same() -> None:
    """Layers with feedback do not use `.grad`, so a threshold that would stop SGD leaves their steps as they are."""
    lightning_digits = example("lightning_digits", "lightning")
    assert lightning_digits.main(epochs=3, enable_progress_bar=False, gradient_clip_val=1e-6) > 90


def test_lightning_with_accumulated_batches_trains() -> None:
    lightning_digits = example("lightning_digits", "lightning")
    assert lightning_digits.main(epochs=4, enable_progress_bar=False, accumulate_grad_batches=2) > 80


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_trains_prepared_and_in_mixed_precision(precision: str) -> None:
    accelerate_digits = example("accelerate_digits", "accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # one a process otherwise
    assert accelerate_digits.main(epochs=3, mixed_precision=precision) > 90


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0], ids=["without clipping", "with its default of clipping"])
def test_the_trainer_of_transformers_trains(max_grad_norm: float) -> None:
    words = example("transformers_words", "transformers")
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    assert words.main(epochs=3, count=512, max_grad_norm=max_grad_norm) > 90


def test_the_trainer_of_transformers_trains_a_language_model_with_a_tied_head(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends))
    first = torch.randint(20, (64, 1))
    ids = (first + 3 * torch.arange(8)) % 20
    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=25, per_device_train_batch_size=8, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, logging_strategy="no", lr_scheduler_type="constant",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids]
    transformers.Trainer(model, settings, train_dataset=rows, optimizers=(DDPNOpt(model), None)).train()
    assert float(model(input_ids=ids, labels=ids).loss.detach()) < 1.5  # of 3 nats: it multiplies the loss in place
