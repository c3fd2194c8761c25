"""Several threads offload, run and restore parts of one model at once: right bits, no failure, no deadlock."""

import copy
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill import homes, streamed
from overspill.errors import StateError
from overspill.graph import onload
from overspill.homes import DiskTensor, HostTensor
from overspill.moving import Mover
from overspill.residency import Residency
from support import Block, Net, Where, aligned

FORWARDS = 200
PATIENCE = 100  # seconds until threads that have not ended count as deadlocked
MOVED_BYTES = (64 * 32 + 64 + 64 * 32) * 4  # of a block: its norm, scale and shift are too small


@pytest.fixture
def model(where: Where) -> Net:
    return aligned(Net()).to(where.device)  # type: ignore[return-value]


@pytest.fixture
def twin(model: Net) -> Net:
    return copy.deepcopy(model)


class Crew:
    """Threads that start together. The first failure of any of them is raised when they are waited for."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._go = threading.Event()

    def add(self, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        def guarded() -> None:
            self._go.wait(PATIENCE)
            try:
                work(*arguments)
            except BaseException as failure:
                self.failures.append(failure)

        thread = threading.Thread(target=guarded, daemon=True)  # a deadlock must not keep the tests from ending
        self._threads.append(thread)
        thread.start()
        return thread

    def run(self, threads: list[threading.Thread] | None = None) -> None:
        """Let them go, and wait until `threads`, or all of them, have ended."""
        self._go.set()
        for thread in self._threads if threads is None else threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"deadlock; failures so far: {self.failures}"
        if self.failures:
            raise self.failures[0]


@contextmanager
def coming_and_going(crew: Crew, where: Where, model: nn.Module, *parts: str) -> Iterator[list[int]]:
    """While the block runs, a thread a part offloads and restores it. Yields how often that happened, by part."""
    ended, turns = threading.Event(), [0] * len(parts)

    def move(index: int) -> None:
        while not ended.wait(0.03):  # a pause, or the calls of the others would wait for moves most of the time
            assert where.offload(model, modules=[parts[index]]).nbytes == MOVED_BYTES
            overspill.restore(model, modules=[parts[index]])
            turns[index] += 1

    for index in range(len(parts)):
        crew.add(move, index)
    try:
        yield turns
    finally:
        ended.set()


def inputs(device: str, count: int = 4) -> list[torch.Tensor]:
    return [torch.randint(0, 64, (2, 12), device=device) for _ in range(count)]


def outputs(model: Callable[[torch.Tensor], torch.Tensor], xs: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(x) for x in xs]


def repeat_forward(
    model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, expected: torch.Tensor, times: int = FORWARDS
) -> None:
    wrong = 0
    with torch.no_grad():
        for _ in range(times):
            wrong += not torch.equal(model(x), expected)
    assert wrong == 0, f"{wrong} of {times} outputs are wrong"


def assert_plain(model: nn.Module, twin: nn.Module) -> None:
    for (path, module), other in zip(model.named_modules(), twin.modules(), strict=True):
        assert list(vars(module)) == list(vars(other)), path
        assert module._compiled_call_impl is None, path
        assert not module._forward_pre_hooks, path
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert type(p) is nn.Parameter, name
        assert p.device == q.device, name
        assert torch.equal(p, q), name
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")


def test_four_threads_run_one_model_two_hundred_times_each(where: Where, model: Net, twin: Net) -> None:
    assert where.offload(model).nbytes == 4 * MOVED_BYTES + 64 * 32 * 4
    xs, crew = inputs(where.device), Crew()
    for x, expected in zip(xs, outputs(twin, xs), strict=True):
        crew.add(repeat_forward, model, x, expected)
    crew.run()
    overspill.restore(model)
    assert_plain(model, twin)


def test_four_threads_run_two_blocks_while_others_come_and_go(where: Where, model: Net, twin: Net) -> None:
    where.offload(model, modules=["blocks.0", "blocks.1"])
    xs, crew = [torch.randn(2, 32, device=where.device) for _ in range(4)], Crew()
    results = outputs(lambda x: twin.blocks[1](twin.blocks[0](x)), xs)
    with coming_and_going(crew, where, model, "blocks.2", "blocks.3") as turns:
        runners = [
            crew.add(repeat_forward, lambda x: model.blocks[1](model.blocks[0](x)), x, y)
            for x, y in zip(xs, results, strict=True)
        ]
        crew.run(runners)
    crew.run()
    assert all(turns), turns
    overspill.restore(model)
    assert_plain(model, twin)


def test_four_threads_run_the_model_while_its_own_parts_come_and_go(where: Where, model: Net, twin: Net) -> None:
    where.offload(model, modules=["blocks.0", "embed"])
    xs, crew = inputs(where.device), Crew()
    results = outputs(twin, xs)
    with coming_and_going(crew, where, model, "blocks.1", "blocks.3") as turns:
        runners = [crew.add(repeat_forward, model, x, y) for x, y in zip(xs, results, strict=True)]
        crew.run(runners)
    crew.run()
    assert all(turns), turns
    overspill.restore(model)
    assert_plain(model, twin)


def test_threads_move_run_edit_and_restore_a_part_each(where: Where, model: Net, twin: Net) -> None:
    crew = Crew()

    def work(index: int) -> None:
        ours, theirs, path = model.blocks[index], twin.blocks[index], f"blocks.{index}"
        generator = torch.Generator().manual_seed(index)
        for turn in range(12):
            assert where.offload(model, modules=[path]).nbytes == MOVED_BYTES
            x = torch.randn(2, 32, generator=generator).to(where.device)
            with torch.no_grad():
                assert torch.equal(ours(x), theirs(x)), (index, turn)
                for block in (ours, theirs):
                    block.up.weight.mul_(0.5)
                    block.down.weight.data[turn] = turn
                assert torch.equal(ours(x), theirs(x)), (index, turn)
            overspill.restore(model, modules=[path], delete=where.tier == "disk" and turn % 2 == 0)
            assert torch.equal(ours(x), theirs(x)), (index, turn)

    for index in range(4):
        crew.add(work, index)
    crew.run()
    assert_plain(model, twin)


@pytest.mark.parametrize("edited", [False, True])
def test_threads_run_one_model_with_gradients_on(edited: bool, where: Where, model: Net, twin: Net) -> None:
    where.offload(model)
    if edited:
        with torch.no_grad():
            for net in (model, twin):
                net.blocks[1].up.weight.mul_(0.5)
    crew = Crew()

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for turn in range(25):
            x = torch.randn(2, 32, generator=generator).to(where.device).requires_grad_()
            results = []
            for net in (model, twin):
                output = net.blocks[2](net.blocks[1](x))
                results.append((output.detach(), *torch.autograd.grad(output.square().sum(), x)))
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (seed, turn)

    for seed in range(4):
        crew.add(work, seed)
    crew.run()
    overspill.restore(model)
    assert_plain(model, twin)


def test_a_call_that_ends_while_a_backward_uses_its_unit_leaves_the_homes(
    where: Where, model: Net, twin: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    where.offload(model)
    block, home = model.blocks[1], model.blocks[1].up.weight
    with torch.no_grad():
        for net in (model, twin):
            net.blocks[1].up.weight.mul_(0.5)
    x = torch.randn(2, 32).to(where.device).requires_grad_()
    begun, go_on = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: block(x.detach()))
    wait_for = Residency._wait_for

    def in_the_middle(*_: object) -> None:
        if threading.current_thread() is other:
            begun.set()
            go_on.wait(20)

    def while_it_is_lent(self: Residency, what: str, units: Any) -> None:
        wait_for(self, what, units)
        if threading.current_thread() is not other:
            go_on.set()
            other.join(20)

    for turn in range(2):  # the second one finds the unit as the first has left it
        output = block(x)
        if turn == 0:
            hook = block.up.register_forward_pre_hook(in_the_middle)
            other.start()
            assert begun.wait(20)
            monkeypatch.setattr(Residency, "_wait_for", while_it_is_lent)
        (gradient,) = torch.autograd.grad(output.square().sum(), x)
        monkeypatch.undo()
        hook.remove()
        assert block.up.weight is home
        (expected,) = torch.autograd.grad(twin.blocks[1](x).square().sum(), x)
        assert torch.equal(gradient, expected)
        assert not other.is_alive()


def test_threads_train_a_part_each(where: Where, model: Net, twin: Net) -> None:
    where.offload(model, modules=["blocks.0", "blocks.1", "blocks.2"])
    crew = Crew()

    def work(index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        for _ in range(50):  # fewer may be over before the other part has come and gone once
            x = torch.randn(2, 32, generator=generator).to(where.device)
            for net in (model, twin):
                net.blocks[index](x).square().mean().backward()

    with coming_and_going(crew, where, model, "blocks.3") as turns:
        crew.run([crew.add(work, index) for index in range(3)])
    crew.run()
    assert all(turns)
    overspill.restore(model)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert torch.equal(p.grad, q.grad), name


def test_two_threads_that_want_the_same_move_one_gets_it(where: Where, model: Net, twin: Net) -> None:
    for _ in range(10):
        done: list[Any] = []
        crew = Crew()

        def move(done: list[Any] = done) -> None:
            try:
                done.append(overspill.offload(model, to="disk", modules=["blocks.1"]))
            except StateError as refused:
                done.append(refused)

        for _ in range(2):
            crew.add(move)
        crew.run()
        assert sorted(isinstance(result, StateError) for result in done) == [False, True]
        overspill.restore(model)
    assert_plain(model, twin)


def test_a_part_is_restored_while_another_thread_is_in_its_forward(where: Where, model: Net, twin: Net) -> None:
    where.offload(model, modules=["blocks.1"])
    x = torch.randn(2, 32, device=where.device)
    with torch.no_grad():
        expected = twin.blocks[1](x)
    inside, go_on, crew = threading.Event(), threading.Event(), Crew()

    def pause(*_: Any) -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    def forward() -> None:
        with torch.no_grad():
            assert torch.equal(model.blocks[1](x), expected)

    def restore() -> None:
        assert inside.wait(PATIENCE)
        timer = threading.Timer(0.2, go_on.set)  # the forward goes on whether or not the restore waits for it
        timer.start()
        overspill.restore(model, modules=["blocks.1"])

    handle = model.blocks[1].up.register_forward_pre_hook(pause)
    crew.add(forward)
    crew.add(restore)
    crew.run()
    handle.remove()
    assert go_on.wait(PATIENCE)
    assert_plain(model, twin)


def test_a_call_that_begins_in_the_middle_of_a_move_waits_for_it(
    where: Where, model: Net, twin: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    where.offload(model, modules=["blocks.0"])
    (x,), crew = [torch.randn(2, 32, device=where.device)], Crew()
    in_the_middle, ended = threading.Event(), threading.Event()
    manage = Mover._manage

    def slow(self: Mover, *args: Any) -> None:
        in_the_middle.set()
        assert not ended.wait(0.3), "nobody led the call"
        manage(self, *args)

    def forward() -> None:
        assert in_the_middle.wait(PATIENCE)
        with torch.no_grad():
            assert torch.equal(model.blocks[0](x), twin.blocks[0](x))
        ended.set()

    monkeypatch.setattr(Mover, "_manage", slow)
    crew.add(forward)
    crew.add(partial(where.offload, model, modules=["blocks.1"]))
    crew.run()
    assert ended.is_set()
    overspill.restore(model)
    assert_plain(model, twin)


def test_a_call_with_gradients_shows_no_home_to_one_that_runs_without(
    where: Where, model: Net, twin: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    where.offload(model)
    block, crew = model.blocks[1], Crew()
    x, inside, seen = torch.randn(2, 32, device=where.device), threading.Event(), threading.Event()
    shown: list[type] = []

    def spying(*args: Any) -> Any:
        result = onload(*args)
        shown.extend(type(p) for p in (block.up.weight, block.down.weight))
        return result

    def pause(*_: Any) -> None:
        inside.set()
        assert seen.wait(PATIENCE)

    def without() -> None:
        handle = block.down.register_forward_pre_hook(pause)
        with torch.no_grad():
            assert torch.equal(block(x), twin.blocks[1](x))
        handle.remove()

    def with_gradients() -> None:
        assert inside.wait(PATIENCE)
        threading.Timer(0.2, seen.set).start()
        block(x).sum().backward()

    monkeypatch.setattr(streamed, "onload", spying)
    crew.add(without)
    crew.add(with_gradients)
    crew.run()
    assert shown
    assert not any(issubclass(kind, HostTensor | DiskTensor) for kind in shown)
    overspill.restore(model)


def test_values_read_while_parts_move_are_always_true(where: Where, model: Net, twin: Net) -> None:
    crew, truth = Crew(), {name: value.cpu() for name, value in twin.state_dict().items()}

    with coming_and_going(crew, where, model, "blocks.1", "blocks.2") as turns:

        def read() -> None:
            while min(turns) < 12 and not crew.failures:
                for name, value in model.state_dict().items():
                    assert torch.equal(value.detach().clone().cpu(), truth[name]), name

        crew.run([crew.add(read) for _ in range(2)])
    crew.run()
    assert_plain(model, twin)


@pytest.mark.gpu
def test_what_comes_back_while_it_is_detached_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(64, 64).to("cuda:0")
    truth = model.weight.detach().cpu().clone()
    overspill.offload(model, to="disk")
    assert isinstance(model.weight, DiskTensor)
    correct = homes.return_and_correct_aliasing

    def meanwhile(*arguments: Any) -> Any:
        overspill.restore(model)  # as another thread may
        return correct(*arguments)

    monkeypatch.setattr(homes, "return_and_correct_aliasing", meanwhile)
    detached = model.weight.detach()
    assert torch.equal(detached.clone().cpu(), truth)
    assert torch.equal(model.weight.detach().cpu(), truth)
    assert model.weight.device.type == "cuda"


def test_threads_move_and_run_models_of_their_own(where: Where) -> None:
    crew = Crew()

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(Block(), Block())
        for p in model.parameters():
            nn.init.normal_(p, generator=generator)
        model = aligned(model).to(where.device)
        twin, x = copy.deepcopy(model), torch.randn(2, 32, generator=generator).to(where.device)
        for _ in range(10):
            assert where.offload(model).nbytes == 2 * MOVED_BYTES
            with torch.no_grad():
                assert torch.equal(model(x), twin(x))
            overspill.restore(model)

    for seed in range(4):
        crew.add(work, seed)
    crew.run()


def test_nothing_is_collected_while_threads_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection in the middle of that is a deadlock on Python before 3.12.4."""
    look, collecting = sys._current_frames, list[bool]()

    def looking() -> Any:
        collecting.append(gc.isenabled())
        return look()

    monkeypatch.setattr(sys, "_current_frames", looking)
    assert gc.isenabled()
    model = aligned(Net())
    overspill.offload(model, to="disk")
    overspill.restore(model, delete=True)
    assert collecting
    assert not any(collecting)
    assert gc.isenabled()
