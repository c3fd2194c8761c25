"""Slabs of a window, used for longer than any test of a model lasts: what is remembered of them must not grow."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager

from overspill import slab
from overspill.slab import HostPool, Layout, Slab, Window, extra_slab
from overspill.tensors import TensorSpec

KIB = 1024


class Clock:
    """Work on a device that is behind the host by a few marks."""

    def __init__(self, behind: int) -> None:
        self.behind, self.recorded = behind, 0

    def record(self, device: torch.device) -> "Mark":
        self.recorded += 1
        return Mark(self, self.recorded)


class Mark:
    """What stands for an event of that device."""

    def __init__(self, clock: Clock, number: int) -> None:
        self._clock, self.number = clock, number

    def query(self) -> bool:
        return self._clock.recorded - self.number >= self._clock.behind


@pytest.fixture(params=[0, 3])
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(request.param)
    monkeypatch.setattr(slab, "record_event", clock.record)
    return clock


def test_whoever_takes_a_slab_waits_only_for_work_that_has_not_been_done(clock: Clock) -> None:
    window = Window(3 * 64 * KIB + 4 * KIB, torch.device("cpu"))  # with an end that no unit has room in
    held: list[Slab] = []
    chance = random.Random(0)
    for _ in range(2000):
        taken = window.take(64 * KIB)
        while taken is None:
            held.pop(chance.randrange(len(held)))
            taken = window.take(64 * KIB)
        assert len(taken.overwrite_after) <= clock.behind + 1
        taken.used_until(clock.record(window.device))  # type: ignore[arg-type]
        held.append(taken)
    assert window.free_bytes() == 4 * KIB


def test_whoever_takes_memory_waits_for_all_that_used_any_of_it() -> None:
    clock = Clock(100)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slab, "record_event", clock.record)
        window = Window(128 * KIB, torch.device("cpu"))
        made = clock.recorded
        first, second = window.take(64 * KIB), window.take(64 * KIB)
        assert first is not None
        assert second is not None
        uses = [clock.record(window.device) for _ in range(2)]
        first.used_until(uses[0])  # type: ignore[arg-type]
        second.used_until(uses[1])  # type: ignore[arg-type]
        del first, second
        both = window.take(128 * KIB)
    assert both is not None
    waits: list[Any] = both.overwrite_after
    assert set(uses) < set(waits)
    later = {mark.number for mark in waits} - {mark.number for mark in uses} - set(range(made + 1))
    assert later, "views may have been used behind the last use that was told: until the memory was seen to be free"
    assert min(later) > uses[1].number


def test_what_stays_is_taken_from_the_far_end_so_that_the_rest_is_in_one_piece() -> None:
    window = Window(4 * 64 * KIB, torch.device("cpu"))
    passing = [window.take(64 * KIB)]
    staying = window.take(64 * KIB, to_stay=True)
    passing.append(window.take(64 * KIB))
    passing.clear()
    assert staying is not None
    assert window.take(3 * 64 * KIB) is not None


def test_a_slab_that_is_never_given_up_remembers_its_last_uses_only(clock: Clock) -> None:
    taken = Window(64 * KIB, torch.device("cpu")).take(64 * KIB, to_stay=True)
    assert taken is not None
    for _ in range(2000):
        taken.used_until(clock.record(torch.device("cpu")))  # type: ignore[arg-type]
        assert len(taken.uses) <= clock.behind + 1


def test_a_pool_of_many_arenas_is_asked_where_it_had_room_last(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = HostPool(torch.device("cpu")), 0
    monkeypatch.setattr(HostPool, "_GROWTH", 256 * KIB)
    take = slab._Arena.take

    def counting(arena: slab._Arena, nbytes: int, *, to_stay: bool) -> Slab | None:
        nonlocal asked
        asked += 1
        return take(arena, nbytes, to_stay=to_stay)

    monkeypatch.setattr(slab._Arena, "take", counting)
    grown = [pool.take(64 * KIB) for _ in range(200)]  # each new arena follows a look at all the others
    assert pool.nbytes == 200 * 64 * KIB
    del grown
    asked = 0
    for _ in range(3):
        held = [pool.take(64 * KIB) for _ in range(200)]
        assert pool.free_bytes() == 0
        del held
    assert asked <= 3 * (200 + 50)
    assert pool.nbytes == 200 * 64 * KIB, "nothing is taken while there is room anywhere"


def test_a_pool_grows_by_several_of_what_it_lacks_room_for() -> None:
    pool = HostPool(torch.device("cpu"))
    size = 50 * 1024 * KIB  # three of them are more than it grows by at least, two are less
    first = [pool.take(size) for _ in range(3)]
    assert pool.nbytes == 3 * size
    assert pool.free_bytes() == 0
    del first


def test_a_pool_takes_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.slab.free_memory", lambda device: 100 * KIB)
    pool = HostPool(torch.device("cpu"))
    pool.take(64 * KIB)
    assert pool.nbytes == 64 * KIB


def test_what_another_thread_adds_while_the_passed_are_forgotten_is_not_lost() -> None:
    clock = Clock(0)
    taken = Window(64 * KIB, torch.device("cpu")).take(64 * KIB)
    assert taken is not None
    passed, arrived, used = (clock.record(torch.device("cpu")) for _ in range(3))
    clock.behind = 2

    class Shared(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            if arrived not in self:
                self.append(arrived)  # as a reader thread does when the last of its copies is queued

    taken.uses = Shared([passed])
    taken.used_until(used)  # type: ignore[arg-type]
    assert list(taken.uses) == [arrived, used]


# Slabs that go from one unit to the next as they are.

LAYOUT = Layout.of([TensorSpec((4, 8), torch.float32), TensorSpec((16,), torch.float32)])


def filled_slab(window: Window) -> Slab:
    taken = window.take(LAYOUT.nbytes)
    assert taken is not None
    taken.layout = LAYOUT
    taken.tensors()
    return taken


def test_whoever_gets_a_slab_as_it_is_waits_for_all_that_used_it(clock: Clock) -> None:
    window = Window(64 * KIB, torch.device("cpu"))
    passed = filled_slab(window)
    tensors, used = passed.tensors(), clock.record(window.device)
    passed.uses.append(used)  # type: ignore[arg-type]
    assert window.pass_on(passed)
    waits: list[Any] = passed.overwrite_after
    assert [mark.number for mark in waits] == [used.number, clock.recorded]
    assert passed.uses == []
    assert passed.tensors() is tensors
    passed.uses.append(used)  # type: ignore[arg-type]
    del passed, tensors
    whole = window.take(64 * KIB)
    assert whole is not None, "the range is free when nobody has the slab any more"
    assert clock.behind == 0 or used in whole.overwrite_after


def test_whoever_has_bytes_next_waits_for_each_stream_that_they_were_lent_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams: dict[int, Any] = {number: object() for number in range(3)}
    marked: list[object] = []

    def record(device: torch.device, stream: object = None) -> object:
        marked.append(stream)
        return ("mark", stream)

    monkeypatch.setattr(slab, "record_event", record)
    monkeypatch.setattr(slab, "_forget_passed", lambda events: None)
    monkeypatch.setattr(slab, "stream_numbers", lambda device: lambda: 0)  # the first is the current one
    window = Window(LAYOUT.nbytes, torch.device("cpu"))
    taken = filled_slab(window)
    marked.clear()
    taken.lent_on.update(streams)
    assert window.pass_on(taken)
    assert marked == [None, streams[1], streams[2]]
    assert taken.overwrite_after == [("mark", stream) for stream in marked]
    assert taken.lent_on == {}
    taken.lent_on.update(streams)
    del taken
    marked.clear()
    again = window.take(LAYOUT.nbytes)
    assert again is not None
    assert again.overwrite_after == [("mark", stream) for stream in (None, streams[1], streams[2])]
    assert again.lent_on == {}


KEEPERS: dict[str, Callable[[Slab], object]] = {
    "the bytes": lambda kept: kept.memory[:4],
    "a tensor": lambda kept: kept.tensors()[1],
    "a view of a tensor": lambda kept: kept.tensors()[0].t(),
    "a detached tensor": lambda kept: kept.tensors()[0].detach(),
    "a graph": lambda kept: torch.ones(16, requires_grad=True) * kept.tensors()[1],
}


@pytest.mark.parametrize("what", KEEPERS)
def test_a_slab_that_somebody_has_a_part_of_stays_theirs(what: str) -> None:
    window = Window(64 * KIB, torch.device("cpu"))
    taken = filled_slab(window)
    part = KEEPERS[what](taken)
    assert not window.pass_on(taken)
    del part
    assert window.pass_on(taken)


def test_a_slab_from_elsewhere_is_not_passed_on() -> None:
    window = Window(64 * KIB, torch.device("cpu"), held=False)
    extra = extra_slab(LAYOUT.nbytes, torch.device("cpu"), [])
    extra.layout = LAYOUT
    extra.tensors()
    assert not window.pass_on(extra)
    before = filled_slab(window)
    window.let_go()
    assert not window.pass_on(before)
    after = filled_slab(window)
    assert not window.pass_on(before), "the memory that it is in is to be given back"
    assert window.pass_on(after)


def test_units_alike_have_one_layout() -> None:
    assert Layout.of(list(LAYOUT.specs)) is LAYOUT
    transposed = TensorSpec((4, 8), torch.float32, (1, 4))
    assert Layout.of([transposed, LAYOUT.specs[1]]) is not LAYOUT, "their elements lie in another order"


@contextmanager
def within_a_fake_operation() -> Iterator[None]:
    mode = FakeTensorMode()
    with mode, in_kernel_invocation_manager(mode):
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("around", [FakeTensorMode, within_a_fake_operation, lambda: torch.device("meta")])
def test_a_window_whose_slab_is_in_use_may_go_in_the_middle_of_a_compilation(
    around: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[torch.Stream] = []
    record = torch.Tensor.record_stream

    def noting(memory: torch.Tensor, stream: torch.Stream) -> None:
        record(memory, stream)  # what this raises in a finalizer fails the test as well
        recorded.append(stream)

    monkeypatch.setattr(torch.Tensor, "record_stream", noting)
    device, user = torch.device("cuda", 0), torch.Stream(device=torch.device("cuda", 0))
    window = Window(64 * KIB, device, streams=[user])
    taken = window.take(KIB)
    assert taken is not None
    with around():
        del window  # as the garbage collector may have it go
    assert user in recorded
    taken.memory.fill_(1)
    assert bool((taken.memory == 1).all())
