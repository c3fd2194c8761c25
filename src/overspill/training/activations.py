"""Saved tensors that leave the device until backward needs them.

Note: the life of a saved tensor. What an operation saves for its backward is *packed*: the bytes of its storage are
sent to pinned host memory, once for all tensors that share them, and a `Saved` with its dtype, shape, strides and
version is what autograd keeps. The last few that were sent are *held* on the device too: backward needs those first.
The others exist in host memory alone. When backward *unpacks* one, those that were packed before it are brought back
ahead of their need. A storage that came back is let go as soon as each tensor in it was asked for, so its memory lives
as long as autograd uses it. Unpacking changes nothing but that, so it may happen twice, or never.
"""

import heapq
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overspill.config import DEVICE_ALIGNMENT, MIB, SMALL_TENSOR
from overspill.devices import current_stream, current_stream_waits, keep_for, running_backward, total_memory
from overspill.graph import SavedTensor, Version
from overspill.host_link import Departure, HostLink
from overspill.tensors import storage_key, view_over
from overspill.training.spill import SpillFile


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of the saved tensors is on the device at once."""

    small: int = SMALL_TENSOR
    """Storages smaller than this stay where they are."""
    held: int
    """Bytes that may wait for their copy, or stay because they were saved last; a tensor at least, or two of those that
    leave one by one, unless 0."""
    ahead: int
    """Bytes that are brought back before backward asks for them; one tensor at least."""

    @classmethod
    def usual(cls, device: torch.device, *, double_buffering: bool = True) -> "Limits":
        """One slab each way or two; a slab is what hides the latency of a copy, and a small part of the device."""
        slab = min(_SLAB, total_memory(device) // 128)
        slabs = 2 if double_buffering else 1
        return cls(held=slabs * slab, ahead=slabs * slab)


_SLAB = 128 * MIB
"""Eight Llama blocks, 2 × 4,096 tokens, on an H200: 0.44 s and 8.1 GB. With 512 MiB 0.40 s, and 0.8 GB more."""

_WHOLE = 4
"""A tensor that spans at least one part in this many of its storage takes all of it along: others will follow."""


class Stored:
    """Some bytes of one storage, in host memory."""

    def __init__(
        self, storage: torch.UntypedStorage, start: int, held: torch.Tensor, link: HostLink, file: SpillFile | None
    ) -> None:
        self.start = start  # where they begin in the storage
        self.nbytes = held.nbytes
        self.views: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._storage = StorageWeakRef(storage)  # nothing else can have its identity meanwhile
        self._address = storage.data_ptr()
        self._held: torch.Tensor | None = None  # the storage itself, while it is still on the device
        self._comes = False  # it is on its way back, or there
        self._back: torch.Tensor | None = None
        self._arrived: torch.Event | None = None
        self._stream: torch.Stream | None = None
        self._awaited: weakref.WeakSet[Saved] = weakref.WeakSet()  # the views that have not been asked for yet
        self._served: int | None = None  # the backward in which all of them were
        self._link = link
        self._departure: Departure | None = link.send([held])[0]
        self._held = held
        self._spilled = None if file is None else file.put(self._departure, link.pool)

    def covers(self, start: int, end: int) -> bool:
        return self.start <= start and end <= self.start + self.nbytes

    def on_device(self) -> bool:
        """Whether the bytes are there, be it because somebody else keeps the storage."""
        if self._held is None and not self._comes:
            storage = _alive(self._storage)
            if storage is not None and storage.data_ptr() == self._address:
                self._held = view_over(storage, torch.uint8, self.start, (self.nbytes,), (1,))
        return self._held is not None or self._comes

    def was_served(self) -> bool:
        """Whether this backward has asked for all of its views already."""
        return self._served is not None and self._served == running_backward()

    def let_go(self) -> None:
        """Exist in host memory alone, or in a file alone."""
        if self._held is not None:
            if self._departure is not None:
                self._departure.wait()
            self._held = None
        if self._spilled is not None:
            self._departure = None  # its host memory is free once it is written

    def bring_back(self) -> None:
        """Be on the device soon, for each of the views once."""
        self._comes = True
        self._awaited = weakref.WeakSet(self.views)
        if self._spilled is None:
            self._cross()
        else:
            self._spilled.begin_to_read()

    def _cross(self) -> None:
        """From host memory to the device."""
        if self._spilled is not None:
            host, left = self._spilled.host(), None
        else:
            assert self._departure is not None
            host, left = self._departure.host, self._departure.left
        self._back, self._arrived = self._link.bring_back(host, self.nbytes, left)
        self._stream = current_stream(self._link.device)

    def memory(self, view: "Saved") -> tuple[torch.UntypedStorage, int]:
        """A storage with the bytes, for one of the views, and which byte of the original it begins with."""
        if self._held is not None:
            return self._held.untyped_storage(), 0
        if self._back is None:
            self._cross()
        back = self._back
        assert back is not None
        current_stream_waits(back.device, self._arrived)
        here = current_stream(back.device)
        if here is not None and here != self._stream:
            keep_for(here, back)
        self._awaited.discard(view)
        if not self._awaited:
            self._back, self._comes = None, False
            self._served = running_backward()
        return back.untyped_storage(), self.start

    def __del__(self) -> None:
        # The device may still be reading or writing: nobody else may have the memory before it is done.
        if self._held is not None and self._departure is not None and not self._departure.ended():
            _unfinished.append((self._departure.wait, self._held))
        if self._back is not None and self._arrived is not None and not self._arrived.query():
            _unfinished.append((self._arrived.synchronize, self._back))


_unfinished: deque[tuple[Callable[[], None], torch.Tensor]] = deque()
"""Copies that nobody needs any more: how to wait for each, and its memory on the device. Filled by finalizers, which
may run in any thread and must not lock."""


def _end_unfinished() -> None:
    """Wait for them: a host that is ahead of its device would otherwise hold their memory until the step has ended.

    The device does not run dry meanwhile. Whatever their graph did since is queued already.
    """
    while True:
        try:
            wait, _ = _unfinished.popleft()
        except IndexError:  # be it that another thread was faster
            return
        wait()


def _alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage, if somebody still has it, and has not given its memory away."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage if storage is not None and storage.nbytes() else None


class Saved:
    """One saved tensor: which bytes it is made of, and how."""

    def __init__(self, tensor: torch.Tensor, stored: Stored, place: int) -> None:
        self.stored = stored
        self.place = place  # in the order of saving, those counted that are gone
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._start = int(tensor.storage_offset()) * tensor.element_size()
        self._version = Version(tensor)
        stored.views.add(self)

    def check(self) -> None:
        """Raise as autograd does if the tensor was edited since."""
        self._version.check()

    def values(self) -> torch.Tensor:
        """The tensor, whose bytes are on the device."""
        storage, start = self.stored.memory(self)
        return view_over(storage, self._dtype, self._start - start, self._shape, self._stride)


Packed = Saved | SavedTensor


class _Ahead:
    """What a backward has on the device ahead of its asking, and down to which place in the order of saving.

    Each of its questions is answered from where the last one ended: many small tensors may be ahead.
    """

    def __init__(self) -> None:
        self.down_to = 0
        """Whatever lies between this place and the last question is counted, asked for already, or gone."""
        self.nbytes = 0
        """Of those that are counted."""
        self._backward: int | None = None
        self._from = 0  # the place that it began with
        self._counted: dict[int, tuple[int, int]] = {}  # by identity: bytes, and place; the highest place first

    def __len__(self) -> int:
        return len(self._counted)

    def __contains__(self, stored: Stored) -> bool:
        return id(stored) in self._counted

    def come_to(self, place: int) -> None:
        """This thread's backward needs what was saved before `place` next."""
        backward = running_backward()
        if backward is None or backward != self._backward or not self.down_to < place <= self._from:
            self._backward, self._from, self.down_to, self.nbytes = backward, place, place, 0
            self._counted.clear()
        while self._counted and next(iter(self._counted.values()))[1] >= place:
            self._forget(next(iter(self._counted)))

    def count(self, stored: Stored, place: int) -> bool:
        """It is at `place`. Whether it was counted before, at a place above."""
        before = self._counted.pop(id(stored), None)
        self._counted[id(stored)] = stored.nbytes, place
        self.nbytes += stored.nbytes if before is None else 0
        return before is not None

    def served(self, stored: Stored) -> None:
        """It may have been asked for."""
        if stored in self and stored.was_served():
            self._forget(id(stored))

    def _forget(self, key: int) -> None:
        self.nbytes -= self._counted.pop(key)[0]


