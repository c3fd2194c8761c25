"""What a recomputed block does beside its result, to its buffers and its inputs, is done once."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

import overspill
from overspill.errors import StateError
from overspill.homes import HostTensor
from overspill.stand_ins import StandIns, take_back
from overspill.training import buffers
from overspill.training.inputs import Input
from support import aligned
from training.random_nets import Counting, Normalised, Reassigning, Spectral

WIDTH = 16
WEIGHTS: list[bool | str] = [False, True, "disk"]


class Codebook(nn.Module):
    """A large buffer that is written in the calls that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(WIDTH, WIDTH), True
        self.register_buffer("codes", torch.ones(2048, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x * self.codes.mean(0))
        if self.writes:
            self.codes.mul_(0.5).add_(x.detach().mean())
        return x + y


class Statistics(nn.Module):
    """Saves its buffer for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * self.scale


class Inplace(nn.Module):
    """Edits its input before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.edits = nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        x = functional.leaky_relu(x, 0.5, inplace=self.edits)
        y = x + self.linear(x)
        return y if other is None else y + torch.tanh(self.linear(other))


def both(
    kind: Callable[[], nn.Module], device: str, weights: bool | str, dtype: torch.dtype = torch.float32
) -> tuple[nn.Sequential, nn.Sequential]:
    """A model of such blocks, and the same with the first ones recomputed."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(kind() for _ in range(3)), nn.Linear(WIDTH, WIDTH))
    aligned(plain.to(device, dtype))
    ours = copy.deepcopy(plain)
    aligned(ours)
    overspill.offload_training(ours, layers=["1", "2", "3"], recompute=True, weights=weights)
    return plain, ours


def inputs(device: str) -> torch.Tensor:
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


def assert_equal(ours: nn.Module, plain: nn.Module) -> None:
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad.cpu(), theirs.grad.cpu()), name
    state, expected = ours.state_dict(), plain.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name].cpu(), value.cpu()), name


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", [Normalised, Counting, Reassigning, Spectral, Codebook])
def test_a_block_writes_its_buffers_once(kind: type[nn.Module], weights: bool | str, device: str) -> None:
    plain, ours = both(kind, device, weights)
    for step in range(4):
        for model in (plain, ours):
            model.train(step != 2)
            model.zero_grad()
            loss = model(inputs(device)).square().mean()
            loss.backward(retain_graph=True)
            if step % 2:
                loss.backward()
        assert_equal(ours, plain)
    before = copy.deepcopy(plain.state_dict())
    overspill.restore(ours)
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("weights", WEIGHTS)
def test_two_forwards_each_have_the_buffers_of_their_own_time(weights: bool | str, device: str) -> None:
    plain, ours = both(Counting, device, weights)
    for model in (plain, ours):
        first, second = (model(x).square().mean() for x in (inputs(device), inputs(device) * 2))
        second.backward()
        first.backward()
    assert_equal(ours, plain)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_buffer_that_was_edited_since_is_what_it_was(weights: bool | str, device: str) -> None:
    plain, ours = both(Counting, device, weights)
    for model in (plain, ours):
        loss = model(inputs(device)).square().mean()
        for block in list(model)[1:-1]:
            with torch.no_grad():
                block.mean.add_(1)
        loss.backward()
    assert_equal(ours, plain)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_edit_of_a_buffer_that_was_saved_raises_as_in_eager(weights: bool | str, device: str) -> None:
    for model in both(Statistics, device, weights):
        loss = model(inputs(device)).square().mean()
        with torch.no_grad():
            model[2].scale.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_whoever_looks_at_a_model_between_forward_and_backward_edits_nothing(
    weights: bool | str, frozen: bool, device: str
) -> None:
    plain, ours = both(Statistics, device, weights)
    for model in (plain, ours):
        for parameter in model[1:-1].parameters():
            parameter.requires_grad_(not frozen)
        loss = model(inputs(device)).square().mean()
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.detach().float().norm().item()
            tensor.is_inference()  # which counts as a use, since nobody knows what a call does
        model.state_dict()
        loss.backward()
    assert_equal(ours, plain)


class Odd(nn.Module):
    """Buffers and inputs of kinds that nobody can copy for sure."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("graph", torch.eye(WIDTH).to_sparse() * 2, persistent=False)

    def forward(self, x: torch.Tensor, also: torch.Tensor) -> torch.Tensor:
        return x + torch.sparse.mm(self.graph, self.linear(x).flatten(0, 1).t()).t().view_as(x) + also.to_dense().sum()


def test_a_sparse_buffer_and_a_sparse_input() -> None:
    plain, ours = (nn.ModuleList(Odd() for _ in range(2)) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    overspill.offload_training(ours, layers=["0", "1"], recompute=True)
    for blocks in (plain, ours):
        x = inputs("cpu")
        for block in blocks:
            x = block(x, torch.eye(2).to_sparse())
        x.square().mean().backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_large_buffer_is_copied_only_where_it_is_written(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    of = buffers._Entry.of

    def noted(*args: Any) -> Any:
        entry = of(*args)
        if entry.copy is not None:
            copied.append(entry.name)
        return entry

    monkeypatch.setattr(buffers._Entry, "of", noted)
    _, ours = both(Codebook, device, weights=True)
    ours[1].writes = False
    for calls, expected in enumerate((3, 2, 2)):
        copied.clear()
        ours(inputs(device)).square().mean().backward()
        assert len(copied) == expected, calls


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_large_buffer_that_is_written_late_is_told_and_then_kept(weights: bool | str, device: str) -> None:
    plain, ours = both(Codebook, device, weights)
    for model in (plain, ours):
        model[2].writes = False
        model(inputs(device)).square().mean().backward()
        model[2].writes = True
        loss = model(inputs(device)).square().mean()
        if model is ours:
            with pytest.raises(StateError, match=r"Codebook\.codes, a buffer of 2, was written .* run the step again"):
                loss.backward()
        model.zero_grad()
        model(inputs(device)).square().mean().backward()
    assert_equal(ours, plain)


def test_a_lasting_call_elsewhere_leaves_no_weight_of_its_own_behind() -> None:
    home, shown, other = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    table: dict[str, Any] = {"seen": shown, "gone": home}
    with StandIns([(table, "seen", other)]):
        assert table["seen"] is other
        take_back(table, "seen", shown, home)  # the other thread's call has ended
        take_back(table, "gone", shown, home)
        assert table["seen"] is other
    assert table == {"seen": home, "gone": home}


def test_two_threads_that_replay_one_block_wait_for_each_other() -> None:
    table: dict[str, Any] = {"seen": 0}
    wrong: list[object] = []

    def replay(number: int) -> None:
        for _ in range(200):
            with StandIns([(table, "seen", number)]):
                if table["seen"] != number:
                    wrong.append(table["seen"])

    threads = [threading.Thread(target=replay, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert table == {"seen": 0}


# Tensors that are others for one call, or from then on.


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", [Counting, Codebook])
def test_weights_and_buffers_that_are_given_for_one_call(
    kind: type[nn.Module], weights: bool | str, device: str
) -> None:
    found = []
    for model in both(kind, device, weights):
        if kind is Codebook:
            for block in list(model)[1:-1]:
                block.writes = False
        model(inputs(device)).square().mean().backward()
        given = {name: (p.detach().to(device) * 1.5).requires_grad_() for name, p in model.named_parameters()}
        buffers_too = {name: b.detach().to(device) + 1 for name, b in model.named_buffers()}
        functional_call(model, {**given, **buffers_too}, (inputs(device),)).square().mean().backward()
        found.append([p.grad.cpu() for p in given.values()])
        assert all(p is not given[name] for name, p in model.named_parameters())
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_step_within_a_step(weights: bool | str, device: str) -> None:
    found = []
    for model in both(Counting, device, weights, torch.float64):
        named = dict(model.named_parameters())
        loss = model(inputs(device).double()).square().mean()
        gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        stepped = {
            name: p.to(device) - 0.5 * g.to(device) for (name, p), g in zip(named.items(), gradients, strict=True)
        }
        functional_call(model, stepped, (inputs(device).double() * 2,)).square().mean().backward()
        found.append([p.grad.cpu() for p in named.values()])
    for mine, theirs in zip(*found, strict=True):
        # On a GPU autograd adds up what reaches a weight at home from two threads, as it comes: docs/train.md.
        assert torch.equal(mine, theirs) if device == "cpu" else torch.allclose(mine, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_weight_that_was_replaced_since_has_its_gradient(weights: bool | str, device: str) -> None:
    found = []
    for model in both(Counting, device, weights):
        loss = model(inputs(device)).square().mean()
        before = model[1].linear.weight
        model[1].linear.weight = after = nn.Parameter(torch.zeros(WIDTH, WIDTH, device=device))
        loss.backward()
        assert model[1].linear.weight is after
        assert after.grad is None
        found.append([before.grad.cpu(), model[2].linear.weight.grad.cpu(), model[0].weight.grad.cpu()])
    assert all(map(torch.equal, *found))


def test_a_weight_that_is_gone_since_is_told(device: str) -> None:
    _, ours = both(Counting, device, weights=True)
    loss = ours(inputs(device)).square().mean()
    ours[1].linear.bias = None
    with pytest.raises(StateError, match="saved other tensors when it was recomputed"):
        loss.backward()


# Inputs.


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_a_block_may_edit_its_input(weights: bool, activations: bool, device: str) -> None:
    plain, ours = both(Inplace, device, weights or not activations)
    if not activations:
        overspill.restore(ours)
        overspill.offload_training(ours, layers=["1", "2", "3"], recompute=True, weights=True, activations=False)
    for step in range(3):
        for model in (plain, ours):
            loss = model(inputs(device)).square().mean()
            loss.backward(retain_graph=step == 1)
            if step == 1:
                loss.backward()
        assert_equal(ours, plain)


def test_inputs_are_copied_only_where_they_are_edited(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Input] = []
    keep = Input.keep_as_it_is

    def noted(self: Input) -> None:
        kept.append(self)
        keep(self)

    monkeypatch.setattr(Input, "keep_as_it_is", noted)
    _, ours = both(Inplace, device, weights=True)
    for block in list(ours)[1:-1]:
        block.edits = False
    for expected in (1, 0):  # of three blocks of one kind the first
        kept.clear()
        ours(inputs(device)).square().mean().backward()
        assert len(kept) == expected


class _OnPurposeError(Exception):
    """Raised by a test."""


def _fail(module: nn.Module, args: Any) -> None:
    raise _OnPurposeError


@pytest.mark.parametrize("kind", [Inplace, Codebook])
def test_a_first_call_that_fails_teaches_nothing(kind: type[nn.Module], device: str) -> None:
    plain, ours = both(kind, device, weights=True)
    for model in (plain, ours):
        for block in list(model)[1:-1]:
            failing = block.register_forward_pre_hook(_fail)
            with pytest.raises(_OnPurposeError):
                model(inputs(device))
            failing.remove()
        model(inputs(device)).square().mean().backward()
    assert_equal(ours, plain)


def test_an_input_that_is_edited_late_is_told_and_then_kept(device: str) -> None:
    plain, ours = both(Inplace, device, weights=True)
    for model in (plain, ours):
        for block in list(model)[1:-1]:
            block.edits = False
        model(inputs(device)).square().mean().backward()
        for block in list(model)[1:-1]:
            block.edits = True
        loss = model(inputs(device)).square().mean()
        if model is ours:
            with pytest.raises(StateError, match=r"has edited an input, of shape \[2, 6, 16\].* run the step again"):
                loss.backward()
        model.zero_grad()
        model(inputs(device)).square().mean().backward()
    assert_equal(ours, plain)


def test_an_input_that_is_edited_beside_another_name_for_it_is_told(device: str) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.block = nn.Linear(WIDTH, WIDTH), Inplace()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.before(x)
            output: torch.Tensor = self.block(y, y.view(12, WIDTH).unflatten(0, (2, 6)))
            return output

    model = Both().to(device)
    overspill.offload_training(model, layers=["block"], recompute=True)
    loss = model(inputs(device)).square().mean()
    with pytest.raises(StateError, match="another input has the same memory"):
        loss.backward()


def test_homes_are_not_used_by_looking_for_what_was_written(device: str) -> None:
    _, ours = both(Counting, device, weights=True)
    ours.eval()
    ours(inputs(device)).square().mean().backward()
    home = ours[1].mean
    assert isinstance(home, HostTensor)
    uses = home._overspill_slot.uses
    ours(inputs(device)).square().mean().backward()
    assert home._overspill_slot.uses == uses
