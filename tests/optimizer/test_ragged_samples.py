"""Samples with unequal numbers of rows: their gradients are those of autograd, the steps those of padded samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt._collect import one_recording
from ddpnopt.trace.ragged import Rows, factors, filled, samples_of
from ddpnopt.trace.recording import Recording

B, N = 5, 4
tight = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


@dataclass
class Graphs:
    """Graphs of unequal size, their nodes one behind the other or in any order."""

    x: Tensor  # (nodes, N)
    links: Tensor  # (2, links), within each graph
    graph: Tensor  # (nodes,)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.links, self.graph


def graphs(sizes: list[int] | None = None, *, shuffled: bool = False) -> Graphs:
    sizes = [3, 1, 5, 2, 4] if sizes is None else sizes
    graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    if shuffled:
        graph = graph[torch.randperm(len(graph))]
    linked = (graph[:, None] == graph) & (torch.rand(len(graph), len(graph)) < 0.6)
    return Graphs(torch.randn(len(graph), N), linked.nonzero().T.contiguous(), graph)


def pooled(h: Tensor, graph: Tensor, count: int) -> Tensor:
    return h.new_zeros(count, *h.shape[1:]).index_add(0, graph, h)


class Network(nn.Module):
    """Layers on nodes, on links between them, and on graphs."""

    def __init__(self, *, edges: bool = False, norm: bool = False, bare: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(N, 6), nn.Linear(6, 5), nn.Linear(5, 3)
        self.message = nn.Linear(6, 6) if edges else nn.Identity()
        self.norm = nn.LayerNorm(6) if norm else nn.Identity()
        self.shift = nn.Parameter(torch.randn(5)) if bare else None

    def spread(self, h: Tensor, links: Tensor) -> Tensor:
        return h.index_add(0, links[1], torch.tanh(self.message(h[links[0]])))

    def forward(self, x: Tensor, links: Tensor, graph: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.a(x)))
        h = self.b(self.spread(h, links))
        h = torch.tanh(h if self.shift is None else h + self.shift)
        out: Tensor = self.head(pooled(h, graph, int(graph.max()) + 1))
        return out


class OfObject(Network):
    """Reads its inputs from one object, which only the model knows."""

    def forward(self, data: Graphs) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.links, data.graph)


class Numbered(Network):
    """Its graphs have numbers of their own, which tell nothing of their place in the outputs."""

    def forward(self, x: Tensor, links: Tensor, graph: Tensor) -> Tensor:
        return super().forward(x, links, graph - 7)


class Tokens(nn.Module):
    """Sentences one behind the other, mixed by attention within each; `how` tells where they begin."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.words, self.qkv, self.head = nn.Embedding(9, 6), nn.Linear(6, 18), nn.Linear(6, 3)

    def forward(self, ids: Tensor, where: Tensor) -> Tensor:
        if self.how == "bounds":
            lengths = where.diff()
        elif self.how == "starts":
            lengths = torch.cat([where, where.new_tensor([len(ids)])]).diff()
        else:
            lengths = where
        q, k, v = self.qkv(self.words(ids)).chunk(3, 1)
        of_each = [t.split(lengths.tolist()) for t in (q, k, v)]
        mixed = [(a @ b.T).softmax(1) @ c for a, b, c in zip(*of_each, strict=True)]
        out: Tensor = self.head(torch.stack([m.mean(0) for m in mixed]))
        return out


