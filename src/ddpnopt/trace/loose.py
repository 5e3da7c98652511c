"""Parameters that belong to no layer: every use of them in a pass, and from it the gradients of each sample.

Such a parameter may be added or multiplied by broadcasting, belong to a module that hooks know nothing of, be shared by
several modules, or be what a parametrised weight is computed from. While a pass is recorded, each function of torch
that gets one is seen. Functions of parameters alone, such as a slice, a view or a weight norm, are remembered. Where
the result meets the samples, the gradient at the output of that function is recorded. The gradient of a sample is then
that of the function on its part of the arguments, pulled back to the parameter, and the sum over all uses.

Only functions that are known to treat the samples in dimension 0 one by one take part. A parameter with any other use
is left to the base optimizer. Samples are told by their number, but a tensor that the model itself holds, such as the
mask of a masked layer, has none, even if it has as many rows as there are samples.

What is remembered hangs on hooks of autograd's graph, so it must not hold a tensor of that graph: neither counting
references nor Python's collector could ever free such a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddpnopt.trace.gradient_hooks import on_gradient
from ddpnopt.trace.layer_uses import shared
from ddpnopt.trace.loose_functions import (
    EXPANDING,
    IN_PLACE,
    MEETING,
    MEETING_SECOND,
    OF_PARAMETERS,
    PASSIVE,
    STACKED,
    SUMS,
    WITH_RULES,
)
from ddpnopt.trace.loose_rules import TRANSPOSED, gradients, of_linear, of_transposed_convolution
from ddpnopt.trace.loose_samples import (
    are_ids,
    as_choice,
    draws,
    gives_one_to_each,
    gives_one_to_each_second,
    has_samples,
    has_samples_behind,
    is_held,
    may_have_samples,
    samples_of_second,
)
from ddpnopt.trace.loose_values import Made, replaced, tensors, value_of

LARGEST = 2**25  # numbers of the explicit gradients of one parameter; a larger one is left to the base optimizer

Touch = Callable[[nn.Parameter], None]
"""Called with a parameter at its first use."""


class UseError(Exception):
    """A use from which the gradients of the samples cannot be computed."""


@dataclass(eq=False)
class Meeting:
    """A function of samples and of tensors computed from parameters."""

    func: Callable[..., Any]
    args: Any  # as in `Made`
    kwargs: Any
    roots: set[nn.Parameter]
    out: Tensor
    versions: list[tuple[Tensor, int]]  # of the samples' tensors when the function ran
    dim: int = 0  # that has the samples
    gradient: Tensor | None = None


class Watch(TorchFunctionMode):
    """While it is entered, every function of torch that gets one of these parameters is seen."""

    def __init__(self, parameters: Iterable[nn.Parameter], touch: Touch) -> None:
        super().__init__()
        self.known = {id(p): Made.of(p) for p in parameters}
        self.touch = touch
        self.touched: set[nn.Parameter] = set()

    def _found(self, args: Any, kwargs: Any) -> list[Made]:
        known = self.known
        found = []
        for each in (*args, *kwargs.values()) if kwargs else args:
            made = known.get(id(each))
            if made is not None:
                found.append(made)
            elif isinstance(each, (tuple, list, dict)):
                found += [known[id(t)] for t in tensors(each) if id(t) in known]
        return found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in PASSIVE:
            return func(*args, **kwargs)
        found = self._found(args, kwargs)
        if not found:
            return func(*args, **kwargs)
        new: Collection[nn.Parameter] = {p for made in found for p in made.roots} - self.touched
        if len(new) > 1:  # a set has another order in each process
            order = list(self.known)
            new = sorted(new, key=lambda p: order.index(id(p)))
        for p in new:
            self.touched.add(p)
            self.touch(p)
        return self.seen(func, args, kwargs, found)

    def seen(self, func: Callable[..., Any], args: Any, kwargs: Any, found: list[Made]) -> Any:
        return func(*args, **kwargs)


class Uses(Watch):
    """All uses of some parameters in one pass with a graph."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        touch: Touch,
        samples: Callable[[], int],
        *,
        constants: Iterable[Tensor] = (),
        kept: bool = False,
        ignores: Callable[[], bool] = bool,
        second: bool = False,
    ) -> None:
        super().__init__(parameters, touch)
        self.second = second  # whether the model has its samples in dimension 1
        self.samples = samples  # their number, which is known by the time that a parameter meets them
        self.ignores = ignores  # whether the backward pass that is running is not that of the loss
        self.kept = kept  # whether outputs are cloned, so that they can be differentiated with respect to
        self.meetings: list[Meeting] = []
        self._alive: list[Tensor] = []  # those in `known`, whose ids are theirs as long as they live
        for t in constants:
            self._hold(t)
        self.left: set[nn.Parameter] = set()  # with a use that is not supported

    def __exit__(self, *failed: Any) -> None:
        super().__exit__(*failed)  # type: ignore[no-untyped-call]
        self.known = {key: made for key, made in self.known.items() if made.parameter is not None}
        self._alive.clear()

    def forget(self) -> None:
        """Drop what was remembered, when the gradients are known: hooks may hold this as long as the loss lives."""
        self.meetings.clear()

    def _hold(self, t: Tensor) -> None:
        self.known[id(t)] = Made(set(), constant=t.detach())
        self._alive.append(t)

    def _kept(self, t: Tensor) -> Tensor | Made:
        """An argument as it is remembered, without its graph."""
        return self.known.get(id(t)) or (Made(set(), constant=t.detach()) if is_held(t) else t.detach())

    def seen(self, func: Callable[..., Any], args: Any, kwargs: Any, found: list[Made]) -> Any:
        if func is torch.broadcast_tensors:  # as distributions do with a scale that all samples share
            shape = torch.broadcast_shapes(*(t.shape for t in args))
            return tuple(self.__torch_function__(Tensor.expand, (), (t, shape)) for t in args)
        roots = {p for made in found for p in made.roots}
        before = [(t, t._version) for t in tensors((args, kwargs)) if id(t) not in self.known]
        out = func(*args, **kwargs)
        outs = list(tensors(out))
        if func is Tensor.__setitem__ and roots:
            choice = as_choice(*args)
            if choice is None:
                self.left |= roots
                return out
            func, args, outs, before = torch.where, choice, [args[0]], [(choice[0], choice[0]._version)]
        if not roots:
            for each in outs if not before and func in OF_PARAMETERS else ():
                self._hold(each)
            return out
        if not any(o.requires_grad for o in outs):
            return out
        if (
            (func in SUMS or func in IN_PLACE)
            and before
            and all(t.dim() == 0 for t in (*outs, *(b for b, _ in before)))
        ):
            return out  # a penalty that the model adds to its loss: autograd has its gradient
        B = self.samples()
        if not B:
            self.left |= roots
            return out
        if func is Tensor.__getitem__ and self._is_lookup(args, B):
            func, args = F.embedding, (args[1], args[0])
        if func is F.dropout and out is not args[0]:  # with the numbers that it has drawn
            func, args, kwargs = torch.mul, (args[0], (out / args[0]).detach().nan_to_num_()), {}
        others, dim, meets = self._samples_among(func, args, before, found, B)
        first = next(t for t in tensors((args, kwargs)) if id(t) in self.known and self.known[id(t)].roots)
        expands = func in EXPANDING and gives_one_to_each(first, outs[0], B)
        if self.second and func in EXPANDING and not others:
            expands = gives_one_to_each_second(first, outs[0], B)
            dim = 1 if expands else 0
        chosen = func is Tensor.__getitem__ and self._is_choice(args, B)
        if expands or chosen or (others and meets):
            if draws(func, args, kwargs) or len(outs) > 1 or outs[0].dim() <= dim or outs[0].shape[dim] % B:
                self.left |= roots
                return out
            kept = replaced(args, self._kept), replaced(kwargs, self._kept)
            meeting = Meeting(IN_PLACE.get(func, func), *kept, roots, outs[0], others, dim)
            self.meetings.append(meeting)
            if self.kept:
                return out if func in IN_PLACE or out is None else out.clone()
            on_gradient(outs[0], partial(self._arrived, meeting))
            meeting.out = outs[0].detach()
        elif func is F.embedding and not shared(args[0], B):
            self.left |= roots  # ids of samples that are not in dimension 0
        elif not others and func in OF_PARAMETERS:
            kept = replaced(args, self._kept), replaced(kwargs, self._kept)
            for k, each in enumerate(outs):
                index = None if isinstance(out, Tensor) else k
                shape = tuple(each.shape)
                self.known[id(each)] = Made(roots, None, WITH_RULES.get(func, func), *kept, index, shape)
                self._alive.append(each)
        else:
            self.left |= roots
        return out

    def _samples_among(
        self, func: Callable[..., Any], args: Any, before: list[tuple[Tensor, int]], found: list[Made], B: int
    ) -> tuple[list[tuple[Tensor, int]], int, bool]:
        """The arguments with samples and their versions, the dimension, and whether the function is known to fit."""
        may = may_have_samples(func, args)
        free = [(t, version) for t, version in before if may(t) and not is_held(t)]
        if self.second:
            dim = samples_of_second([t for t, _ in free], B)
            if dim is None:
                return [(t.detach(), version) for t, version in free if B in t.shape[:2]], 0, False
            with_samples = [(t.detach(), version) for t, version in free if t.dim() > dim and t.shape[dim] == B]
            return with_samples, dim, func in IN_PLACE or func in (MEETING_SECOND if dim else MEETING)
        others = [(t.detach(), version) for t, version in free if has_samples(t, func, B)]
        if others or func not in STACKED:
            return others, 0, func in MEETING or func in IN_PLACE
        shapes = [made.shape for made in found if made.roots]
        others = [(t.detach(), version) for t, version in before if has_samples_behind(t, func, shapes, B)]
        return others, 1 if others else 0, True

    def _is_lookup(self, args: Any, B: int) -> bool:
        """Whether rows of a table are chosen by ids of the samples: `table[ids]`."""
        return args[0].dim() == 2 and self._is_choice(args, B) and bool((args[1] >= 0).all())

    def _is_choice(self, args: Any, B: int) -> bool:
        """Whether ids of the samples choose among what a parameter has in dimension 0, such as weights of experts."""
        return id(args[1]) not in self.known and args[0].dim() > 1 and are_ids(args[1], B)

    def _arrived(self, meeting: Meeting, gradient: Tensor | None) -> None:
        if gradient is not None and not self.ignores():
            gradient = gradient.detach().reshape(meeting.out.shape)
            meeting.gradient = gradient if meeting.gradient is None else meeting.gradient + gradient

    # -- the gradients of the samples ---------------------------------------------------------------------------------

    def gradients(self, at: list[Tensor | None] | None = None) -> dict[nn.Parameter, Tensor]:
        """Of each parameter, (B, numbers), from the gradients at the meetings, those recorded or others."""
        B = self.samples()
        total: dict[nn.Parameter, Tensor] = {}
        for meeting, g in zip(self.meetings, [m.gradient for m in self.meetings] if at is None else at, strict=True):
            roots = [p for p in meeting.roots if p not in self.left]
            if g is None or not roots:
                continue
            try:
                if any(t._version != version for t, version in meeting.versions) and meeting.func not in SUMS:
                    raise UseError
                if any(B * p.numel() > LARGEST for p in roots):
                    raise UseError
                found = self._of_meeting(meeting, g, roots, B)
            except (UseError, RuntimeError, NotImplementedError, ValueError, TypeError):
                self.left |= meeting.roots
                continue
            for p, gradient in zip(roots, found, strict=True):
                gradient = gradient.reshape(B, -1)
                total[p] = gradient if p not in total else total[p] + gradient
        return {p: gradient for p, gradient in total.items() if p not in self.left}

    def _of_meeting(self, meeting: Meeting, g: Tensor, roots: list[nn.Parameter], B: int) -> list[Tensor]:
        if len(roots) == 1 and not meeting.dim:
            plain = gradients(meeting.func, meeting.args, meeting.kwargs, g, Made, B)
            if plain is not None:
                return [plain]
        if (meeting.func in TRANSPOSED or meeting.func is F.linear) and not meeting.kwargs and not meeting.dim:
            rule = of_linear if meeting.func is F.linear else of_transposed_convolution
            of_both = rule(meeting.args, g, Made, B)
            if of_both is not None:
                return [of_both[p] for p in roots]
        values = [p.detach() for p in roots]
        per_sample: list[Tensor] = []  # arguments with samples, (B, k, …)
        places: dict[int, int] = {}
        may = may_have_samples(meeting.func, meeting.args)
        for t in tensors((meeting.args, meeting.kwargs)):
            behind = meeting.dim == 1 and t.dim() > 1 and t.shape[1] == B
            if id(t) not in places and (behind if meeting.dim else may(t) and has_samples(t, meeting.func, B)):
                places[id(t)] = len(per_sample)
                per_sample.append(t.unflatten(meeting.dim, (B, -1)).movedim(meeting.dim, 0))

        def of_sample(sample: Tensor, parts: list[Tensor], q: Tensor) -> tuple[Tensor, ...]:
            def output(*u: Tensor) -> Tensor:
                env: dict[Any, Tensor] = dict(zip(roots, u, strict=True))
                change = partial(value_of, env=env, places=places, parts=parts)
                out: Tensor = meeting.func(*replaced(meeting.args, change), **replaced(meeting.kwargs, change))
                if per_sample:
                    return out
                dim = meeting.dim
                return out.unflatten(dim, (B, -1)).index_select(dim, sample[None]).flatten(dim, dim + 1)

            pull = torch.func.vjp(output, *values)[1]
            found: tuple[Tensor, ...] = pull(q)
            return found

        q = g.to(values[0].dtype).unflatten(meeting.dim, (B, -1)).movedim(meeting.dim, 0)
        with torch.enable_grad():
            each = torch.func.vmap(of_sample)(torch.arange(B, device=g.device), per_sample, q)
        return [gradient.detach() for gradient in each]

    def scale(self, factor: float) -> None:
        """Replace the recorded gradients by those of `factor` times the loss."""
        for meeting in self.meetings:
            if meeting.gradient is not None:
                wide = torch.promote_types(meeting.gradient.dtype, torch.float32)
                meeting.gradient = meeting.gradient.to(wide) * factor
