"""What the user hands over, brought into one shape and checked, with errors that say where and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from .errors import ControlError
from .problem import LimitLike, Problem
from .stages import Blocks, Limits, Run, plan, stack

ControlsLike = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Start:
    """x0 (B, n_0), u as blocks, the runs, the limits, and whether the user gave a batch at all."""

    x0: Tensor
    u: Blocks
    runs: tuple[Run, ...]
    limits: Limits | None
    batched: bool


def prepare(problem: Problem, x0: Tensor, u0: ControlsLike) -> Start:
    """Check x0 and u0 against the problem and give both a batch dimension."""
    x0, u, batched = batch(problem, x0, u0)
    n = state_sizes(problem, x0[0], [stage[0] for stage in u])
    runs = plan(problem, n, [stage.shape[-1] for stage in u])
    blocks = stack(runs, u)
    limits = resolve_limits(problem, runs, x0)
    if limits is not None:
        _require_inside(limits, blocks, runs)
    return Start(x0, blocks, runs, limits, batched)


def batch(problem: Problem, x0: Tensor, u0: ControlsLike) -> tuple[Tensor, list[Tensor], bool]:
    """x0 as (B, n_0), u as T tensors (B, m_t), and whether either had a batch dimension.

    One start with many control sequences, or many starts with one sequence, are broadcast to each other.
    """
    if not isinstance(x0, Tensor) or x0.dim() not in (1, 2):
        raise ControlError(f"x0 must be a tensor (n,) or (B, n), not {_describe(x0)}")
    if not x0.is_floating_point():
        raise ControlError(f"x0 is {x0.dtype}; derivatives need floating point, use x0.double()")
    stages = _control_stages(problem.T, u0)
    for t, stage in enumerate(stages):
        if stage.dtype != x0.dtype or stage.device != x0.device:
            raise ControlError(
                f"the start control of stage {t} is {stage.dtype} on {stage.device}, "
                f"x0 is {x0.dtype} on {x0.device}; convert one of them"
            )
    sizes = {"x0": x0.shape[0]} if x0.dim() == 2 else {}
    if stages[0].dim() == 2:
        sizes["u0"] = stages[0].shape[0]
    if len(set(sizes.values())) > 1:
        raise ControlError(f"x0 is a batch of {sizes['x0']} problems but u0 one of {sizes['u0']}; make them equal")
    if 0 in sizes.values():
        raise ControlError("the batch is empty; give at least one problem")
    B = next(iter(sizes.values()), 1)
    x0 = x0.detach().expand(B, -1) if x0.dim() == 2 else x0.detach().unsqueeze(0).expand(B, -1)
    u = [s.detach().expand(B, -1) if s.dim() == 2 else s.detach().unsqueeze(0).expand(B, -1) for s in stages]
    return x0, u, bool(sizes)


def state_sizes(problem: Problem, x0: Tensor, u: Sequence[Tensor]) -> list[int]:
    """Follow one problem through the stages on plain tensors: the sizes n_0 .. n_T, or a clear error."""
    sizes = [x0.shape[-1]]
    known: dict[tuple[int, int, int, int], int] = {}
    x = x0
    with torch.no_grad():
        for t, u_t in enumerate(u):
            key = id(problem.f(t)), id(problem.l(t)), x.shape[-1], u_t.shape[-1]
            if key not in known:
                # same functions, same sizes: same shapes; so a horizon of 1000 stages is still checked once
                x_next = _call(problem.f(t), f"dynamics at stage {t}", x, u_t)
                x_next = _require_state(x_next, x, t, problem)
                _require_scalar(_call(problem.l(t), f"stage_cost at stage {t}", x, u_t), x, f"stage_cost at stage {t}")
                known[key] = x_next.shape[-1]
            else:
                x_next = x.new_zeros(known[key])
            x = x_next
            sizes.append(x.shape[-1])
        name = f"terminal_cost (at stage {problem.T})"
        _require_scalar(_call(problem.terminal_cost, name, x), x, name)
    return sizes


def resolve_limits(problem: Problem, runs: Sequence[Run], like: Tensor) -> Limits | None:
    """Limits as blocks (S, 1, m), infinite where none was given; None if the problem has no limits at all."""
    if problem.lower is None and problem.upper is None:
        return None
    sizes = [run.m for run in runs for _ in range(run.length)]
    lower = _limit_stages(problem.lower, -torch.inf, "lower", sizes, like)
    upper = _limit_stages(problem.upper, torch.inf, "upper", sizes, like)
    for t, (lo, hi) in enumerate(zip(lower, upper, strict=True)):
        if not bool((lo <= hi).all()):
            raise ControlError(f"at stage {t} the lower limit {lo.tolist()} is above the upper limit {hi.tolist()}")
    return Limits(stack(runs, [l.unsqueeze(0) for l in lower]), stack(runs, [h.unsqueeze(0) for h in upper]))


def _control_stages(T: int, u0: ControlsLike) -> list[Tensor]:
    if isinstance(u0, Tensor):
        if u0.dim() not in (2, 3) or u0.shape[-2] != T:
            raise ControlError(f"u0 must be a tensor (T, m) or (B, T, m) with T = {T}, not {_describe(u0)}")
        return list(u0.unbind(-2))
    stages = list(u0)
    if len(stages) != T:
        raise ControlError(f"u0 has {len(stages)} stages, the problem has {T}; give one control tensor per stage")
    for t, stage in enumerate(stages):
        if not isinstance(stage, Tensor) or stage.dim() not in (1, 2):
            raise ControlError(f"u0[{t}] must be a tensor (m,) or (B, m), not {_describe(stage)}")
        if stage.shape[:-1] != stages[0].shape[:-1]:
            raise ControlError(f"u0[{t}] is {_describe(stage)}, but u0[0] is {_describe(stages[0])}: batches differ")
    return stages


def _limit_stages(
    limit: LimitLike | None, default: float, name: str, sizes: Sequence[int], like: Tensor
) -> list[Tensor]:
    if limit is None:
        limit = default
    if isinstance(limit, Sequence) and len(limit) > 0 and isinstance(limit[0], Tensor) and limit[0].dim() > 0:
        stages = [torch.as_tensor(stage).to(like) for stage in limit]
        if len(stages) != len(sizes):
            raise ControlError(f"{name} has {len(stages)} stages, the problem has {len(sizes)}; give one per stage")
    else:
        value = torch.as_tensor(limit).to(like)
        if value.dim() == 2 and value.shape[0] != len(sizes):
            raise ControlError(f"{name} has {value.shape[0]} rows, the problem has {len(sizes)} stages")
        stages = list(value.unbind(0)) if value.dim() == 2 else [value] * len(sizes)
    for t, (stage, m) in enumerate(zip(stages, sizes, strict=True)):
        if stage.dim() > 1 or (stage.dim() == 1 and stage.shape[0] != m):
            raise ControlError(
                f"{name} at stage {t} has shape {tuple(stage.shape)}, the control there has {m} components; "
                "give a number, an (m,) or (T, m) tensor, or one (m_t,) tensor per stage"
            )
    return [stage.expand(m) for stage, m in zip(stages, sizes, strict=True)]


def _require_inside(limits: Limits, u: Blocks, runs: Sequence[Run]) -> None:
    for run, lo, hi, block in zip(runs, limits.lower, limits.upper, u, strict=True):
        outside = (block < lo) | (block > hi)  # (S, B, m)
        if bool(outside.any()):
            s, b, i = outside.nonzero()[0].tolist()
            raise ControlError(
                f"the start control {block[s, b, i].item():g} (stage {run.start + s}, problem {b}, component "
                f"{i}) is outside its limits [{lo[s, 0, i].item():g}, {hi[s, 0, i].item():g}]; "
                "start inside, for example with u0.clamp(lower, upper)"
            )


def _call(function: Callable[..., object], name: str, *arguments: Tensor) -> object:
    try:
        value = function(*arguments)
    except Exception as error:
        sizes = " and ".join(f"{tuple(a.shape)}" for a in arguments)
        raise ControlError(f"{name} failed on arguments of shape {sizes}: {error}") from error
    if isinstance(value, Tensor):
        try:
            vmap(function)(*(argument.unsqueeze(0) for argument in arguments))
        except Exception as error:
            raise ControlError(
                f"{name} works on plain tensors but not under torch.func.vmap: {error} -- write it without `if` "
                "on tensor values (torch.where), without .item(), without in-place changes"
            ) from error
    return value


def _require_state(x_next: object, x: Tensor, t: int, problem: Problem) -> Tensor:
    name = f"dynamics at stage {t}"
    if not isinstance(x_next, Tensor):
        raise ControlError(f"{name} must return a tensor (n_next,), not {type(x_next).__name__}")
    if x_next.dim() != 1:
        raise ControlError(f"{name} must return a vector (n_next,), not {_describe(x_next)}; write it for one problem")
    if x_next.dtype != x.dtype:
        raise ControlError(f"{name} turned a {x.dtype} state into {x_next.dtype}; keep the dtype")
    # One function for all stages maps the state space to itself; with one per stage a change of size is the
    # point. There the next stage's function finds the mismatch, unless it is written for any size.
    repeats = t + 1 < problem.T and problem.f(t + 1) is problem.f(t)
    if repeats and x_next.shape != x.shape:
        raise ControlError(
            f"{name} returned {x_next.shape[0]} components for a state of {x.shape[0]}, yet the "
            f"same function is used at stage {t + 1}; return the next state in the size of x, "
            "or give one function per stage"
        )
    return x_next


def _require_scalar(value: object, x: Tensor, name: str) -> None:
    if not isinstance(value, Tensor):
        raise ControlError(f"{name} must return a scalar tensor, not {type(value).__name__}")
    if value.dim() != 0:
        raise ControlError(f"{name} must return a scalar, not {_describe(value)}; sum it up, for example with .sum()")
    if value.dtype != x.dtype:
        raise ControlError(f"{name} turned a {x.dtype} state into a {value.dtype} cost; keep the dtype")


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
