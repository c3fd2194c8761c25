"""One aligned byte buffer a unit, typed views into it, and the memory that such buffers are taken from."""

import contextlib
import sys
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch

from overspill.config import DEVICE_ALIGNMENT, MIB, align, format_size
from overspill.devices import (
    CPU,
    HostPages,
    current_stream,
    free_memory,
    host_bytes,
    keep_for,
    lease_range,
    new_arena,
    record_event,
    storage_users,
    stream_numbers,
    touch,
)
from overspill.errors import BudgetError
from overspill.tensors import TensorSpec, over, storage_key


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a unit lies in its slab."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, specs: Sequence[TensorSpec]) -> "Layout":
        """One for all units alike: whose layout is the same object can have each other's slabs as they are."""
        return _layout(tuple((spec.shape, spec.dtype, spec.strides) for spec in specs))

    def spots(self) -> Iterator[tuple[TensorSpec, int]]:
        """Each tensor and where it starts."""
        return zip(self.specs, self.offsets, strict=True)

    def index_at(self, start: int) -> int:
        """Which tensor lies at a byte."""
        return self._by_offset[bisect_right(self._sorted_offsets, start) - 1]

    @cached_property
    def _by_offset(self) -> list[int]:
        return sorted(range(len(self.offsets)), key=self.offsets.__getitem__)

    @cached_property
    def _sorted_offsets(self) -> list[int]:
        return sorted(self.offsets)

    def view(self, memory: torch.Tensor, index: int) -> torch.Tensor:
        """Tensor `index` as a typed view of `memory`."""
        spec, start = self.specs[index], self.offsets[index]
        return spec.shaped(memory[start : start + spec.nbytes].view(spec.dtype))


@lru_cache(maxsize=1024)
def _layout(tensors: tuple[tuple[tuple[int, ...], torch.dtype, tuple[int, ...] | None], ...]) -> Layout:
    specs, offsets, end = [TensorSpec(*each) for each in tensors], [], 0
    for spec in specs:
        offsets.append(end)
        end = align(end + spec.nbytes, DEVICE_ALIGNMENT)
    return Layout(tuple(specs), tuple(offsets), end)


def _forget_passed(events: list[torch.Event]) -> None:
    """Nobody has to wait for these any more. Other threads may add to them meanwhile, and nothing of that is lost."""
    for event in list(events):
        if event.query():
            with contextlib.suppress(ValueError):  # another thread has just removed it
                events.remove(event)


@dataclass(eq=False)
class _Gap:
    """A free range of the window. `events` must have passed before its bytes may be overwritten."""

    start: int
    end: int
    events: list[torch.Event] = field(default_factory=list)
    lent_on: dict[int, torch.Stream] = field(default_factory=dict)


def _merged(gaps: list[_Gap]) -> list[_Gap]:
    """Gaps in order, with neighbours made one."""
    gaps.sort(key=lambda gap: gap.start)
    merged = gaps[:1]
    for gap in gaps[1:]:
        if gap.start == merged[-1].end:
            merged[-1].end = gap.end
            merged[-1].events += gap.events
        else:
            merged.append(gap)
    return merged


class Slab:
    """Bytes on the compute device that hold one unit while it is on its way or live."""

    def __init__(
        self,
        memory: torch.Tensor,
        events: list[torch.Event],
        uses: list[torch.Event],
        lent_on: dict[int, torch.Stream] | None = None,
    ) -> None:
        self.memory = memory
        self.overwrite_after = events  # what whoever fills the slab must wait for
        self.uses = uses  # what whoever has these bytes next must wait for
        self.lent_on = {} if lent_on is None else lent_on  # … and all that these streams, by number, do until then
        self.name = ""  # of the unit that they are
        self.layout: Layout | None = None  # of that unit's tensors in it
        self.is_extra = False  # no window has room for it: it goes as soon as nobody uses it
        self.arena: object = None  # stands for what it was taken from
        self._tensors: list[torch.Tensor] = []
        self._copies: weakref.WeakSet[object] | None = None
        _slabs[storage_key(memory)] = self

    def tensors(self) -> list[torch.Tensor]:
        """The unit's tensors, plain ones, where they lie in it. Made once."""
        if not self._tensors:
            assert self.layout is not None
            storage = self.memory.untyped_storage()
            with torch.inference_mode(False), torch.no_grad():
                # Not views of the slab for autograd: those share a version, and each of these needs its own.
                self._tensors = [
                    over(storage, spec.dtype, start, spec.shape, spec.strides or ())
                    for spec, start in self.layout.spots()
                ]
        return self._tensors

    def note_copy(self, copy: object) -> None:
        """As long as `copy` lives, it knows these bytes by their storage: another unit must come to other memory."""
        if self._copies is None:
            self._copies = weakref.WeakSet()
        self._copies.add(copy)

    def is_shared(self) -> bool:
        """Whether anybody but this has a view of these bytes, or one of the tensors, or knows them by their storage."""
        if self._copies:
            return True
        return _references(self.memory, self._tensors) != _references_of_one(len(self._tensors))

    def used_until(self, event: torch.Event | None) -> None:
        """The work in front of `event` uses these bytes: nobody may overwrite them before it has passed."""
        if event is not None:
            _forget_passed(self.uses)  # a slab may be used millions of times
            self.uses.append(event)

    def lend_on(self, number: int) -> None:
        """The current stream, which has this number, uses these bytes from now on, nobody knows for how long."""
        if number not in self.lent_on:
            stream = current_stream(self.memory.device)
            if stream is not None:
                self.lent_on[number] = stream

    def end_loans(self) -> None:
        """Nobody uses these bytes any more, as far as is known: their last uses are those that are queued by now."""
        for stream in self.lent_on.values():
            self.used_until(record_event(self.memory.device, stream))
        self.lent_on.clear()


