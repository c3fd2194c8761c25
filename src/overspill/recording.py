"""What happened when: reads, copies, waits and computations. Counted always, noted in full while somebody traces."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from overspill.devices import Moment, synchronize

READ, COPY, WAIT, COMPUTE = "read", "copy", "wait", "compute"


class Span(NamedTuple):
    """Something that took time, in seconds since the recording began."""

    kind: str
    """READ, COPY, WAIT or COMPUTE."""
    what: str
    """A unit's name."""
    lane: str
    """Where it took place: a reader thread, a link, a device."""
    start: float
    seconds: float
    nbytes: int


class _Noted(NamedTuple):
    kind: str
    what: str
    lane: str
    start: Moment
    end: Moment
    nbytes: int


class Recording:
    """All that is done for a model between two moments. Safe from several threads."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = [device for device in devices if device.type != "cpu"]
        self._noted: deque[_Noted] = deque()  # appending to one needs no lock
        self._ended: list[Span] | None = None
        for device in self._devices:
            synchronize(device)
        self._zeros = {device: Moment(device) for device in self._devices}
        self._zero = Moment(torch.device("cpu"))

    def note(self, kind: str, what: str, lane: str, start: Moment, end: Moment, nbytes: int = 0) -> None:
        """Remember something that began and ended, or will have when the device gets there."""
        self._noted.append(_Noted(kind, what, lane, start, end, nbytes))

    def spans(self) -> list[Span]:
        """Everything, by its start. Ends the recording."""
        if self._ended is None:
            for device in self._devices:
                synchronize(device)
            self._ended = sorted(self._resolved(), key=lambda span: span.start)
            self._noted.clear()
        return self._ended

    def _resolved(self) -> Iterator[Span]:
        for noted in self._noted:
            zero = self._zero if noted.start.device is None else self._zeros[noted.start.device]
            seconds = max(0.0, noted.end.seconds_since(noted.start))
            yield Span(noted.kind, noted.what, noted.lane, noted.start.seconds_since(zero), seconds, noted.nbytes)


KEPT: Final = 32
"""Passes whose times are remembered."""


@dataclass
class Counts:
    """What was done for a model so far, and how well the prefetch guessed. Kept under the locks of those who do it."""

    needed: int = 0
    """How often a unit was called for."""
    ready: int = 0
    """… and was there already."""
    under_way: int = 0
    """… and was on its way: fetched ahead of need, but not early enough."""
    moved: dict[str, int] = field(default_factory=dict)
    """Bytes, by the tier that they came from."""
    waited: float = 0.0
    """Seconds that calling threads stood still. A device that waits for a copy while its host runs on is not here."""
    passes: int = 0
    times: deque[tuple[Moment, Moment]] = field(default_factory=lambda: deque(maxlen=KEPT))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, *, ready: bool, under_way: bool) -> None:
        """A unit was called for."""
        self.needed += 1
        self.ready += ready
        self.under_way += under_way and not ready

    def move(self, tier: str, nbytes: int) -> None:
        """Bytes set out from a tier."""
        self.moved[tier] = self.moved.get(tier, 0) + nbytes

    def end_pass(self, start: Moment, end: Moment) -> None:
        """The model was called."""
        with self.lock:
            self.passes += 1
            self.times.append((start, end))

    def pass_seconds(self) -> list[float]:
        """How long the last passes took, of the device's time. The first is not among them: it warms up."""
        with self.lock:
            times = list(self.times)
            skip = 1 if self.passes == len(times) else 0
        return [end.seconds_since(start) for start, end in times[skip:]]


class Stopwatch:
    """Adds the time of its block to what the calling thread has waited."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._counts.waited += time.perf_counter() - self._start
