"""Bytes on their way to a device: reader threads, pinned ring, copy streams. Only this file and host_link make any."""

import atexit
import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from overspill.checkpoint.index import SourceFile
from overspill.checkpoint.reader import DIRECT_ALIGNMENT, RangeReader
from overspill.config import MIB
from overspill.devices import (
    CPU,
    OUR_THREADS,
    Moment,
    buffer_of,
    current_stream_waits,
    new_stream,
    on_stream,
    outside_inference_mode,
    pinned_bytes,
    reader_threads,
    record_event,
    stream_waits,
)
from overspill.errors import CheckpointReadError
from overspill.host_link import HostLink
from overspill.mapping import MappedPiece
from overspill.recording import COPY, READ, Recording
from overspill.slab import Slab

CHUNK = 16 * MIB
"""Bytes a read: large enough for a disk's and the link's full rate, small enough to share among threads."""

_CHUNKS_BEING_COPIED = 4
"""In the ring beyond one for each reader thread. More of them leave the processor's cache before they are copied: twice
as many chunks as threads made a warm load of 16 GB take 0.39 s instead of 0.37 (H200, 14 threads)."""

DEMANDED, PREFETCHED = 0, 1
"""What a computation waits for is read before what it may want later."""


@dataclass(frozen=True)
class Piece:
    """A range of a file, and the memory that it goes to. `target` is flat; a dtype other than `dtype` means a cast."""

    file: SourceFile
    offset: int
    dtype: torch.dtype
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.target.numel() * self.dtype.itemsize

    def chunks(self) -> Iterator["Piece"]:
        """The same in parts of at most CHUNK bytes, cut between elements."""
        step = CHUNK // self.dtype.itemsize
        for start in range(0, self.target.numel(), step):
            target = self.target[start : start + step]
            yield Piece(self.file, self.offset + start * self.dtype.itemsize, self.dtype, target)


_DONE: Final = threading.Event()
_DONE.set()
_NOT_NOTED: Final = contextlib.nullcontext()


class Fetch:
    """Some bytes on their way to a device. Done when the last copy has been queued there, or when one failed."""

    def __init__(
        self,
        device: torch.device,
        parts: int,
        nbytes: int,
        *,
        uses: list[torch.Event] | None = None,
    ) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._left = parts  # to be queued
        self._held = parts  # whose memory somebody still works on
        self._done = threading.Event() if parts else _DONE
        self._arrived: torch.Event | None = None
        self._uses = uses
        self._process = os.getpid()
        self.nbytes = nbytes
        self.nbytes_done = 0
        self.error: BaseException | None = None
        self.cancelled = False

    def part_queued(self, stream: torch.Stream | None, nbytes: int, error: BaseException | None = None) -> None:
        """Called once a part, behind the part's copy on `stream`."""
        with self._lock:
            self._left -= 1
            self.nbytes_done += nbytes
            self.error = self.error or error
            last = self._left == 0
        if last and stream is not None:
            self.all_queued(stream)

    def all_queued(self, stream: torch.Stream) -> None:
        """Every part is queued on `stream`, and all have arrived when it has come to here."""
        self._arrived = record_event(self._device, stream)
        if self._uses is not None and self._arrived is not None:
            self._uses.append(self._arrived)  # whoever overwrites these bytes next waits for it, also if cancelled

    def part_let_go(self) -> None:
        """Called once a part, when it is queued and nobody holds its memory any more: that is free once all is done."""
        with self._lock:
            self._held -= 1
            done = self._held == 0
        if done:
            self._done.set()

    def cancel(self) -> None:
        """Nobody wants the rest: parts that have not started are skipped."""
        self.cancelled = True

    def arrived(self) -> bool:
        """Whether the bytes are there."""
        return self._done.is_set() and self.error is None and (self._arrived is None or self._arrived.query())

    def finished(self) -> bool:
        return self._done.is_set() or os.getpid() != self._process

    def wait_some(self, seconds: float) -> bool:
        """Wait for at most `seconds`; whether it is done."""
        return self._done.wait(timeout=seconds)

    def wait(self) -> None:
        """Wait here until all is queued, raise what went wrong, and let the current stream wait for the bytes."""
        self._wait_done()
        if self.error is not None:
            raise self.error
        if not self._done.is_set():
            raise CheckpointReadError("a read that was under way when this process was forked goes on in its parent")
        current_stream_waits(self._device, self._arrived)

    def wait_host(self) -> None:
        """Wait here until the bytes have arrived, or failed to."""
        self._wait_done()
        if self._arrived is not None:
            self._arrived.synchronize()

    def _wait_done(self) -> None:
        # A bounded wait lets an interrupt through. A forked child has no reader threads to wait for.
        while not self.finished() and not self._done.wait(timeout=1.0):
            pass


