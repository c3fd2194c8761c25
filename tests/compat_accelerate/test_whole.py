"""A model comes to its device whole and goes again: parameters stay the same, edits too, whoever calls what and when.

Where the CPU computes, the models here rest on disk: in host memory they would be where they compute.
"""

import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any, Literal

import accelerate
import pytest
import torch
from torch import nn

import overspill
import overspill.compat.accelerate as compat
from overspill.compat.accelerate import cpu_offload_with_hook, init_empty_weights, remove_hook_from_submodules
from overspill.compat.accelerate.whole import UserCpuOffloadHook
from overspill.errors import StateError
from overspill.homes import DiskTensor, HostTensor
from overspill.managed import managed
from support import Net, aligned, run

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture
def model(device: str) -> Net:
    return aligned(Net()).eval()  # type: ignore[return-value]


@pytest.fixture
def twin(model: Net, device: str) -> nn.Module:
    return copy.deepcopy(model).to(device)


def hooked(model: nn.Module, device: str, previous: UserCpuOffloadHook | None = None) -> UserCpuOffloadHook:
    rests: Literal["cpu", "disk"] = "disk" if device == "cpu" else "cpu"
    return UserCpuOffloadHook(model, torch.device(device), previous, rests)


def is_away(model: nn.Module) -> bool:
    return any(isinstance(parameter, HostTensor | DiskTensor) for parameter in model.parameters())


def same(model: nn.Module, twin: nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(model(IDS.to(next(model.parameters()).device)).cpu(), run(twin, IDS))


def test_a_model_comes_when_it_is_called_and_goes_when_it_is_told(model: Net, twin: nn.Module, device: str) -> None:
    held = [*model.parameters()]
    hook = hooked(model, device)
    for _ in range(3):
        assert is_away(model)
        assert same(model, twin)
        assert not is_away(model)
        assert managed(model) is None  # an ordinary model, which nothing slows down
        assert {str(parameter.device) for parameter in model.parameters()} == {device}
        assert same(model, twin)
        hook.offload()
        hook.offload()  # it is away
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("called", [True, False])
def test_a_removed_hook_leaves_an_ordinary_model(model: Net, twin: nn.Module, device: str, called: bool) -> None:
    before = vars(model).keys() - {"training"}
    hook = hooked(model, device)
    if called:
        model(IDS)
    hook.remove()
    hook.offload()  # does nothing any more
    assert not is_away(model)
    assert vars(model).keys() - {"training"} == before
    assert {str(parameter.device) for parameter in model.parameters()} == {device if called else "cpu"}
    assert same(model, twin.to(device if called else "cpu"))
    pickle.loads(pickle.dumps(model))


def test_hooks_are_removed_with_all_others(model: Net, twin: nn.Module, device: str) -> None:
    hooked(model, device)
    remove_hook_from_submodules(model)
    assert not is_away(model)
    assert model._compiled_call_impl is None
    assert same(model, twin.cpu())


def test_the_one_before_goes_when_the_next_one_is_called(device: str) -> None:
    models = [aligned(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))) for _ in range(3)]
    hooks: list[UserCpuOffloadHook] = []
    for model in models:
        hooks.append(hooked(model, device, hooks[-1] if hooks else None))
    x = torch.ones(2, 32)
    for at, model in enumerate(models):
        model(x)
        assert [is_away(other) for other in models] == [index != at for index in range(3)]
    models[0](x)  # nobody is before the first: the last one stays
    assert [is_away(model) for model in models] == [False, True, False]
    models[1](x)
    assert [is_away(model) for model in models] == [True, False, False]


def test_an_edit_made_on_the_device_is_kept(model: Net, twin: nn.Module, device: str) -> None:
    hook = hooked(model, device)
    model(IDS)
    with torch.no_grad():
        for net in (model, twin):
            net.get_parameter("blocks.1.up.weight").mul_(2)
    hook.offload()
    assert same(model, twin)
    hook.offload()
    with torch.no_grad():
        for net in (model, twin):
            net.get_parameter("blocks.1.up.weight").add_(1)
    assert same(model, twin)


def test_a_part_can_be_called_while_the_model_is_away(model: Net, twin: nn.Module, device: str) -> None:
    """As pipelines do with an autoencoder's halves, where Accelerate computes on the wrong device."""
    hooked(model, device)
    x = torch.randn(2, 32)
    with torch.no_grad():
        output = model.blocks[2](x).cpu()
        assert torch.equal(output, twin.get_submodule("blocks.2")(x.to(device)).cpu())
    assert is_away(model)


def test_gradients_come_as_usual(model: Net, twin: nn.Module, device: str) -> None:
    hook = hooked(model, device)
    for net in (model, twin):
        net(IDS.to(device)).sum().backward()
    hook.offload()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad.cpu(), theirs.grad.cpu())


def test_inputs_come_along_each_time(device: str) -> None:
    """Accelerate brings them only when it brings the model."""
    model = aligned(nn.Linear(32, 32))
    hooked(model, device)
    for _ in range(2):
        assert str(model(torch.ones(1, 32)).device) == device


def test_a_failing_forward_leaves_the_model_usable(model: Net, twin: nn.Module, device: str) -> None:
    hook = hooked(model, device)
    with pytest.raises((RuntimeError, IndexError, TypeError)):
        model(IDS.float())
    assert same(model, twin)
    hook.offload()
    assert is_away(model)
    assert same(model, twin)