def sentences(how: str, sizes: list[int]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor(sizes)
    ends = lengths.cumsum(0)
    where = {"lengths": lengths, "starts": ends - lengths, "bounds": F.pad(ends, (1, 0))}[how]
    return torch.randint(9, (int(lengths.sum()),)), where


def recorded(opt: DDPNOpt, loss: Tensor) -> Recording:
    opt.zero_grad()
    loss.backward()
    with torch.no_grad():
        recording, _ = one_recording(opt)
    assert recording is not None
    return recording


def check(model: nn.Module, *batches: tuple[Any, ...]) -> DDPNOpt:
    """In one batch after the other the gradient of each sample at each parameter is that of autograd."""
    y = torch.arange(B) % 3
    parameters = dict(model.named_parameters())
    losses = [F.cross_entropy(model(*inputs), y, reduction="none") / B for inputs in batches]
    wanted = [
        [torch.autograd.grad(loss, list(parameters.values()), retain_graph=True) for loss in each] for each in losses
    ]
    opt = DDPNOpt(model)
    for inputs, of_batch in zip(batches, wanted, strict=True):
        recording = recorded(opt, F.cross_entropy(model(*inputs), y))
        for i, expected in enumerate(of_batch):
            found = {p: torch.zeros_like(p) for p in parameters.values()}
            for record in recording.layers:
                assert record.p_h is not None
                parts = record.layer.grad(record.x[i : i + 1], record.p_h[i : i + 1])
                for p, part in zip(record.parameters, parts, strict=True):
                    found[p] += part
            for (name, p), g in zip(parameters.items(), expected, strict=True):
                torch.testing.assert_close(found[p], g, **tight, msg=lambda m, name=name: f"{name}: {m}")
    return opt


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize(
    "options", [{}, {"edges": True}, {"norm": True}, {"bare": True}], ids=["plain", "edges", "norm", "bare"]
)
def test_the_gradient_of_each_graph_is_that_of_autograd(options: dict[str, Any], shuffled: bool) -> None:
    check(Network(**options), *[graphs(sizes, shuffled=shuffled).inputs() for sizes in (None, None, [2, 7, 1, 1, 4])])


@pytest.mark.parametrize("sizes", [[2, 2, 2, 2, 2], [1, 4, 2, 2, 1], [1, 1, 1, 1, 1]])
def test_nodes_of_which_there_are_as_many_as_graphs_or_a_multiple_are_not_mistaken_for_samples(
    sizes: list[int],
) -> None:
    check(Network(), graphs().inputs(), graphs(sizes, shuffled=True).inputs())
    if sum(sizes) > B:
        check(Network(), graphs(sizes, shuffled=True).inputs())


def test_graphs_in_an_object_have_feedback() -> None:
    check(OfObject(), (graphs(),), (graphs([1, 2, 6, 1, 3]),))


def test_where_no_input_tells_the_samples_each_batch_is_asked() -> None:
    batches = [graphs(sizes, shuffled=True) for sizes in (None, [1, 2, 6, 1, 3])]
    for data in batches:
        data.graph += 7
    check(Numbered(edges=True), *[data.inputs() for data in batches])


@pytest.mark.parametrize("how", ["lengths", "starts", "bounds"])
def test_the_gradient_of_each_sentence_is_that_of_autograd(how: str) -> None:
    check(Tokens(how), sentences(how, [3, 6, 1, 4, 2]), sentences(how, [2, 1, 1, 5, 3]))


@pytest.mark.parametrize("seed", range(8))
def test_graphs_of_random_sizes_have_the_gradients_of_autograd(seed: int) -> None:
    torch.manual_seed(seed)
    data = graphs(torch.randint(1, 9, (B,)).tolist(), shuffled=bool(seed % 2))
    check(Network(edges=bool(seed % 3)), data.inputs())


def test_where_an_input_tells_the_samples_only_the_first_batch_needs_a_further_pass() -> None:
    model = Network()
    opt = DDPNOpt(model)
    asked = []
    with_graph = opt._capture.with_graph
    opt._capture.with_graph = lambda *args: (asked.append(1), with_graph(*args))  # type: ignore[method-assign]
    for sizes in ([3, 1, 5, 2, 4], [2, 2, 7, 1, 1], [4, 4, 1]):
        data = graphs(sizes)
        opt.zero_grad()
        F.cross_entropy(model(*data.inputs()), torch.arange(len(sizes)) % 3).backward()
        opt.step()
    assert len(asked) == 1
    assert opt.report.open_loop == []


class Padded(nn.Module):
    """The same network on graphs of equal size, with empty nodes."""

    def __init__(self, net: Network) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, links: Tensor, real: Tensor) -> Tensor:
        net = self.net
        h = torch.tanh(net.a(x)) * real
        h = torch.tanh(net.b(h + links @ torch.tanh(h))) * real
        out: Tensor = net.head(h.sum(1))
        return out


