"""Where homes keep their bytes: in pinned host memory or on disk. One store a unit."""

from collections.abc import Sequence
from typing import Protocol

import torch

from overspill.checkpoint.reader import RangeReader
from overspill.devices import HostPages, host_bytes
from overspill.homes import DiskValues, HostSlot, HostTensor, disk_home, host_home
from overspill.slab import Layout, Slab
from overspill.transfer import Fetch, Piece, Transfer


class Store(Protocol):
    """The homes of one unit's tensors, and how their bytes get to a slab and back."""

    layout: Layout
    homes: list[torch.Tensor]
    reads_disk: bool

    def fetch(self, slab: Slab, transfer: Transfer, priority: int) -> Fetch:
        """Start to bring all bytes to `slab`."""

    def stamps(self) -> list[object]:
        """One a tensor: equal to an earlier one only if the values cannot have changed since."""

    def refresh(self, index: int, live: torch.Tensor) -> None:
        """Copy the present values to `live`."""

    def absorb(self, index: int, live: torch.Tensor) -> None:
        """Take what a forward wrote to `live` as the truth."""

    def version(self, index: int) -> int:
        """Grows with each in-place edit that autograd would notice."""


class HostStore:
    """A unit whose values live in host memory, laid out as its slab is: one flat copy brings all of it."""

    reads_disk = False

    def __init__(self, layout: Layout, likes: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self._pages = HostPages(layout.nbytes)
        self.memory = host_bytes(self._pages)
        self._in_flight: Fetch | None = None
        self.homes = [self._make_home(index, like) for index, like in enumerate(likes)]
        self._slots = [_slot(home) for home in self.homes]

    def _make_home(self, index: int, like: torch.Tensor) -> torch.Tensor:
        spec, offset = self.layout.specs[index], self.layout.offsets[index]
        if spec.numel == 0:
            values = torch.empty(spec.shape, dtype=spec.dtype)
        else:
            # A storage of its own: torch.save and safetensors write just this tensor, and aliases of it can be counted.
            values = torch.frombuffer(self._pages, dtype=spec.dtype, count=spec.numel, offset=offset).view(spec.shape)
        home = host_home(values, like)
        del values  # it would count as an alias
        home._overspill_slot = HostSlot(home, self.settle)
        return home

    def pin(self, device: torch.device) -> None:
        """Register the memory with `device`. Fast once its pages have been written to."""
        self._pages.register(device)

    def settle(self) -> None:
        """Wait until no copy reads this memory any more: it is about to be edited."""
        if self._in_flight is not None:
            self._in_flight.wait_host()
            self._in_flight = None

    def fetch(self, slab: Slab, transfer: Transfer, priority: int) -> Fetch:
        fetch = transfer.from_host(self.memory[: self.layout.nbytes], slab)
        self._in_flight = fetch
        if any(slot.shared() for slot in self._slots):
            # Someone holds an alias, and may write through it as soon as this returns.
            self.settle()
        return fetch

    def stamps(self) -> list[object]:
        with torch._C.DisableTorchFunctionSubclass():
            return [slot.stamp(home) for slot, home in zip(self._slots, self.homes, strict=True)]

    def refresh(self, index: int, live: torch.Tensor) -> None:
        live.copy_(_plain(self.homes[index]))

    def absorb(self, index: int, live: torch.Tensor) -> None:
        self.settle()
        _plain(self.homes[index]).copy_(live)

    def version(self, index: int) -> int:
        return self.homes[index]._version


class DiskStore:
    """A unit whose values lie in files: read there each time, never written there."""

    reads_disk = True

    def __init__(
        self, layout: Layout, values: Sequence[DiskValues], likes: Sequence[torch.Tensor], reader: RangeReader
    ) -> None:
        self.layout = layout
        self._values = list(values)
        self._reader = reader
        self.homes = [disk_home(value, like) for value, like in zip(values, likes, strict=True)]

    def fetch(self, slab: Slab, transfer: Transfer, priority: int) -> Fetch:
        pieces = []
        for values, offset in zip(self._values, self.layout.offsets, strict=True):
            if values.memory is not None:
                continue  # `refresh` brings it: memory may be edited at any time, through views of it
            for span in values.spans:
                pieces.append(Piece(span.file, span.offset, torch.uint8, slab.memory[offset : offset + span.nbytes]))
                offset += span.nbytes
        return transfer.from_disk(merged(pieces), self._reader, slab=slab, priority=priority)

    def stamps(self) -> list[object]:
        return ["on disk" if values.memory is None else object() for values in self._values]

    def refresh(self, index: int, live: torch.Tensor) -> None:
        live.copy_(self._values[index].read())

    def absorb(self, index: int, live: torch.Tensor) -> None:
        self._values[index].replace(live)

    def version(self, index: int) -> int:
        return self._values[index].edits


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


def _slot(home: torch.Tensor) -> HostSlot:
    assert isinstance(home, HostTensor)
    return home._overspill_slot


def _plain(home: torch.Tensor) -> torch.Tensor:
    """A host home's memory as an ordinary tensor: what we do ourselves is no use by others."""
    with torch._C.DisableTorchFunctionSubclass():
        return home.detach()
