"""Who is on the compute device: the window shared out among the units that calls need now and those that come next."""

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from overspill.devices import record_event
from overspill.errors import CheckpointError
from overspill.schedule import Schedule
from overspill.slab import Slab, Window, extra_slab
from overspill.streamed import StreamedUnit
from overspill.transfer import DEMANDED, PREFETCHED, Fetch, Transfer

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Root:
    """A module whose forward needs some units, all at once."""

    path: str
    module: nn.Module
    units: list[StreamedUnit] = field(default_factory=list)


@dataclass(eq=False)
class Use:
    """One call's hold on a root's units: what it has got so far."""

    root: Root
    units: list[StreamedUnit] = field(default_factory=list)
    running: bool = False


class Residency:
    """The streamed units of one compute device, their window, and the order in which they come."""

    def __init__(self, roots: Sequence[Root], window: Window, transfer: Transfer) -> None:
        self.device = window.device
        self.window = window
        self.transfer = transfer
        self._units = list(dict.fromkeys(unit for root in roots for unit in root.units))
        self._by_worth = sorted(self._units, key=lambda unit: unit.kept)  # what streams through goes first
        self._kept = {unit for unit in self._units if unit.kept}
        self._schedule = Schedule(roots)
        self._two_sources = len({unit.store.reads_disk for unit in self._units}) > 1
        self._changed = threading.Condition()
        self._draining: list[Fetch] = []
        self._running = 0  # uses by calls that are under way and do not themselves wait for room
        self._mine = threading.local()  # this thread's share of those

    def acquire(self, use: "Use") -> None:
        """Let the root's modules show tensors on the compute device. `release` must follow, also if this fails."""
        root = use.root
        with self._changed:
            self._schedule.note(root)
            for unit in root.units:
                unit.users += 1
                use.units.append(unit)
            for unit in root.units:
                self._ensure_fetched(unit)
            self._prefetch()
        for unit in root.units:
            self._arrive(unit)
        with self._changed:
            for unit in root.units:
                unit.make_live()
                unit.bind(root.module)
            self._count_running(+1)
            use.running = True

    def release(self, use: "Use") -> None:
        """Undo what `acquire` did, as far as it got."""
        with self._changed:
            if use.running:
                self._count_running(-1)
                use.running = False
            end = record_event(self.device) if use.units else None
            while use.units:
                self._end_use(use.units.pop(), end)
            self._prefetch()
            self._changed.notify_all()

    def _end_use(self, unit: StreamedUnit, end: torch.Event | None) -> None:
        unit.users -= 1
        if unit.slab is not None:
            unit.slab.used_until(end)
        if unit.users == 0:
            unit.unbind()
            if unit.fetch is not None and (not unit.fetch.finished() or unit.fetch.error is not None):
                self._drop(unit)

    def _ensure_fetched(self, unit: StreamedUnit) -> None:
        while unit.slab is None:
            slab = self._take(unit)
            if unit.slab is None:  # taking a slab may wait, and another thread may have been faster
                unit.start(slab, self.transfer, DEMANDED)

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
            with self._changed:
                if unit.fetch is fetch:
                    assert unit.slab is not None
                    unit.start(unit.slab, self.transfer, DEMANDED)

    def idle(self) -> None:
        """No call is under way. A window that is held for calls only is given back."""
        if self.window.held:
            return
        with self._changed:
            self._schedule.end_pass()
            self._empty()
            self.window.let_go()

    def clear(self) -> None:
        """Give up every slab. No call is under way."""
        with self._changed:
            self._empty()

    def _empty(self) -> None:
        for unit in self._units:
            if unit.users == 0 and unit.slab is not None:
                self._drop(unit)
        while self._draining:
            self._draining.pop().wait_host()

    # Room in the window.

    def _take(self, unit: StreamedUnit) -> Slab:
        """A slab for a unit that is needed now: waits for other calls to end, never for this one."""
        while True:
            slab = self._room(unit, keep=self._kept)
            if slab is None and not self._wait_for_others():
                slab = self._room(unit, keep=set()) or self._outside(unit)
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
        self._draining = [fetch for fetch in self._draining if not fetch.finished()]
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

    def _room(self, unit: StreamedUnit, keep: set[StreamedUnit]) -> Slab | None:
        """A slab for `unit`, if need be in the place of others that nobody uses and that are not in `keep`."""
        slab = self.window.take(unit.nbytes, to_stay=unit.kept)
        if slab is None:
            for other in self._by_worth:
                if other.slab is not None and other.users == 0 and other not in keep:
                    self._drop(other)
                    slab = self.window.take(unit.nbytes, to_stay=unit.kept)
                    if slab is not None:
                        break
        return slab

    def _drop(self, unit: StreamedUnit) -> None:
        draining = unit.drop()
        if draining is not None:
            self._draining.append(draining)

    def _count_running(self, change: int) -> None:
        self._running += change
        self._mine.running = getattr(self._mine, "running", 0) + change

    # Ahead of need.

    def _prefetch(self) -> None:
        """Fetch what comes next, nearest first, while there is room."""
        keep: set[StreamedUnit] = set()
        for unit in self._ahead():
            if unit in keep:
                continue
            keep.add(unit)
            if unit.slab is None:
                slab = self._room(unit, keep | self._kept)
                if slab is None:
                    return
                unit.start(slab, self.transfer, PREFETCHED)

    def _ahead(self) -> Iterator[StreamedUnit]:
        """The units of the coming steps. The next one from disk comes second, however far: the disk must not idle."""
        coming = (unit for root in self._schedule.upcoming() for unit in root.units)
        if not self._two_sources:
            yield from coming
            return
        units = list(coming)
        yield from units[:1]
        yield from (unit for unit in units[1:] if unit.store.reads_disk and unit.slab is None)
        yield from units[1:]
