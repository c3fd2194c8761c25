"""A unit's bytes at rest in a file that is edited: trained weights on disk."""

import torch

from overspill.checkpoint.index import SourceFile
from overspill.slab import Layout, Slab
from overspill.store import HostStore, laid_out_in
from overspill.transfer import Fetch, Piece, Transfer
from overspill.unnamed_file import UnnamedFile


class FileStore(HostStore):
    """A unit whose values lie in a file of its own, and are edited there.

    Its homes are tensors over the file's pages, so optimizers find ordinary CPU memory. The system brings in what they
    touch, writes back what they edit, and keeps of it in memory what it has room for.
    """

    reads_disk = True

    def __init__(self, layout: Layout, file: UnnamedFile) -> None:
        size = max(layout.nbytes, 1)
        file.reserve(size)
        super().__init__(layout, *laid_out_in(file.pages(size), layout), memory=[])
        self._file = file

    @classmethod
    def fresh(cls, layout: Layout) -> "FileStore":
        return cls(layout, UnnamedFile("trained weights"))

    def touch(self, device: torch.device) -> None:
        """Its pages are as fast as they get: they are never pinned."""

    def fetch(self, slab: Slab, transfer: Transfer, priority: int) -> Fetch:
        piece = Piece(self._file.source, 0, torch.uint8, slab.memory[: self.layout.nbytes])
        fetch = transfer.from_disk([piece], _Reader(self._file), slab=slab, priority=priority)
        self.is_read_by(fetch)
        return fetch


class _Reader:
    """Reads through the page cache, where the latest edits are."""

    def __init__(self, file: UnnamedFile) -> None:
        self._file = file

    def read(self, file: SourceFile, offset: int, target: memoryview) -> None:
        self._file.read(target, offset)

    def read_aligned(self, file: SourceFile, offset: int, nbytes: int, scratch: memoryview) -> int:
        self._file.read(scratch[:nbytes], offset)
        return 0
