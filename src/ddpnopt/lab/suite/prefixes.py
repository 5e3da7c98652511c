"""A frozen language model that is steered by learned keys and values in front of its text (prefix tuning)."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.pretrained import prose, trained_on_code
from ddpnopt.lab.suite.task import Setup, suite_task
from ddpnopt.lab.suite.tokens import CausalBlock, CharacterGPT, nats, next_token_loss

PREFIX = 8


class Steered(nn.Module):
    """The frozen model; every block also attends to eight learned pairs of key and value."""

    def __init__(self, frozen: CharacterGPT) -> None:
        super().__init__()
        self.frozen = frozen
        width = frozen.tokens.embedding_dim
        self.prefix = nn.Parameter(0.1 * torch.randn(len(frozen.blocks), 2, PREFIX, width))

    def _through(self, block: CausalBlock, prefix: Tensor, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = block.qkv(block.norm1(x)).chunk(3, 2)
        k, v = (torch.cat([learned.expand(batch, -1, -1), own], 1) for learned, own in zip(prefix, (k, v), strict=True))
        q, k, v = (part.unflatten(2, (block.heads, -1)).transpose(1, 2) for part in (q, k, v))
        mask = torch.ones(time, PREFIX + time, dtype=torch.bool).tril(PREFIX)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + block.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + block.mlp(block.norm2(x))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen.tokens(tokens) + self.frozen.positions.weight[: tokens.shape[1]]
        for block, prefix in zip(self.frozen.blocks, self.prefix, strict=True):
            assert isinstance(block, CausalBlock)
            x = self._through(block, prefix, x)
        return self.frozen.head(self.frozen.norm(x))


@suite_task("tokens", "nats", "lower", steps=300, batch_size=16, sealed=True)
def prefix_tuning() -> Setup:
    """From code to prose: a character model learns a prefix and its layer norms anew; chance is the model as it was."""
    splits, chance = prose()
    model = Steered(copy.deepcopy(trained_on_code()))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)
    return Setup(model, splits, next_token_loss, nats, chance)


TASKS = (prefix_tuning,)
