"""Who is on the compute device: the window shared out among the units that calls need now and those that come next."""

import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from overspill.devices import (
    CPU,
    NO_BACKWARD,
    Moment,
    at_end_of_backward,
    backward_number,
    record_event,
    running_backward,
    stream_numbers,
)
from overspill.errors import CheckpointError
from overspill.graph import refuse_edited
from overspill.mapping import MappedSlab
from overspill.recording import WAIT, Counts, Stopwatch
from overspill.schedule import Line, Schedule
from overspill.slab import Slab, Window, extra_slab
from overspill.steps import Phase, Root, Step, Steps
from overspill.streamed import StreamedUnit
from overspill.transfer import DEMANDED, PREFETCHED, Fetch, Transfer

logger = logging.getLogger(__name__)

_LOOK_AHEAD = 64
"""Steps: each call looks at so many, however many units the window has room for."""


@dataclass(eq=False)
class Use:
    """One call's hold on a root's units: what it has got so far."""

    root: Root
    units: list[StreamedUnit] = field(default_factory=list)
    running: bool = False

    def slabs(self) -> list[Slab]:
        """Where the units are."""
        return [unit.slab for unit in self.units if unit.slab is not None]


class Loan:
    """A unit's bytes, to be had again in the backward of one call of a root."""

    __slots__ = ("_homes", "_residency", "_step", "_unit")

    def __init__(self, residency: "Residency", step: Step, unit: StreamedUnit) -> None:
        self._residency, self._step, self._unit = residency, step, unit
        self._homes: list[int] | None = None  # versions: what is edited at home during the call is not computed with

    def weight(self, index: int, version: int) -> torch.Tensor:
        """A weight, arrived as far as the current stream is concerned. Raises if it is not at `version` any more.

        A backward asks for each weight of a block, one right after the other, and short steps wait for that.
        """
        residency, unit = self._residency, self._unit
        with residency.lock:  # another thread may be dropping the unit, and passing its slab on, at any other time
            now = unit.version(index)
            if now == version and unit.slab is not None and residency.is_at(self._step, unit):
                return unit.slab.tensors()[index]
        if now != version:
            shape = list(unit.store.layout.specs[index].shape)
            refuse_edited(f"an offloaded weight of shape {shape} was edited between forward and backward")
        return residency.lend(self._step, unit)[index]

    def version(self, index: int) -> int:
        """Grows with each in-place edit of a weight that autograd would notice, at home or in a call."""
        unit = self._unit
        with self._residency.lock:
            if self._homes is None:
                self._homes = unit.versions_at_home()
            return self._homes[index] + unit.edits(index)


