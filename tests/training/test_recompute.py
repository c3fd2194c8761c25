"""Blocks that are computed once more: whatever they are called with."""

import copy
import gc
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.devices import NO_BACKWARD, RandomState
from overspill.graph import Replaying, Version, is_replaying, recorder
from overspill.homes import DiskTensor
from overspill.managed import managed
from overspill.slab import Slab
from overspill.training import recompute
from overspill.training.buffers import BlockBuffers
from overspill.training.inputs import EditedInputs
from overspill.training.recompute import Effects, Frame
from training.loops import Net, activations_of, batches, loss_of

Pair = namedtuple("Pair", ["first", "second"])


class Mixing(nn.Module):
    """A block that finds tensors in arguments of any form."""

    def __init__(self, find: Callable[[Any], list[torch.Tensor]]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.find = find

    def forward(self, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        for tensor in self.find([*more, named]):
            x = x + tensor.sin()
        return torch.tanh(self.linear(x))


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors_in(each)]
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, tuple | list) else []


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "nothing": lambda a, b: ((), {}),
    "tuple": lambda a, b: ((), {"pair": (a, b)}),
    "nested": lambda a, b: (([a, {"b": (b, None, 3)}], None, True), {"c": 1.5, "d": "text", "e": [a]}),
    "namedtuple": lambda a, b: ((Pair(a, b), 2), {"pair": Pair(b, (a,))}),
    "ordered": lambda a, b: ((OrderedDict(z=a, y=b),), {"last": OrderedDict(x=[b], w=())}),
    "the same twice": lambda a, b: ((a, a), {"a": a}),
    "no container of ours": lambda a, b: ((slice(1, 2), {1, 2}, object()), {"b": b}),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("form", list(FORMS))
def test_a_block_may_be_called_with_anything(device: str, form: str, recompute: bool) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2))
    args, kwargs = FORMS[form](a, b)
    seen: list[str] = []

    def find(value: Any) -> list[torch.Tensor]:
        seen.append(repr([type(each) for each in value]))
        return tensors_in(value)

    model = nn.Sequential(Mixing(find), Mixing(find)).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    inputs = [x, a, b, *model.parameters()]

    def gradients() -> tuple[torch.Tensor | None, ...]:
        y = model[1](model[0](x, *args, **kwargs), *args, **kwargs)
        return torch.autograd.grad(y.square().sum(), inputs, allow_unused=True)

    expected = gradients()
    calls = len(seen)
    overspill.offload_training(model, layers=["0", "1"], recompute=recompute)
    found = gradients()
    assert activations_of(model).nbytes_sent > 0
    assert len(seen) == calls + (4 if recompute else 2)
    assert len(set(seen)) == 1, "each call was given the same kinds of arguments"
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or torch.equal(mine, theirs)


def test_what_blocks_have_put_into_an_argument_goes_with_it(device: str) -> None:
    class Collection:
        def __init__(self) -> None:
            self.results: list[torch.Tensor] = []

    class Telling(Mixing):
        def forward(self, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
            result = super().forward(x)
            more[0].results.append(result)
            return result.exp()

    model = nn.Sequential(Telling(tensors_in), Telling(tensors_in)).to(device)
    overspill.offload_training(model, layers=["0", "1"], recompute=True, weights=True)
    collection = Collection()
    model[1](model[0](torch.randn(4, 8, device=device), collection), collection).sum().backward()
    assert len(collection.results) == 4, "a replay has put them there, too"
    references = [weakref.ref(each) for each in (collection, *collection.results)]
    gc.disable()
    try:
        del collection
        assert not any(reference() for reference in references)
    finally:
        gc.enable()


@pytest.mark.parametrize("retain", [False, True])
def test_what_blocks_leave_behind_holds_neither_weights_nor_what_was_saved(
    device: str, retain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = self.down(self.up(x).exp())
            self.left = result.square().sum()
            return torch.tanh(result)

    model = nn.Sequential(*(Leaving() for _ in range(6))).to(device)
    twin = copy.deepcopy(model)
    overspill.offload_training(model, recompute=True, weights=True)
    x = torch.randn(4, 8, device=device)

    def loss_of_all(net: Any) -> torch.Tensor:
        loss: torch.Tensor = net(x).sum() + sum(block.left for block in net)
        return loss

    for _ in range(3):
        losses = [loss_of_all(each) for each in (model, twin)]
        for loss in losses:
            loss.backward(retain_graph=retain)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad.to(device), theirs.grad)
    assert [record.message for record in caplog.records] == []
    assert all(block.left.grad_fn is not None for block in list(model)[:-1]), "a replay has left it there"
    del loss, losses, twin, model[-1]
    gc.collect()
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    assert not any(tensor.shape == (4, 24) for tensor in tensors)


def test_random_numbers_are_drawn_again_and_then_go_on(device: str) -> None:
    here = torch.device(device)

    def draw() -> list[torch.Tensor]:
        return [torch.rand(5), torch.rand(5, device=here)]

    def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, first, second))

    torch.manual_seed(2**63 + 11)
    draw()
    state = RandomState(here)
    assert not state.has_passed()
    first, second = draw(), draw()
    assert state.has_passed()
    with state.again():
        assert same(draw(), first)
        assert same(draw(), second)
        draw()
    third = draw()
    with state.again():
        assert [draw(), draw()][1][0].equal(second[0])
        assert same(draw(), third), "what was drawn within did not count"