class Activations:
    """All that is saved through one set of hooks. The forward's thread packs, autograd's threads unpack."""

    def __init__(self, device: torch.device, limits: Limits | None = None, *, to_disk: bool = False) -> None:
        self.device = device
        self.file = SpillFile() if to_disk else None
        self.limits = limits or Limits.usual(device)
        self._links: dict[torch.device, HostLink] = {}
        self._known: weakref.WeakValueDictionary[tuple[int, int, int], Stored] = weakref.WeakValueDictionary()
        self._order: list[weakref.ref[Stored]] = []  # of saving
        self._gone = 0  # places in front of those
        self._held: deque[tuple[weakref.ref[Stored], int]] = deque()  # with their bytes
        self._held_bytes = 0  # of all of them, those counted that are gone
        self._largest_held = 0
        self._ahead = _Ahead()
        self._lock = threading.RLock()
        self.nbytes_sent = 0
        """Since this was made."""

    def _link(self, device: torch.device) -> HostLink:
        if device not in self._links:
            self._links[device] = HostLink(device)
        return self._links[device]

    @property
    def pinned_bytes(self) -> int:
        """Host memory taken so far."""
        return sum(link.pool.nbytes for link in self._links.values())

    @property
    def held_bytes(self) -> int:
        """Device memory of what waits for its copy, or stays because it was saved last."""
        with self._lock:
            held = [stored for reference, _ in self._held if (stored := reference()) is not None]
            return sum(stored.nbytes for stored in held if stored.on_device())

    @property
    def unused_bytes(self) -> int:
        """Of that, what holds nothing now."""
        return sum(link.pool.free_bytes() for link in self._links.values())

    # Forward.

    def pack(self, tensor: torch.Tensor, stays: Collection[int] = (), *, waiting: int = 1) -> Packed:
        """Send a tensor away, or keep it if it is not worth it or its storage is in `stays`.

        As many as `waiting` may wait for their copies however large they are.
        """
        if not self._leaves(tensor) or storage_key(tensor) in stays:
            return SavedTensor(tensor)
        with self._lock:
            stored = self._stored(tensor, waiting)
            self._order.append(weakref.ref(stored))
            return Saved(tensor, stored, self._gone + len(self._order) - 1)

    def _leaves(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or is_traceable_wrapper_subclass(tensor):
            return False
        if tensor.device.type != self.device.type or tensor.layout is not torch.strided or _is_parameter(tensor):
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.is_conj() or tensor.is_neg():
            return False
        start, end = _span(tensor)
        return end - start >= max(self.limits.small, 1) and storage_key(tensor) != 0

    def _stored(self, tensor: torch.Tensor, waiting: int) -> Stored:
        _end_unfinished()
        self._forget_gone()
        storage = tensor.untyped_storage()
        start, end = _span(tensor)
        version = 0 if tensor.is_inference() else tensor._version
        key = storage._cdata, storage.data_ptr(), version
        known = self._known.get(key)
        if known is not None and known.covers(start, end):
            return known
        if (end - start) * _WHOLE >= storage.nbytes():
            start, end = 0, storage.nbytes()
        start = start // DEVICE_ALIGNMENT * DEVICE_ALIGNMENT  # kernels may round differently on another alignment
        held = view_over(storage, torch.uint8, start, (end - start,), (1,))
        stored = Stored(storage, start, held, self._link(tensor.device), self.file)
        self.nbytes_sent += stored.nbytes
        self._known[key] = stored
        self._forget_gone_at_the_ends()
        self._held.append((weakref.ref(stored), stored.nbytes))
        self._held_bytes += stored.nbytes
        self._largest_held = max(self._largest_held, stored.nbytes)
        self._let_go_of_the_oldest(waiting)
        return stored

    def _forget_gone(self) -> None:
        """What graphs had saved that are gone: the last one's, or the oldest's where another has been made since."""
        while self._order and self._order[-1]() is None:
            self._order.pop()
        oldest = next((index for index, reference in enumerate(self._order) if reference() is not None), 0)
        del self._order[:oldest]
        self._gone += oldest

    def _let_go_of_the_oldest(self, waiting: int) -> None:
        if self._held_bytes <= self.limits.held:
            return
        allowed = self.limits.held
        if allowed and waiting * self._largest_held > allowed:
            self._forget_what_is_not_held()
            allowed = max(allowed, sum(heapq.nlargest(waiting, (nbytes for _, nbytes in self._held))))
        while self._held_bytes > allowed:
            reference, nbytes = self._held.popleft()
            self._held_bytes -= nbytes
            stored = reference()
            if stored is not None and stored.on_device():
                stored.let_go()

    def _forget_gone_at_the_ends(self) -> None:
        """Of what is held: those of other graphs, without looking at all that are between."""
        held = self._held
        while held and held[0][0]() is None:
            self._held_bytes -= held.popleft()[1]
        while held and held[-1][0]() is None:
            self._held_bytes -= held.pop()[1]

    def _forget_what_is_not_held(self) -> None:
        held = [(stored, each) for each in self._held if (stored := each[0]()) is not None]
        self._held = deque(each for stored, each in held if stored.on_device())
        self._held_bytes = sum(nbytes for _, nbytes in self._held)
        self._largest_held = max((nbytes for _, nbytes in self._held), default=0)

    def end_forward(self) -> None:
        """Nothing more will be saved: hold no more than what is allowed, however large the last tensor is."""
        with self._lock:
            self._let_go_of_the_oldest(waiting=0)

    # Backward.

    def unpack(self, packed: Packed, *, back_to: int = 0) -> torch.Tensor:
        """The tensor as it was. Those saved before it are brought back ahead of their need, down to place `back_to`."""
        if isinstance(packed, SavedTensor):
            return packed.values()
        packed.check()
        with self._lock:
            _end_unfinished()
            if not packed.stored.on_device():
                packed.stored.bring_back()
            values = packed.values()
            self._ahead.served(packed.stored)
            self._bring_back(packed.place, back_to, self.limits.ahead)
            return values

    def bring_back_before(self, place: int, room: int) -> None:
        """Backward will soon need what was saved before `place`: `room` bytes of it, or a tensor."""
        with self._lock:
            self._bring_back(place, 0, room)

    def _bring_back(self, before: int, back_to: int, room: int) -> None:
        """What backward will need next, as far as there is room: one tensor at least."""
        ahead = self._ahead
        ahead.come_to(min(before, self._gone + len(self._order)))
        for place in range(ahead.down_to - 1, max(back_to, self._gone) - 1, -1):
            stored = self._order[place - self._gone]()
            if stored is not None and not stored.was_served():
                if ahead and ahead.nbytes + stored.nbytes > room and stored not in ahead:
                    return
                if not ahead.count(stored, place) and not stored.on_device():
                    stored.bring_back()
            ahead.down_to = place

    @contextmanager
    def saving(self, stays: Collection[int] = ()) -> Iterator[None]:
        """Within, what operations save is sent away, but for storages in `stays`."""
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: self.pack(tensor, stays), self.unpack):
            yield


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter, or a view of one: `nn.Linear` saves `weight.t()`."""
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches: from, to."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()
