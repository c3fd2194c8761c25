"""Units that are computed with where they lie in the page cache: no copy is made, and no file changes beneath them.

Note: what makes that safe. A model that computes on the CPU needs no copy of what a file holds, if
- the bits come out the same: a tensor is mapped only where it lies as it would in memory of its own, on 64 bytes;
- nobody can change it meanwhile: while a unit is in use there is a lease on its file (`checkpoint/lease.py`), and once
  that is had the file is compared with what it was. Between two uses anybody may write, and the next use finds out;
- a disk that fails is an error, not the end of the process: each use has the pages brought in first, which tells;
- nothing that is written to a weight reaches the file: the pages are private;
- what outlives the call (an output that aliases a weight) has the pages copied before the lease ends.
Where one of these cannot be had, the unit is copied to the window as ever.
"""

import resource
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path

import torch

from overspill.checkpoint import pagecache
from overspill.checkpoint.index import FileSpan, SourceFile
from overspill.checkpoint.lease import Lease
from overspill.checkpoint.reader import FileReader
from overspill.config import DEVICE_ALIGNMENT, HOST_ALIGNMENT, KIB, MIB, align
from overspill.devices import HostPages, lease_range
from overspill.errors import CheckpointError, CheckpointReadError
from overspill.slab import Layout, Slab
from overspill.tensors import TensorSpec

_WORTH_A_RUN = 256 * KIB  # what is smaller is copied: a mapping costs the kernel more
_WORTH_MAPPING = 0.9  # of a unit's bytes that can be mapped; else its memory is better taken from the window
_CHUNK = 16 * MIB  # that one thread brings in
_HUGE_PAGE = 2 * MIB
"""Where a file's pages show at the same distance from a multiple of this, the kernel maps many of them as one. Memory
in between is never touched, and takes none."""


@dataclass(frozen=True)
class Run:
    """Whole pages of a file, and where in a slab they show."""

    file: SourceFile
    offset: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class Mapping:
    """How a unit's tensors lie in memory of which most shows pages of files."""

    layout: Layout
    runs: tuple[Run, ...]
    copied: frozenset[int]
    """Tensors that are not mapped: too small, too little aligned, or put together from several places."""

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], spans: Sequence[Sequence[FileSpan]]) -> "Mapping | None":
        """None where mapping is not worth while."""
        offsets = dict.fromkeys(range(len(specs)), 0)
        runs: list[Run] = []
        copied = set(offsets)
        end = mapped = 0
        for members in _runs([(index, parts[0]) for index, parts in enumerate(spans) if _can_be_mapped(parts)]):
            first, last = members[0][1], members[-1][1]
            floor = first.offset // PAGESIZE * PAGESIZE
            nbytes = align(last.offset + last.nbytes, PAGESIZE) - floor
            if nbytes < _WORTH_A_RUN:
                continue
            end += (floor - end) % _HUGE_PAGE
            runs.append(Run(first.file, floor, end, nbytes))
            for index, span in members:
                offsets[index] = end + span.offset - floor
                copied.discard(index)
                mapped += span.nbytes
            end += nbytes
        if mapped < _WORTH_MAPPING * sum(spec.nbytes for spec in specs) or not mapped:
            return None
        for index in sorted(copied):
            offsets[index] = end
            end = align(end + specs[index].nbytes, DEVICE_ALIGNMENT)
        layout = Layout(tuple(specs), tuple(offsets.values()), align(end, PAGESIZE))
        return cls(layout, tuple(runs), frozenset(copied))


def _can_be_mapped(parts: Sequence[FileSpan]) -> bool:
    return len(parts) == 1 and parts[0].offset % HOST_ALIGNMENT == 0


def _runs(found: Sequence[tuple[int, FileSpan]]) -> Iterator[list[tuple[int, FileSpan]]]:
    """Tensors that lie side by side in a file."""
    run: list[tuple[int, FileSpan]] = []
    for index, span in sorted(found, key=lambda each: (str(each[1].file.path), each[1].offset)):
        if run and (run[-1][1].file != span.file or run[-1][1].offset + run[-1][1].nbytes != span.offset):
            yield run
            run = []
        run.append((index, span))
    if run:
        yield run


@dataclass(frozen=True)
class MappedPiece:
    """Pages that show a file's, to be brought in."""

    run: Run
    descriptor: int
    memory: torch.Tensor
    """All of the slab, which lives as long as it is brought in."""

    @property
    def nbytes(self) -> int:
        return self.run.nbytes

    def chunks(self) -> Iterator["MappedPiece"]:
        """The same in parts, for several threads."""
        run = self.run
        for done in range(0, run.nbytes, _CHUNK):
            part = Run(run.file, run.offset + done, run.start + done, min(_CHUNK, run.nbytes - done))
            yield MappedPiece(part, self.descriptor, self.memory)

    def is_cached(self) -> bool:
        """Whether no disk is needed to bring the pages in."""
        return pagecache.lies_in_page_cache(self.descriptor, self.run.offset, self.run.nbytes) is True

    def bring_in(self) -> None:
        """Wait until the pages are in memory."""
        try:
            pagecache.bring_in(self.memory.data_ptr() + self.run.start, self.run.nbytes)
        except OSError as error:
            raise CheckpointReadError(
                f"reading {self.run.nbytes} bytes at offset {self.run.offset} of {self.run.file.path} failed "
                f"({error.strerror}). Check the disk; the next call tries again"
            ) from error