class Residency:
    """The streamed units of one compute device, their window, and the order in which they come."""

    def __init__(self, roots: Sequence[Root], window: Window, transfer: Transfer, counts: Counts | None = None) -> None:
        self.device = window.device
        self.counts = Counts() if counts is None else counts
        self.window = window
        self.transfer = transfer
        self._units = list(dict.fromkeys(unit for root in roots for unit in root.units))
        self._kept = [unit for unit in self._units if unit.kept]
        self._passing: dict[StreamedUnit, None] = {}  # those not kept that have a slab of the window, oldest first
        self._steps = Steps(roots)
        self._schedule = Schedule(self._steps.guess())
        self._trained: Line[Step] | None = None  # of the thread that ran the last forward with gradients
        self._backward: int | None = None  # the backward that was served last
        self._stream = stream_numbers(self.device)
        self._pass = 0  # of training: a forward and its backward
        self._two_sources = len({unit.store.reads_disk for unit in self._units}) > 1
        self.lock = threading.RLock()  # of all that is here, and of the units
        self._changed = threading.Condition(self.lock)
        self._draining: list[Fetch] = []
        self._lacked_room = False  # of something that was to be fetched ahead
        self._running = 0  # uses by calls that are under way and do not themselves wait for room
        self._mine = threading.local()  # this thread's share of those

    def acquire(self, use: "Use") -> None:
        """Let the root's modules show tensors on the compute device. `release` must follow, also if this fails."""
        root, now = use.root, self._now()
        with_grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with self.lock:
            if now is not None:
                self._begin_backward()
            line = self._line()
            last, before = line.last, None if line.last is None else line.last.phase
            if before is Phase.BACKWARD and now is None:
                self._pass += 1  # an optimizer may have been there
            step = self._steps[root, Phase.of_a_call(with_grad=with_grad)]
            goes_on = step is last and before is Phase.BACKWARD  # which needs its units more than once
            is_first = step.phase is Phase.FORWARD and before is not Phase.FORWARD
            if not goes_on:
                self._schedule.note(step, line)
            if with_grad:
                self._trained = line
            for unit in root.units:
                unit.users += 1
                unit.calls += 1
                use.units.append(unit)
            # A backward that computes a block once more has just asked for a weight of it, most of the time.
            awaited = root.units if now is None else [unit for unit in root.units if unit.arrived_for != now]
            for unit in awaited:
                self._drop_outdated(unit, users=1)
                self._ensure_fetched(unit, may_map=not with_grad)
            if not goes_on:
                self._prefetch(line)
        if awaited:
            self._wait_for(root.path, awaited)
        with self.lock:
            for unit in awaited:
                unit.bring_up_to_date()
            for unit in root.units:
                unit.make_live()
                unit.bind(root.module, is_first=is_first)
                unit.arrived_for = now
            self._count_running(+1)
            use.running = True

    def release(self, use: "Use") -> None:
        """Undo what `acquire` did, as far as it got."""
        with self.lock:
            if use.running:
                self._count_running(-1)
                use.running = False
            try:
                self._end_uses(use)
            finally:
                if self._lacked_room:
                    self._prefetch(self._line())
                self._changed.notify_all()

    def _end_uses(self, use: "Use") -> None:
        if not use.units:
            return
        # A graph that was made, or is gone through, may use the bytes later on the same stream.
        stays = torch.is_grad_enabled() or running_backward() is not None
        number, end = (self._stream(), None) if stays else (None, record_event(self.device))
        failure = None
        while use.units:
            try:
                self._end_use(use.units.pop(), number, end)
            except BaseException as error:  # the others' uses end all the same
                failure = error
        if failure is not None:
            raise failure

    def _end_use(self, unit: StreamedUnit, number: int | None, end: torch.Event | None) -> None:
        unit.users -= 1
        unit.calls -= 1
        if unit.slab is not None and number is not None:
            unit.slab.lend_on(number)
        elif unit.slab is not None:
            unit.slab.used_until(end)
        try:
            if unit.calls == 0:  # a backward of another thread that has it yet needs the slab only
                unit.unbind()
            fetch = unit.fetch
            if unit.users == 0 and fetch is not None and (not fetch.finished() or fetch.error is not None):
                self._drop(unit)
        finally:
            if unit.users == 0:
                unit.let_go()
                if self._backward is None:  # else it may be wanted once more before that ends
                    self._drop_extra(unit)

    def _drop_extra(self, unit: StreamedUnit) -> None:
        if unit.slab is not None and unit.slab.is_extra and unit.users == 0:
            self._drop(unit)

    def loans(self, use: "Use") -> list[tuple[Slab, Loan]]:
        """What a call computes with, and how its backward gets that again."""
        step = self._steps[use.root, Phase.BACKWARD]
        return [(unit.slab, Loan(self, step, unit)) for unit in use.units if unit.slab is not None]

    def is_at(self, step: Step, unit: StreamedUnit) -> bool:
        """Whether this thread's backward is at `step`, and has waited for the unit on its stream already."""
        backward = backward_number()
        return (
            unit.arrived_for == (backward, self._stream())
            and self._backward == backward
            and self._trained is not None
            and self._trained.last is step
        )

    def lend(self, step: Step, unit: StreamedUnit) -> list[torch.Tensor]:
        """The tensors of a unit for a step of a backward. While somebody has one, nobody gets their memory."""
        line, now = self._line(), self._now()
        with self.lock:
            self._begin_backward()
            is_new = line.last is not step  # else its block was computed once more, and has seen to what comes next
            if is_new:
                self._schedule.note(step, line)
            unit.users += 1
        try:
            with self.lock:
                # Without waiting for room: a forward that is under way may be waiting for us.
                self._ensure_fetched(unit, may_map=False, may_wait=False)
                if is_new or self._lacked_room:
                    self._prefetch(line)
            self._wait_for(step.root.path, [unit])
            with self.lock:
                unit.bring_up_to_date()
                unit.arrived_for = now
                assert unit.slab is not None
                unit.slab.lend_on(self._stream())
                return list(unit.slab.tensors())
        finally:
            with self.lock:
                unit.users -= 1
                self._changed.notify_all()

    def _now(self) -> tuple[int, int] | None:
        """Which backward this thread works for, and on which stream. Nothing where it works for none."""
        backward = backward_number()
        return None if backward == NO_BACKWARD else (backward, self._stream())

    def _begin_backward(self) -> None:
        """Know which backward this is, and be told when it ends."""
        backward = running_backward()
        if backward is not None and backward != self._backward:
            at_end_of_backward(self.end_backward)
        self._backward = backward

    def end_backward(self) -> None:
        """A backward that needed units is over."""
        self._backward = None
        with self.lock:
            for unit in self._units:
                if unit.slab is not None and unit.users == 0:
                    unit.slab.end_loans()  # whoever made a stream may end it now
                self._drop_extra(unit)
        if self._running == 0:
            self._rest()

    def _line(self) -> Line[Step]:
        """What this thread does is part of: in a backward, of the pass whose gradients it computes."""
        if running_backward() is not None and self._trained is not None:
            return self._trained
        return self._schedule.line()

    def _ensure_fetched(self, unit: StreamedUnit, *, may_map: bool, may_wait: bool = True) -> None:
        self._hold_or_leave_mapped(unit, may_map=may_map)
        ready = unit.slab is not None and (unit.fetch is None or unit.fetch.arrived())
        self.counts.count(ready=ready, under_way=unit.slab is not None)
        if unit.slab is None:
            slab = self._take(unit, may_wait=may_wait)
            if unit.slab is not None:  # taking a slab may wait, and another thread was faster
                self._hold_or_leave_mapped(unit, may_map=may_map)
            if unit.slab is None:
                self._start(unit, slab, DEMANDED)
        assert unit.slab is not None
        if unit.fetch is None:  # it is mapped
            self._start(unit, unit.slab, DEMANDED)

    def _hold_or_leave_mapped(self, unit: StreamedUnit, *, may_map: bool) -> None:
        if not unit.store.reads_disk:
            return
        if may_map:
            self._hold_mapped(unit)
        else:
            self._leave_mapped(unit)

    def _hold_mapped(self, unit: StreamedUnit) -> None:
        """Use a unit where it lies in the page cache, if its files can be kept from changing meanwhile."""
        slab = self._mapped(unit)
        if slab is None or slab.hold():
            return
        self._leave_mapped(unit)

    def _mapped(self, unit: StreamedUnit) -> MappedSlab | None:
        """The unit's slab, if it shows files' pages or can be one that does."""
        slab = unit.mapped
        if slab is not None and not slab.is_held and slab.mapping is not unit.store.mapping():
            self._drop(unit)  # what it shows is no longer where the values are
        if unit.slab is None and self.device == CPU:
            unit.slab = unit.store.map()
        return unit.mapped

    def _leave_mapped(self, unit: StreamedUnit) -> None:
        """Have a unit in memory of its own: for a backward that comes at nobody knows what time, or for a writer."""
        slab = unit.mapped
        if slab is None:
            return
        if slab.is_held:  # by other calls: whoever merely waits to use it has no lease yet
            slab.make_own()
        else:
            self._drop(unit)

    def _start(self, unit: StreamedUnit, slab: Slab, priority: int) -> None:
        if not unit.kept and not isinstance(slab, MappedSlab):
            self._passing[unit] = None
        unit.start(slab, self.transfer, priority)
        unit.checked_in = self._pass
        assert unit.fetch is not None
        self.counts.move("disk" if unit.store.reads_disk else "cpu", unit.fetch.nbytes)

    def now(self) -> Moment | None:
        """This moment, if somebody records."""
        return None if self.transfer.recording is None else Moment(self.device)

    def note(self, kind: str, what: str, start: Moment | None) -> None:
        """Have the recording know what took place on the compute device since `start`."""
        recording = self.transfer.recording
        if recording is not None and start is not None:
            recording.note(kind, what, f"{self.device}", start, Moment(self.device))

    def _wait_for(self, what: str, units: Sequence[StreamedUnit]) -> None:
        start = self.now()
        with Stopwatch(self.counts):
            for unit in units:
                self._arrive(unit)
        self.note(WAIT, what, start)

    def _arrive(self, unit: StreamedUnit) -> None:
        """Wait for the unit's bytes. What failed ahead of time is tried once more, now that it is needed."""
        tried_again = False
        while True:
            fetch = unit.fetch
            assert fetch is not None
            try:
                fetch.wait()
                return
            except CheckpointError:
                if tried_again:
                    raise
            tried_again = True
            with self.lock:
                if unit.fetch is fetch:
                    assert unit.slab is not None
                    self._start(unit, unit.slab, DEMANDED)

    def idle(self) -> None:
        """No call is under way."""
        if running_backward() is None:  # else `end_backward` follows
            self._rest()

    def _rest(self) -> None:
        """Give back a window that is held for calls only."""
        if self.window.held:
            return
        with self.lock:
            self._schedule.end_pass()
            self._empty(mapped=False)  # those take nothing of the window
            self.window.let_go()

    def clear(self) -> None:
        """Give up every slab. No call is under way."""
        with self.lock:
            self._empty(mapped=True)

    def _empty(self, *, mapped: bool) -> None:
        for unit in self._units:
            if unit.users == 0 and unit.slab is not None and (mapped or unit.mapped is None):
                self._drop(unit)
        while self._draining:
            self._draining.pop().wait_host()

    # Room in the window.

    def _take(self, unit: StreamedUnit, *, may_wait: bool) -> Slab:
        """A slab for a unit that is needed now: waits for other calls to end, never for this one."""
        while True:
            slab = self._room(unit, instead_of=self._passing)
            if slab is None and not (may_wait and self._wait_for_others()):
                slab = self._room(unit, instead_of=self._kept) or self._outside(unit)
            if slab is not None:
                return slab

    def _outside(self, unit: StreamedUnit) -> Slab:
        logger.warning(
            "the window of %d bytes has no room for %s while tensors of earlier units are still in use; "
            "taking %d bytes outside it",
            self.window.nbytes,
            unit.name,
            unit.nbytes,
        )
        return extra_slab(unit.nbytes, self.device, self.transfer.streams)

    def _wait_for_others(self) -> bool:
        """Wait until something may have been freed. False if nothing under way can free anything."""
        self._draining = self._still_draining()
        if self._draining:
            self._changed.wait(timeout=0.001)
            return True
        mine = getattr(self._mine, "running", 0)
        if self._running == mine:
            return False
        self._running -= mine
        try:
            self._changed.wait(timeout=1.0)
        finally:
            self._running += mine
        return True

    def _still_draining(self) -> list[Fetch]:
        return [fetch for fetch in self._draining if not fetch.finished()]

    def _room(
        self, unit: StreamedUnit, instead_of: Iterable[StreamedUnit], keep: Collection[StreamedUnit] = ()
    ) -> Slab | None:
        """A slab for `unit`, if need be in the place of some `instead_of` which nobody uses, but not of `keep`."""
        slab = self.window.take(unit.nbytes, to_stay=unit.kept)
        if slab is None:
            for other in list(instead_of):
                if other.slab is not None and other.users == 0 and other.mapped is None and other not in keep:
                    slab = self._in_place_of(other, unit)
                    if slab is not None:
                        break
        return slab

    def _in_place_of(self, other: StreamedUnit, unit: StreamedUnit) -> Slab | None:
        """Drop a unit for the sake of another, which gets the slab as it is where the two are alike."""
        slab = other.slab
        self._drop(other)
        if slab is not None and other.could_be(unit) and self.window.pass_on(slab):
            return slab
        del slab  # its range is free with it
        return self.window.take(unit.nbytes, to_stay=unit.kept)

    def _drop(self, unit: StreamedUnit) -> None:
        self._passing.pop(unit, None)
        draining = unit.drop()
        if draining is not None:
            self._draining = [*self._still_draining(), draining]

    def _count_running(self, change: int) -> None:
        self._running += change
        self._mine.running = getattr(self._mine, "running", 0) + change

    # Ahead of need.

    def _prefetch(self, line: Line[Step]) -> None:
        """Fetch what comes next while there is room, in the place of what comes later."""
        if line.last is None:
            return
        self._lacked_room = False
        wanted = self._wanted(line)
        for unit in wanted:
            if unit in line.last.root.units:
                continue
            self._drop_outdated(unit)
            if line.last.phase is Phase.INFERENCE:
                self._prefetch_mapped(unit)
            if unit.slab is None:
                slab = self._room(unit, self._passing, keep=wanted)
                if slab is None:
                    self._lacked_room = True
                    return
                self._start(unit, slab, PREFETCHED)

    def _wanted(self, line: Line[Step]) -> dict[StreamedUnit, None]:
        """The units that the window should have by now: those of the last step, and of the coming ones while they fit.

        A backward's last step counts though its units have no users: it may need them again.
        """
        assert line.last is not None
        wanted = dict.fromkeys(line.last.root.units)
        room = self.window.nbytes - sum(unit.nbytes for unit in wanted)
        for unit in self._ahead(line):
            if unit in wanted:
                continue
            room -= unit.nbytes
            if room < 0:
                break
            wanted[unit] = None
        return wanted

    def _prefetch_mapped(self, unit: StreamedUnit) -> None:
        slab = self._mapped(unit)
        if slab is None or unit.fetch is not None:
            return
        if not slab.hold():
            self._drop(unit)  # it will have to be copied
            return
        try:
            self._start(unit, slab, PREFETCHED)
        finally:
            slab.end_leases()  # nobody computes with it yet

    def _drop_outdated(self, unit: StreamedUnit, users: int = 0) -> None:
        """Let go of a copy that was made before an optimizer's step, so that it is fetched anew in one piece."""
        if unit.slab is None or unit.users != users or unit.checked_in == self._pass:
            return
        unit.checked_in = self._pass
        if unit.is_outdated():
            self._drop(unit)

    def _ahead(self, line: Line[Step]) -> Iterator[StreamedUnit]:
        """The units of the coming steps: the next one, then those on disk first: the disk must not idle."""
        if self._two_sources:
            yield from islice(self._coming(line), 1)
            yield from (unit for unit in self._coming(line) if unit.store.reads_disk)
        yield from self._coming(line)

    def _coming(self, line: Line[Step]) -> Iterator[StreamedUnit]:
        return (unit for step in islice(self._schedule.upcoming(line), _LOOK_AHEAD) for unit in step.root.units)