_slabs: weakref.WeakValueDictionary[int, Slab] = weakref.WeakValueDictionary()
"""By their storages."""


def slab_of(tensor: torch.Tensor) -> Slab | None:
    """The slab that a tensor lies in. Its bytes may become other ones, without a trace in any version."""
    return _slabs.get(storage_key(tensor))


def _references(memory: torch.Tensor, tensors: list[torch.Tensor]) -> list[int]:
    """How often some memory and all tensors over it are referred to: from Python, and from within torch."""
    users = storage_users(memory.untyped_storage())
    return [users, *map(sys.getrefcount, tensors), *map(_uses_within_torch, tensors)]


@lru_cache(maxsize=64)
def _references_of_one(count: int) -> list[int]:
    """The same where one list has the tensors, and nobody anything else."""
    with torch.inference_mode(False), torch.no_grad():
        memory = torch.empty(1, dtype=torch.uint8)
        return _references(memory, [over(memory.untyped_storage(), torch.uint8, 0, (1,), (1,)) for _ in range(count)])


_uses_within_torch: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]


class _Arena:
    """The window's memory, and which ranges of it are free."""

    def __init__(self, nbytes: int, device: torch.device, streams: Sequence[torch.Stream]) -> None:
        self._made_on: torch.Stream | None = None
        self.device = device
        self.key = object()
        self.memory = new_arena(nbytes, device)
        self.nbytes = nbytes
        self._made_on = current_stream(device)
        self._streams = set(streams)  # that use it
        self._stream = stream_numbers(device)
        # Torch's allocator gives memory that work queued on this stream may still use: copies on others must wait.
        made = record_event(device)
        self._gaps = [_Gap(0, nbytes, [] if made is None else [made])]
        self._returned: deque[_Gap] = deque()  # filled by finalizers, which may run in any thread and must not lock

    def take(self, nbytes: int, *, to_stay: bool) -> Slab | None:
        self._collect()
        gaps = reversed(self._gaps) if to_stay else iter(self._gaps)
        gap = next((gap for gap in gaps if gap.end - gap.start >= nbytes), None)
        if gap is None:
            return None
        start = gap.end - nbytes if to_stay else gap.start
        taken, events = _Gap(start, start + nbytes), list(gap.events)
        gap.start, gap.end = (gap.start, start) if to_stay else (taken.end, gap.end)
        if gap.start == gap.end:
            self._gaps.remove(gap)
        memory, owner = lease_range(self.memory, start, nbytes)
        weakref.finalize(owner, self._returned.append, taken).atexit = False
        self._note_user()
        slab = Slab(memory, events, taken.events, taken.lent_on)
        slab.arena = self.key
        return slab

    def pass_on(self, slab: Slab) -> None:
        slab.overwrite_after = [*slab.uses, *self._last_uses([slab.lent_on])]
        slab.uses.clear()  # the list itself is the range's, for when that is free
        slab.lent_on.clear()
        self._note_user()

    def _last_uses(self, lent_on: Iterable[Mapping[int, torch.Stream]]) -> list[torch.Event]:
        """Marks behind all that may have used some bytes: on the streams that they were lent on, and on this one.

        A view that outlived its unit's release may have been used after the events that the release recorded.
        """
        here = record_event(self.device)
        if here is None:
            return []
        streams = {number: stream for each in lent_on for number, stream in each.items()}
        streams.pop(self._stream(), None)
        elsewhere = [record_event(self.device, stream) for stream in streams.values()]
        return [here, *(mark for mark in elsewhere if mark is not None)]

    def _note_user(self) -> None:
        user = current_stream(self.device)
        if user is not None:
            self._streams.add(user)

    def __del__(self) -> None:
        """Torch's allocator gives the memory to whoever comes next on the stream that it was made on: not too soon."""
        if self._made_on is None or sys.is_finalizing():
            return
        if self.free_bytes() == self.nbytes:
            for event in (event for gap in self._gaps for event in gap.events):
                self._made_on.wait_event(event)
        else:  # someone uses a slab of it for longer, nobody knows on which stream
            for stream in self._streams:
                keep_for(stream, self.memory)

    def free_bytes(self) -> int:
        self._collect()
        return sum(gap.end - gap.start for gap in self._gaps)

    def _collect(self) -> None:
        """Put what finalizers returned back among the gaps, merging neighbours."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        if not returned:
            return
        last_uses = self._last_uses([gap.lent_on for gap in returned])
        for gap in returned:
            gap.events += last_uses
            gap.lent_on.clear()
        self._gaps = _merged([*self._gaps, *returned])  # all at once: a step's gradients are hundreds
        for gap in self._gaps:  # also of those that nobody took lately
            _forget_passed(gap.events)


class Window:
    """A fixed piece of the compute device's memory that slabs are taken from. The caller serialises calls.

    Note: the life of a slab. A slab is a tensor with a storage of its own over a range of the window (see
    `devices.lease_range`). Nobody hands a slab back: its range is free when the last tensor that views it is gone.
    So an output that aliases a weight, a tensor that autograd saved or one that a user's hook kept stays right for as
    long as it lives; it only makes the window smaller meanwhile. The host may be ahead of the device: a freed range
    carries the events of its last uses, and whoever fills it next waits for them on the device.
    """

    def __init__(
        self, nbytes: int, device: torch.device, *, streams: Sequence[torch.Stream] = (), held: bool = True
    ) -> None:
        self.nbytes = align(nbytes, DEVICE_ALIGNMENT)
        self.device = device
        self.held = held  # its memory is taken at once and for good, not only while something streams through it
        self._streams = streams  # that copy to it
        self._arena = _Arena(self.nbytes, device, streams) if held else None

    def take(self, nbytes: int, *, to_stay: bool = False) -> Slab | None:
        """A slab of `nbytes`, or None when no gap is wide enough.

        What is going `to_stay` is taken from the far end, so that it does not cut up the room that the others share.
        """
        if self._arena is None:
            self._arena = _Arena(self.nbytes, self.device, self._streams)
        return self._arena.take(align(max(nbytes, 1), DEVICE_ALIGNMENT), to_stay=to_stay)

    def pass_on(self, slab: Slab) -> bool:
        """Let a slab and its tensors be for whoever comes next, if nobody else has a part. Quicker than a new one."""
        if self._arena is None or slab.arena is not self._arena.key or slab.is_shared():
            return False
        self._arena.pass_on(slab)
        return True

    def let_go(self) -> None:
        """Give the memory back until it is needed again, but for what slabs that are still in use hold of it."""
        if not self.held:
            self._arena = None

    def free_bytes(self) -> int:
        """Bytes in no slab now."""
        return self.nbytes if self._arena is None else self._arena.free_bytes()


def extra_slab(nbytes: int, device: torch.device, streams: Sequence[torch.Stream]) -> Slab:
    """A slab outside any window, for the rare call that could otherwise never go on."""
    slab = _Arena(max(nbytes, 1), device, streams).take(max(nbytes, 1), to_stay=False)
    assert slab is not None
    slab.is_extra = True
    return slab


class HostPool:
    """Host memory for what leaves a device for a while, pinned for it, and used again and again.

    A slab of it lives as a window's does: its range is free when the last tensor that views it is gone. So the pool
    grows to the most that was ever away at once, and stays there.
    """

    _GROWTH = 128 * MIB  # at least: many small arenas would be cut into useless ends

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arenas: deque[_Arena] = deque()  # first the one that had room last: most of the others are full
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """All that the pool has taken."""
        return sum(arena.nbytes for arena in self._arenas)

    def free_bytes(self) -> int:
        """Bytes in no slab now."""
        with self._lock:
            return sum(arena.free_bytes() for arena in self._arenas)

    def take(self, nbytes: int) -> Slab:
        """A slab of `nbytes`. Whoever fills it waits for its `overwrite_after`."""
        nbytes = align(max(nbytes, 1), DEVICE_ALIGNMENT)
        with self._lock:
            for _ in range(len(self._arenas)):
                slab = self._arenas[0].take(nbytes, to_stay=False)
                if slab is not None:
                    return slab
                self._arenas.rotate(-1)
            self._arenas.appendleft(self._grown(nbytes))
            slab = self._arenas[0].take(nbytes, to_stay=False)
            assert slab is not None
            return slab

    def _grown(self, nbytes: int) -> "_Arena":
        free = free_memory(CPU)
        if nbytes > free:
            raise BudgetError(
                f"what leaves {self._device} needs {format_size(nbytes)} more host memory, where {format_size(free)} "
                f"are free and {format_size(self.nbytes)} are in use for this already. Offload fewer layers"
            )
        several = nbytes * -(-self._GROWTH // nbytes)  # those that follow are mostly alike, and leave no useless ends
        arena = _Arena(several if several <= free else nbytes, CPU, [])
        if self._device.type != "cpu":
            assert isinstance(arena.memory, HostPages)
            touch(host_bytes(arena.memory))
            arena.memory.register(self._device)
        return arena
