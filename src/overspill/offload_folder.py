"""A folder of our own for tensors that cannot be read in place: made fresh, marked, and removed with the model.

Note: leftovers. The folder of a process that was killed, a model's worth of disk, is removed by the next load into the
same place. It takes a folder for a leftover if the mark in it is this user's, says that it was made for converted
tensors on this machine, and is not locked: the owner holds a lock on the mark for as long as it lives. The mark is
written under the lock, so one that is still empty tells nothing, and stays.
"""

import fcntl
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from overspill.bundles import is_own, read_mark, try_lock
from overspill.checkpoint.writer import private_file, write_all
from overspill.config import align, format_size
from overspill.errors import OffloadFolderError

_PREFIX = "overspill-"
_MARK = "overspill.json"
_TENSORS = "tensors.bin"
_ALIGNMENT = 4096  # a tensor that starts on a page can be read past the page cache without waste


class OffloadFolder:
    """A fresh subfolder of the user's folder, or of the system's temporary one. Deletes only what it wrote itself."""

    def __init__(self, parent: str | os.PathLike[str] | None, *, fingerprint: str, nbytes: int) -> None:
        where = Path(parent) if parent is not None else Path(tempfile.gettempdir())
        with _explained(f"cannot make an offload folder in {where}"):
            where.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(where)
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{fingerprint}-", dir=where))
        self.tensors = self.path / _TENSORS
        self._finalizer = weakref.finalize(self, _remove, os.getpid(), self.path, os.lstat(self.path))
        try:
            self._require(nbytes)
            self._put_mark(fingerprint)
        except BaseException:
            self.remove()
            raise

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Within, a failing write of `what` becomes an error that says so."""
        with _explained(f"writing {what} to {self.tensors} failed"):
            yield

    def open(self) -> FileIO:
        """The one file for all tensors, new and empty."""
        with _explained(f"cannot write to {self.path}"):
            return private_file(self.tensors)

    def remove(self) -> None:
        """Delete our files, and the folder if nothing else is in it."""
        self._finalizer()

    def _put_mark(self, fingerprint: str) -> None:
        with _explained(f"cannot write to {self.path}"), private_file(self.path / _MARK) as file:
            lock = os.dup(file.fileno())
            weakref.finalize(self, os.close, lock)
            with suppress(OSError):  # a file system without locks, where nobody takes this for a leftover either
                fcntl.flock(lock, fcntl.LOCK_EX)
            write_all(file, memoryview(json.dumps({**_whose(), "fingerprint": fingerprint}).encode()))

    def _require(self, nbytes: int) -> None:
        free = shutil.disk_usage(self.path).free
        if nbytes > free:
            raise OffloadFolderError(
                f"the converted tensors need {format_size(nbytes)} in {self.path.parent}, "
                f"where {format_size(free)} are free. "
                "Free some space, pass another offload_folder, or load without dtype= so that they are read in place"
            )


def padded(nbytes: int) -> int:
    """What a tensor of `nbytes` takes in a file of ours."""
    return align(nbytes, _ALIGNMENT)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, OffloadFolderError) or error.errno is None:
            raise
        reason = error.strerror or str(error)
        raise OffloadFolderError(f"{what} ({reason}). Free some space, or pass another offload_folder") from error


def _whose() -> dict[str, str]:
    """What the marks of all such folders say that were made here. Locks may not reach from one machine to another."""
    return {"made by": "overspill", "holds": "converted tensors", "machine": os.uname().nodename}


def _remove_leftovers(where: Path) -> None:
    for folder in where.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it has no mark, or is gone by now, or is not ours to look into
            _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    made = os.lstat(folder)
    # Not waiting for a pipe, nor following a link, in the place of a mark.
    mark = os.open(folder / _MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if is_own(made) and is_own(os.fstat(mark)) and try_lock(mark) and _is_ours(read_mark(mark)):
            _remove(os.getpid(), folder, made)
    finally:
        os.close(mark)


def _is_ours(mark: bytes) -> bool:
    try:
        document = json.loads(mark)
    except ValueError:
        return False
    return isinstance(document, dict) and document.items() >= _whose().items()


def _remove(owner: int, folder: Path, made: os.stat_result) -> None:
    if os.getpid() != owner:  # a forked child that ends leaves its parent's files alone
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it is gone, or someone has put a link there
        return
    try:
        if not os.path.samestat(os.fstat(descriptor), made):
            return  # another folder in the place of ours
        for name in (_MARK, _TENSORS):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
        with suppress(OSError):  # someone else put something there: not ours to touch
            folder.rmdir()
    finally:
        os.close(descriptor)