# Edits of what was saved.


class Leaving(nn.Module):
    """A block that leaves something behind which it has saved."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(8, 8), way
        self.left: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        saved = y.sigmoid()
        if self.way == "its output":
            self.left = saved
        elif self.way == "a view of it":
            self.left = saved = saved.flatten()
        elif self.way == "what it is a view of":
            self.left, saved = y, y.t().sin()
        elif self.way == "edited in the call":
            result = saved.flatten().sum()
            saved.detach().add_(1)
            return result
        return saved


@pytest.mark.parametrize("way", ["its output", "a view of it", "what it is a view of", "edited in the call"])
def test_an_edit_of_what_was_saved_is_found_out(device: str, way: str) -> None:
    def train(model: nn.Sequential) -> None:
        output = model(torch.ones(4, 8, device=device))
        left = model[0].left
        if left is not None:
            left.detach().add_(1)
        output.sum().backward()

    for offloads in (False, True):
        model = nn.Sequential(Leaving(way), nn.Identity()).to(device)
        if offloads:
            overspill.offload_training(model, layers=["0"], recompute=True, weights=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            train(model)


def test_what_does_not_outlive_its_call_is_not_watched(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, saved = list[Version](), list[int]()

    class Counted(Version):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            watched.append(self)

    end = Frame.end

    def counting(frame: Frame, **how: bool) -> None:
        saved.append(len(frame._places))
        end(frame, **how)

    monkeypatch.setattr(Frame, "end", counting)
    model = Net().to(device)
    overspill.offload_training(model, recompute=True, activations=False, weights=True)
    monkeypatch.setattr(recompute, "Version", Counted)
    loss_of(model, next(batches(1, device))).backward()
    assert len(saved) == 5
    assert 0 < len(watched) < sum(saved) / 3


class SavesItsInputOften(nn.Module):
    """A block whose operations save one tensor, and views of it, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x.sin() + x.cos() + x.t().exp().t() + x.view(-1).tanh().view(4, 8))
        return y


def test_what_is_saved_often_is_watched_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, watched = nn.Sequential(SavesItsInputOften(), nn.Identity()).to(device), list[torch.Tensor]()

    class Counted(Version):
        def __init__(self, tensor: torch.Tensor, *args: Any) -> None:
            super().__init__(tensor, *args)
            watched.append(tensor)

    overspill.offload_training(model, layers=["0"], recompute=True, activations=False, weights=True)
    monkeypatch.setattr(recompute, "Version", Counted)
    for edited in (False, True):
        x = torch.randn(4, 8, device=device)
        x.requires_grad_()
        loss = model(x).sum()
        assert sum(tensor is x for tensor in watched) == 1
        if edited:
            x.detach().add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
        watched.clear()


