"""What a graph saved and has in host memory: the bytes of a storage, and the tensors that are made of them."""

import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from overspill.devices import current_stream, current_stream_waits, keep_for, running_backward
from overspill.graph import SavedTensor, Version
from overspill.host_link import Departure, HostLink
from overspill.slab import Slab
from overspill.tensors import view_over
from overspill.training.spill import SpillFile


class Stored:
    """Some bytes of one storage, in host memory."""

    def __init__(
        self,
        storage: torch.UntypedStorage,
        start: int,
        held: torch.Tensor,
        link: HostLink,
        file: SpillFile | None,
        slab: Slab | None,
    ) -> None:
        self.start = start  # where they begin in the storage
        self.nbytes = held.nbytes
        self.views: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._storage = StorageWeakRef(storage)  # nothing else can have its identity meanwhile
        self._is_slab = slab is not None  # what its storage holds by then may come from a file, or be gone
        if slab is not None:
            slab.note_copy(self)
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
        self._departure.let_go()  # it is ours to hold
        self._held = held
        self._spilled = None if file is None else file.put(self._departure, link.pool)

    def covers(self, start: int, end: int) -> bool:
        return self.start <= start and end <= self.start + self.nbytes

    def on_device(self) -> bool:
        """Whether the bytes are there, be it because somebody else keeps the storage."""
        if self._held is None and not self._comes and not self._is_slab:
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


def end_unfinished() -> None:
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
