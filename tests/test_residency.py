"""Who gets room in the window, what is fetched ahead, and when copies are let go of. Every fetch is the test's own."""

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from overspill.checkpoint.index import SourceFile
from overspill.devices import CPU, Arena, new_arena
from overspill.errors import CheckpointReadError
from overspill.recording import COMPUTE, WAIT, Recording
from overspill.residency import Loan, Residency, Use
from overspill.schedule import Line, Schedule
from overspill.slab import Layout, Slab, Window
from overspill.steps import Phase, Root
from overspill.streamed import StreamedUnit
from overspill.tensors import Place, TensorSpec
from overspill.transfer import DEMANDED, Fetch, Transfer

SIZE = 256
"""Bytes that sizes are counted in: what slabs are aligned to."""

LONG = 30.0
"""Seconds that nothing here takes unless something waits for ever."""


class SlowFetch(Fetch):
    """A fetch that does what the test wants when somebody waits for it."""

    def __init__(self, nbytes: int, when_waited: Callable[[], None]) -> None:
        super().__init__(CPU, 1, nbytes)
        self._when_waited = when_waited

    def wait(self) -> None:
        self._when_waited()
        super().wait()

    def wait_host(self) -> None:
        self._when_waited()
        super().wait_host()


class Shelf:
    """The homes of one unit. Its fetches end at once, or, while it is `slow`, when they are waited for."""

    def __init__(self, name: str, size: int, log: list[str], *, reads_disk: bool) -> None:
        self.homes: list[torch.Tensor] = [torch.zeros(SIZE * size, dtype=torch.uint8)]
        self.layout = Layout.of([TensorSpec.of(self.homes[0])])
        self.reads_disk = reads_disk
        self.edits = self.mended = 0
        self.slow = False
        self.when_waited: Callable[[], None] = self.end
        self.errors: list[Exception] = []
        self._name, self._log = name, log
        self._under_way: list[tuple[Fetch, torch.Tensor]] = []  # with the memory, as those who read into it do

    def fetch(self, slab: Slab, transfer: Transfer, priority: int) -> Fetch:
        self._log.append(self._name if priority == DEMANDED else f"{self._name} ahead")
        fetch = SlowFetch(self.layout.nbytes, lambda: self.when_waited())
        self._under_way.append((fetch, slab.memory))
        if not self.slow:
            self.end()
        return fetch

    def end(self) -> None:
        """Let the fetches end that are under way."""
        while self._under_way:
            fetch, memory = self._under_way.pop()
            fetch.part_queued(None, fetch.nbytes, self.errors.pop() if self.errors else None)
            del memory
            fetch.part_let_go()

    def brings(self, index: int) -> bool:
        return True

    def stamps(self) -> list[object]:
        return [self.edits]

    def refresh(self, index: int, live: torch.Tensor) -> None:
        self.mended += 1

    def absorb(self, index: int, live: torch.Tensor, *, edits: int) -> None:
        raise AssertionError("nobody writes to live tensors here")

    def version(self, index: int) -> int:
        return self.edits

    def part(self, indices: Sequence[int]) -> "Shelf":
        raise AssertionError("nobody takes units apart here")

    def move_in(self, tensors: Sequence[torch.Tensor]) -> None:
        raise AssertionError("nobody moves in here")

    def mapping(self) -> None:
        return None

    def map(self) -> None:
        return None

    def files(self) -> set[SourceFile]:
        return set()


class Patience(threading.Condition):
    """A condition whose waits end when they are notified, not before: who forgets to notify is found out."""

    def __init__(self, lock: threading.RLock, when_waiting: Callable[[], None]) -> None:
        super().__init__(lock)
        self._when_waiting = when_waiting

    def wait(self, timeout: float | None = None) -> bool:
        self._when_waiting()
        assert super().wait(LONG), "nobody said that something has changed"
        return True


