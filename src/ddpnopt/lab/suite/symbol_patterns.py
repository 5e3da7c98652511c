"""Patterns among symbols: motifs anywhere in a strand, code by a mixture of experts, two sentences on one topic."""

from __future__ import annotations

import inspect
import tarfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import classifier, cross_entropy
from ddpnopt.lab.suite.measures import accuracy
from ddpnopt.lab.suite.sequences import windows
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def strands(number: int = 6000, length: int = 60, motif: int = 8) -> Splits:
    """Four letters at random, and one of five motifs somewhere, each letter of it wrong in one case of ten."""
    source = generator(215)
    motifs = torch.randint(4, (5, motif), generator=source)
    label = torch.randint(5, (number,), generator=source)
    strand = torch.randint(4, (number, length), generator=source)
    wrong = torch.rand(number, motif, generator=source) < 0.1
    written = torch.where(wrong, torch.randint(4, (number, motif), generator=source), motifs[label])
    first = torch.randint(length - motif, (number, 1), generator=source)
    return split((strand.scatter(1, first + torch.arange(motif), written), label), 600, 1200)


class MotifNetwork(nn.Module):
    """Convolutions of three widths over the letters, the strongest answer of each anywhere, and dropout."""

    def __init__(self, letters: int, classes: int, each: int = 16) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, 8)
        self.widths = nn.ModuleList(nn.Conv1d(8, each, width) for width in (4, 6, 8))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(3 * each, classes)

    def forward(self, strand: Tensor) -> Tensor:
        x = self.letters(strand).transpose(1, 2)
        return self.head(self.drop(torch.cat([F.relu(width(x)).amax(2) for width in self.widths], 1)))


@suite_task("convolutional", "accuracy %", "higher", steps=400, batch_size=64, sealed=True)
def motifs_anywhere() -> Setup:
    """Which motif a strand of sixty letters holds, by the maximum over all places (as for texts and for DNA)."""
    return classifier(MotifNetwork(4, 5), strands())


class Experts(nn.Module):
    """Four networks, of which a gate weighs the best two for each token; also returns how uneven the gate is."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.gate(x).softmax(-1)
        best = share >= share.topk(2, -1).values[..., 1:]
        weight = share * best
        weight = weight / weight.sum(-1, keepdim=True)
        answers = torch.stack([expert(x) for expert in self.experts], -1)
        uneven = 2 * (best.float().mean((0, 1)) * share.mean((0, 1))).sum()
        return (answers * weight[..., None, :]).sum(-1), uneven


class ExpertModel(nn.Module):
    """Two pre-norm blocks of causal attention and experts; returns logits and the unevenness of the gates."""

    def __init__(self, characters: int, context: int, width: int = 32) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Parameter(0.1 * torch.randn(context, width))
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(2))
        self.experts = nn.ModuleList(Experts(width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.head = nn.Linear(width, characters)
        self.later: Tensor
        self.register_buffer("later", torch.ones(context, context).triu(1).bool())

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        x = self.characters(text) + self.places
        uneven = torch.zeros(())
        for layer, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            h = self.norms[2 * layer](x)
            x = x + attention(h, h, h, need_weights=False, attn_mask=self.later)[0]
            found, more = experts(self.norms[2 * layer + 1](x))
            x, uneven = x + found, uneven + more
        return self.head(self.norms[4](x)), uneven


@suite_task("tokens", "nats", "lower", steps=300, batch_size=8, sealed=True)
def experts_on_code() -> Setup:
    """The characters of Python's module of tar archives by a mixture of experts, whose use is to be even."""
    context = 32
    text = inspect.getsource(tarfile)
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    splits, chance = windows(torch.tensor([alphabet[character] for character in text]), context, 7)

    def nats(logits: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits, uneven = model(batch[0])
        return nats(logits, batch[1]) + 0.01 * uneven

    def measure(model: nn.Module, data: Batch) -> float:
        return nats(model(data[0])[0], data[1]).item()

    return Setup(ExpertModel(len(alphabet), context), splits, loss, measure, chance)


PADDING, START, BETWEEN, WORDS = 0, 1, 2, 3
TOPICS, EACH = 4, 8


def pairs_of_sentences(number: int = 7000, longest: int = 7) -> Splits:
    """Two sentences of four to seven words on one topic or on two: a start, the first, a sign between, the second."""
    source = generator(216)
    same = torch.randint(2, (number,), generator=source)
    one = torch.randint(TOPICS, (number,), generator=source)
    two = (one + (1 - same) * torch.randint(1, TOPICS, (number,), generator=source)) % TOPICS
    length = torch.randint(4, longest + 1, (number, 2), generator=source)
    # about one word in seven is of a topic at random.
    about = torch.stack([one, two], 1)[:, :, None].expand(-1, -1, longest)
    other = torch.randint(TOPICS, about.shape, generator=source)
    about = torch.where(torch.rand(about.shape, generator=source) < 0.15, other, about)
    word = WORDS + EACH * about + torch.randint(EACH, about.shape, generator=source)
    text = torch.full((number, 2 * longest + 2), PADDING)
    text[:, 0] = START
    for row, (a, b) in enumerate(length.tolist()):
        text[row, 1 : a + 1] = word[row, 0, :a]
        text[row, a + 1] = BETWEEN
        text[row, a + 2 : a + b + 2] = word[row, 1, :b]
    return split((text, same), 700, 1500)


class PairReader(nn.Module):
    """BERT's way: words, places, which sentence it is, post-norm layers that skip padding, the answer at the start."""

    def __init__(self, longest: int, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + TOPICS * EACH, width)
        self.places, self.sentences = nn.Embedding(longest, width), nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, text: Tensor) -> Tensor:
        second = ((text == BETWEEN).cumsum(1) > 0).long()
        place = torch.arange(text.shape[1]).expand_as(text)
        x = self.norm(self.words(text) + self.places(place) + self.sentences(second))
        return self.head(self.body(x, src_key_padding_mask=text == PADDING)[:, 0])


@suite_task("tokens", "accuracy %", "higher", steps=350, batch_size=48, sealed=True)
def paired_sentences() -> Setup:
    """Are two sentences about the same thing? An encoder as BERT's, trained from the start; chance is a guess."""
    return Setup(PairReader(16), pairs_of_sentences(), cross_entropy, accuracy, chance=50.0)


TASKS = (motifs_anywhere, experts_on_code, paired_sentences)
