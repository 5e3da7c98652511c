"""Which form the per-sample gradients of a layer have in balanced variables: the one with the least work."""

from __future__ import annotations

from torch import Tensor

from ddpnopt.ddp.balance import Balance, Mixing
from ddpnopt.ddp.balanced import BalancedGradients, InBalance, OuterProducts, Repeated, Stored, Tokens
from ddpnopt.ddp.sketched import Sketched, SketchedProducts, combinations, is_large
from ddpnopt.linear.convolution import Conv
from ddpnopt.linear.layer import Layer
from ddpnopt.linear.linear import Linear
from ddpnopt.linear.sample_gradients import ByPlaces, Explicit, Recomputed


def balanced_gradients(
    layer: Layer, x: Tensor, p: Tensor, balance: Balance, *, others: int, recompute: bool | None
) -> BalancedGradients:
    """For inputs x and output gradients p; `others`: samples in the whole batch."""
    combined = sketched(layer, x, p, balance, others)
    if combined is not None:
        return combined
    if type(layer) is Linear and x.dim() == 2:
        return OuterProducts(layer, x, p, balance)
    form = layer.form_over_places(x, p, others, recompute)
    if form is Explicit:
        return Stored(layer, x, p, balance)
    if form is Recomputed:
        return Repeated(layer, x, p, balance)
    if form is ByPlaces:
        return Tokens(layer, x, p, balance)
    return InBalance(layer, x, p, balance, others, recompute)


def sketched(
    layer: Layer, x: Tensor, p: Tensor, balance: Balance | None, samples: int, *, sent: bool = False
) -> Sketched | SketchedProducts | None:
    """The form of a large layer; None for any other. `sent`: whether other processes get the combinations."""
    if not isinstance(balance, Mixing):
        return None
    if type(layer) is Linear and x.dim() == 2:
        large = is_large(layer, samples, 1, sent=sent)
        return SketchedProducts(layer, x, p, balance, combinations(layer, samples, sent=sent)) if large else None
    if type(layer) is Linear or type(layer) is Conv:
        large = is_large(layer, samples, p.numel() // (len(p) * layer.weight_shape[0]), sent=sent)
        return Sketched(layer, x, p, balance, combinations(layer, samples, sent=sent)) if large else None
    return None