class _Ring:
    """Pinned chunks, made when they are needed, up to a fixed number.

    A chunk in use by a copy comes back with the event that ends the copy.
    """

    def __init__(self, chunks: int, device: torch.device) -> None:
        self._device = device
        self._free: queue.SimpleQueue[tuple[torch.Tensor, torch.Event | None]] = queue.SimpleQueue()
        self._may_be_made: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for _ in range(chunks):
            self._may_be_made.put(True)

    def take(self) -> torch.Tensor:
        if self._free.empty():
            chunk = self._another()
            if chunk is not None:
                return chunk
        chunk, copied = self._free.get()
        if copied is not None and not copied.query():
            another = self._another()
            if another is not None:
                self.give(chunk, copied)
                return another
            copied.synchronize()  # the device still reads from this chunk
        return chunk

    def _another(self) -> torch.Tensor | None:
        """A fresh chunk, while there may be more of them."""
        try:
            self._may_be_made.get_nowait()
        except queue.Empty:
            return None
        try:
            return pinned_bytes(CHUNK + 2 * DIRECT_ALIGNMENT, self._device)  # a direct read starts and ends on a page
        except BaseException:
            self._may_be_made.put(True)
            raise

    def give(self, chunk: torch.Tensor, copied: torch.Event | None) -> None:
        self._free.put((chunk, copied))


class _Readers:
    """The process's reader threads. They serve every model, nearest need first."""

    def __init__(self) -> None:
        # Not a PriorityQueue, whose lock is Python's: fourteen threads that take a chunk each spend more time on that
        # than on reading. One token is put for each task, so whoever has a token finds a task.
        self._tasks: dict[int, deque[Callable[[], None]]] = {DEMANDED: deque(), PREFETCHED: deque()}
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{OUR_THREADS}reader-{index}", daemon=True)
            for index in range(reader_threads())
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, priority: int, task: Callable[[], None]) -> None:
        self._tasks[priority].append(task)
        self._tokens.put(True)

    def stop(self) -> None:
        """End the threads, each behind the chunk that it reads: Python would end them inside torch, which aborts."""
        for tasks in self._tasks.values():
            tasks.clear()
        for _ in self._threads:
            self._tokens.put(False)
        for thread in self._threads:
            thread.join(timeout=10)

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # of this thread, once: a context at each chunk would hold the interpreter's lock
        while self._tokens.get():
            task = self._next()
            if task is None:
                return  # the program ends
            task()
            del task  # a thread that waits for work must not keep the last task's memory alive

    def _next(self) -> Callable[[], None] | None:
        """What is waited for before what may be wanted later."""
        for tasks in self._tasks.values():
            with contextlib.suppress(IndexError):
                return tasks.popleft()
        return None


