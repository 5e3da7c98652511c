"""Optimizers of other packages, each used as its documentation says, with factors refreshed as often as ours."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ddpnopt.lab.timing.networks import Network
from ddpnopt.lab.timing.steppers import LR, Form, Stepper
from ddpnopt.lab.windows.contenders import Pair

REFRESH = 10
"""Steps between two updates of Kronecker factors, for every method that has them."""
DAMPING = 1e-2


def _sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=LR)


def _of_layers(model: nn.Module) -> list[nn.Parameter]:
    """Weights and biases of the layers that KFAC knows in every one of these packages."""
    layers = (m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))
    return [p for layer in layers for p in layer.parameters()]


def _singd(**options: Any) -> Callable[[nn.Module], Optimizer]:
    """SINGD with dense factors; what it does not train is left to SGD."""

    def build(model: nn.Module) -> Optimizer:
        module = importlib.import_module("singd.optim.optimizer")
        mine = module.SINGD(model, lr=LR, momentum=0.0, damping=DAMPING, T=REFRESH, warn_unsupported=False, **options)
        taken = {id(p) for group in mine.param_groups for p in group["params"]}
        rest = [p for p in model.parameters() if id(p) not in taken]
        return Pair(mine, SGD(rest, lr=LR)) if rest else mine

    return build


def _pytorch_optimizer(name: str, **options: Any) -> Callable[[nn.Module], Optimizer]:
    def build(model: nn.Module) -> Optimizer:
        made: Optimizer = getattr(importlib.import_module("pytorch_optimizer"), name)(
            model.parameters(), lr=LR, **options
        )
        return made

    return build


class SharpnessAware(Stepper):
    """SAM: a second pass at perturbed weights within every step."""

    def update(self) -> None:
        def again() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.forward()
            self.backward(loss)
            return loss

        self.optimizer.step(again)  # type: ignore[arg-type]  # torch says float; a loss is what is meant


class Preconditioned(Stepper):
    """SGD whose gradients are multiplied by inverse Kronecker factors, which are taken up now and then."""

    def __init__(self, form: Form, network: Network, batch_size: int) -> None:
        super().__init__(form, network, batch_size)
        self.count = 0

    @property
    def due(self) -> bool:
        return self.count % REFRESH == 0

    def update(self) -> None:
        if self.due:
            self.take_up()
        self.precondition()
        super().update()
        self.count += 1

    @abstractmethod
    def take_up(self) -> None:
        """New factors, from the batch of this step."""

    @abstractmethod
    def precondition(self) -> None:
        """Puts the preconditioned gradients in the place of the gradients."""


class Curvlinops(Preconditioned):
    """The KFAC operator of curvlinops and its inverse, of the empirical Fisher as in SINGD and here: one pass more."""

    def __init__(self, form: Form, network: Network, batch_size: int) -> None:
        super().__init__(form, network, batch_size)
        self.package = importlib.import_module("curvlinops")
        self.parameters = _of_layers(self.model)
        self.loss = nn.CrossEntropyLoss()

    def take_up(self) -> None:
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


class Backpack(Preconditioned):
    """The KFAC extension of BackPACK, which samples a label for each input, and products with the inverses by hand."""

    def __init__(self, form: Form, network: Network, batch_size: int) -> None:
        super().__init__(form, network, batch_size)
        self.package = importlib.import_module("backpack")
        self.extension = importlib.import_module("backpack.extensions").KFAC(mc_samples=1)
        self.model = self.package.extend(self.model)
        self.loss = self.package.extend(nn.CrossEntropyLoss())
        self.parameters = list(self.model.parameters())

    def forward(self) -> Tensor:
        if self.due:
            return self.loss(self.model(self.x), self.y)
        with self.package.disable():  # keeps nothing for an extension that does not come
            return super().forward()

    def backward(self, loss: Tensor) -> None:
        if not self.due:
            loss.backward()
            return
        with self.package.backpack(self.extension):
            loss.backward()

    def take_up(self) -> None:
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


_SINGD = ("singd", "singd")
_PYTORCH_OPTIMIZER = ("pytorch_optimizer", "pytorch_optimizer")
_CURVLINOPS = ("curvlinops", "curvlinops-for-pytorch")
_BACKPACK = ("backpack", "backpack-for-pytorch")

PEERS = (
    Form("singd", "SINGD (singd)", _singd(), None, REFRESH, *_SINGD),
    Form("singd-kfac", "inverse-free KFAC (singd)", _singd(kfac_like=True, alpha1=0.0), None, REFRESH, *_SINGD),
    Form("curvlinops-kfac", "KFAC (curvlinops)", _sgd, None, REFRESH, *_CURVLINOPS, stepper=Curvlinops),
    Form("backpack-kfac", "KFAC (backpack)", _sgd, None, REFRESH, *_BACKPACK, stepper=Backpack),
    Form(
        "soap",
        "SOAP (pytorch_optimizer)",
        _pytorch_optimizer("SOAP", precondition_frequency=REFRESH),
        None,
        REFRESH,
        *_PYTORCH_OPTIMIZER,
    ),
    Form(
        "shampoo",
        "Shampoo (pytorch_optimizer)",
        _pytorch_optimizer("Shampoo", preconditioning_compute_steps=REFRESH),
        None,
        REFRESH,
        *_PYTORCH_OPTIMIZER,
    ),
    Form(
        "sam",
        "SAM (pytorch_optimizer)",
        _pytorch_optimizer("SAM", base_optimizer=SGD),
        None,
        1,
        *_PYTORCH_OPTIMIZER,
        stepper=SharpnessAware,
    ),
)
