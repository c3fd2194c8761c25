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
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overspill.config import DEVICE_ALIGNMENT, MIB, SMALL_TENSOR
from overspill.devices import running_backward, total_memory
from overspill.graph import SavedTensor
from overspill.host_link import HostLink
from overspill.slab import slab_of
from overspill.tensors import storage_key, view_over
from overspill.training.spill import SpillFile
from overspill.training.stored import Packed, Saved, Stored, end_unfinished


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of the saved tensors is on the device at once."""

    small: int = SMALL_TENSOR
    """Storages smaller than this stay where they are."""
    held: int
    """Bytes that may wait for their copy, or stay because they were saved last; a tensor at least, or two of those that
    leave one by one, unless 0."""
    ahead: int
    """Bytes that are brought back before backward asks for them; as many as the largest tensor has, unless 0."""

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


class _Held:
    """What waits for its copy, or stays because it was saved last: the oldest first."""

    def __init__(self) -> None:
        self._entries: deque[tuple[weakref.ref[Stored], int]] = deque()  # with their bytes
        self._nbytes = 0  # of all of them, those counted that are gone

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, stored: Stored) -> None:
        self._forget_gone_at_the_ends()
        self._entries.append((weakref.ref(stored), stored.nbytes))
        self._nbytes += stored.nbytes

    def _forget_gone_at_the_ends(self) -> None:
        """Those of other graphs, without looking at all that are between."""
        entries = self._entries
        while entries and entries[0][0]() is None:
            self._nbytes -= entries.popleft()[1]
        while entries and entries[-1][0]() is None:
            self._nbytes -= entries.pop()[1]

    def let_go(self, limit: int, waiting: int) -> None:
        """Hold `limit` bytes at most, or as many as `waiting` tensors however large they are."""
        if self._nbytes <= limit:
            return
        if limit:
            limit = max(limit, sum(heapq.nlargest(waiting, (nbytes for _, nbytes in self._entries))))
        while self._nbytes > limit:
            reference, nbytes = self._entries.popleft()
            self._nbytes -= nbytes
            stored = reference()
            if stored is not None and stored.on_device():
                stored.let_go()

    def nbytes_on_device(self) -> int:
        """Bytes of those that are there."""
        alive = [stored for reference, _ in self._entries if (stored := reference()) is not None]
        return sum(stored.nbytes for stored in alive if stored.on_device())


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
        self._known: weakref.WeakValueDictionary[_Bytes, Stored] = weakref.WeakValueDictionary()
        self._order: list[weakref.ref[Stored]] = []  # of saving
        self._gone = 0  # places in front of those
        self._run_began = 0  # the place that the first of some blocks in a row began with
        self._largest = 0  # bytes of one that has left
        self._held = _Held()
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
            return self._held.nbytes_on_device()

    @property
    def unused_bytes(self) -> int:
        """Of that, what holds nothing now."""
        return sum(link.pool.free_bytes() for link in self._links.values())

    # Forward.

    def begin_call(self, *, goes_on: bool) -> int:
        """A block is called, the next that sends what it saves: right behind another such block if it `goes_on`.

        Returns the place in the order of saving that the first of these blocks began with. What was saved before that
        is not needed before some other block has been gone through, which may take all the memory there is.
        """
        with self._lock:
            self._forget_gone()  # first: the places of a graph that is gone are given once more
            next_place = self._gone + len(self._order)
            self._run_began = min(self._run_began, next_place) if goes_on else next_place
            return self._run_began

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
        end_unfinished()
        self._forget_gone()
        storage = tensor.untyped_storage()
        start, end = _span(tensor)
        version = 0 if tensor.is_inference() else tensor._version
        # The chunks of torch.unsafe_chunk, which recurrent modules edit one by one, count their edits one by one.
        counted = _span(tensor if tensor._base is None else tensor._base)
        key = storage._cdata, storage.data_ptr(), version, *counted
        known = self._known.get(key)
        if known is not None and known.covers(start, end):
            return known
        if (end - start) * _WHOLE >= counted[1] - counted[0]:
            start, end = min(start, counted[0]), max(end, counted[1])
        start = start // DEVICE_ALIGNMENT * DEVICE_ALIGNMENT  # kernels may round differently on another alignment
        held = view_over(storage, torch.uint8, start, (end - start,), (1,))
        stored = Stored(storage, start, held, self._link(tensor.device), self.file, slab_of(tensor))
        self.nbytes_sent += stored.nbytes
        self._largest = max(self._largest, stored.nbytes)
        self._known[key] = stored
        self._held.add(stored)
        self._held.let_go(self.limits.held, waiting)
        return stored

    def _forget_gone(self) -> None:
        """What graphs had saved that are gone: the last one's, or the oldest's where another has been made since."""
        while self._order and self._order[-1]() is None:
            self._order.pop()
        oldest = next((index for index, reference in enumerate(self._order) if reference() is not None), 0)
        del self._order[:oldest]
        self._gone += oldest

    def end_forward(self) -> None:
        """Nothing more will be saved: hold no more than what is allowed, however large the last tensor is."""
        with self._lock:
            self._held.let_go(self.limits.held, waiting=0)

    def let_go(self) -> None:
        """Hold nothing on the device."""
        with self._lock:
            self._held.let_go(0, waiting=0)

    # Backward.

    def unpack(self, packed: Packed, *, back_to: int = 0) -> torch.Tensor:
        """The tensor as it was. Those saved before it are brought back ahead of their need, down to place `back_to`."""
        if isinstance(packed, SavedTensor):
            return packed.values()
        packed.check()
        with self._lock:
            end_unfinished()
            if not packed.stored.on_device():
                packed.stored.bring_back()
            values = packed.values()
            self._ahead.served(packed.stored)
            ahead = self.limits.ahead
            self._bring_back(packed.place, back_to, max(ahead, self._largest) if ahead else 0)
            return values

    def bring_back_before(self, place: int, room: int, back_to: int) -> None:
        """Backward will soon need what was saved before `place`: `room` bytes of it, or a tensor, down to `back_to`."""
        with self._lock:
            self._bring_back(place, back_to, room)

    def _bring_back(self, before: int, back_to: int, room: int) -> None:
        """What backward will need next, as far as there is room: one tensor at least, unless there is none."""
        if not room:
            return
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
    def saving(self, stays: Collection[int] = (), back_to: int = 0) -> Iterator[None]:
        """Within, what operations save is sent away, but for storages in `stays`.

        `back_to`: the place down to which backward brings back ahead what was saved before.
        """
        unpack = partial(self.unpack, back_to=back_to)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: self.pack(tensor, stays), unpack):
            yield


_Bytes = tuple[int, int, int, int, int]
"""Of a storage: its identity and address, the version of some of its bytes, and which those are, from and to."""


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
