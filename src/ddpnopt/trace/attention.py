"""`nn.MultiheadAttention` made of linear pieces: the projections of queries, keys and values, and of the output."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.trace.fused import Fused, Piece, Replacement


class Attention(Fused):
    """Replaces `F.multi_head_attention_forward`; the module around it prepares and returns as usual."""

    module: nn.MultiheadAttention

    def __init__(self, name: str, module: nn.MultiheadAttention) -> None:
        super().__init__(name, module)
        for each in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            weight = module._parameters.get(each)
            if weight is not None:  # a bias is packed for all three, also where the weights are not
                bias = module.in_proj_bias if each == "in_proj_weight" else None
                self.pieces[each.removesuffix("_weight")] = Piece(weight, bias)
        self.pieces["out_proj"] = module.out_proj

    def replacements(self, args: tuple[Any, ...]) -> dict[Any, Replacement]:
        return {F.multi_head_attention_forward: self._forward}

    def applies(self) -> bool:
        return self.module.training and super().applies()  # in evaluation torch may choose another path

    def _forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        training: bool = True,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        use_separate_proj_weight: bool = False,
        q_proj_weight: Tensor | None = None,
        k_proj_weight: Tensor | None = None,
        v_proj_weight: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        **others: Any,
    ) -> Any:
        usual = query.dim() == 3 and bias_k is None and bias_v is None and not add_zero_attn
        given = {
            "in_proj": in_proj_weight, "q_proj": q_proj_weight, "k_proj": k_proj_weight, "v_proj": v_proj_weight,
            "out_proj": out_proj_weight,
        }  # fmt: skip
        mine = all(given[each] is piece.weight for each, piece in self.pieces.items())
        if not usual or not mine or any(other is not None for other in others.values()):
            return NotImplemented
        if is_causal and attn_mask is None:
            return NotImplemented  # torch raises the error
        mask = _mask(query, num_heads, attn_mask, key_padding_mask)
        hint = is_causal and key_padding_mask is None and not need_weights  # then the mask is the causal one
        q, k, v = (_heads(a, num_heads) for a in self._projected(query, key, value))
        dropout_p = dropout_p if training else 0.0
        if need_weights:
            logits = (q * sqrt(1.0 / q.shape[-1])) @ k.mT
            weights = F.softmax(logits if mask is None else logits + mask, dim=-1)
            weights = F.dropout(weights, dropout_p) if dropout_p > 0 else weights
            found = weights @ v
        else:
            weights = None
            found = F.scaled_dot_product_attention(q, k, v, None if hint else mask, dropout_p, hint)
        out = self.pieces["out_proj"](found.transpose(1, 2).flatten(2))
        out = out.transpose(0, 1).contiguous()  # the layout in memory decides which numbers a later dropout drops
        return out, weights.mean(1) if weights is not None and average_attn_weights else weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, B, n) each -> (B, tokens, n)."""
        x, y, z = (a.transpose(0, 1) for a in (query, key, value))
        n, bias = self.module.embed_dim, self.module.in_proj_bias
        packed = self.pieces.get("in_proj")
        if packed is None:
            shifts = [None] * 3 if bias is None else bias.chunk(3)
            found = [self.pieces[f"{each}_proj"](a) for each, a in zip("qkv", (x, y, z), strict=True)]
            q, k, v = [h if b is None else h + b for h, b in zip(found, shifts, strict=True)]
        elif query is key and key is value:
            q, k, v = packed(x).chunk(3, -1)
        else:
            assert isinstance(packed, Piece)
            q = packed.part(x, 0, n)
            if key is value:
                k, v = packed.part(y, n, 3 * n).chunk(2, -1)
            else:
                k, v = packed.part(y, n, 2 * n), packed.part(z, 2 * n, 3 * n)
        return q, k, v


def _heads(a: Tensor, heads: int) -> Tensor:
    """(B, tokens, n) -> (B, heads, tokens, n / heads)."""
    return a.unflatten(-1, (heads, -1)).transpose(1, 2)


def _mask(query: Tensor, heads: int, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """Both masks as one that is added to the logits, (…, …, tokens, keys)."""
    found = None if attn_mask is None else _added(attn_mask, query.dtype)
    if found is not None and found.dim() == 3:  # one for each head of each sample
        found = found.unflatten(0, (-1, heads))
    if padding is not None:
        hidden = _added(padding, query.dtype)[:, None, None]
        found = hidden if found is None else found + hidden
    return found


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf")) if mask.dtype == torch.bool else mask
