"""E-MSA (Li et al. 2017): training by Pontryagin's principle, each layer against the same frozen trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpnopt._checks import require
from ddpnopt.lab.baselines.base import ChainOptimizer, Pass
from ddpnopt.lab.baselines.chain import ChainStage


@dataclass(frozen=True, eq=False)
class AugmentedHamiltonian:
    """What layer t minimises, eq. (emsa) of the appendix with Li et al.'s signs.

        -H + rho/2 |x_{t+1} - f|^2 + rho/2 |p_t - H_x|^2        H = p_{t+1} . f(x_t, u) - reg/2 |u|^2

    p = -grad of the batch loss; squared norms are summed over the batch. At the current weights both penalties are
    zero and the gradient is that of the loss plus reg u.
    """

    f: ChainStage
    x: Tensor  # x_t
    x_next: Tensor  # x_{t+1}
    p: Tensor  # p_t
    p_next: Tensor  # p_{t+1}
    rho: float
    reg: float

    def __call__(self, u: Sequence[Tensor]) -> Tensor:
        """The value at weights u, differentiable."""
        x = self.x.detach().requires_grad_()
        f = self.f(x, u)
        along = (self.p_next * f).sum()
        # H_x depends on u: its own graph is needed
        H_x = torch.autograd.grad(along, x, create_graph=True)[0]
        squares = torch.stack([w.square().sum() for w in u]).sum()
        drift = (self.x_next - f).square().sum() + (self.p - H_x).square().sum()
        return -along + 0.5 * self.reg * squares + 0.5 * self.rho * drift


def costate(f: ChainStage, x: Tensor, p_next: Tensor) -> Tensor:
    """p_t = f_x' p_{t+1} at the current weights (19b)."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad((p_next * f(x, f.parameters)).sum(), x)[0]


class EMSA(ChainOptimizer):
    """The extended method of successive approximations.

    Use it like any other optimizer: one forward and backward pass freezes x and p, then `step()` lets L-BFGS (strong
    Wolfe line search) minimise every layer's augmented Hamiltonian from the current weights.

    Args:
        model: a chain of `nn.Linear` and `nn.Conv` layers without batch norm or dropout.
        lr: step size of L-BFGS.
        rho: weight of the feasibility penalties; Li et al. take 1.0 for toy problems and 0.03 for MNIST.
        reg: weight of |u|^2 / 2.
        max_iter: L-BFGS iterations a layer and step.
    """

    def __init__(
        self, model: nn.Module, lr: float = 1.0, *, rho: float = 0.03, reg: float = 1e-3, max_iter: int = 10
    ) -> None:
        require(lr > 0, "lr", lr, "positive")
        require(rho >= 0, "rho", rho, "zero or positive")
        require(reg >= 0, "reg", reg, "zero or positive")
        require(isinstance(max_iter, int) and max_iter >= 1, "max_iter", max_iter, "an integer >= 1")
        super().__init__(model, {"lr": lr, "rho": rho, "reg": reg, "max_iter": max_iter}, skip_weight_grads=True)

    def hamiltonians(self, seen: Pass) -> list[AugmentedHamiltonian]:
        """The problems of all layers, against one frozen trajectory."""
        group = self.param_groups[0]
        problems = []
        for t, f in enumerate(self.stages):
            q, q_next = seen.grad_x[t], seen.grad_x[t + 1]
            assert q_next is not None  # only the network's input may go without
            p = costate(f, seen.x[t], -q_next) if q is None else -q
            problems.append(
                AugmentedHamiltonian(f, seen.x[t], seen.x[t + 1], p, -q_next, float(group["rho"]), float(group["reg"]))
            )
        return problems

    def _propose(self, seen: Pass) -> list[list[Tensor]]:
        return [self._minimise(problem) for problem in self.hamiltonians(seen)]

    def _minimise(self, problem: AugmentedHamiltonian) -> list[Tensor]:
        group = self.param_groups[0]
        # torch's L-BFGS flattens weights and gradients by view(-1), so not with the channels last
        u = [p.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for p in problem.f.parameters]
        lbfgs = torch.optim.LBFGS(
            u, lr=float(group["lr"]), max_iter=int(group["max_iter"]), line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            with torch.enable_grad():
                value = problem(u)
                for w, g in zip(u, torch.autograd.grad(value, u), strict=True):
                    w.grad = g.contiguous()
            return value.detach()

        lbfgs.step(closure)
        return [w.detach() for w in u]
