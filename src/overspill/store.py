"""Where homes keep their bytes: in pinned host memory or on disk. One store a unit."""

import itertools
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

import torch
from torch.autograd.graph import increment_version

from overspill.checkpoint.index import FileSpan, SourceFile
from overspill.checkpoint.reader import FileReader, RangeReader
from overspill.devices import ALONE_ON_ITS_PAGES, CPU, HostPages, PinnedRanges, host_bytes, touch
from overspill.homes import DiskValues, HostSlot, HostSlots, HostTensor, disk_home, host_home
from overspill.mapping import MappedSlab, Mapping
from overspill.rehoming import turn_into_disk_home, turn_into_host_home
from overspill.slab import Layout, Slab
from overspill.tensors import TensorSpec
from overspill.transfer import Fetch, Piece, Transfer


class Store(Protocol):
    """The homes of one unit's tensors, and how their bytes get to a slab and back."""

    layout: Layout
    homes: list[torch.Tensor]
    reads_disk: bool

    def fetch(self, slab: Slab, transfer: Transfer, priority: int) -> Fetch:
        """Start to bring all bytes to `slab`."""

    def brings(self, index: int) -> bool:
        """Whether `fetch` brings a tensor. Else it takes a `refresh`."""

    def stamps(self) -> list[object]:
        """One a tensor: equal to an earlier one only if the values cannot have changed since."""

    def refresh(self, index: int, live: torch.Tensor) -> None:
        """Copy the present values to `live`."""

    def absorb(self, index: int, live: torch.Tensor, *, edits: int) -> None:
        """Take what a forward wrote to `live` as the truth. `edits`: how many times autograd would have noticed."""

    def version(self, index: int) -> int:
        """Grows with each in-place edit that autograd would notice."""

    def part(self, indices: Sequence[int]) -> "Store":
        """Some of the tensors, where they are, with a store of their own. This one is not used any more."""

    def move_in(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let `tensors`, the objects themselves, have their values here from now on."""

    def files(self) -> set[SourceFile]:
        """The files that values are read from."""

    def mapping(self) -> Mapping | None:
        """How files' pages could be computed with as they are; None where they cannot, or that is not worth while."""

    def map(self) -> MappedSlab | None:
        """Memory that shows those pages; None where there is none to be had."""


class HostStore:
    """A unit whose values live in host memory: laid out as its slab is, or each tensor where it lay before."""

    reads_disk = False

    def __init__(
        self,
        layout: Layout,
        elements: Callable[[int], torch.Tensor],
        copies: Sequence[tuple[int, torch.Tensor]],
        memory: Sequence[HostPages | PinnedRanges],
    ) -> None:
        self.layout = layout
        self.homes: list[torch.Tensor] = []
        self._elements = elements  # of each tensor, flat; with a storage that nothing else is in
        self._copies = copies  # what brings all of it to a slab: offsets there, and bytes
        self._memory = memory  # what the elements lie in: it lives, and is pinned, as long as this
        self._slots = HostSlots()
        self._in_flight: Fetch | None = None

    @classmethod
    def fresh(cls, layout: Layout) -> "HostStore":
        """In memory of its own, to be filled."""
        pages = HostPages(layout.nbytes)
        return cls(layout, *laid_out_in(pages, layout), [pages])

    @classmethod
    def in_place(cls, layout: Layout, tensors: Sequence[torch.Tensor], pinned: PinnedRanges) -> "HostStore":
        """Large tensors where they lie already, which `pinned` knows; the small ones have memory of their own."""
        small = Layout.of([spec for spec in layout.specs if spec.nbytes < ALONE_ON_ITS_PAGES])
        pages = HostPages(small.nbytes)
        spots = small.spots()
        elements = []
        for spec, tensor in zip(layout.specs, tensors, strict=True):
            if spec.nbytes < ALONE_ON_ITS_PAGES:
                elements.append(_own_storage(pages, *next(spots)).copy_(spec.flat(tensor)))
            else:
                elements.append(spec.flat(tensor))
        return cls._scattered(layout, elements, [pinned, pages])

    @classmethod
    def _scattered(
        cls, layout: Layout, elements: Sequence[torch.Tensor], memory: Sequence[HostPages | PinnedRanges]
    ) -> "HostStore":
        """One copy a tensor."""
        copies = [
            (offset, flat.view(torch.uint8))
            for offset, flat in zip(layout.offsets, elements, strict=True)
            if flat.numel()
        ]
        return cls(layout, lambda index: elements[index], copies, memory)

    def target(self, index: int) -> torch.Tensor:
        """The memory of tensor `index` in a fresh store, to be filled."""
        return self.layout.view(self._copies[0][1], index)

    def make_homes(self, likes: Sequence[torch.Tensor]) -> None:
        """New tensors over this memory, to show in the place of `likes`."""
        for index, like in enumerate(likes):
            self.homes.append(host_home(self._shaped(index), like))
        self._settle_in()

    def move_in(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let `tensors`, the objects themselves, have their values in this memory from now on."""
        for index, tensor in enumerate(tensors):
            self._slots.add(turn_into_host_home(tensor, partial(self._shaped, index), self.settle))
            self.homes.append(tensor)

    def _shaped(self, index: int) -> torch.Tensor:
        return self.layout.specs[index].shaped(self._elements(index))

    def _settle_in(self) -> None:
        for home in self.homes:
            slot = HostSlot(home, self.settle)
            cast(HostTensor, home)._overspill_slot = slot
            self._slots.add(slot)

    def files(self) -> set[SourceFile]:
        return set()

    def mapping(self) -> None:
        return None

    def map(self) -> None:
        return None

    def touch(self, device: torch.device) -> None:
        """Write to every page of fresh memory, where that makes pinning it for `device` faster."""
        if device != CPU:
            touch(self._copies[0][1])

    def pin(self, device: torch.device) -> None:
        """Register the memory with `device`. Fast once its pages have been written to."""
        for memory in self._memory:
            memory.register(device)

    def settle(self) -> None:
        """Wait until no copy reads this memory any more: it is about to be edited."""
        if self._in_flight is not None:
            self._in_flight.wait_host()
            self._in_flight = None

    def fetch(self, slab: Slab, transfer: Transfer, priority: int) -> Fetch:
        fetch = transfer.from_host(self._copies, slab)
        self.is_read_by(fetch)
        return fetch

    def is_read_by(self, fetch: Fetch) -> None:
        """Have whoever edits the memory wait for `fetch`."""
        self._in_flight = fetch
        if self._slots.any_shared():
            # Someone holds an alias, and may write through it as soon as this returns.
            self.settle()

    def brings(self, index: int) -> bool:
        return True

    def stamps(self) -> list[object]:
        with torch._C.DisableTorchFunctionSubclass():
            return self._slots.stamps(self.homes)

    def refresh(self, index: int, live: torch.Tensor) -> None:
        live.copy_(_plain(self.homes[index]))

    def absorb(self, index: int, live: torch.Tensor, *, edits: int) -> None:
        self.settle()
        home = _plain(self.homes[index])
        home.data.copy_(live)  # which has no part in the version
        for _ in range(edits):
            increment_version(home)

    def version(self, index: int) -> int:
        return self.homes[index]._version

    def part(self, indices: Sequence[int]) -> "HostStore":
        self.settle()
        homes = [self.homes[index] for index in indices]
        layout = Layout.of([TensorSpec.laid_out_as(_plain(home)) for home in homes])
        elements = [spec.flat(_plain(home)) for spec, home in zip(layout.specs, homes, strict=True)]
        store = HostStore._scattered(layout, elements, self._memory)
        store.homes = homes
        store._settle_in()
        return store


class DiskStore:
    """A unit whose values lie in files: read there each time, never written there."""

    reads_disk = True

    def __init__(self, layout: Layout, values: Sequence[DiskValues], reader: RangeReader) -> None:
        self.layout = layout
        self.homes: list[torch.Tensor] = []
        self._values = list(values)
        self._reader = reader
        self._mapped_spans: list[tuple[FileSpan, ...]] | None = None
        self._mapping: Mapping | None = None

    def make_homes(self, likes: Sequence[torch.Tensor]) -> None:
        """New tensors without memory, to show in the place of `likes`."""
        self.homes = [disk_home(value, like) for value, like in zip(self._values, likes, strict=True)]

    def move_in(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let `tensors`, the objects themselves, have their values in these files from now on, and no memory."""
        for value, tensor in zip(self._values, tensors, strict=True):
            turn_into_disk_home(tensor, value)
        self.homes = list(tensors)

    def fetch(self, slab: Slab, transfer: Transfer, priority: int) -> Fetch:
        assert slab.layout is not None
        pieces: list[Piece] = []
        for index, (spec, offset) in enumerate(slab.layout.spots()):
            # Promoted ones are brought by `refresh`: memory may be edited at any time, through views of it.
            if self._values[index].memory is None and not (isinstance(slab, MappedSlab) and slab.has(index)):
                pieces += pieces_of(self._values[index], slab.memory[offset : offset + spec.nbytes])
        shown = slab.pieces() if isinstance(slab, MappedSlab) else []
        return transfer.from_disk([*shown, *merged(pieces)], self._reader, slab=slab, priority=priority)

    def map(self) -> MappedSlab | None:
        mapping = self.mapping()
        if mapping is None or not isinstance(self._reader, FileReader):
            return None
        return MappedSlab.of(mapping, self._reader)

    def mapping(self) -> Mapping | None:
        spans = [values.spans if values.memory is None else () for values in self._values]
        if spans != self._mapped_spans:
            self._mapped_spans, self._mapping = spans, Mapping.of(self.layout.specs, spans)
        return self._mapping

    def brings(self, index: int) -> bool:
        return self._values[index].memory is None

    def stamps(self) -> list[object]:
        return [values.stamp() for values in self._values]

    def refresh(self, index: int, live: torch.Tensor) -> None:
        live.copy_(self._values[index].read())

    def absorb(self, index: int, live: torch.Tensor, *, edits: int) -> None:
        self._values[index].replace(live, edits=edits)

    def version(self, index: int) -> int:
        return self._values[index].edits

    def part(self, indices: Sequence[int]) -> "DiskStore":
        layout = Layout.of([self.layout.specs[index] for index in indices])
        store = DiskStore(layout, [self._values[index] for index in indices], self._reader)
        store.homes = [self.homes[index] for index in indices]
        return store

    def files(self) -> set[SourceFile]:
        return {span.file for values in self._values if values.memory is None for span in values.spans}


def pieces_of(values: DiskValues, target: torch.Tensor) -> list[Piece]:
    """What to read of files to fill flat byte `target` with `values`."""
    starts = itertools.accumulate((span.nbytes for span in values.spans), initial=0)
    return [
        Piece(span.file, span.offset, torch.uint8, target[start : start + span.nbytes])
        for span, start in zip(values.spans, starts, strict=False)  # the last start is the end
    ]


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces that touch in their file and in memory, as one: a block's tensors often lie side by side."""
    result: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (str(piece.file.path), piece.offset)):
        last = result[-1] if result else None
        if last is not None and _touch(last, piece):
            whole = torch.as_strided(last.target, (last.nbytes + piece.nbytes,), (1,))
            result[-1] = Piece(last.file, last.offset, torch.uint8, whole)
        else:
            result.append(piece)
    return result


def _touch(first: Piece, second: Piece) -> bool:
    if not first.dtype == second.dtype == torch.uint8:
        return False  # a cast is made tensor by tensor
    in_file = first.file == second.file and first.offset + first.nbytes == second.offset
    one_storage = first.target.untyped_storage()._cdata == second.target.untyped_storage()._cdata
    # Neighbours of two storages touch by chance only, and cannot be one tensor.
    return in_file and one_storage and first.target.data_ptr() + first.nbytes == second.target.data_ptr()


def laid_out_in(
    pages: mmap.mmap, layout: Layout
) -> tuple[Callable[[int], torch.Tensor], Sequence[tuple[int, torch.Tensor]]]:
    """Tensors that lie in `pages` as in a slab: the elements of each, and the one copy that brings all of them."""
    one_copy = [(0, host_bytes(pages)[: layout.nbytes])]
    return lambda index: _own_storage(pages, layout.specs[index], layout.offsets[index]), one_copy


def _own_storage(pages: mmap.mmap, spec: TensorSpec, offset: int) -> torch.Tensor:
    """Elements of `pages` with a storage of their own: torch.save writes just them, and aliases can be counted."""
    if spec.numel == 0:
        return torch.empty(0, dtype=spec.dtype)
    return torch.frombuffer(pages, dtype=spec.dtype, count=spec.numel, offset=offset)


def _plain(home: torch.Tensor) -> torch.Tensor:
    """A host home's memory as an ordinary tensor: what we do ourselves is no use by others."""
    with torch._C.DisableTorchFunctionSubclass():
        return home.detach()
