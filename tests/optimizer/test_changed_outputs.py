"""Outputs of the model that the training loop changes in place before it computes the loss, or calls backward()."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.trace import hooks


class Tied(nn.Module):
    """A language model with a tied head, which also computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.scale * self.head(torch.tanh(self.body(self.words(ids))))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), "logits": logits}


def losses(model: nn.Module, ids: Tensor, kind: str) -> Tensor:
    out = model(ids)
    if kind == "loss":
        return 0.5 * out["loss"]
    if kind == "loss, in place":
        loss: Tensor = out["loss"]
        loss *= 0.5  # as transformers' Trainer does
        return loss
    logits = out["logits"]
    if kind == "logits, in place":
        logits /= 2
    else:
        logits = logits / 2
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("what", ["loss", "logits"])
@pytest.mark.parametrize("copied", [True, False], ids=["small", "too large to copy"])
def test_a_change_in_place_gives_every_weight_all_of_its_gradient(
    what: str, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not copied:
        monkeypatch.setattr(hooks, "COPIED", 0)
    torch.manual_seed(0)
    model = Tied()
    twin, ids = copy.deepcopy(model), torch.randint(7, (6, 4))
    opt = DDPNOpt(model)
    losses(model, ids, f"{what}, in place").backward()
    (recording,) = opt._capture.arrivals.take_all()
    losses(twin, ids, what).backward()
    wanted = dict(twin.named_parameters())
    for record in recording.layers:
        assert record.p_h is not None
        own = record.layer.grad(record.x, record.p_h)[0]
        name = record.name if record.name in wanted else f"{record.name}.weight"
        torch.testing.assert_close(own, wanted[name].grad)
    assert {p for r in recording.layers for p in r.parameters} == set(model.parameters())


@pytest.mark.filterwarnings("ignore::ddpnopt.TrainingWarning")  # of clipping
@pytest.mark.parametrize("what", ["loss", "logits"])
def test_a_change_in_place_leaves_the_steps_as_they_are(what: str) -> None:
    torch.manual_seed(0)
    model = Tied()
    twin, ids = copy.deepcopy(model), torch.randint(7, (6, 4))
    for net, kind in ((model, f"{what}, in place"), (twin, what)):
        opt = DDPNOpt(net)
        for _ in range(4):
            opt.zero_grad()
            losses(net, ids, kind).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            opt.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