class Stage:
    """Units by name, each with a root of that name that needs it, and a residency for them."""

    def __init__(
        self, sizes: Mapping[str, int], *, window: int, disk: str = "", kept: str = "", held: bool = True
    ) -> None:
        self.log: list[str] = []
        self.shelves = {name: Shelf(name, sizes[name], self.log, reads_disk=name in disk) for name in sizes}
        self.units: dict[str, StreamedUnit] = {}
        self.roots: dict[str, Root] = {}
        for name, shelf in self.shelves.items():
            module = nn.Module()
            module.register_buffer("weight", shelf.homes[0])
            places = [[Place(module, "weight", f"{name}.weight")]]
            self.units[name] = StreamedUnit(name, shelf, places, CPU, kept=name in kept)
            self.roots[name] = Root(name, module, [self.units[name]])
        self.window = Window(SIZE * window, CPU, held=held)
        self.residency = Residency(list(self.roots.values()), self.window, Transfer(CPU))

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[Use]:
        """Within a call of a root."""
        use = Use(self.roots[name])
        try:
            self.residency.acquire(use)
            yield use
        finally:
            self.residency.release(use)

    def call(self, names: Iterable[str]) -> None:
        """Call roots, one after the other."""
        for name in names:
            with self.calling(name):
                pass

    def lend(self, name: str) -> Slab:
        step = self.residency._steps[self.roots[name], Phase.BACKWARD]
        loan = Loan(self.residency, step, self.units[name])
        loan.weight(0, loan.version(0))
        slab = self.units[name].slab
        assert slab is not None
        return slab

    def backward(self, names: str) -> None:
        """A backward that needs these units, one after the other."""

        def work() -> None:
            for name in names:
                self.lend(name)

        in_a_backward(work)

    def train(self, names: str) -> None:
        with torch.enable_grad():
            self.call(names)
        self.backward(names[::-1])

    def edit(self, names: str) -> None:
        """What an optimizer does."""
        for name in names:
            self.shelves[name].edits += 1

    def shows(self, name: str) -> str:
        """Which tensor the module of a root shows."""
        return "home" if self.roots[name].module.weight is self.shelves[name].homes[0] else "live"

    def there(self) -> str:
        """The units that have a slab."""
        return "".join(name for name, unit in self.units.items() if unit.slab is not None)

    def fetched(self) -> list[str]:
        """What was fetched since this was last asked."""
        log = self.log[:]
        self.log.clear()
        return log

    def when_waiting(self, do: Callable[[], None]) -> None:
        """Have `do` called when a thread waits for room, and let that thread wait until it is told that there is."""
        self.residency._changed = Patience(self.residency.lock, do)


def in_a_backward(work: Callable[[], object]) -> None:
    """Do `work` in the middle of a backward of autograd."""
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        y = x * 1

    def hook(gradient: torch.Tensor) -> None:
        work()

    y.register_hook(hook)
    y.backward()