class MappedSlab(Slab):
    """Memory of which most shows pages of files. It is used between `hold` and `let_go`, and lives as long as views."""

    def __init__(self, mapping: Mapping, reader: FileReader) -> None:
        pages = HostPages(mapping.layout.nbytes + _HUGE_PAGE)
        memory, owner = lease_range(pages, -pages.address % _HUGE_PAGE, mapping.layout.nbytes)
        _count_until_gone(len(mapping.runs), owner)
        for run in mapping.runs:
            pagecache.show(memory.data_ptr() + run.start, reader.descriptor(run.file), run.offset, run.nbytes)
        super().__init__(memory, [], [])
        self.layout = mapping.layout
        self.mapping = mapping
        self.is_filled = False  # what is mapped has been brought in once, and what is copied has been
        self.is_own = False  # it shows no file any more
        self._reader = reader
        self._leases: list[Lease] = []

    @classmethod
    def of(cls, mapping: Mapping, reader: FileReader) -> "MappedSlab | None":
        """None where it cannot be had now."""
        if not pagecache.can_show() or _counts_as_memory() or sum(list(_runs_shown.values())) > _most_runs():
            return None
        try:
            return cls(mapping, reader)
        except (OSError, CheckpointError):  # copying tells what is wrong with a file, if anything is
            return None

    def has(self, index: int) -> bool:
        """Whether a tensor is there without being read."""
        return self.is_filled or index not in self.mapping.copied

    def hold(self) -> bool:
        """Whether the files are what they were, and stay so until `let_go`."""
        if self.is_own or self.is_held:
            return all(lease.is_intact() for lease in self._leases)
        self.end_leases()
        try:
            for file in {run.file for run in self.mapping.runs}:
                lease = Lease.take(file, self._reader.descriptor(file))
                if lease is None:
                    self.end_leases()
                    return False
                self._leases.append(lease)
                lease.check()  # from here on nothing changes
        except CheckpointError:
            self.end_leases()
            return False
        return True

    @property
    def is_held(self) -> bool:
        """Whether somebody computes with it. A process that was forked meanwhile does not, but has the same leases."""
        return any(lease.is_ours() for lease in self._leases)

    def let_go(self) -> None:
        """Others may write to the files again. Raises CheckpointChangedError where one did so before it was allowed."""
        try:
            self._check()
        finally:
            self.end_leases()

    def _check(self) -> None:
        for lease in self._leases:
            if not lease.is_intact():
                lease.check()

    def end_leases(self) -> None:
        """Others may write, whatever happened before."""
        while self._leases:
            self._leases.pop().end()

    def make_own(self) -> None:
        """Depend on no file any more, while the leases are still held. They end with it, unless it fails."""
        for run in self.mapping.runs:
            try:
                pagecache.make_own(self.memory.data_ptr() + run.start, run.nbytes)
            except OSError as error:
                raise CheckpointReadError(
                    f"no copy of {run.nbytes} bytes of {run.file.path} can be made ({error.strerror}). "
                    "Free some memory, or check the disk"
                ) from error
        self._check()
        self.is_own = self.is_extra = True
        self.end_leases()

    def pieces(self) -> list[MappedPiece]:
        """What to bring in."""
        return [
            MappedPiece(run, self._reader.descriptor(run.file), self.memory)
            for run in self.mapping.runs
            if not self.is_own and not (self.is_filled and self._is_in_memory(run))
        ]

    def _is_in_memory(self, run: Run) -> bool:
        return pagecache.are_in_memory(self.memory.data_ptr() + run.start, run.nbytes)


_runs_shown: dict[object, int] = {}
"""By slab, as long as its memory is there. Threads of other models add to it and finalizers take from it at any time:
each step on it is one of the interpreter's, so that no lock is needed."""


def _count_until_gone(runs: int, owner: object) -> None:
    slab = object()
    _runs_shown[slab] = runs
    weakref.finalize(owner, _runs_shown.pop, slab).atexit = False


def _counts_as_memory() -> bool:
    """Whether what shows a file counts as memory here, though it takes none: then the window is all we may have."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return True
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"  # no more is given than there is
    except OSError:
        return False


def _most_runs() -> int:
    """Half of the mappings that the kernel allows a process: the other half is for everybody else."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text()) // 4  # memory beside a run is a mapping too
    except (OSError, ValueError):
        return 1 << 14
