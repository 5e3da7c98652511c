"""The terminal curvature, line 6 of Algorithm 3: what is used as the Hessian of the batch loss at the outputs.

Phi_i is the contribution of sample i to the batch loss Phi, and q = dPhi/dz as back-propagation delivers it.

| name            | Hessian of Phi_i                                                   |
| --------------- | ------------------------------------------------------------------ |
| "gn"            | q q' (the paper's form, per sample) or B q q' (the batch-coupled)  |
| "sqrt"          | q q' / (2 Phi_i): the loss as half a square of sqrt(2 Phi_i)       |
| "cross_entropy" | w (diag(s) - s s'), s = softmax(z)                                 |
| "mse"           | 2 w I                                                              |
| "sampled"       | w (s - e_c)(s - e_c)' with c drawn from s at each place            |
| a callable      | w F F' with F = callable(z), or w H for the full form              |

with w = 1/B for a mean loss (for "mse" also averaged over the elements, as torch does) and 1 for a sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddpnopt.errors import ModelError, OptionError

NAMES = ("sqrt", "gn", "cross_entropy", "mse", "sampled")
TerminalOption = str | Callable[[Tensor], Tensor]

FROM_GRADIENT = ("sqrt", "gn")  # rank one, along the gradient itself


def hessian(option: TerminalOption, z: Tensor, mean: bool) -> Tensor:
    """The Hessian of each sample's Phi_i: (B, n, n)."""
    B, n = z.shape[0], z[0].numel()
    w = 1.0 / B if mean else 1.0
    if option == "cross_entropy":
        s = torch.softmax(_plain_outputs(z, "cross_entropy"), 1)
        return w * (torch.diag_embed(s) - s[:, :, None] * s[:, None, :])
    if option == "mse":
        eye = torch.eye(n, dtype=z.dtype, device=z.device)
        return (2 * w / (n if mean else 1) * eye).expand(B, n, n)
    if callable(option):
        H = option(z)
        if H.shape != (B, n, n):
            raise OptionError(
                f"terminal: the callable returned shape {tuple(H.shape)}; value='full' needs the Hessian of each "
                f"sample's loss, {(B, n, n)} for outputs of shape {tuple(z.shape)}."
            )
        return w * H
    F = factor(option, z, mean)  # (R, B, n)
    return torch.einsum("rbi,rbj->bij", F, F)


def factor(option: TerminalOption, z: Tensor, mean: bool) -> Tensor:
    """Columns whose outer products add up to the Hessian of each sample's Phi_i: (R, B, n)."""
    B, n = z.shape[0], z[0].numel()
    w = 1.0 / B if mean else 1.0
    if option == "cross_entropy":
        s = torch.softmax(_plain_outputs(z, "cross_entropy"), 1)
        eye = torch.eye(n, dtype=z.dtype, device=z.device)
        return (w * s.T).sqrt()[:, :, None] * (eye[:, None] - s)
    if option == "mse":
        eye = torch.eye(n, dtype=z.dtype, device=z.device)
        return ((2 * w / (n if mean else 1)) ** 0.5 * eye)[:, None].expand(n, B, n)
    if option == "sampled":
        s = torch.softmax(z, -1)
        drawn = torch.multinomial(s.flatten(0, -2), 1).view(*s.shape[:-1], 1)
        column = s.scatter_add(-1, drawn, -torch.ones_like(drawn, dtype=s.dtype))
        places = z[0].numel() // z.shape[-1]
        return (w / (places if mean else 1)) ** 0.5 * column.reshape(1, B, n)
    assert callable(option)
    F = option(z)
    if F.dim() == 2:
        F = F[:, :, None]
    if F.dim() != 3 or F.shape[:2] != (B, n):
        raise OptionError(
            f"terminal: the callable returned shape {tuple(F.shape)}; it must be a factor F of the Hessian of each "
            f"sample's loss, {(B, n)} or {(B, n, 'R')} for outputs of shape {tuple(z.shape)}."
        )
    return w**0.5 * F.permute(2, 0, 1)


def _plain_outputs(z: Tensor, name: str) -> Tensor:
    if z.dim() != 2:
        raise ModelError(
            f"terminal='{name}' needs outputs (batch, classes), the model gives {tuple(z.shape)}: use 'sampled', "
            "'sqrt' or 'gn' for outputs with further dimensions."
        )
    return z