class Impatient(nn.Module):
    """Wants to go while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.hooks: list[UserCpuOffloadHook] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for hook in self.hooks:
            hook.offload()
        y: torch.Tensor = self.linear(x)
        return y


def test_a_model_cannot_go_while_it_runs(device: str) -> None:
    model = Impatient()
    model.hooks.append(hooked(model, device))
    with pytest.raises(StateError, match="while a forward of it is running"):
        model(torch.ones(1, 32))
    model.hooks.clear()
    assert model(torch.ones(1, 32)).shape == (1, 32)


def test_what_the_verbs_do_meanwhile_is_followed(model: Net, twin: nn.Module, device: str) -> None:
    hook = hooked(model, device)
    overspill.restore(model)
    assert same(model, twin)
    hook.offload()
    assert same(model, twin)
    overspill.offload(model, to="disk")
    assert same(model, twin)
    hook.offload()
    assert is_away(model)
    assert same(model, twin)
    hook.remove()
    assert not is_away(model)
    assert same(model, twin.to(next(model.parameters()).device))


def test_a_call_from_inside_an_interception_is_passed_on(model: Net, twin: nn.Module, device: str) -> None:
    """A model that is away may be called while both are being put in place: it streams then."""
    hook = hooked(model, device)
    model(IDS)
    hook.offload()
    manager = managed(model)
    assert manager is not None
    manager.refresh()  # stands outside of the hook now
    assert same(model, twin)
    assert is_away(model)


def test_a_call_that_comes_too_late_for_its_hook_moves_nothing(device: str) -> None:
    first, second = aligned(nn.Linear(32, 32)), aligned(nn.Linear(32, 32))
    hook = hooked(second, device, hooked(first, device))
    first(torch.ones(1, 32))
    late = second._compiled_call_impl
    assert late is not None
    hook.remove()
    assert late(torch.ones(1, 32)).shape == (1, 32)
    assert not is_away(first)


def test_a_second_hook_takes_the_place_of_the_first(model: Net, twin: nn.Module, device: str) -> None:
    first = hooked(model, device)
    second = hooked(model, device)
    first.offload()
    assert same(model, twin)
    assert not is_away(model)
    first.offload()
    assert not is_away(model)
    second.offload()
    assert is_away(model)


@pytest.mark.parametrize("library", [accelerate, compat])
def test_a_model_that_was_dispatched_takes_its_turns_whole(
    library: Any, model: Net, twin: nn.Module, device: str, tmp_path: Path
) -> None:
    device_map = {"embed": "cpu", "head": "cpu", "blocks": "disk", "norm": "cpu"}
    library.dispatch_model(model, device_map, offload_dir=tmp_path, offload_buffers=True)
    hook = hooked(model, device)
    for _ in range(2):
        assert same(model, twin)
        assert not is_away(model)
        hook.offload()
        assert is_away(model)
    hook.remove()
    assert same(model, twin.cpu())


def test_a_copy_is_an_ordinary_model(model: Net, twin: nn.Module, device: str) -> None:
    hooked(model, device)
    clone = copy.deepcopy(model)
    assert not is_away(clone)
    assert clone._compiled_call_impl is None
    assert same(clone, twin.cpu())
    assert is_away(model)


def test_a_model_ends_with_its_hook(device: str) -> None:
    model = aligned(nn.Linear(64, 64))
    reference = weakref.ref(model)
    hooked(model, device)
    model(torch.ones(1, 64))
    del model
    gc.collect()
    assert reference() is None


def test_a_model_without_values_is_refused() -> None:
    with init_empty_weights():
        model = nn.Linear(4, 4)
    with pytest.raises(StateError, match="weight is on the meta device"):
        cpu_offload_with_hook(model)


def test_a_model_without_weights_takes_its_turn(device: str) -> None:
    model = nn.Tanh()
    first = aligned(nn.Linear(32, 32))
    hook = hooked(first, device)
    hooked(model, device, hook)
    model(first(torch.ones(1, 32)))
    assert is_away(first)


def test_on_the_cpu_nothing_moves() -> None:
    model = aligned(nn.Linear(32, 32))
    same_model, hook = cpu_offload_with_hook(model, "cpu")
    assert same_model is model
    model(torch.ones(1, 32))
    hook.offload()
    assert managed(model) is None
    hook.remove()
    assert model._compiled_call_impl is None


def test_threads_call_a_model_while_others_send_it_away(model: Net, twin: nn.Module, device: str) -> None:
    hook = hooked(model, device)
    with torch.no_grad():
        expected = run(twin, IDS)
    failures: list[Any] = []
    done = threading.Event()

    def call() -> None:
        try:
            with torch.no_grad():
                assert all(torch.equal(model(IDS).cpu(), expected) for _ in range(25))
        except BaseException as failure:
            failures.append(failure)

    def send_away() -> None:
        try:
            while not done.is_set():
                hook.offload()
        except BaseException as failure:
            failures.append(failure)

    callers = [threading.Thread(target=call, daemon=True) for _ in range(3)]
    sender = threading.Thread(target=send_away, daemon=True)
    for thread in (*callers, sender):
        thread.start()
    for thread in callers:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    done.set()
    sender.join(60)
    assert not sender.is_alive(), "deadlock"
    assert failures == []
