"""A large batch in blocks."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpnopt import DDPNOpt
from ddpnopt.ddp.value import blocks

NETWORKS = {
    "fcn": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), (5,)),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)),
        (1, 6, 6),
    ),
}


def data(size: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (size,), generator=generator)


def trained(kind: str, x: Tensor, y: Tensor, steps: int = 3, **options: object) -> tuple[nn.Module, DDPNOpt]:
    torch.manual_seed(1)
    model = NETWORKS[kind][0]().double()
    opt = DDPNOpt(model, diagnostics=True, **options)  # type: ignore[arg-type]
    for _ in range(steps):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return model, opt


@pytest.mark.parametrize("terminal", ["sqrt", "gn", "cross_entropy"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("curvature", ["identity", "adam", "ekfac"])
@pytest.mark.parametrize("kind", list(NETWORKS))
def test_blocks_that_are_alike_give_the_step_of_the_whole_batch(
    kind: str, curvature: str, weight_decay: float, terminal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data(6, NETWORKS[kind][1])
    x, y = x.repeat(3, *[1] * (x.dim() - 1)), y.repeat(3)
    # small steps, so that the floor of the damping, which is relative to the size of a block's matrix, is not felt
    options = {"lr": 0.01, "curvature": curvature, "weight_decay": weight_decay, "terminal": terminal}
    if curvature == "adam":
        options["lr"] = 1e-4
    whole, a = trained(kind, x, y, **options)
    monkeypatch.setattr(blocks, "LARGEST", 6)
    monkeypatch.setattr("ddpnopt._value.LARGEST", 6)
    parted, b = trained(kind, x, y, **options)
    for one, other in zip(whole.parameters(), parted.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    assert a.report.predicted == pytest.approx(b.report.predicted, rel=1e-8)


def test_a_batch_of_2048_lowers_its_loss_at_the_default_setting() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 5, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long() + (x[:, 3] > 1).long()
    losses = []
    torch.manual_seed(0)
    model = NETWORKS["fcn"][0]().double()
    opt = DDPNOpt(model)
    for _ in range(70):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        losses.append(float(loss))
        loss.backward()
        opt.step()
    assert losses[-1] < 0.5 * losses[0]


def test_blocks_differ_by_at_most_one_sample() -> None:
    L = torch.ones(2 * 1031)
    value = blocks.Blocks(L, L, None, columns=2)  # type: ignore[arg-type]
    assert sum(value.sizes) == 1031
    assert max(value.sizes) - min(value.sizes) <= 1
    assert max(value.sizes) <= blocks.LARGEST
