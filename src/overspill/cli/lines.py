"""What the disk of this machine gives, measured apart from the library: the line that its figures stand beside."""

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

from overspill.config import MIB
from overspill.devices import PAGE, reader_threads

CHUNK = 16 * MIB
"""Bytes a read, as many as the library reads at once."""


def direct_rate(file: Path) -> float | None:
    """Bytes a second from the disk itself, past the page cache. None where the file system has no direct reads."""
    try:
        return read_rate([file], os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


def cached_rate(file: Path) -> float:
    """Bytes a second from the page cache, which holds all of the file afterwards."""
    read_rate([file])
    return read_rate([file])


def drop_from_cache(file: Path) -> None:
    """Have the next read of `file` come from the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # what is not written yet cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_rate(files: Sequence[Path], flags: int = 0) -> float:
    """Bytes a second of reading all of `files`, with as many threads as the library has and a buffer each."""
    with ExitStack() as opened:
        descriptors = []
        for file in files:
            descriptors.append(os.open(file, os.O_RDONLY | flags))
            opened.callback(os.close, descriptors[-1])
        sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
        chunks = _chunks(descriptors, sizes)
        lock = threading.Lock()

        def work(buffer: memoryview) -> None:
            while True:
                with lock:
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                _read(*chunk, buffer)

        buffers = [memoryview(mmap.mmap(-1, CHUNK)) for _ in range(reader_threads())]
        for buffer in buffers:
            buffer[::PAGE] = b"\1" * (CHUNK // PAGE)  # page faults are no part of the disk's rate
        with ThreadPoolExecutor(len(buffers)) as pool:
            start = perf_counter()
            list(pool.map(work, buffers))
            return sum(sizes) / (perf_counter() - start)


def _chunks(descriptors: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where each starts, and how many bytes it has."""
    for descriptor, size in zip(descriptors, sizes, strict=True):
        for offset in range(0, size, CHUNK):
            yield descriptor, offset, min(CHUNK, size - offset)


def _read(descriptor: int, offset: int, nbytes: int, buffer: memoryview) -> None:
    done = 0
    while done < nbytes:  # a direct read asks for whole pages, and may stop early at the end of an extent
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        assert count > 0, "the file became shorter"
        done += count
