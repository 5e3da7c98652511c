"""A hostile hour: hypothesis builds small networks of every kind that is supported and trains them.

A few examples run with the other tests. The long mode, 1,000 examples for each test:

    DDPNOPT_HOSTILE=1000 pytest tests/hostile -n 2 --hypothesis-show-statistics

It draws anew each time, and keeps what failed in `.hypothesis` for the next run.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import oracle
import pytest
import torch
import torch.nn.functional as F
from hostile_networks import Case, Draw, chains, graphs
from hostile_reference import Settings, reference_step
from hypothesis import HealthCheck, Phase, event, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ddpnopt.ddp.value.damping
from ddpnopt import EKFAC, KFAC, DDPNOpt, ModelError, NonFiniteError, OpenLoopWarning, OptionError

LONG = os.environ.get("DDPNOPT_HOSTILE")
hostile = settings(
    max_examples=int(LONG or 12),
    deadline=None,
    # no shrinking: the networks are small as drawn, and with dense oracles it takes minutes
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target],
    derandomize=not LONG,  # what lands is judged by the same examples each time
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
KINDS = ["identity", "rmsprop", "adam", "kfac", "ekfac"]
RATES = {"identity": [0.01, 0.1, 0.5], "rmsprop": [1e-3, 1e-2], "adam": [1e-3, 1e-2], "kfac": [0.03], "ekfac": [0.03]}


@pytest.fixture(autouse=True)
def _ground() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", OpenLoopWarning)


def curvature(kind: str) -> Any:
    return {"kfac": KFAC(damping=0.1), "ekfac": EKFAC(damping=0.1)}.get(kind, kind)


def shares(case: Case, outputs: Any, y: Tensor, mean: bool = True) -> Tensor:
    """The samples' shares of the sum of the outputs' cross-entropies."""
    parts = []
    for z in outputs if isinstance(outputs, tuple) else (outputs,):
        each = F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction="none").view(len(y), -1)
        parts.append(each.mean(1) / len(y) if mean else each.sum(1))
    return torch.stack(parts).sum(0)


def assert_same(model: nn.Module, other: nn.Module, before: nn.Module, tolerance: float) -> None:
    """The same weights, up to rounding as large as `tolerance` of what has moved."""
    named = dict(other.named_parameters())
    old = dict(before.named_parameters())
    for name, p in model.named_parameters():
        moved = float((named[name] - old[name]).abs().max().detach())
        torch.testing.assert_close(
            p.detach(),
            named[name].detach(),
            rtol=1e-9,
            atol=tolerance * moved + 1e-11,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@st.composite
def weights(draw: Draw, kinds: list[str] = KINDS) -> dict[str, Any]:
    kind = draw(st.sampled_from(kinds))
    return {
        "kind": kind,
        "lr": draw(st.sampled_from(RATES[kind])),
        "weight_decay": draw(st.sampled_from([0.0, 0.0, 0.1])),
        "closed_loop": draw(st.sampled_from([True, True, False])),
    }


# -- chains: Algorithm 1 with dense matrices ---------------------------------------------------------------------------


def dense_hessian(terminal: str, z: Tensor, q: Tensor, phi: Tensor) -> Tensor:
    B, n = z.shape
    if terminal == "cross_entropy":
        s = torch.softmax(z, 1)
        return (torch.diag_embed(s) - s[:, :, None] * s[:, None, :]) / B
    if terminal == "mse":
        return torch.eye(n).expand(B, n, n) * 2 / (B * n)
    outer = q[:, :, None] * q[:, None, :]
    return outer if terminal == "gn" else outer / (2 * phi)[:, None, None]


def out_of_place(model: nn.Module) -> nn.Module:
    """A copy that the oracle can differentiate."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    return twin


def step(
    case: Case, model: nn.Module, size: int, at: int = 0, **options: Any
) -> tuple[DDPNOpt, Tensor, Tensor, Tensor]:
    """One step; the optimizer, the outputs before it, the gradient at them and each sample's loss."""
    x, y = case.batch(size, at)
    opt = DDPNOpt(model, **options)
    z = model(x)
    z.retain_grad()
    phi = shares(case, z, y)
    phi.sum().backward()
    opt.step()
    assert z.grad is not None
    return opt, z.detach(), z.grad, phi.detach()


@hostile
@given(
    chains(), weights(), st.integers(1, 4), st.sampled_from([1, 2]), st.booleans(), st.sampled_from([0.0, 0.05]),
    st.sampled_from(["cross_entropy", "mse", "gn", "sqrt"]),
)  # fmt: skip
def test_full_on_any_chain_equals_algorithm_1(
    case: Case, w: dict[str, Any], size: int, order: int, guard: bool, vxx_reg: float, terminal: str
) -> None:
    before, model = copy.deepcopy(case.model).double(), copy.deepcopy(case.model).double()
    note(str(model))
    steps = oracle.steps_of(out_of_place(before), case.batch(size)[0])
    kind, form = w.pop("kind"), {"order": order, "guard": guard, "vxx_reg": vxx_reg}
    _, z, q, phi = step(case, model, size, value="full", terminal=terminal, curvature=curvature(kind), **w, **form)
    result = oracle.ddp(
        steps, case.batch(size)[0], q, dense_hessian(terminal, z, q, phi), kind=kind, options={"damping": 0.1},
        **{"eta" if k == "lr" else k: v for k, v in w.items()}, **form,
    )  # fmt: skip
    compare(before, model, result)


