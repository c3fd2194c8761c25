"""A folder of our own for tensors that cannot be read in place: made fresh, marked, and removed with the model."""

import json
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from overspill.config import align, format_size
from overspill.errors import OffloadFolderError

_MARK = "overspill.json"
_ALIGNMENT = 4096  # a tensor that starts on a page can be read past the page cache without waste


class OffloadFolder:
    """A fresh subfolder of the user's folder, or of the system's temporary one. Deletes only what it wrote itself."""

    def __init__(self, parent: str | os.PathLike[str] | None, *, fingerprint: str, nbytes: int) -> None:
        self._files: list[Path] = []
        try:
            if parent is not None:
                Path(parent).mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f"overspill-{fingerprint}-", dir=parent))
        except OSError as error:
            where = parent if parent is not None else tempfile.gettempdir()
            raise OffloadFolderError(
                f"cannot make an offload folder in {where} ({error.strerror}). Pass another offload_folder"
            ) from error
        self._finalizer = weakref.finalize(self, _remove, self.path, self._files)
        try:
            self._require(nbytes)
            mark = self.new_file(_MARK)
            mark.write_text(json.dumps({"made by": "overspill", "fingerprint": fingerprint}))
        except BaseException:
            self.remove()
            raise

    def new_file(self, name: str) -> Path:
        """The path of a file that we are about to write, readable by its owner only."""
        path = self.path / name
        self._files.append(path)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        return path

    def __len__(self) -> int:
        """How many files we wrote there."""
        return len(self._files)

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


def _remove(folder: Path, files: list[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError:  # someone else put something there, or took the folder away: not ours to touch
        pass
