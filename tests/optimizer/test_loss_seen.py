"""The loss that backward() was called on is seen by the optimizer: nothing has to be handed over."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpnopt import DDPNOpt
from ddpnopt.trace.backward_root import backward_root

Loop = Callable[[nn.Module, DDPNOpt, Tensor, Tensor, bool], None]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def odd_loss(z: Tensor, y: Tensor) -> Tensor:
    """Of no usual form and scale."""
    return 17.3 * (z - y).abs().pow(1.5).mean()


def plain(model: nn.Module, opt: DDPNOpt, x: Tensor, y: Tensor, hand_over: bool) -> None:
    loss = odd_loss(model(x), y)
    loss.backward()
    opt.step(loss=loss if hand_over else None)


def micro_batches(model: nn.Module, opt: DDPNOpt, x: Tensor, y: Tensor, hand_over: bool) -> None:
    total = torch.zeros(())
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = odd_loss(model(part), target) / 2
        loss.backward()
        total = total + loss.detach()
    opt.step(loss=total if hand_over else None)


def autograd_backward(model: nn.Module, opt: DDPNOpt, x: Tensor, y: Tensor, hand_over: bool) -> None:
    loss = odd_loss(model(x), y)
    torch.autograd.backward([loss])
    opt.step(loss=loss if hand_over else None)


def scaled_gradient(model: nn.Module, opt: DDPNOpt, x: Tensor, y: Tensor, hand_over: bool) -> None:
    loss = odd_loss(model(x), y)
    loss.backward(torch.tensor(0.5))
    opt.step(loss=0.5 * loss if hand_over else None)


def several_passes(model: nn.Module, opt: DDPNOpt, x: Tensor, y: Tensor, hand_over: bool) -> None:
    loss = odd_loss(model(x) - model(x.flip(1)), y)
    loss.backward(torch.tensor(0.5))
    opt.step(loss=0.5 * loss if hand_over else None)


LOOPS: dict[str, Loop] = {
    "plain": plain, "micro-batches": micro_batches, "autograd.backward": autograd_backward, "scaled": scaled_gradient,
    "several passes": several_passes,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::ddpnopt.UncertainLossWarning")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loss_need_not_be_handed_over(loop: str) -> None:
    results = []
    for hand_over in (False, True):
        model = network()
        opt = DDPNOpt(model)
        torch.manual_seed(1)
        for _ in range(4):
            opt.zero_grad()
            LOOPS[loop](model, opt, torch.randn(12, 5), torch.randn(12, 3), hand_over)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


def test_zero_grad_forgets_the_losses_seen() -> None:
    model = network()
    opt = DDPNOpt(model)
    x, y = torch.randn(12, 5), torch.randn(12, 3)
    (100 * odd_loss(model(x), y)).backward()
    opt.zero_grad()
    twin = copy.deepcopy(model)
    other = DDPNOpt(twin)
    for net, each in ((model, opt), (twin, other)):
        odd_loss(net(x), y).backward()
        each.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def seen_from(hooked: Tensor, run: Callable[[], None]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    hooked.register_hook(lambda _: found.append(backward_root()))
    run()
    return found


def test_the_root_is_that_of_the_outermost_backward_pass() -> None:
    """Reentrant checkpointing runs a backward pass of its own inside the user's."""
    x = torch.randn(4, 3, requires_grad=True)
    inner = x * 2
    z = checkpoint(torch.sin, inner, use_reentrant=True)
    loss = z.square().sum()
    (root,) = seen_from(inner, loss.backward)
    assert root is not None
    assert torch.equal(root, loss.detach())


def test_a_hook_in_another_thread_finds_the_root() -> None:
    loss, found = torch.tensor(3.0, requires_grad=True) * 2, list[Tensor | None]()

    def in_a_thread(_: Tensor) -> None:
        thread = threading.Thread(target=lambda: found.append(backward_root()))
        thread.start()
        thread.join()

    loss.register_hook(in_a_thread)
    loss.backward()
    assert found[0] is not None
    assert found[0].item() == 6.0


def test_there_is_no_root_outside_a_backward_pass_or_without_a_scalar() -> None:
    assert backward_root() is None
    z = torch.ones(3, requires_grad=True) * 2
    assert seen_from(z, lambda: z.backward(torch.ones(3))) == [None]
    w = torch.ones(3, requires_grad=True) * 2
    assert seen_from(w, lambda: torch.autograd.grad(F.relu(w).sum(), w) and None) == [None]
