"""A file without a name: room on disk that ends with the process, however that ends."""

import ctypes
import mmap
import os
import tempfile
import weakref
from pathlib import Path

from overspill.checkpoint.index import SourceFile
from overspill.config import format_size
from overspill.errors import OffloadFolderError


class UnnamedFile:
    """A temporary file that nobody else can open. Safe from several threads."""

    def __init__(self, what: str) -> None:
        """`what` is kept in it, for errors."""
        self._what = what
        self._descriptor, path = tempfile.mkstemp(prefix="overspill-")
        self._folder = tempfile.gettempdir()
        self.source = SourceFile.at(path)
        Path(path).unlink()  # nobody else can open it now, and the system removes it however this process ends
        weakref.finalize(self, os.close, self._descriptor)
        self._pages: mmap.mmap | None = None
        self._process = os.getpid()

    def reserve(self, nbytes: int) -> None:
        """Have the disk set so many bytes aside: a page of a mapped file that finds no room there ends the process."""
        try:
            os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            raise self._failed("make room for", nbytes, error) from error

    def pages(self, nbytes: int) -> mmap.mmap:
        """Its first bytes as memory. What is written there is in the file, and whoever reads that sees it at once."""
        self._pages = mmap.mmap(self._descriptor, nbytes, flags=mmap.MAP_SHARED)
        _mapped.add(self)
        return self._pages

    def keep_to_this_process(self) -> None:
        """In a forked child: what is written to its pages from now on is not in the file, which is the parent's."""
        assert self._pages is not None
        address, nbytes = ctypes.addressof(ctypes.c_char.from_buffer(self._pages)), len(self._pages)
        allowed, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        if _libc.mmap(address, nbytes, allowed, flags, self._descriptor, 0) != address:
            _libc.mprotect(address, nbytes, mmap.PROT_READ)  # then an edit ends this process, and no other's values

    def write(self, source: memoryview, offset: int) -> None:
        """Put `source` there."""
        done = 0
        try:
            while done < len(source):
                done += os.pwrite(self._descriptor, source[done:], offset + done)
        except OSError as error:
            raise self._failed("write", len(source), error) from error

    def read(self, target: memoryview, offset: int) -> None:
        """Fill `target` from there on."""
        if self._pages is not None and os.getpid() != self._process:
            target[:] = memoryview(self._pages)[offset : offset + len(target)]  # a child's edits are there alone
            return
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise self._failed("read", len(target), error) from error
            assert count > 0, "the file ends before what was written to it"
            done += count

    def _failed(self, to_do: str, nbytes: int, error: OSError) -> OffloadFolderError:
        return OffloadFolderError(
            f"could not {to_do} {format_size(nbytes)} of {self._what} in a temporary file in {self._folder}: "
            f"{error.strerror}. Free some space there, or set TMPDIR to another disk"
        )


_mapped: "weakref.WeakSet[UnnamedFile]" = weakref.WeakSet()
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FIXED = 0x10  # on Linux and macOS


def _keep_to_this_process() -> None:
    for file in list(_mapped):
        file.keep_to_this_process()


os.register_at_fork(after_in_child=_keep_to_this_process)