def test_a_place_that_is_filled_anew_meanwhile_is_no_edit(device: str) -> None:
    here = torch.device(device)
    first, other = torch.ones(2, device=here), torch.ones(2, device=here)
    other.add_(1)  # another backward's, of another version

    class FillsAnew:
        def __call__(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: tensor

        def bring_next(self) -> None:
            place.filled = other, other._version

    frame = Frame("block", nn.Identity(), (), {}, here, FillsAnew(), Effects(BlockBuffers(), EditedInputs()))
    place = frame._pack(first)
    frame.end()
    frame._half = 1
    place.filled, frame._filled_for = (first, first._version), NO_BACKWARD
    frame._replayed_on = frame._stream()
    assert frame._unpack(place) is first


class Forces(nn.Module):
    """A block that computes a gradient within itself, as networks for molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(torch.tanh(self.linear(here)).square().sum(), here)
        return x + self.linear(x).sin() * force


@pytest.mark.parametrize("weights", [False, True])
def test_a_block_may_compute_gradients_within_itself(device: str, weights: bool) -> None:
    model = nn.Sequential(Forces(), Forces(), nn.Linear(8, 8)).to(device)
    x = torch.randn(4, 8, device=device)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [weight.grad.to(device) for weight in model.parameters()]  # type: ignore[union-attr]

    expected = gradients()
    overspill.offload_training(model, layers=["0", "1"], recompute=True, weights=weights)
    assert all(map(torch.equal, gradients(), expected))


def test_an_edit_of_a_weight_on_disk_is_found_out(device: str) -> None:
    model = Net().to(device)
    for weight in model.blocks.parameters():
        weight.requires_grad_(False)
    overspill.offload_training(model, recompute=True, activations=False, weights="disk")
    weight = model.blocks[2].out.weight
    assert isinstance(weight, DiskTensor)
    loss = loss_of(model, next(batches(1, device)))
    weight.data = torch.zeros(weight.shape)
    with pytest.raises(RuntimeError, match=r"a weight of blocks\.2.* was edited"):
        loss.backward()


# Streamed weights are saved as all else is.


def test_weights_of_a_blocks_parts_are_fetched_one_after_the_other(device: str) -> None:
    model, taken = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)).to(device), []

    def ask(*_: Any) -> None:
        records = recorder()
        assert records is not None
        taken.append([records.takes_weights(module, []) for module in (model[0], model[0][1], model)])

    model[0][1].register_forward_pre_hook(ask)
    overspill.offload_training(model, layers=["0"], recompute=True)
    model(torch.ones(2, 8, device=device)).sum().backward()
    assert taken == [[True, False, False]] * 2, "in the forward, and in the replay"


@pytest.mark.parametrize("retained", [False, True])
def test_the_weights_of_replayed_blocks_stay_in_the_window(
    device: str, retained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def gradients(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loss = loss_of(model, next(batches(1, device)))
        for _ in range(2 if retained else 1):
            loss.backward(retain_graph=retained)
        return [each.grad.to(device, copy=True) for each in model.parameters() if each.grad is not None]

    models = [Net(8, dropout=0.0).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    overspill.offload_training(models[1], recompute=True, activations=False, weights=True)
    manager = managed(models[1])
    assert manager is not None
    plain, ours = (gradients(model) for model in models)
    assert all(map(torch.equal, ours, plain))
    assert manager.counts.moved["cpu"] > sum(each.nbytes for each in models[1].blocks.parameters())
    assert not [record for record in caplog.records if "outside" in record.getMessage()]


def test_what_was_replayed_on_another_stream_is_waited_for_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, lent = list[object](), set[int]()
    numbers = {"replay": 1, "backward": 1}

    def number() -> int:
        return numbers["replay" if is_replaying() else "backward"]

    monkeypatch.setattr(recompute, "stream_numbers", lambda device: number)
    monkeypatch.setattr(recompute, "current_stream_waits", lambda device, event: waits.append(event))
    monkeypatch.setattr(Slab, "lend_on", lambda slab, number: lent.add(number))
    monkeypatch.setattr(Frame, "_replay", _within(Replaying, Frame._replay))
    model = Net().to(device)
    overspill.offload_training(model, recompute=True, activations=False, weights=True)
    batch = next(batches(1, device))
    loss_of(model, batch).backward()
    assert not waits
    numbers["backward"] = 2
    lent.clear()
    loss_of(model, batch).backward()
    assert waits
    assert 2 in lent, "whoever has the slab next must wait for that stream as well"


def _within(context: Callable[[], Any], call: Callable[[Any], None]) -> Callable[[Any], None]:
    def calls(frame: Any) -> None:
        with context():
            call(frame)

    return calls


class TwoStreams(nn.Module):
    """A block that computes half of what it does on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(256, 256), nn.Linear(256, 256)
        self.stream = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        x.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(2_000_000)
            y = self.there(x).tanh()
        z = self.here(x).sigmoid()
        current.wait_stream(self.stream)
        y.record_stream(current)
        return x + y * z


@pytest.mark.gpu
def test_blocks_may_compute_on_several_streams() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(TwoStreams() for _ in range(8))).cuda()
    ours = nn.Sequential(*(TwoStreams() for _ in range(8))).cuda()
    ours.load_state_dict(plain.state_dict())
    overspill.offload_training(ours, recompute=True, activations=False, weights=True)
    for _ in range(4):
        x = torch.randn(64, 256, device="cuda")
        for model in (plain, ours):
            model.zero_grad()
            model(x).square().mean().backward()
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.equal(mine.grad.cuda(), theirs.grad)
