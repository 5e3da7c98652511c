"""DDPNOpt as a submission to AlgoPerf, self-tuning rules: nothing is tuned, `DDPNOpt(model)` is all there is.

The functions have the names and arguments that the benchmark's `algoperf.spec` asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from algoperf import spec

from ddpnopt import DDPNOpt

# With several devices the linear algebra of a step is cubic in the batch size: at these sizes it does not dominate.
BATCH_SIZES = {
    "criteo1tb": 2048,
    "fastmri": 32,
    "finewebedu": 64,
    "imagenet_resnet": 512,
    "imagenet_vit": 512,
    "librispeech_conformer": 128,
    "librispeech_deepspeech": 128,
    "ogbg": 512,
    "wmt": 128,
    "cifar": 128,
    "mnist": 256,
}


def get_batch_size(workload_name: str) -> int:
    """The global batch size; variants of a workload have that of the workload."""
    for name, size in BATCH_SIZES.items():
        if workload_name.startswith(name):
            return size
    raise ValueError(f"unsupported workload {workload_name!r}; known: {', '.join(BATCH_SIZES)}")


def init_optimizer_state(
    workload: spec.Workload, model_params: Any, model_state: Any, hyperparameters: Any, rng: Any
) -> dict[str, Any]:
    """The optimizer at its defaults; a batch that is not finite is skipped rather than ending the run."""
    del workload, model_state, hyperparameters, rng
    return {"optimizer": DDPNOpt(model_params, on_nonfinite="skip")}


def update_params(
    workload: spec.Workload,
    current_param_container: Any,
    current_params_types: Any,
    model_state: Any,
    hyperparameters: Any,
    batch: dict[str, Any],
    loss_type: Any,
    optimizer_state: dict[str, Any],
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: Any,
    train_state: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], Any, Any]:
    """One step: the mean loss of the valid examples, its gradient, and the optimizer's step."""
    del current_params_types, hyperparameters, loss_type, eval_results, train_state
    model, optimizer = current_param_container, optimizer_state["optimizer"]
    optimizer.train()  # the training weights, after an evaluation of the averaged ones
    model.train()
    optimizer.zero_grad()
    outputs, new_model_state = workload.model_fn(
        params=model,
        augmented_and_preprocessed_input_batch=batch,
        model_state=model_state,
        mode=spec.ForwardPassMode.TRAIN,
        rng=rng,
        update_batch_norm=True,
    )
    losses = workload.loss_fn(label_batch=batch["targets"], logits_batch=outputs, mask_batch=batch.get("weights"))
    loss = losses["summed"] / losses["n_valid_examples"]
    loss.backward()
    optimizer.step(loss=loss)
    logger = getattr(workload, "metrics_logger", None)
    if logger is not None and global_step % 500 == 0:
        logger.append_scalar_metrics({"loss": loss.item(), "fraction": optimizer.report.fraction}, global_step)
    return optimizer_state, model, new_model_state


def prepare_for_eval(
    workload: spec.Workload,
    current_param_container: Any,
    current_params_types: Any,
    model_state: Any,
    hyperparameters: Any,
    loss_type: Any,
    optimizer_state: dict[str, Any],
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: Any,
) -> tuple[dict[str, Any], Any, Any]:
    """Evaluate the average of the weights."""
    del workload, current_params_types, hyperparameters, loss_type, eval_results, global_step, rng
    optimizer_state["optimizer"].eval()
    return optimizer_state, current_param_container, model_state


def data_selection(
    workload: spec.Workload,
    input_queue: Iterator[dict[str, Any]],
    optimizer_state: dict[str, Any],
    current_param_container: Any,
    model_state: Any,
    hyperparameters: Any,
    global_step: int,
    rng: Any,
) -> dict[str, Any]:
    """The next batch."""
    del workload, optimizer_state, current_param_container, model_state, hyperparameters, global_step, rng
    return next(input_queue)
