"""A folder of our own for tensors that cannot be read in place: made fresh, marked, and removed with the model."""

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from overspill.checkpoint.writer import private_file, write_all
from overspill.config import align, format_size
from overspill.errors import OffloadFolderError

_MARK = "overspill.json"
_TENSORS = "tensors.bin"
_ALIGNMENT = 4096  # a tensor that starts on a page can be read past the page cache without waste


class OffloadFolder:
    """A fresh subfolder of the user's folder, or of the system's temporary one. Deletes only what it wrote itself."""

    def __init__(self, parent: str | os.PathLike[str] | None, *, fingerprint: str, nbytes: int) -> None:
        where = Path(parent) if parent is not None else Path(tempfile.gettempdir())
        with _explained(f"cannot make an offload folder in {where}"):
            where.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f"overspill-{fingerprint}-", dir=where))
        self.tensors = self.path / _TENSORS
        self._finalizer = weakref.finalize(self, _remove, os.getpid(), self.path, os.lstat(self.path))
        try:
            self._require(nbytes)
            mark = {"made by": "overspill", "fingerprint": fingerprint}
            with _explained(f"cannot write to {self.path}"), private_file(self.path / _MARK) as file:
                write_all(file, memoryview(json.dumps(mark).encode()))
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
