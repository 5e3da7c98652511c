"""The batch is found where not all layers have it in dimension 0; the step is that of the usual arrangement."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt, OpenLoopWarning, OptionError
from ddpnopt._collect import one_recording


class Attention(nn.Module):
    """Attention over time, in any arrangement."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.first = first
        self.norm, self.qkv, self.mix, self.out = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 6), or (T, B, 6)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        a, b = ("tbd", "sbd") if self.first == "time" else ("btd", "bsd")
        weight = torch.einsum(f"{a},{b}->bts", q, k).softmax(-1)
        h = x + self.mix(torch.einsum(f"bts,{b}->{a}", weight, v))
        if self.first == "tokens":  # flattened for the last layer
            return self.out(h.flatten(0, 1)).unflatten(0, h.shape[:2])
        return self.out(h)


def twins(first: str) -> tuple[Attention, Attention]:
    plain = Attention("batch")
    other = copy.deepcopy(plain)
    other.first = first
    return plain, other


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


def train(model: nn.Module, opt: DDPNOpt, *, transposed: bool, T: int) -> None:
    torch.manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(8, T, 6), torch.randint(3, (8, T))
        opt.zero_grad()
        z = model(x.transpose(0, 1)).transpose(0, 1) if transposed else model(x)
        F.cross_entropy(z.flatten(0, 1), y.flatten()).backward()
        opt.step()


@pytest.mark.parametrize("T", [5, 8], ids=["5 steps", "as many steps as samples"])
@pytest.mark.parametrize("batch_dim", [None, 1])
def test_a_sequence_first_model_takes_the_steps_of_the_batch_first_one(batch_dim: int | None, T: int) -> None:
    plain, other = twins("time")
    train(plain, DDPNOpt(plain), transposed=False, T=T)
    opt = DDPNOpt(other, batch_dim=batch_dim)
    train(other, opt, transposed=True, T=T)
    assert opt.report.open_loop == []
    assert_same(plain, other)


