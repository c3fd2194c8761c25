"""A file without a name: room on disk that ends with the process, however that ends."""

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

    def reserve(self, nbytes: int) -> None:
        """Have the disk set so many bytes aside: a page of a mapped file that finds no room there ends the process."""
        try:
            os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            raise self._failed("make room for", nbytes, error) from error

    def pages(self, nbytes: int) -> mmap.mmap:
        """Its first bytes as memory. What is written there is in the file, and whoever reads that sees it at once."""
        return mmap.mmap(self._descriptor, nbytes, flags=mmap.MAP_SHARED)

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