@contextlib.contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Do `work` in another thread, and raise here what it raises."""
    failures: list[BaseException] = []

    def working() -> None:
        try:
            with torch.no_grad():
                work()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=working, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(LONG)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def elsewhere(work: Callable[[], object]) -> None:
    """Do `work` in another thread, to its end."""
    with meanwhile(work):
        pass


def alike(names: str, size: int = 1) -> dict[str, int]:
    return dict.fromkeys(names, size)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


# A call has its units.


def test_modules_show_live_tensors_until_the_last_call_has_ended() -> None:
    stage = Stage(alike("ab"), window=2)
    for _ in range(2):
        with stage.calling("a"):
            with stage.calling("a"):
                assert (stage.shows("a"), stage.shows("b")) == ("live", "home")
            assert stage.shows("a") == "live"
        assert stage.shows("a") == "home"


def test_a_call_waits_for_its_unit() -> None:
    stage = Stage(alike("ab"), window=1)
    stage.shelves["a"].slow = True
    with stage.calling("a"):
        fetch = stage.units["a"].fetch
        assert fetch is not None
        assert fetch.finished()


def test_a_backward_waits_for_its_unit() -> None:
    stage = Stage(alike("ab"), window=1)
    stage.shelves["a"].slow = True
    stage.backward("a")
    fetch = stage.units["a"].fetch
    assert fetch is not None
    assert fetch.finished()


def test_what_failed_ahead_of_need_is_tried_again_when_it_is_needed() -> None:
    stage = Stage(alike("ab"), window=2)
    stage.shelves["b"].errors = [CheckpointReadError("once")]
    stage.call("ab")
    assert stage.fetched() == ["a", "b ahead", "b"]


def test_what_fails_again_is_an_error_of_the_call_and_leaves_nothing_behind() -> None:
    stage = Stage(alike("ab"), window=2)
    stage.shelves["a"].errors = [CheckpointReadError(f"error {count}") for count in (3, 2, 1)]
    with pytest.raises(CheckpointReadError, match="error 2"):
        stage.call("a")
    assert stage.there() == "b"
    assert stage.shows("a") == "home"
    assert stage.window.free_bytes() == SIZE
    stage.call("a")


def test_an_interrupted_call_gives_up_what_it_waited_for() -> None:
    stage = Stage(alike("ab"), window=1)
    shelf = stage.shelves["a"]
    shelf.slow, shelf.when_waited = True, interrupt
    with pytest.raises(KeyboardInterrupt):
        stage.call("a")
    assert stage.there() == ""


def test_an_interrupted_call_leaves_others_what_they_wait_for() -> None:
    stage = Stage(alike("ab"), window=1)
    shelf, waiting = stage.shelves["a"], threading.Event()
    shelf.slow, shelf.when_waited = True, waiting.set
    with meanwhile(lambda: stage.call("a")):
        assert waiting.wait(LONG)
        shelf.when_waited = interrupt
        with pytest.raises(KeyboardInterrupt):
            stage.call("a")
        assert stage.there() == "a"
        shelf.end()
    assert stage.fetched() == ["a"]


def test_a_call_that_never_began_ends_without_a_trace() -> None:
    stage = Stage(alike("ab"), window=2)
    stage.residency.release(Use(stage.roots["a"]))
    assert stage.fetched() == []


def test_a_call_may_be_ended_twice() -> None:
    stage = Stage(alike("ab"), window=1)
    with stage.calling("b"):
        with stage.calling("a") as use:
            stage.residency.release(use)
        assert stage.residency._running == 1


def test_bytes_are_in_use_until_the_device_has_come_to_the_end_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    end: Any = Passed()
    stage = Stage(alike("ab"), window=2)
    monkeypatch.setattr("overspill.residency.record_event", lambda device: end)
    with stage.calling("a"):
        slab = stage.units["a"].slab
        assert slab is not None
        assert slab.uses == []
    assert slab.uses == [end]


def test_what_a_graph_may_need_again_is_in_use_for_all_that_its_stream_does(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = object()
    marks: Counter[object] = Counter()
    monkeypatch.setattr("overspill.slab.current_stream", lambda device: stream)

    def record(device: torch.device, stream: object = None) -> Passed:
        marks[stream] += 1
        return Passed()

    monkeypatch.setattr("overspill.slab.record_event", record)
    stage = Stage(alike("ab"), window=2)
    with torch.enable_grad(), stage.calling("a"):
        slab = stage.units["a"].slab
        assert slab is not None
        assert slab.lent_on == {}
    assert slab.lent_on == {0: stream}
    slab.lent_on.clear()
    lent: list[dict[int, Any]] = []
    in_a_backward(lambda: lent.append(dict(stage.lend("a").lent_on)))
    assert lent == [{0: stream}]
    assert slab.lent_on == {}, "the backward has ended, and so may the stream"
    assert marks[stream] == 1
    assert len(slab.uses) == 1


def test_units_are_counted_as_they_are_found() -> None:
    stage = Stage({"a": 1, "b": 3}, window=4, disk="b")
    counts = stage.residency.counts
    stage.shelves["b"].slow = True
    with stage.calling("a"):
        assert (counts.needed, counts.ready, counts.under_way) == (1, 0, 0)
    stage.call("b")
    assert (counts.needed, counts.ready, counts.under_way) == (2, 0, 1)
    stage.call("b")
    assert (counts.needed, counts.ready, counts.under_way) == (3, 1, 1)
    assert counts.moved == {"cpu": SIZE, "disk": 3 * SIZE}


def test_who_records_is_told_what_was_waited_for() -> None:
    stage = Stage(alike("ab"), window=2)
    before = stage.residency.now()
    stage.call("a")
    recording = stage.residency.transfer.recording = Recording([])
    stage.residency.note(COMPUTE, "began before the recording", before)
    stage.call("a")
    stage.residency.note(COMPUTE, "a", stage.residency.now())
    assert [(span.kind, span.what, span.lane) for span in recording.spans()] == [
        (WAIT, "a", "cpu"),
        (COMPUTE, "a", "cpu"),
    ]
    stage.residency.transfer.recording = None
    stage.residency.note(COMPUTE, "ended behind the recording", stage.residency.now())


class Passed:
    """An event that the device has come to."""

    def query(self) -> bool:
        return True


def interrupt() -> None:
    raise KeyboardInterrupt


# Ahead of need.


def test_what_comes_next_is_fetched_while_there_is_room() -> None:
    stage = Stage(alike("abcd"), window=3)
    with stage.calling("a"):
        assert stage.fetched() == ["a", "b ahead", "c ahead"]


def test_a_unit_that_is_called_again_and_again_is_fetched_once() -> None:
    stage = Stage(alike("abc"), window=2)
    stage.call("aaa")
    assert stage.fetched() == ["a", "b ahead"]


def test_what_has_no_room_ahead_costs_nobody_else_the_room() -> None:
    stage = Stage({"a": 2, "b": 2, "c": 2, "s": 1}, window=5)
    stage.call("sa")
    assert stage.there() == "abs"


def test_a_unit_that_comes_twice_is_counted_once() -> None:
    stage = Stage(alike("abcd"), window=3)
    stage.call("abacd" * 2)
    with stage.calling("a"):
        assert stage.there() == "abc"


def test_when_a_call_within_a_call_has_ended_its_room_is_used() -> None:
    stage = Stage(alike("abc"), window=2)
    with stage.calling("a"), stage.calling("b"):
        assert stage.there() == "ab"
    assert stage.there() == "bc"


def test_a_pass_without_gradients_is_followed_by_another() -> None:
    stage = Stage(alike("abcd"), window=2)
    stage.call("d")
    assert stage.fetched() == ["d", "a ahead"]
    with torch.inference_mode():
        stage.call("b")
    assert stage.fetched() == ["b", "c ahead"]


def test_a_forward_with_gradients_is_followed_by_its_backward() -> None:
    stage = Stage(alike("abcd"), window=2)
    with torch.enable_grad():
        stage.call("a")
        assert stage.fetched() == ["a", "b ahead"]
        stage.call("d")
        assert stage.fetched() == ["d", "c ahead"]
    stage.residency.clear()
    stage.backward("c")
    assert stage.fetched() == ["c", "b ahead"]


def test_the_backward_of_the_first_is_followed_by_a_forward() -> None:
    stage = Stage(alike("abcd"), window=2)
    stage.backward("a")
    assert stage.fetched() == ["a", "b ahead"]


def test_the_next_unit_from_disk_comes_second_however_far() -> None:
    stage = Stage(alike("abcdef"), window=3, disk="ef")
    with stage.calling("a"):
        assert stage.fetched() == ["a", "b ahead", "e ahead"]


def test_a_unit_from_disk_that_comes_second_is_not_passed_over_for_one_behind_it() -> None:
    stage = Stage(alike("abcd"), window=3, disk="cd")
    with stage.calling("a"):
        assert stage.fetched() == ["a", "b ahead", "c ahead"]


def test_behind_the_disks_units_the_others_come_in_their_order() -> None:
    stage = Stage(alike("abcdef"), window=5, disk="f")
    with stage.calling("a"):
        assert stage.fetched() == ["a", "b ahead", "f ahead", "c ahead", "d ahead"]


@pytest.mark.parametrize("window", [2, 3, 4, 6])
@pytest.mark.parametrize("disk", ["ghi", "abc", "cfi", "aei", "h"])
def test_with_two_sources_nothing_is_fetched_twice_in_a_pass(window: int, disk: str) -> None:
    stage = Stage(alike("abcdefghi"), window=window, disk=disk)
    for _ in range(3):
        stage.call("abcdefghi")
    stage.fetched()
    for _ in range(5):
        stage.call("abcdefghi")
    fetched = stage.fetched()
    assert all(name.endswith("ahead") for name in fetched)
    assert max(Counter(fetched).values()) <= 5
    assert set(stage.residency._passing) == {unit for unit in stage.units.values() if unit.slab is not None}


def test_a_call_looks_at_a_few_of_the_coming_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "".join(chr(ord("a") + number) for number in range(500))
    stage = Stage(alike(names), window=400, disk="b")
    looked, upcoming = 0, Schedule.upcoming

    def counting(schedule: Schedule[Any], line: Line[Any]) -> Iterator[Any]:
        nonlocal looked
        for step in upcoming(schedule, line):
            looked += 1
            yield step

    monkeypatch.setattr(Schedule, "upcoming", counting)
    stage.call(names)
    assert looked < 500 * 2 * 2 * 70  # calls, once each at its begin and end, once for each source


# After an optimizer's step.


def test_what_an_optimizer_has_changed_is_fetched_anew_and_ahead() -> None:
    stage = Stage(alike("abc"), window=3)
    stage.train("abc")
    stage.edit("abc")
    stage.fetched()
    with torch.enable_grad(), stage.calling("a"):
        assert stage.fetched() == ["a", "b ahead", "c ahead"]
    assert [shelf.mended for shelf in stage.shelves.values()] == [0, 0, 0]


def test_what_no_optimizer_has_changed_stays() -> None:
    stage = Stage(alike("abc"), window=3)
    stage.train("abc")
    stage.edit("b")
    stage.fetched()
    with torch.enable_grad(), stage.calling("a"):
        assert stage.fetched() == ["b ahead"]


def test_a_copy_that_somebody_computes_with_is_not_fetched_anew() -> None:
    stage = Stage(alike("abc"), window=3)
    stage.train("abc")
    with torch.enable_grad(), stage.calling("a"):
        stage.backward("b")
        stage.edit("a")
        stage.fetched()
        with stage.calling("a"):
            assert stage.fetched() == []


def test_an_edit_in_the_middle_of_a_pass_is_mended_in_place() -> None:
    stage = Stage(alike("abc"), window=3)
    stage.call("abcabc")
    stage.fetched()
    stage.edit("a")
    stage.call("a")
    assert stage.fetched() == []
    assert stage.shelves["a"].mended == 1


@pytest.mark.parametrize("interrupted_by", ["nothing", "another thread"])
def test_a_step_is_told_by_the_backward_of_the_forward_wherever_that_runs(interrupted_by: str) -> None:
    stage = Stage(alike("abc"), window=3)
    with torch.enable_grad():
        stage.call("abc")
    elsewhere(lambda: stage.backward("cba"))
    if interrupted_by == "another thread":
        elsewhere(lambda: stage.call("a"))
    stage.edit("a")
    stage.fetched()
    with torch.enable_grad(), stage.calling("a"):
        assert stage.fetched() == ["a"]


# A backward has its units.


def test_a_backward_fetches_ahead() -> None:
    stage = Stage(alike("abcd"), window=2)
    with torch.enable_grad():
        stage.call("abcd")
    stage.fetched()
    stage.backward("dcb")
    assert stage.fetched() == ["b ahead", "a ahead"]


def test_one_backward_asks_for_a_unit_once_however_many_tensors_it_needs_of_it() -> None:
    stage = Stage(alike("ab"), window=2)
    with torch.enable_grad():
        stage.call("ab")
    slabs: list[Slab] = []
    in_a_backward(lambda: slabs.extend(stage.lend(name) for name in "bbaa"))
    assert slabs == [stage.units[name].slab for name in "bbaa"]
    assert stage.residency.counts.needed == 4
    stage.backward("a")
    assert stage.residency.counts.needed == 5


def test_a_unit_that_was_dropped_in_the_middle_of_a_backward_comes_again() -> None:
    stage = Stage(alike("ab"), window=2)
    slabs: list[Slab] = []

    def work() -> None:
        stage.lend("a")
        stage.residency.clear()
        slabs.append(stage.lend("a"))

    in_a_backward(work)
    assert slabs == [stage.units["a"].slab]


def test_a_backward_sees_what_was_edited_since() -> None:
    stage = Stage(alike("ab"), window=2)
    with torch.enable_grad():
        stage.call("a")
    stage.edit("a")
    stage.backward("a")
    assert stage.shelves["a"].mended == 1


def test_a_call_knows_how_its_backward_gets_its_units_again() -> None:
    stage = Stage(alike("ab"), window=2)
    with stage.calling("a") as use:
        ((slab, loan),) = stage.residency.loans(use)
    assert loan.version(0) == stage.shelves["a"].edits
    assert slab is stage.units["a"].slab
    stage.residency.clear()
    weight = loan.weight(0, loan.version(0))
    again = stage.units["a"].slab
    assert again not in (None, slab)
    assert weight is again.tensors()[0]


def test_a_weight_is_taken_while_nobody_drops_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(alike("ab"), window=2)
    with torch.enable_grad():
        stage.call("a")
    owned = stage.residency.lock._is_owned  # type: ignore[attr-defined]
    tensors, safe = Slab.tensors, list[bool]()

    def noting(self: Slab) -> list[torch.Tensor]:
        safe.append(owned())
        return tensors(self)

    monkeypatch.setattr(Slab, "tensors", noting)
    in_a_backward(lambda: (stage.lend("a"), stage.lend("a")))
    assert safe == [True, True], "its slab may be passed on before somebody has the weight"


def test_a_version_is_asked_while_nobody_drops_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(alike("ab"), window=2)
    with stage.calling("a") as use:
        ((_, loan),) = stage.residency.loans(use)
    owned = stage.residency._changed._is_owned  # type: ignore[attr-defined]
    monkeypatch.setattr(stage.units["a"], "edits", lambda index: 7 if owned() else 0)
    assert loan.version(0) == 7
    monkeypatch.setattr(stage.units["a"], "versions_at_home", lambda: [5 if owned() else 0])
    assert loan.version(0) == 7, "those at home are asked once in a call"
    with stage.calling("a") as use:
        ((_, another),) = stage.residency.loans(use)
    assert another.version(0) == 12


# Room.


def test_what_is_larger_than_the_window_is_taken_outside_it(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage({"a": 2, "b": 1}, window=1)
    stage.call("a")
    assert "no room for a" in caplog.text
    assert stage.window.free_bytes() == SIZE
    assert stage.there() == "", "memory that no window counts is held"


def test_what_is_taken_outside_the_window_stays_for_the_rest_of_a_backward() -> None:
    stage = Stage({"a": 2, "b": 1}, window=1)
    fetched: list[str] = []

    def work() -> None:
        for _ in range(2):
            stage.lend("a")
            stage.lend("b")
        fetched.extend(stage.fetched())

    in_a_backward(work)
    assert fetched == ["a", "b"]
    assert "a" not in stage.there()


def test_a_call_never_waits_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(alike("abc"), window=1)
    elsewhere(lambda: stage.call("a"))
    for _ in range(2):
        with stage.calling("a"), stage.calling("b"):
            assert stage.shows("a") == stage.shows("b") == "live"
        stage.residency.clear()
    assert caplog.text.count("no room for b") == 2
    assert stage.residency._running == 0


def test_what_is_to_stay_goes_before_anything_is_taken_outside(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(alike("abk"), window=2, kept="k")
    stage.call("k")
    with stage.calling("a"), stage.calling("b"):
        assert stage.there() == "ab"
    assert "outside" not in caplog.text


def test_no_more_is_dropped_than_is_needed() -> None:
    stage = Stage({**alike("abcd"), "e": 3}, window=3)
    stage.call("ad")
    assert stage.there() == "bcd"


def test_a_call_waits_for_room_that_another_threads_call_has(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(alike("ab"), window=1)
    holding, waits = threading.Event(), threading.Semaphore(0)
    stage.when_waiting(waits.release)

    def hold() -> None:
        with stage.calling("a"):
            holding.set()
            assert waits.acquire(timeout=LONG)
            stage.call("a")  # something ends, but gives no room
            assert waits.acquire(timeout=LONG)

    with meanwhile(hold):
        assert holding.wait(LONG)
        with stage.calling("b"):
            assert stage.there() == "b"
    assert "outside" not in caplog.text


def test_a_backward_never_waits_for_a_call(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(alike("ab"), window=1)
    with stage.calling("a"):
        elsewhere(lambda: stage.backward("b"))
    assert "no room for b" in caplog.text


def test_a_call_waits_for_room_that_a_backward_has(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(alike("abc"), window=2)
    lent, waiting = threading.Event(), threading.Event()
    shelf = stage.shelves["a"]
    shelf.slow = True

    def go_on() -> None:
        lent.set()
        assert waiting.wait(LONG)
        shelf.end()

    shelf.when_waited = go_on
    stage.when_waiting(waiting.set)
    holding, done = threading.Event(), threading.Event()

    def hold() -> None:
        with stage.calling("b"):
            holding.set()
            assert done.wait(LONG)

    with meanwhile(hold):
        assert holding.wait(LONG)
        with meanwhile(lambda: stage.backward("a")):
            assert lent.wait(LONG)
            with stage.calling("c"):
                assert stage.there() == "bc"
            done.set()
    assert "outside" not in caplog.text


def test_of_two_calls_that_wait_for_each_others_room_one_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(alike("abcd"), window=2)
    both, waiting = threading.Barrier(2, timeout=LONG), threading.Event()
    stage.when_waiting(waiting.set)

    def wait_within_a_call() -> None:
        with stage.calling("a"):
            both.wait()
            stage.call("b")

    with meanwhile(wait_within_a_call), stage.calling("c"):
        both.wait()
        assert waiting.wait(LONG)
        stage.call("d")
    assert "no room for d" in caplog.text
    assert "no room for b" not in caplog.text
    assert stage.residency._running == 0


def test_a_call_waits_for_memory_that_a_fetch_which_nobody_wants_still_fills(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(alike("abc"), window=2)
    unwanted = stage.shelves["b"]
    unwanted.slow = True
    with stage.calling("a"):
        fetch = stage.units["b"].fetch
        assert fetch is not None
        stage.residency._changed = Meanwhile(stage.residency.lock, [lambda: None, unwanted.end])
        with stage.calling("c"):
            assert stage.there() == "ac"
            assert fetch.cancelled
            assert "outside" not in caplog.text
            stage.call("b")  # and does not wait for that fetch for ever
            assert "no room for b" in caplog.text


def test_fetches_that_nobody_wanted_are_forgotten_once_they_have_ended() -> None:
    stage = Stage(alike("abcd"), window=2)
    unwanted = stage.shelves["b"]
    for _ in range(20):
        unwanted.slow = True
        with stage.calling("a"):
            stage.residency._drop(stage.units["b"])  # as whoever needs its room does
        unwanted.end()
        stage.call("bcd")
    assert stage.fetched().count("b ahead") == 20
    assert len(stage.residency._draining) <= 1


class Meanwhile(threading.Condition):
    """A condition during whose waits things happen."""

    def __init__(self, lock: threading.RLock, happenings: Sequence[Callable[[], None]]) -> None:
        super().__init__(lock)
        self._happenings = list(happenings)

    def wait(self, timeout: float | None = None) -> bool:
        self._happenings.pop(0)()
        return False


# Nothing under way.


def test_a_window_for_calls_only_is_given_back_when_none_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    memory: list[weakref.ref[Arena]] = []

    def noting(nbytes: int, device: torch.device) -> Arena:
        arena = new_arena(nbytes, device)
        memory.append(weakref.ref(arena))
        return arena

    monkeypatch.setattr("overspill.slab.new_arena", noting)
    stage = Stage(alike("abc"), window=2, held=False)
    stage.call("abc")
    stage.residency.idle()
    assert stage.there() == ""
    assert [arena() for arena in memory] == [None]


def test_nothing_follows_the_last_call_before_the_end() -> None:
    stage = Stage(alike("abc"), window=2, held=False)
    stage.call("abc")
    stage.residency.idle()
    stage.fetched()
    stage.call("abc")
    assert stage.fetched() == ["a", "b ahead", "c ahead"]


def test_a_window_that_is_held_stays_as_it_is() -> None:
    stage = Stage(alike("abc"), window=2)
    stage.call("a")
    stage.residency.idle()
    stage.backward("a")
    assert stage.there() == "ab"


def test_a_window_for_calls_only_stays_until_the_backward_has_ended() -> None:
    stage = Stage(alike("abc"), window=2, held=False)
    there: list[str] = []

    def work() -> None:
        stage.lend("b")
        stage.residency.idle()
        stage.lend("a")
        there.append(stage.there())

    for _ in range(2):
        in_a_backward(work)
        assert stage.there() == ""
    assert there == ["ab", "ab"]
    stage.backward("a")
    assert stage.there() == ""


def test_a_unit_may_be_asked_for_outside_any_backward_also_after_one_that_failed() -> None:
    stage = Stage(alike("abc"), window=2)

    def fail() -> None:
        stage.lend("a")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_a_backward(fail)
    assert stage.lend("a") is stage.units["a"].slab


def test_the_end_of_a_backward_leaves_calls_alone_that_are_under_way() -> None:
    stage = Stage(alike("abc"), window=3, held=False)
    with stage.calling("a"):
        stage.backward("b")
        assert stage.there() == "abc"


def test_clearing_leaves_what_is_in_use_and_waits_for_what_is_on_its_way() -> None:
    stage = Stage(alike("abc"), window=3)
    stage.shelves["b"].slow = True
    with stage.calling("a"):
        stage.residency.clear()
        assert stage.there() == "a"
        assert stage.window.free_bytes() == 2 * SIZE
    stage.residency.clear()
    assert stage.there() == ""