class Shifted(Attention):
    """Bare parameters before the attention: a shift, a table of places and a token, the class of the sequence."""

    def __init__(self, first: str) -> None:
        super().__init__(first)
        self.shift, self.table = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(9, 1, 6))
        self.token = nn.Parameter(torch.randn(1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        time = int(self.first != "time")
        table = self.table[: x.shape[time]] if self.first == "time" else self.table[: x.shape[time]].transpose(0, 1)
        sizes = [1, 1, 1]
        sizes[1 - time] = x.shape[1 - time]
        h = torch.cat(
            [self.token.expand(*[-1 if n == 1 else n for n in sizes]), torch.tanh(x + self.shift) + table], time
        )
        return super().forward(h).narrow(time, 1, x.shape[time])


def test_in_a_sequence_first_model_bare_parameters_take_part() -> None:
    plain = Shifted("batch")
    other = copy.deepcopy(plain)
    other.first = "time"
    x, y = torch.randn(8, 5, 6), torch.randint(3, (8, 5))
    opt = DDPNOpt(other)
    for _ in range(2):  # the first pass tells where the samples are
        opt.zero_grad()
        F.cross_entropy(other(x.transpose(0, 1)).transpose(0, 1).flatten(0, 1), y.flatten()).backward()
        (recording,) = opt._capture.arrivals.take_all()
        found = {record.name: record.p_h for record in recording.layers}
    usual = DDPNOpt(plain)
    F.cross_entropy(plain(x).flatten(0, 1), y.flatten()).backward()
    wanted = {record.name: record.p_h for record in usual._capture.arrivals.take_all()[0].layers}
    assert set(found) == set(wanted)
    for name in ("shift", "table", "token"):
        torch.testing.assert_close(found[name], wanted[name])
    for record in recording.layers:
        record.free()
    opt._capture.retrace(recording)
    for record in recording.layers:
        torch.testing.assert_close(record.p_h, found[record.name])


def test_bare_parameters_of_a_sequence_first_model_get_feedback_without_a_warning() -> None:
    model = Shifted("time")
    opt = DDPNOpt(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OpenLoopWarning)
        train(model, opt, transposed=True, T=5)
    assert opt.report.open_loop == []


def test_with_as_many_steps_as_samples_a_bare_parameter_is_left_to_the_base_optimizer_with_its_gradient() -> None:
    model = Shifted("time")
    opt = DDPNOpt(model, average=False)
    before = model.shift.detach().clone()
    train(model, opt, transposed=True, T=8)
    assert opt.report.open_loop == ["shift", "table", "token"]
    assert model.shift.grad is not None
    assert not torch.equal(model.shift, before)


def test_flattened_tokens_are_found_in_dimension_0() -> None:
    plain, other = twins("tokens")
    train(plain, DDPNOpt(plain), transposed=False, T=5)
    train(other, DDPNOpt(other), transposed=False, T=5)
    assert_same(plain, other)


class Frames(nn.Module):
    """Convolutions on all frames, which are in dimension 0 meanwhile."""

    def __init__(self, *, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.conv, self.norm, self.out = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 2, 4, 4)
        B, T = x.shape[:2]
        x = x.transpose(0, 1) if self.interleaved else x
        h = torch.tanh(self.norm(self.conv(x.flatten(0, 1)))).flatten(1)
        h = h.view(T, B, -1).mean(0) if self.interleaved else h.view(B, T, -1).mean(1)
        out: Tensor = self.out(h)
        return out


def test_frames_in_dimension_0_are_found_in_either_order() -> None:
    blocks = Frames(interleaved=False)
    interleaved = copy.deepcopy(blocks)
    interleaved.interleaved = True
    for model in (blocks, interleaved):
        opt = DDPNOpt(model)
        torch.manual_seed(1)
        for _ in range(3):
            x, y = torch.randn(6, 5, 2, 4, 4), torch.randint(3, (6,))
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        assert opt.report.open_loop == []
    assert_same(blocks, interleaved)


class Recogniser(nn.Module):
    """Frames in the usual order, a recurrent layer over time, and outputs with the time first, as for CTC."""

    def __init__(self, kind: type[nn.RNNBase], *, time_first: bool) -> None:
        super().__init__()
        self.time_first = time_first
        self.frames = nn.Linear(6, 5)
        self.rnn = kind(5, 4, batch_first=not time_first)  # type: ignore[call-arg]
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.frames(x)
        out: Tensor = self.out(self.rnn(h.transpose(0, 1) if self.time_first else h)[0])
        return out


@pytest.mark.parametrize("T", [5, 8, 16])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_with_time_first_among_layers_with_samples_first_takes_part(
    kind: type[nn.RNNBase], T: int
) -> None:
    torch.manual_seed(0)
    plain = Recogniser(kind, time_first=False)
    other = Recogniser(kind, time_first=True)
    other.load_state_dict(plain.state_dict())
    for model in (plain, other):
        opt = DDPNOpt(model)
        torch.manual_seed(1)
        for _ in range(3):
            x, y = torch.randn(8, T, 6), torch.randint(3, (8, T))
            opt.zero_grad()
            z = model(x)
            z = z.transpose(0, 1) if model.time_first else z
            F.cross_entropy(z.flatten(0, 1), y.flatten()).backward()
            opt.step()
        assert opt.report.open_loop == []
    assert_same(plain, other)


def test_a_smaller_last_batch_has_the_same_arrangement() -> None:
    _, model = twins("time")
    opt = DDPNOpt(model)
    for B in (8, 3, 1, 8):
        opt.zero_grad()
        F.cross_entropy(model(torch.randn(5, B, 6)).flatten(0, 1), torch.randint(3, (5 * B,))).backward()
        opt.step()
    assert opt.report.open_loop == []


def test_a_layer_whose_samples_cannot_be_found_is_left_to_the_base_optimizer_by_name() -> None:
    class Pairs(nn.Module):
        """All pairs of samples: an entry belongs to two of them."""

        def __init__(self) -> None:
            super().__init__()
            self.into, self.pair = nn.Linear(5, 4), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.into(x))
            i, j = torch.triu_indices(len(x), len(x), 1)
            out: Tensor = self.pair(torch.cat([h[i], h[j]], 1))
            return out

    model = Pairs()
    opt = DDPNOpt(model)
    model(torch.randn(6, 5)).square().mean().backward()
    with pytest.warns(match=r"pair\.weight.*In pair the samples were not found.*batch_dim=1"):
        opt.step()
    assert opt.report.open_loop == ["pair.weight", "pair.bias"]


def test_another_batch_dim_is_refused() -> None:
    with pytest.raises(OptionError, match="batch_dim=2"):
        DDPNOpt(nn.Linear(2, 2), batch_dim=2)


class OwnGraph(nn.Module):
    """A graph that belongs to the model: its features are a buffer, which the first layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.features: Tensor
        self.average: Tensor
        self.register_buffer("features", torch.randn(20, 5))
        self.register_buffer("average", torch.rand(20, 20) / 20)
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, nodes: Tensor) -> Tensor:
        h = torch.relu(self.average @ self.first(self.features))
        return (self.average @ self.second(h))[nodes]


def test_a_layer_may_read_a_buffer_of_the_model() -> None:
    torch.manual_seed(0)
    model, y = OwnGraph(), torch.randint(3, (8,))
    opt = DDPNOpt(model)
    losses = []
    for _ in range(10):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.arange(8)), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_layer_that_runs_on_a_single_vector_is_left_to_the_base_optimizer_by_name() -> None:
    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.into, self.out = nn.Linear(1, 8), nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, t: float) -> Tensor:
            found: Tensor = self.out(torch.tanh(self.into(x) + self.time(x.new_tensor([t]))))
            return found

    torch.manual_seed(0)
    model = Timed()
    x, y = torch.randn(16, 4), torch.arange(16) % 3
    wanted = torch.autograd.grad(F.cross_entropy(model(x, 0.5), y), model.time.weight)[0]
    opt = DDPNOpt(model)
    F.cross_entropy(model(x, 0.5), y).backward()
    with torch.no_grad():
        one_recording(opt)
    torch.testing.assert_close(model.time.weight.grad, wanted)

    def step() -> float:
        opt.zero_grad()
        loss = F.cross_entropy(model(x, 0.5), y)
        loss.backward()
        opt.step()
        return loss.item()

    with pytest.warns(OpenLoopWarning, match=r"time\.weight, time\.bias"):
        first = step()
    assert [step() for _ in range(20)][-1] < 0.8 * first


def test_a_layer_on_samples_of_unequal_length_in_a_nested_tensor_is_left_to_the_base_optimizer() -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(torch.stack([t.mean(0) for t in torch.relu(self.each(x)).unbind()]))
            return found

    torch.manual_seed(0)
    model = Ragged()
    parts = [torch.randn(k % 4 + 2, 4) + k % 3 for k in range(12)]
    x, y = torch.nested.nested_tensor(parts, layout=torch.jagged), torch.arange(12) % 3
    opt = DDPNOpt(model)
    F.cross_entropy(model(x), y).backward()
    with pytest.warns(OpenLoopWarning, match=r"each\.weight"):
        opt.step()
    losses = []
    for _ in range(30):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert opt.report.open_loop == ["each.weight", "each.bias"]
    assert losses[-1] < 0.5 * losses[0]
