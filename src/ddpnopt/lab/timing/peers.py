"""How a step of other packages' second-order methods is made, where it takes more than `optimizer.step()`.

Each is used as its documentation says, with factors refreshed as often as ours.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod

import torch
from torch import Tensor, nn

from ddpnopt.lab.methods.method import Method
from ddpnopt.lab.timing.networks import Network
from ddpnopt.lab.timing.steppers import Stepper

REFRESH = 10
"""Steps between two updates of Kronecker factors, for every method that has them."""
DAMPING = 1e-2


def _of_layers(model: nn.Module) -> list[nn.Parameter]:
    """Weights and biases of the layers that KFAC knows in every one of these packages."""
    layers = (m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))
    return [p for layer in layers for p in layer.parameters()]


class SharpnessAwareStepper(Stepper):
    """SAM: a second pass at perturbed weights within every step."""

    def update(self) -> None:
        def again() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.forward()
            self.backward(loss)
            return loss

        self.optimizer.step(again)  # type: ignore[arg-type]  # torch says float; a loss is what is meant


class PreconditionedStepper(Stepper):
    """SGD whose gradients are multiplied by inverse Kronecker factors, which are updated every few steps."""

    def __init__(self, method: Method, network: Network, batch_size: int) -> None:
        super().__init__(method, network, batch_size)
        self.count = 0

    @property
    def due(self) -> bool:
        return self.count % REFRESH == 0

    def update(self) -> None:
        if self.due:
            self.update_factors()
        self.precondition()
        super().update()
        self.count += 1

    @abstractmethod
    def update_factors(self) -> None:
        """New factors, from the batch of this step."""

    @abstractmethod
    def precondition(self) -> None:
        """Replace the gradients by the preconditioned ones."""


class CurvlinopsStepper(PreconditionedStepper):
    """The KFAC operator of curvlinops and its inverse, of the empirical Fisher as in SINGD and here: one pass more."""

    def __init__(self, method: Method, network: Network, batch_size: int) -> None:
        super().__init__(method, network, batch_size)
        self.package = importlib.import_module("curvlinops")
        self.parameters = _of_layers(self.model)
        self.loss = nn.CrossEntropyLoss()

    def update_factors(self) -> None:
        curvature = self.package.KFACLinearOperator(
            self.model,
            self.loss,
            self.parameters,
            [(self.x, self.y)],
            check_deterministic=False,
            fisher_type=self.package.FisherType.EMPIRICAL,
            separate_weight_and_bias=False,
            # Both would be counted by passes over the data.
            num_per_example_loss_terms=1,
            num_data=len(self.x),
        )
        inverse = self.package.KFACInverseLinearOperator(curvature, damping=DAMPING, use_heuristic_damping=True)
        self.optimizer.state[self.parameters[0]]["inverse"] = inverse

    def precondition(self) -> None:
        # The first product computes the factors, with passes of its own that need gradients.
        inverse = self.optimizer.state[self.parameters[0]]["inverse"]
        for p, direction in zip(self.parameters, inverse @ [p.grad for p in self.parameters], strict=True):
            p.grad = direction


class BackpackStepper(PreconditionedStepper):
    """The KFAC extension of BackPACK, which samples a label for each input, and explicit products with the inverses."""

    def __init__(self, method: Method, network: Network, batch_size: int) -> None:
        super().__init__(method, network, batch_size)
        self.package = importlib.import_module("backpack")
        self.extension = importlib.import_module("backpack.extensions").KFAC(mc_samples=1)
        self.model = self.package.extend(self.model)
        self.loss = self.package.extend(nn.CrossEntropyLoss())
        self.parameters = list(self.model.parameters())

    def forward(self) -> Tensor:
        if self.due:
            return self.loss(self.model(self.x), self.y)
        with self.package.disable():  # stores nothing for an extension that is not used in this step
            return super().forward()

    def backward(self, loss: Tensor) -> None:
        if not self.due:
            loss.backward()
            return
        with self.package.backpack(self.extension):
            loss.backward()

    def update_factors(self) -> None:
        for p in self.parameters:
            factors: list[Tensor] = p.kfac  # type: ignore[attr-defined]
            self.optimizer.state[p]["inverses"] = [_damped_inverse(f, DAMPING ** (1 / len(factors))) for f in factors]
            del p.kfac  # type: ignore[attr-defined]

    @torch.no_grad()
    def precondition(self) -> None:
        for p in self.parameters:
            left, *right = self.optimizer.state[p]["inverses"]
            assert p.grad is not None
            direction = left @ p.grad.flatten(1) @ right[0] if right else left @ p.grad
            p.grad = direction.view_as(p)


def _damped_inverse(factor: Tensor, damping: float) -> Tensor:
    damped = factor + damping * torch.eye(len(factor), dtype=factor.dtype)
    return torch.cholesky_inverse(torch.linalg.cholesky(damped))