@pytest.mark.parametrize("options", [{}, {"lr": 0.3}, {"closed_loop": True}], ids=["automatic", "lr", "closed loop"])
def test_the_steps_are_those_of_padded_graphs(options: dict[str, Any]) -> None:
    ragged = Network()
    padded = Padded(Network())
    padded.net.load_state_dict(ragged.state_dict())
    opts = DDPNOpt(ragged, **options), DDPNOpt(padded, **options)
    for k in range(4):
        torch.manual_seed(k)
        data = graphs(shuffled=True)
        rows, y = Rows(data.graph, B), torch.randint(3, (B,))
        dense = torch.zeros(B, rows.places, rows.places)
        source, target = data.links
        dense[data.graph[target], rows.place[target], rows.place[source]] = 1.0
        real = rows.fold(torch.ones(len(data.x), 1))
        for opt in opts:
            opt.zero_grad()
        F.cross_entropy(ragged(*data.inputs()), y).backward()
        F.cross_entropy(padded(rows.fold(data.x), dense, real), y).backward()
        for opt in opts:
            opt.step()
    for p, q in zip(ragged.parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


def test_micro_batches_of_graphs_are_one_batch() -> None:
    model = Network(bare=True)
    sizes = [3, 1, 5, 2, 4]
    data = graphs(sizes)
    y = torch.arange(B) % 3
    whole = recorded(DDPNOpt(model), F.cross_entropy(model(*data.inputs()), y))
    opt = DDPNOpt(model)
    for first, last in ((0, 2), (2, 5)):
        some = (data.graph >= first) & (data.graph < last)
        begin = int(some.int().argmax())
        links = data.links[:, some[data.links[0]]] - begin
        out = model(data.x[some], links, data.graph[some] - first)
        F.cross_entropy(out, y[first:last], reduction="sum").div(B).backward()
    with torch.no_grad():
        joined, _ = one_recording(opt)
    assert joined is not None
    for one, other in zip(whole.layers, joined.layers, strict=True):
        assert one.p_h is not None
        assert other.p_h is not None
        for i in range(B):
            a = one.layer.grad(one.x[i : i + 1], one.p_h[i : i + 1])
            b = other.layer.grad(other.x[i : i + 1], other.p_h[i : i + 1])
            torch.testing.assert_close(a, b, **tight)


def test_nodes_that_several_graphs_read_are_left_as_they_are() -> None:
    data = graphs()
    data.links = torch.randint(len(data.x), (2, 40))
    model = Network()
    opt = DDPNOpt(model)
    recorded(opt, F.cross_entropy(model(*data.inputs()), torch.arange(B) % 3))
    assert not opt._capture.arrangement._ragged._known


class Chosen(Network):
    """A layer reads the nodes that it likes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.more = nn.Linear(5, 1), nn.Linear(5, 5)

    def forward(self, x: Tensor, links: Tensor, graph: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        score = self.score(h).sigmoid()
        liked = (score[:, 0] > score.median()).nonzero()[:, 0]
        h = h.index_add(0, liked, torch.tanh(self.more(h[liked])) * score[liked])
        out: Tensor = self.head(pooled(h, graph, int(graph.max()) + 1))
        return out


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")
def test_a_layer_that_may_read_other_rows_after_a_step_is_left_and_the_others_take_part() -> None:
    model = Chosen()
    opt = DDPNOpt(model)
    losses = []
    for _ in range(20):
        torch.manual_seed(0)
        data = graphs([3, 1, 5, 2, 6])
        loss = F.cross_entropy(model(*data.inputs()), torch.arange(B) % 3)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        assert opt.report.open_loop == ["more.weight", "more.bias"]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("batch", [1, 2, 16, 17, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_tell_the_sample_of_each_row_and_rows_folded_are_all_there(batch: int, dtype: torch.dtype) -> None:
    sample = torch.randint(batch, (4 * batch,))
    g = torch.randn(len(sample), 3, dtype=dtype)
    g[1] = 0
    found = samples_of([g * s.to(dtype)[sample, None] for s in factors(batch)], batch)
    assert found is not None
    assert found[1] == -1
    assert filled(found)[1] == sample[0]
    found[1] = sample[1]
    assert torch.equal(found, sample)
    rows = Rows(sample, batch)
    folded = rows.fold(g)
    torch.testing.assert_close(folded.sum(1), rows.sums(g))
    assert torch.equal(folded[sample, rows.place], g)
    assert int((folded != 0).any(2).sum()) == len(sample) - 1
    for other in (g[:-1], torch.cat([g, g])):  # of a replay in which the model has chosen other rows
        assert rows.fold(other).shape == folded.shape


def test_a_row_that_two_samples_read_has_no_sample() -> None:
    g = torch.randn(6, 3)
    other = torch.randn(6, 3)
    sample = torch.arange(6) % 3
    assert samples_of([g * s[sample, None] + other * s[0] for s in factors(3)], 3) is None


def test_a_last_batch_of_one_sample_with_one_number_has_feedback() -> None:
    model = Network()
    model.head = nn.Linear(5, 1)
    opt = DDPNOpt(model)
    for sizes in ([3, 1, 5], [1, 2], [3]):
        opt.zero_grad()
        model(*graphs(sizes).inputs()).square().mean().backward()
        opt.step()
        assert not opt.report.open_loop