@hostile
@given(chains(), weights(), st.integers(1, 4), st.sampled_from(["cross_entropy", "gn", "sqrt"]), st.floats(0.1, 1.0))
def test_batch_on_any_chain_equals_joint_ddp(
    case: Case, w: dict[str, Any], size: int, terminal: str, relax: float
) -> None:
    before, model = copy.deepcopy(case.model).double(), copy.deepcopy(case.model).double()
    note(str(model))
    steps = oracle.steps_of(out_of_place(before), case.batch(size)[0])
    kind = w.pop("kind")
    with patch.object(ddpnopt.ddp.value.damping, "FLOOR", 0.0):  # the oracle has no floor below the damping
        form = {"terminal": terminal, "curvature": curvature(kind), "relax": relax, "dof": 1.0}
        opt, z, q, phi = step(case, model, size, **form, **w)
    if opt.report.shortened:
        event("shortened")  # the first attempt is what the oracle knows
        return
    H = dense_hessian(terminal, z, q, phi)
    H = torch.block_diag(*(size * H if terminal == "gn" else H))
    result = oracle.joint_ddp(
        steps, case.batch(size)[0], relax * q.flatten(), H, kind=kind, options={"damping": 0.1},
        **{"eta" if k == "lr" else k: v for k, v in w.items()},
    )  # fmt: skip
    compare(before, model, result)


def compare(before: nn.Module, model: nn.Module, result: oracle.Result) -> None:
    wanted = copy.deepcopy(before)
    layers = [m for m in wanted.modules() if hasattr(m, "weight")]
    for layer, u in zip(layers, result.u, strict=True):
        parts = [p for p in (layer.weight, layer.bias) if p is not None]
        for p, part in zip(parts, u.split([p.numel() for p in parts]), strict=True):
            p.data.copy_(part.view_as(p))
    assert_same(model, wanted, before, 1e-6)


# -- graphs: the same with the columns P -------------------------------------------------------------------------------