class Transfer:
    """Everything that moves to one device: its copy streams, its ring, and a share of the reader threads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Two streams: a copy from host memory must not queue behind one that still waits for the disk.
        self._host_copies = new_stream(device)
        self._disk_copies = new_stream(device)
        self._host_lane = f"{device}: copies from host memory"
        self.recording: Recording | None = None  # set while somebody wants to know
        self._ring: _Ring | None = None
        self._host_link: HostLink | None = None
        self._lock = threading.Lock()

    def from_host(self, sources: Sequence[tuple[int, torch.Tensor]], slab: Slab) -> Fetch:
        """Copies of pinned bytes, each to its offset in the slab, once the slab's last users are done."""
        fetch = Fetch(self.device, 0, sum(source.nbytes for _, source in sources), uses=slab.uses)
        stream = self._host_copies
        with on_stream(stream), outside_inference_mode():
            stream_waits(stream, slab.overwrite_after)
            with self._noted(COPY, slab.name, self._host_lane, stream, fetch.nbytes):
                for offset, source in sources:
                    whole = source.nbytes == slab.memory.nbytes  # one flat copy, as nearly always
                    target = slab.memory if whole else slab.memory[offset : offset + source.nbytes]
                    target.copy_(source, non_blocking=True)
        if stream is not None:
            fetch.all_queued(stream)
        return fetch

    def from_disk(
        self,
        pieces: Sequence[Piece | MappedPiece],
        reader: RangeReader,
        *,
        slab: Slab | None = None,
        priority: int = DEMANDED,
    ) -> Fetch:
        """Read `pieces` with the reader threads, each chunk copied on as it lands.

        Where the targets lie in `slab`, the copies wait for the slab's last users. Else they wait for what the current
        stream was asked to do so far: torch's allocator gives memory that such work may still use.
        """
        nbytes = sum(piece.nbytes for piece in pieces)
        chunks = [chunk for piece in pieces for chunk in piece.chunks() if not _brought_in_at_once(chunk)]
        fetch = Fetch(self.device, len(chunks), nbytes, uses=None if slab is None else slab.uses)
        made = None if slab is not None else record_event(self.device)
        stream_waits(self._disk_copies, slab.overwrite_after if slab is not None else [] if made is None else [made])
        for chunk in chunks:
            _readers().submit(priority, _ChunkRead(self, chunk, reader, fetch, "" if slab is None else slab.name))
        return fetch

    def ring(self) -> _Ring:
        with self._lock:
            if self._ring is None:
                self._ring = _shared_ring(self.device)
            return self._ring

    @property
    def host_link(self) -> HostLink:
        """The way out, for gradients."""
        with self._lock:
            if self._host_link is None:
                self._host_link = HostLink(self.device)
            return self._host_link

    def _noted(
        self, kind: str, what: str, lane: str, stream: torch.Stream | None, nbytes: int
    ) -> contextlib.AbstractContextManager[None]:
        """Have the recording, if there is one, know what happens within, on `stream` or here."""
        recording = self.recording
        return _NOT_NOTED if recording is None else self._noting(recording, kind, what, lane, stream, nbytes)

    @contextlib.contextmanager
    def _noting(
        self, recording: Recording, kind: str, what: str, lane: str, stream: torch.Stream | None, nbytes: int
    ) -> Iterator[None]:
        device = CPU if stream is None else self.device
        start = Moment(device, stream)
        yield
        recording.note(kind, what, lane, start, Moment(device, stream), nbytes)

    def land(self, piece: Piece | MappedPiece, reader: RangeReader, what: str) -> None:
        """Read one chunk and bring it to its target."""
        if isinstance(piece, MappedPiece):
            with self._noted(READ, what, threading.current_thread().name, None, piece.nbytes):
                piece.bring_in()
            return
        if piece.target.device == CPU:
            with self._noted(READ, what, threading.current_thread().name, None, piece.nbytes):
                _land_on_host(piece, reader)
            return
        ring = self.ring()
        chunk, copied = ring.take(), None
        try:
            with self._noted(READ, what, threading.current_thread().name, None, piece.nbytes):
                start = reader.read_aligned(piece.file, piece.offset, piece.nbytes, buffer_of(chunk))
            source = _typed(chunk[start : start + piece.nbytes], piece.dtype)
            with on_stream(self._disk_copies):
                lane = f"{self.device}: copies of what was read"
                with self._noted(COPY, what, lane, self._disk_copies, piece.nbytes):
                    piece.target.copy_(source, non_blocking=True)
                copied = record_event(self.device, self._disk_copies)
        finally:
            ring.give(chunk, copied)

    @property
    def streams(self) -> list[torch.Stream]:
        """Those that copy to the device."""
        return [stream for stream in (self._host_copies, self._disk_copies) if stream is not None]

    @property
    def disk_stream(self) -> torch.Stream | None:
        return self._disk_copies


