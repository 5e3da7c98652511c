"""Networks with parameters that belong to no layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

B, N, CLASSES = 5, 4, 3


class Net(nn.Module):
    """A layer, something else on (B, 6, N), and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(N, N), nn.Linear(N, CLASSES)

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.between(self.into(x))).mean(1))
        return found


class Tokens(Net):
    """A class token and a table of positions, of which a part is used."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.table = nn.Parameter(torch.randn(1, 1, N)), nn.Parameter(torch.randn(1, 9, N))

    def between(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return x + self.table[:, : x.shape[1]]


class Masked(Net):
    """A token in the place of others, written into what a layer has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(N))

    def between(self, x: Tensor) -> Tensor:
        x = 2 * x
        x[x.detach().sum(2) > 0] = self.token.tanh()
        return x.square()


class Heads(Net):
    """Keys of two heads, repeated for each sample: heads and samples in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(2, 3, N // 2))

    def between(self, x: Tensor) -> Tensor:
        queries = x.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1)  # (2 B, 6, N / 2)
        keys = self.keys.tanh().repeat(len(x), 1, 1)
        found = torch.bmm(torch.bmm(queries, keys.mT).softmax(-1), keys)
        return x + found.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)


class InPlace(Net):
    """A table without a dimension for the batch, added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, N))

    def between(self, x: Tensor) -> Tensor:
        x = 2 * x
        x += self.table
        return x


class Scales(Net):
    """The scale of a layer, a temperature, and a shift of each place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.temperature = nn.Parameter(torch.rand(N) + 0.5), nn.Parameter(torch.zeros(()))
        self.shift = nn.Parameter(torch.randn(6, 1))

    def between(self, x: Tensor) -> Tensor:
        return (x + self.scale * torch.sin(x)) / self.temperature.exp() + self.shift - 0.5 * self.shift


class Positions(Net):
    """Rows of positions, which all samples share."""

    def __init__(self, batched: bool) -> None:
        super().__init__()
        self.positions, self.batched = nn.Embedding(9, N), batched

    def between(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        return x * self.positions(places[None] if self.batched else places)


class OwnForwards(Net):
    """Modules with a forward of their own, and some that have no layer here."""

    def __init__(self) -> None:
        super().__init__()

        class Scaled(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                return 0.5 * super().forward(input)

        class Transposed(nn.Module):  # as in the models of some libraries
            def __init__(self) -> None:
                super().__init__()
                self.weight, self.bias = nn.Parameter(torch.randn(N, N)), nn.Parameter(torch.randn(N))

            def forward(self, x: Tensor) -> Tensor:
                return torch.addmm(self.bias, x.reshape(-1, N), self.weight).view(x.shape)

        class OwnNorm(nn.LayerNorm):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(input)

        self.scaled, self.transposed, self.norm = Scaled(N, N), Transposed(), OwnNorm(N)
        self.act, self.up = nn.PReLU(), nn.ConvTranspose1d(N, N, 3, padding=1)

    def between(self, x: Tensor) -> Tensor:
        x = x + self.transposed(torch.tanh(self.scaled(x)))
        return self.act(self.norm(x)) + self.up(x.transpose(1, 2)).transpose(1, 2)


class Tied(nn.Module):
    """An embedding whose rows are those of the head, and the bias of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(7, N), nn.Linear(N, N), nn.Linear(N, 7)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.words(ids))).mean(1))


class Shared(Net):
    """One weight in two layers, and once more transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(N, N), nn.Linear(N, N)
        self.b.weight = self.a.weight

    def between(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.b(torch.tanh(self.a(x)))), self.a.weight.T)


class Parametrised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = weight_norm(nn.Linear(N, N)), spectral_norm(nn.Linear(N, N))
        self.c = weight_norm(nn.Conv1d(N, N, 3, padding=1))

    def between(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) + self.c(x.transpose(1, 2)).transpose(1, 2)


class Experts(Net):
    """Three experts as one parameter: all of them on all samples, experts first, or those that a sample chooses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight, self.shift = nn.Parameter(torch.randn(3, N, N)), nn.Parameter(torch.randn(3, N))

    def between(self, x: Tensor) -> Tensor:
        if self.kind == "first":
            each = torch.bmm(x.sum(1).expand(3, -1, -1), self.weight) + self.shift[:, None]
            return x + torch.tanh(each).sum(0)[:, None]
        chosen = (x.detach().sum(2)[:, :2] > 0).long() + 1  # (B, 2)
        each = (x.sum(1)[:, None, None] @ self.weight[chosen]).squeeze(2) + self.shift[chosen]
        return x + torch.tanh(each).sum(1, keepdim=True)


class Thresholds(Net):
    """Values in ascending order, from gaps, and a rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gaps = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(N - 1))
        self.angles = nn.Parameter(torch.randn(N, N))

    def between(self, x: Tensor) -> Tensor:
        limits = torch.cat([self.first, self.first + F.softplus(self.gaps).cumsum(0)])
        return torch.sigmoid(limits - x @ torch.matrix_exp(self.angles - self.angles.mT))


class BiasedAttention(Net):
    """Fused attention with a bias by how far apart two places are, as in BEiT."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.table = nn.Linear(N, 3 * N), nn.Parameter(torch.randn(11, 2))

    def between(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = self.table[places[:, None] - places + 5].permute(2, 0, 1)
        q, k, v = (a.unflatten(2, (2, -1)).transpose(1, 2) for a in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


class Latents(Net):
    """As many latent vectors as samples, which attend to each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(B, N))

    def between(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(len(x), -1, -1)
        return latents + (latents @ x.mT).softmax(-1) @ x


class MaskedConvolution(nn.Conv2d):
    """A convolution with a forward pass of its own, as in PixelCNN."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(self.weight)
        mask[:, :, 2:] = 0
        return self._conv_forward(x, self.weight * mask, self.bias)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tokens": Tokens, "in place": InPlace, "scales": Scales, "own forwards": OwnForwards, "tied": Tied,
    "shared": Shared, "parametrised": Parametrised,
    "masked": Masked, "heads": Heads, "thresholds": Thresholds, "biased attention": BiasedAttention,
    "latents": Latents,
    "experts": lambda: Experts("first"), "experts of samples": lambda: Experts("chosen"),
    "positions": lambda: Positions(False), "positions, one row": lambda: Positions(True),
}  # fmt: skip


def data(model: nn.Module, n: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    if isinstance(model, Tied):
        return torch.randint(7, (n, 6), generator=g), torch.randint(7, (n,), generator=g)
    return torch.randn(n, 6, N, generator=g), torch.randint(CLASSES, (n,), generator=g)
