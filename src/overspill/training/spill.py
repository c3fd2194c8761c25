"""Saved tensors on disk: a file without a name, that ends with the process."""

import os
import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from overspill.config import MIB
from overspill.devices import OUR_THREADS, buffer_of
from overspill.errors import StateError
from overspill.host_link import Departure
from overspill.slab import HostPool, Slab
from overspill.unnamed_file import UnnamedFile

_IN_FLIGHT = 512 * MIB
"""Bytes in host memory that may wait to be written."""

_THREADS = 4


class SpillFile:
    """Room for tensors in a temporary file, used again and again."""

    def __init__(self) -> None:
        self.begin_anew()
        self._file: UnnamedFile | None = UnnamedFile("saved tensors")
        _files.add(self)

    def begin_anew(self) -> None:
        """Hold nothing: at first, and in a forked child, which has none of its parent's threads and shares its file.

        Most children save nothing: one gets a file of its own with its first tensor.
        """
        self._file = None
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"{OUR_THREADS}spill")
        self._writing: deque[Spilled] = deque()

    @property
    def nbytes(self) -> int:
        """The most that was in it at once."""
        return self._end

    def put(self, departure: Departure, pool: HostPool) -> "Spilled":
        """Start to write what `departure` brings to host memory, which is free again when that is done."""
        with self._lock:
            while self._writing and (
                self._writing[0].is_written() or sum(each.nbytes for each in self._writing) > _IN_FLIGHT
            ):
                self._writing.popleft().wait()
            if self._file is None:
                self._file = UnnamedFile("saved tensors")
            places = self._free.setdefault(departure.nbytes, [])
            place = places.pop() if places else self._end
            self._end = max(self._end, place + departure.nbytes)
            spilled = Spilled(self, departure, place, pool)
            weakref.finalize(spilled, places.append, place).atexit = False
            spilled.start(self._threads)
            self._writing.append(spilled)
        return spilled

    def write(self, memory: torch.Tensor, place: int) -> None:
        assert self._file is not None
        self._file.write(buffer_of(memory), place)

    def read(self, memory: torch.Tensor, place: int) -> None:
        assert self._file is not None
        self._file.read(buffer_of(memory), place)


_files: "weakref.WeakSet[SpillFile]" = weakref.WeakSet()


def _begin_anew() -> None:
    for file in list(_files):
        file.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)


class Spilled:
    """The bytes of one departure, on their way to the file, in it, or on their way back."""

    def __init__(self, file: SpillFile, departure: Departure, place: int, pool: HostPool) -> None:
        self.nbytes = departure.nbytes
        self._file, self._place, self._pool = file, place, pool
        self._departure: Departure | None = departure
        self._written: Future[None] | None = None
        self._read: Future[Slab] | None = None
        self._process = os.getpid()

    def start(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        departure = self._departure
        assert departure is not None

        def write() -> None:
            departure.wait()
            self._file.write(departure.host.memory[: departure.nbytes], self._place)

        self._written = threads.submit(write)

    def is_written(self) -> bool:
        return self._written is not None and self._written.done()

    def wait(self) -> None:
        """Wait until the bytes are in the file, and in host memory no more."""
        self._refuse_in_child()
        assert self._written is not None
        self._written.result()
        self._departure = None

    def begin_to_read(self) -> None:
        """Have the bytes in host memory soon."""
        self._refuse_in_child()
        if self._read is None:
            self.wait()
            self._read = self._threads.submit(self._fill)

    def _refuse_in_child(self) -> None:
        if os.getpid() != self._process:
            raise StateError(
                "this process was forked between a forward and its backward, and what the forward saved is in a file "
                "of its parent's. Fork before the forward, or behind the backward"
            )

    def _fill(self) -> Slab:
        slab = self._pool.take(self.nbytes)
        for event in slab.overwrite_after:
            event.synchronize()
        self._file.read(slab.memory[: self.nbytes], self._place)
        return slab

    def host(self) -> Slab:
        """The bytes in host memory."""
        self.begin_to_read()
        assert self._read is not None
        slab, self._read = self._read.result(), None
        return slab
