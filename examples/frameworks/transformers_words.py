"""DDPNOpt in the Trainer of Hugging Face transformers, on a small BERT with random weights.

The task is to detect whether a sequence contains the word 7. Three settings matter:

- pass the optimizer as `optimizers=(DDPNOpt(model), …)` together with a scheduler. Otherwise Trainer decays lr, a
  factor of the steps that starts at 1; the scheduler below keeps it constant;
- `compute_loss_func` computes the loss outside the model, so that DDPNOpt sees the logits and recognises it. A
  loss that the model computes itself also works;
- `max_grad_norm=0`: clipping acts on `.grad`, which layers with feedback do not use.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from ddpnopt import DDPNOpt, OpenLoopWarning

WORD = 7


class Words(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(8, 32, (count, 6), generator=g)
        hit = torch.rand(count, generator=g) < 0.5
        place = torch.randint(6, (count,), generator=g)
        self.ids[hit, place[hit]] = WORD
        self.labels = hit.long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def cross_entropy(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, labels)


def main(epochs: int = 5, count: int = 1024, **arguments: Any) -> float:
    """Accuracy on new sequences, in percent."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=8,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    warnings.simplefilter("ignore", OpenLoopWarning)  # the positions, which all samples share
    opt = DDPNOpt(model)
    constant = torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=32, report_to=[],
            use_cpu=True, save_strategy="no", disable_tqdm=True, logging_strategy="no",
            **{"max_grad_norm": 0.0, **arguments},
        )  # fmt: skip
        Trainer(
            model, settings, train_dataset=Words(count, 0), optimizers=(opt, constant), compute_loss_func=cross_entropy
        ).train()
    model.eval()
    new = Words(512, 1)
    with torch.no_grad():
        right = model(input_ids=new.ids).logits.argmax(1) == new.labels
    return 100 * float(right.float().mean())


if __name__ == "__main__":
    print(f"accuracy {main():.1f} %")