class _ChunkRead:
    """One chunk's task for a reader thread. Its references end with it, so a slab is free when its fetch is."""

    def __init__(
        self, transfer: Transfer, piece: Piece | MappedPiece, reader: RangeReader, fetch: Fetch, what: str
    ) -> None:
        self._transfer, self._piece, self._reader, self._fetch, self._what = transfer, piece, reader, fetch, what

    def __call__(self) -> None:
        piece, fetch, transfer = self._piece, self._fetch, self._transfer
        nbytes, error = piece.nbytes, None
        try:
            if not fetch.cancelled and fetch.error is None:
                transfer.land(piece, self._reader, self._what)
        except BaseException as failure:  # it belongs to the call that needs the data, not to this thread
            error = _without_frames(failure)
        fetch.part_queued(transfer.disk_stream, nbytes, error)
        del piece, self._piece
        fetch.part_let_go()


def _without_frames(error: BaseException) -> BaseException:
    """`error`, and all that led to it, without the frames they passed: those hold the memory that was read into."""
    part: BaseException | None = error
    while part is not None:
        part.__traceback__ = None
        part = part.__cause__ or part.__context__
    return error


def _brought_in_at_once(piece: Piece | MappedPiece) -> bool:
    """Bring in what is in memory already: waking another thread for that takes longer than doing it."""
    if not isinstance(piece, MappedPiece) or not piece.is_cached():
        return False
    try:
        piece.bring_in()
    except CheckpointReadError:
        return False  # whoever waits for it is told
    return True


def _land_on_host(piece: Piece, reader: RangeReader) -> None:
    if piece.target.dtype == piece.dtype:
        reader.read(piece.file, piece.offset, buffer_of(piece.target))
        return
    staging = torch.empty(piece.nbytes, dtype=torch.uint8)
    reader.read(piece.file, piece.offset, buffer_of(staging))
    piece.target.copy_(_typed(staging, piece.dtype))


def _typed(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`memory` as elements of `dtype`, also where it does not start at a multiple of their size."""
    if dtype == torch.uint8:
        return memory
    if memory.data_ptr() % dtype.itemsize:
        memory = memory.clone()
    return memory.view(dtype)


_shared_lock = threading.Lock()
_shared_readers: _Readers | None = None
_shared_rings: dict[torch.device, _Ring] = {}


def _readers() -> _Readers:
    global _shared_readers
    with _shared_lock:
        if _shared_readers is None:
            _shared_readers = _Readers()
        return _shared_readers


def _shared_ring(device: torch.device) -> _Ring:
    with _shared_lock:
        if device not in _shared_rings:
            _shared_rings[device] = _Ring(reader_threads() + _CHUNKS_BEING_COPIED, device)
        return _shared_rings[device]


def _forget_threads() -> None:
    """A forked child has none of its parent's threads: it starts its own when it needs them."""
    global _shared_readers, _shared_lock
    _shared_lock = threading.Lock()
    _shared_readers = None
    _shared_rings.clear()


os.register_at_fork(after_in_child=_forget_threads)


@atexit.register
def _stop_threads() -> None:
    if _shared_readers is not None:
        _shared_readers.stop()
