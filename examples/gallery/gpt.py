"""A character-level GPT that learns a licence: `python examples/gallery/gpt.py --out pictures`."""

from __future__ import annotations

import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from drawing import arguments, picture
from torch import Tensor, nn

from ddpnopt import DDPNOpt

LICENCE = Path(__file__).parents[2] / "LICENSE"


class Block(nn.Module):
    """Attention and an MLP, each behind a norm. Linear layers instead of nn.MultiheadAttention: they have feedback."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(attended)
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self, letters: int, width: int = 48, length: int = 32) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1]).expand_as(text)
        return self.head(self.norm(self.blocks(self.letters(text) + self.places(places))))


def main(steps: int = 400, out: Path | None = None, length: int = 32) -> str:
    torch.manual_seed(0)
    text = LICENCE.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(letter) for letter in text])
    model = GPT(len(alphabet), length=length)
    opt = DDPNOpt(model)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - length - 1, (16, 1)) + torch.arange(length)
        opt.zero_grad()
        loss = F.cross_entropy(model(data[starts]).flatten(0, 1), data[starts + 1].flatten())
        loss.backward()
        opt.step()
        losses.append(loss.item())
    opt.eval()
    written = data[None, :length]
    with torch.no_grad():
        for _ in range(150):
            written = torch.cat([written, model(written[:, -length:])[:, -1].argmax(-1, keepdim=True)], 1)
    sample = "".join(alphabet[i] for i in written[0, length:])
    if out is not None:
        with picture(out / "gallery-gpt", "Character-level GPT: loss, and what it writes", losses, 1) as [axis]:
            axis.text(0, 0.5, textwrap.fill(sample, 34), family="monospace", va="center")
    return sample


if __name__ == "__main__":
    print(main(**arguments()))
