"""Byte ranges of files into memory: from the page cache where they lie there, else past it, with every fault named."""

import errno
import os
import threading
from typing import Protocol

from overspill.checkpoint.index import SourceFile
from overspill.checkpoint.pagecache import lies_in_page_cache
from overspill.config import align
from overspill.errors import CheckpointChangedError, CheckpointError, CheckpointReadError

DIRECT_ALIGNMENT = 4096
"""What O_DIRECT asks of addresses, offsets and lengths on every file system in use."""


class RangeReader(Protocol):
    """The seam at which tests put a reader that fails, waits or lies."""

    def read(self, file: SourceFile, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of `file` from `offset` on."""

    def read_aligned(self, file: SourceFile, offset: int, nbytes: int, scratch: memoryview) -> int:
        """Read `nbytes` somewhere into page-aligned `scratch`, which has room for two more pages; return where."""


class _DirectReadRefusedError(Exception):
    """The file system does not do direct reads after all."""


class FileReader:
    """Reads ranges of files, which it keeps open. Safe from several threads; reads release the GIL."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: dict[tuple[SourceFile, bool], int | None] = {}
        self._refused: list[int] = []

    def read(self, file: SourceFile, offset: int, target: memoryview) -> None:
        descriptor = self._open(file)
        done = 0
        while done < len(target):
            done += self._once(file, descriptor, target[done:], offset + done)
        file.check(descriptor)  # behind the read, so that a change just before or during it is noticed too

    def read_aligned(self, file: SourceFile, offset: int, nbytes: int, scratch: memoryview) -> int:
        if self._read_cached(file, offset, scratch[:nbytes]):
            file.check(self._open(file))
            return 0
        direct = self._open_direct(file)
        if direct is not None:
            try:
                return self._read_direct(file, direct, offset, nbytes, scratch)
            except _DirectReadRefusedError:
                self._refuse_direct(file)
        self.read(file, offset, scratch[:nbytes])
        return 0

    def _read_direct(self, file: SourceFile, direct: int, offset: int, nbytes: int, scratch: memoryview) -> int:
        """Read past the page cache; where in `scratch` the bytes begin."""
        before = offset % DIRECT_ALIGNMENT
        start, wanted = offset - before, align(before + nbytes, DIRECT_ALIGNMENT)
        done = 0
        while done < before + nbytes:
            # A direct read may stop early, at an extent's end; it goes on from an aligned place.
            aligned = done // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
            reached = aligned + self._once(file, direct, scratch[aligned:wanted], start + aligned, direct=True)
            if reached <= done:
                raise self._shortened(file, start + done)
            done = reached
        file.check(direct)
        return before

    def _refuse_direct(self, file: SourceFile) -> None:
        """Some file systems open a file for direct reads and then refuse them."""
        with self._lock:
            descriptor, self._descriptors[file, True] = self._descriptors[file, True], None
            if descriptor is not None:  # else another thread was refused first
                self._refused.append(descriptor)  # not closed: other threads may be about to read with it

    def descriptor(self, file: SourceFile) -> int:
        """`file`, open for reading, and unchanged at this moment."""
        descriptor = self._open(file)
        file.check(descriptor)
        return descriptor

    def close(self) -> None:
        """Close every file that was opened."""
        with self._lock:
            for descriptor in (*self._descriptors.values(), *self._refused):
                if descriptor is not None:
                    os.close(descriptor)
            self._descriptors.clear()
            self._refused.clear()

    def __del__(self) -> None:
        self.close()

    def _read_cached(self, file: SourceFile, offset: int, target: memoryview) -> bool:
        """Whether the whole range lay in the page cache, and was copied from there."""
        flag = getattr(os, "RWF_NOWAIT", None)
        if flag is None or lies_in_page_cache(self._open(file), offset, len(target)) is False:
            return False
        try:
            return os.preadv(self._open(file), [target], offset, flag) == len(target)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                return False
            raise self._failed(file, offset, len(target), error) from error

    def _once(self, file: SourceFile, descriptor: int, target: memoryview, offset: int, *, direct: bool = False) -> int:
        try:
            count = os.preadv(descriptor, [target], offset)
        except OSError as error:
            if error.errno == errno.EINVAL and direct:
                raise _DirectReadRefusedError from error
            raise self._failed(file, offset, len(target), error) from error
        if count == 0:
            raise self._shortened(file, offset)
        return count

    def _open(self, file: SourceFile) -> int:
        descriptor = self._descriptors.get((file, False))
        if descriptor is None:
            with self._lock:
                descriptor = self._descriptors.get((file, False))
                if descriptor is None:
                    descriptor = self._opened(file, os.O_RDONLY)
                    self._descriptors[file, False] = descriptor
        return descriptor

    def _open_direct(self, file: SourceFile) -> int | None:
        """A descriptor that reads past the page cache; None where the file system does not offer that."""
        if (file, True) not in self._descriptors:
            with self._lock:
                if (file, True) not in self._descriptors:
                    self._descriptors[file, True] = self._opened_direct(file)
        return self._descriptors[file, True]

    def _opened(self, file: SourceFile, flags: int) -> int:
        try:
            # Non-blocking, or a named pipe in the place of the file would hang us before we could see what it is.
            descriptor = os.open(file.path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointReadError(
                f"cannot open {file.path} any more ({error.strerror}). Put the file back, or load the model again"
            ) from error
        try:
            file.check(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _opened_direct(self, file: SourceFile) -> int | None:
        try:
            return self._opened(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except CheckpointError:  # no direct reads here, or the file was replaced: the open descriptor still reads it
            return None

    @staticmethod
    def _shortened(file: SourceFile, offset: int) -> CheckpointChangedError:
        return CheckpointChangedError(
            f"{file.path} changed after it was opened: it had {file.size} bytes and ends at {offset}. "
            "Load the model again"
        )

    @staticmethod
    def _failed(file: SourceFile, offset: int, nbytes: int, error: OSError) -> CheckpointReadError:
        return CheckpointReadError(
            f"reading {nbytes} bytes at offset {offset} of {file.path} failed ({error.strerror or error}). "
            "Check the disk; the next call tries again"
        )
