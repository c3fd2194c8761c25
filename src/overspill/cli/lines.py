"""What the disk of this machine gives, measured apart from the library: the line that its figures stand beside."""

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

from overspill.config import MIB
from overspill.devices import PAGE, reader_threads

_CHUNK = 16 * MIB


def direct_rate(file: Path) -> float | None:
    """Bytes a second from the disk itself, past the page cache. None where the file system has no direct reads."""
    try:
        return _read_all(file, os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


def cached_rate(file: Path) -> float:
    """Bytes a second from the page cache, which holds all of the file afterwards."""
    _read_all(file, 0)
    return _read_all(file, 0)


def drop_from_cache(file: Path) -> None:
    """Have the next read of `file` come from the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # what is not written yet cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read_all(file: Path, flags: int) -> float:
    """Bytes a second, with as many threads as the library has."""
    descriptor = os.open(file, os.O_RDONLY | flags)
    try:
        size = os.fstat(descriptor).st_size
        threads = reader_threads()
        buffers = [memoryview(mmap.mmap(-1, _CHUNK)) for _ in range(threads)]
        for buffer in buffers:
            buffer[::PAGE] = b"\1" * (_CHUNK // PAGE)  # page faults are no part of the disk's rate

        def work(thread: int) -> None:
            for offset in range(thread * _CHUNK, size, threads * _CHUNK):
                _read(descriptor, buffers[thread], offset, min(_CHUNK, size - offset))

        with ThreadPoolExecutor(threads) as pool:
            start = perf_counter()
            list(pool.map(work, range(threads)))
            return size / (perf_counter() - start)
    finally:
        os.close(descriptor)


def _read(descriptor: int, buffer: memoryview, offset: int, nbytes: int) -> None:
    done = 0
    while done < nbytes:  # a direct read asks for whole pages, and may stop early at the end of an extent
        done += os.preadv(descriptor, [buffer[done:]], offset + done)
