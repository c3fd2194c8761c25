"""Writes a safetensors file whose every offset is known before its first byte: the header, then tensor after tensor."""

import errno
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from overspill.checkpoint.pagecache import start_writing
from overspill.checkpoint.reader import DIRECT_ALIGNMENT
from overspill.checkpoint.safetensors_header import DTYPES, MAX_HEADER
from overspill.config import MIB, align
from overspill.errors import CheckpointError
from overspill.tensors import TensorSpec

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_LENGTH_FIELD = 8
_NO_RANGE_COPIES = {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM}
_BEHIND = 64 * MIB
PRIVATE: Final = 0o600
"""The mode of files that are nobody else's business."""
PUBLIC: Final = 0o666
"""The mode of files that the umask says it for: what the user asked for, and may give to others."""
_WRITTEN_AT_ONCE = 16 * MIB  # a single write of gigabytes could not be interrupted


@dataclass(frozen=True)
class FileLayout:
    """What a safetensors file will be: its header, and each tensor's absolute offset in the file's order."""

    header: bytes
    specs: Mapping[str, TensorSpec]
    offsets: Mapping[str, int]
    nbytes: int
    """Of the whole file."""


def by_alignment(tensors: Iterable[tuple[str, TensorSpec]]) -> list[tuple[str, TensorSpec]]:
    """`tensors`, those first whose sizes are multiples of a page, and so on down to the odd ones.

    The format allows no gaps, so one tensor of 4 bytes in front would push all that follow off their pages. Behind
    sizes that are multiples of a larger power of two than its own, a tensor starts on a multiple of its own: on a page
    where its size is one, on 64 bytes where that divides it, and always on a whole element.
    """
    return sorted(tensors, key=lambda tensor: -math.gcd(tensor[1].nbytes, DIRECT_ALIGNMENT))


def lay_out(tensors: Iterable[tuple[str, TensorSpec]], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """The file that holds `tensors` in the order given. Its data starts on a page, for direct reads without waste.

    A dtype that the format has no name for becomes plain bytes; whoever writes it must remember what they are.
    """
    entries: dict[str, object] = {} if metadata is None else {_METADATA: dict(metadata)}
    specs: dict[str, TensorSpec] = {}
    begins: dict[str, int] = {}
    end = 0
    for name, spec in tensors:
        assert name not in specs, f"{name} is given twice"
        _check_name(name)
        dtype, shape = _stored_as(spec)
        specs[name], begins[name] = spec, end
        end += spec.nbytes
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begins[name], end]}
    header = _header(entries)
    offsets = {name: len(header) + begin for name, begin in begins.items()}
    return FileLayout(header, specs, offsets, len(header) + end)


def _stored_as(spec: TensorSpec) -> tuple[str, list[int]]:
    if spec.dtype in _NAMES:
        return _NAMES[spec.dtype], list(spec.shape)
    return "U8", [spec.nbytes]


def _check_name(name: str) -> None:
    if name == _METADATA:
        raise CheckpointError(f"a safetensors file keeps the name {name!r} for itself. Rename the tensor")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"the tensor name {name!r} is not valid Unicode, which a safetensors file needs. Rename the tensor"
        ) from error


def _header(entries: Mapping[str, object]) -> bytes:
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    length = align(_LENGTH_FIELD + len(text), DIRECT_ALIGNMENT) - _LENGTH_FIELD
    if length > MAX_HEADER:
        raise CheckpointError(
            f"{len(entries)} tensors need a header of {length} bytes, and safetensors allows {MAX_HEADER}. "
            "Spread them over several files"
        )
    return length.to_bytes(_LENGTH_FIELD, "little") + text.ljust(length)  # spaces at its end are part of the format


class SafetensorsWriter:
    """Writes one new file after its layout: the tensors one after the other, each in chunks of any size.

    Leaving the `with` block puts the file on the disk: what the system only promised to write could still be lost to a
    full disk, and nobody would be told. A file that failed is left for its owner to delete.
    """

    def __init__(self, path: Path, layout: FileLayout, *, mode: int = PRIVATE) -> None:
        self._path, self._layout = path, layout
        self._due = iter(layout.specs)
        self._behind = 0  # bytes that the disk has not been told to write
        self._copies_ranges = hasattr(os, "copy_file_range")
        self._file = new_file(path, mode)
        try:
            write_all(self._file, memoryview(layout.header))
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Write `name`, whose turn it must be. Takes a chunk when the one before it is written and let go."""
        due = next(self._due, None)
        assert due == name, f"it is the turn of {due}, not of {name}"
        promised, written = self._layout.specs[name].nbytes, 0
        for chunk in chunks:
            written += chunk.nbytes
            if written > promised:
                break
            write_all(self._file, chunk)
            self._wrote(chunk.nbytes)
            del chunk  # or it would live on while the next one is made
        if written != promised:
            relation = "more than" if written > promised else f"{written} of"
            raise CheckpointError(
                f"{self._path} was to hold {name}, {self._layout.specs[name]}, and was given {relation} the {promised} "
                "bytes that it takes. Try again once nothing else changes the tensor"
            )

    def copy(self, name: str, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Write `name`, whose turn it must be, from ranges of open files, inside the kernel.

        A range is a descriptor, an offset and a number of bytes.
        """
        due = next(self._due, None)
        assert due == name, f"it is the turn of {due}, not of {name}"
        for source, offset, nbytes in ranges:
            end = offset + nbytes
            while offset < end:
                moved = self._copy_some(source, offset, min(end - offset, _WRITTEN_AT_ONCE))
                if moved == 0:
                    raise CheckpointError(f"the file that {name} is read from ends at {offset}: it was cut short")
                offset += moved
                self._wrote(moved)

    def _wrote(self, nbytes: int) -> None:
        """Keep the disk busy while the next bytes are made."""
        self._behind += nbytes
        if self._behind >= _BEHIND:
            start_writing(self._file.fileno(), self._file.tell() - self._behind, self._behind)
            self._behind = 0

    def _copy_some(self, source: int, offset: int, nbytes: int) -> int:
        if self._copies_ranges:
            try:
                return os.copy_file_range(source, self._file.fileno(), nbytes, offset)
            except OSError as error:
                if error.errno not in _NO_RANGE_COPIES:
                    raise
        self._copies_ranges = False  # not between these file systems
        data = os.pread(source, nbytes, offset)
        write_all(self._file, memoryview(data))
        return len(data)

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                missing = list(self._due)
                assert not missing, f"{missing} were not written"
                os.fsync(self._file.fileno())


def new_file(path: Path, mode: int) -> FileIO:
    """A new file, open for writing; never one that is there already, or that a link leads to.

    The umask takes from `mode`, as it does from that of any file. Unbuffered: closing it after a failed write must not
    fail again.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
    return FileIO(os.open(path, flags, mode), "wb")


def private_file(path: Path) -> FileIO:
    """A new file that its owner alone may read."""
    return new_file(path, PRIVATE)


def write_all(file: FileIO, data: memoryview) -> None:
    """Write all of `data`, however many calls it takes."""
    if data.nbytes == 0:  # an empty view cannot be cast
        return
    data = data.cast("B")
    while data:
        data = data[file.write(data[:_WRITTEN_AT_ONCE]) :]
