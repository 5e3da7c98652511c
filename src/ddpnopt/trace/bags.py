"""`nn.EmbeddingBag` in two pieces: an embedding, and the sum or mean over each bag."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.trace.fused import Fused, Replacement


class Words(nn.Embedding):
    """The rows of the weight of an embedding bag; it is not part of the model."""

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__(1, 1, sparse=bag.sparse)
        self.weight, self.num_embeddings, self.embedding_dim = bag.weight, bag.num_embeddings, bag.embedding_dim
        self.padding_idx = bag.padding_idx


class Bag(Fused):
    """Replaces the call that looks up the rows of all bags and adds them up, or takes their mean."""

    module: nn.EmbeddingBag

    def __init__(self, name: str, module: nn.EmbeddingBag) -> None:
        super().__init__(name, module)
        self.pieces["words"] = Words(module)

    @staticmethod
    def of(name: str, module: nn.EmbeddingBag) -> Bag | None:
        """None for a bag whose rows have gradients that are no sums over their uses."""
        plain = module.mode in ("sum", "mean") and module.max_norm is None and not module.scale_grad_by_freq
        return Bag(name, module) if plain else None

    def replacements(self, args: tuple[Any, ...]) -> dict[Any, Replacement]:
        return {F.embedding_bag: self._forward}

    def _forward(self, ids: Tensor, weight: Tensor, offsets: Tensor | None = None, **settings: Any) -> Any:
        if weight is not self.module.weight or ids.is_nested:
            return NotImplemented
        factor = settings.get("per_sample_weights")
        rows = self.pieces["words"](ids)
        rows = rows if factor is None else rows * factor[..., None]
        counted = torch.ones_like(ids) if self.module.padding_idx is None else (ids != self.module.padding_idx).long()
        rows = rows if self.module.padding_idx is None else rows * counted[..., None]
        if offsets is None:
            sums, counts = rows.sum(1), counted.sum(1)
        else:
            bags = len(offsets) - self.module.include_last_offset
            bounds = torch.cat([offsets[:bags], offsets.new_tensor([len(ids)])])
            bag = torch.arange(bags, device=ids.device).repeat_interleave(bounds.diff())
            sums = rows.new_zeros(bags, rows.shape[1]).index_add(0, bag, rows)
            counts = counted.new_zeros(bags).index_add(0, bag, counted)
        return sums if self.module.mode == "sum" else sums / counts.clamp_min(1)[:, None]