@hostile
@given(
    st.one_of(graphs(), chains()), weights(), st.integers(2, 4), st.sampled_from(["outer", "batch"]),
    st.sampled_from(["gn", "sqrt"]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_outer_and_batch_on_any_graph_equal_the_dense_reference(
    case: Case, w: dict[str, Any], size: int, value: str, terminal: str, guard: bool, mean: bool
) -> None:
    model = copy.deepcopy(case.model).double()
    note(str(model))
    s = Settings(value, terminal, guard=guard, mean=mean, relax=0.7 if value == "batch" else 1.0, **w)
    form: dict[str, Any] = {"relax": s.relax, "dof": 1.0} if value == "batch" else {"guard": guard}
    opt = DDPNOpt(
        model, s.lr, value=value, terminal=terminal, curvature=curvature(s.kind), **form,
        reduction="mean" if mean else "sum", closed_loop=s.closed_loop, weight_decay=s.weight_decay, diagnostics=True,
    )  # fmt: skip
    for at in range(2 if s.kind == "identity" and value == "outer" else 1):  # the reference has no memory
        x, y = case.batch(size, at)
        before, wanted = copy.deepcopy(model), copy.deepcopy(model)
        torch.manual_seed(at)
        rng = torch.get_rng_state()
        opt.zero_grad()
        shares(case, model(x), y, mean).sum().backward()
        with patch.object(ddpnopt.ddp.value.damping, "FLOOR", 0.0):
            opt.step()
        if opt.report.shortened or (value == "outer" and not guard and opt.report.guarded):
            event("shortened or clipped")
            return
        reference_step(wanted, x, rng, lambda z, y=y: shares(case, z, y, mean), s)
        assert_same(model, wanted, before, 1e-6)


# -- anything goes -----------------------------------------------------------------------------------------------------


@st.composite
def any_options(draw: Draw) -> dict[str, Any]:
    value = draw(st.sampled_from(["batch", "outer", "full"]))
    kind = draw(st.sampled_from(KINDS))
    terminals = ["sqrt", "gn", "sampled"] + ([] if value == "outer" else ["cross_entropy", "mse"])
    options = {
        "value": value,
        "curvature": curvature(kind),
        "lr": draw(st.sampled_from(RATES[kind] + ([3.0] if value == "batch" and kind == "identity" else []))),
        "terminal": draw(st.sampled_from([None, *terminals])),
        "closed_loop": draw(st.booleans()),
        "weight_decay": draw(st.sampled_from([0.0, 1e-3])),
        "reduction": draw(st.sampled_from(["mean", "sum"])),
        "weight_grads": draw(st.booleans()),
        "diagnostics": draw(st.booleans()),
    }
    if kind != "adam":
        options["momentum"] = draw(st.sampled_from([0.0, 0.0, 0.5]))
    if value != "batch":
        options["guard"] = draw(st.booleans())
    if value == "full":
        options |= {"order": draw(st.sampled_from([1, 2])), "vxx_reg": draw(st.sampled_from([0.0, 0.01]))}
    return options


@hostile
@given(
    st.one_of(graphs(), chains()), any_options(), st.sampled_from(["float32", "float64", "bfloat16", "float16"]),
    st.lists(st.integers(2, 9), min_size=3, max_size=3),
)  # fmt: skip
def test_any_network_trains_without_an_internal_error_or_a_nan(
    case: Case, options: dict[str, Any], precision: str, sizes: list[int]
) -> None:
    dtype = torch.float64 if precision == "float64" else torch.float32
    mixed = precision in ("bfloat16", "float16")
    model = copy.deepcopy(case.model).to(dtype)
    note(str(model))
    mean = options["reduction"] == "mean"
    opt = DDPNOpt(model, **options)
    for at, size in enumerate(sizes):
        x, y = case.batch(size, at, dtype)
        opt.zero_grad()
        context: Any = torch.autocast("cpu", getattr(torch, precision)) if mixed else nullcontext()

        def loss(x: Tensor = x, y: Tensor = y, context: Any = context) -> Tensor:
            with context:
                outputs = model(x)
            single = not isinstance(outputs, tuple)
            wide = outputs.float() if single and mixed else outputs
            wide = tuple(z.float() for z in outputs) if not single and mixed else wide
            return shares(case, wide, y, mean).sum()

        rng = torch.get_rng_state()
        old = copy.deepcopy(model.state_dict())
        before = loss()
        before.backward()
        try:
            opt.step()
        except (ModelError, OptionError) as refused:
            event(f"refused: {str(refused)[:60]}")
            assert_refusal_is_due(case, options, refused)
            assert all(torch.equal(p, old[n]) for n, p in model.named_parameters())
            return
        except NonFiniteError:
            event("not finite")
            assert mixed or not math.isfinite(float(before.detach()))
            return
        assert all(p.isfinite().all() for p in model.parameters())
        assert all(p.requires_grad for p in model.parameters())
        if options["value"] == "batch" and options["closed_loop"] and not options["weight_decay"] and not mixed:
            torch.set_rng_state(rng)
            buffers = [(b, b.clone()) for b in model.buffers()]
            after = float(loss().detach())
            for b, kept in buffers:
                b.copy_(kept)
            opt.zero_grad()
            assert after <= float(before.detach()) * (1 + 1e-5) + 1e-6  # or the step was taken back


def assert_refusal_is_due(case: Case, options: dict[str, Any], refused: Exception) -> None:
    """The documented limits, and no others."""
    text = str(refused)
    batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in case.model.modules())
    several = case.outputs > 1
    assert (
        ("needs a chain" in text and options["value"] == "full")
        or ("couples them" in text and options["value"] == "full" and batch_norm)
        or ("needs one output" in text and several)
        or ("needs outputs (batch, classes)" in text and case.places)
    ), text


@hostile
@given(
    st.one_of(graphs(), chains()), st.sampled_from(["identity", "rmsprop", "adam"]), st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.9]), st.lists(st.integers(2, 5), min_size=3, max_size=3),
)  # fmt: skip
def test_without_feedback_any_network_is_trained_as_by_torch(
    case: Case, kind: str, weight_decay: float, momentum: float, sizes: list[int]
) -> None:
    momentum = 0.0 if kind == "adam" else momentum
    lr = RATES[kind][0]
    ours, theirs = copy.deepcopy(case.model).double(), copy.deepcopy(case.model).double()
    note(str(ours))
    opt = DDPNOpt(ours, lr, feedback=False, curvature=kind, momentum=momentum, weight_decay=weight_decay)
    same = {"lr": lr, "weight_decay": weight_decay}
    ps = list(theirs.parameters())
    peer = {
        "identity": lambda: torch.optim.SGD(ps, momentum=momentum, **same),
        "rmsprop": lambda: torch.optim.RMSprop(ps, momentum=momentum, **same),
        "adam": lambda: torch.optim.Adam(ps, **same),
    }[kind]()
    for at, size in enumerate(sizes):
        before = copy.deepcopy(theirs)
        x, y = case.batch(size, at)
        for model, optimizer in ((ours, opt), (theirs, peer)):
            torch.manual_seed(at)
            optimizer.zero_grad()
            shares(case, model(x), y).sum().backward()
            optimizer.step()
        assert_same(ours, theirs, before, 1e-6)
