"""The reader of byte ranges: the right bytes on every way to them, every fault named, every descriptor given back."""

import ctypes
import errno
import gc
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from overspill.checkpoint import SourceFile
from overspill.checkpoint.reader import DIRECT_ALIGNMENT, FileReader
from overspill.errors import CheckpointChangedError, CheckpointReadError

SIZE = 123_457  # 30 pages and a bit
CONTENT = bytes(itertools.islice(itertools.cycle(range(251)), SIZE))  # no two pages alike

RANGES = [
    (0, 1),
    (0, DIRECT_ALIGNMENT),
    (1, DIRECT_ALIGNMENT),
    (DIRECT_ALIGNMENT - 1, 2),
    (DIRECT_ALIGNMENT, DIRECT_ALIGNMENT),
    (5000, 20_000),
    (SIZE - 1, 1),
    (SIZE - DIRECT_ALIGNMENT - 1, DIRECT_ALIGNMENT + 1),
    (0, SIZE),
    (7, SIZE - 7),
]


class Kernel:
    """Stands before os.open and os.preadv: notes what is asked, and answers as told where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[tuple[str, int]] = []
        self.direct: set[int] = set()
        self.reads: list[tuple[int, int, int, int]] = []  # descriptor, address, length, offset
        self.nowait = 0
        self.before_read: Callable[[], None] = lambda: None
        self.answer_cached: Callable[[int, memoryview, int], int] = self._read_all
        self.answer: Callable[[int, memoryview, int], int] = self._read_all
        self._open, self._preadv = os.open, os.preadv
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "preadv", self.preadv)
        monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)

    def open(self, path: str | os.PathLike[str], flags: int, *args: int) -> int:
        self.opened.append((os.fspath(path), flags))
        # Direct reads are made as ordinary ones: whether the file system below has them must not matter here.
        descriptor = self._open(path, flags & ~os.O_DIRECT, *args)
        self.direct.discard(descriptor)
        if flags & os.O_DIRECT:
            self.direct.add(descriptor)
        return descriptor

    def preadv(self, descriptor: int, buffers: Iterable[memoryview], offset: int, flags: int = 0) -> int:
        (target,) = buffers
        if flags & 8:
            self.nowait += 1
            return self.answer_cached(descriptor, target, offset)
        address = ctypes.addressof(ctypes.c_char.from_buffer(target))
        self.reads.append((descriptor, address, len(target), offset))
        self.before_read()
        return self.answer(descriptor, target, offset)

    def _read_all(self, descriptor: int, target: memoryview, offset: int) -> int:
        return self._preadv(descriptor, [target], offset)

    def at_most(self, count: int) -> Callable[[int, memoryview, int], int]:
        return lambda descriptor, target, offset: self._read_all(descriptor, target[:count], offset)

    def opened_times(self, path: Path, *, direct: bool) -> int:
        return sum(name == str(path) and bool(flags & os.O_DIRECT) is direct for name, flags in self.opened)


def failing(number: int) -> Callable[[int, memoryview, int], int]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def file(path: Path) -> SourceFile:
    return SourceFile.at(path)


@pytest.fixture
def reader() -> FileReader:
    return FileReader()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


@pytest.fixture
def cold(kernel: Kernel) -> Kernel:
    """Nothing lies in the page cache."""
    kernel.answer_cached = failing(errno.EAGAIN)
    return kernel


def read(reader: FileReader, file: SourceFile, offset: int, nbytes: int) -> bytes:
    target = bytearray(nbytes)
    reader.read(file, offset, memoryview(target))
    return bytes(target)


def read_aligned(reader: FileReader, file: SourceFile, offset: int, nbytes: int) -> bytes:
    """What was read into scratch memory that has exactly the room which the protocol asks for."""
    whole = mmap.mmap(-1, nbytes + 2 * DIRECT_ALIGNMENT)  # starts on a page
    start = reader.read_aligned(file, offset, nbytes, memoryview(whole))
    return whole[start : start + nbytes]


def descriptors_of(path: Path) -> int:
    """How many descriptors of this process lead to `path`."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))  # noqa: PTH208  # closed at once
    return sum(link.is_symlink() and str(link.readlink()).removesuffix(" (deleted)") == str(path) for link in links)


# ---------------------------------------------------------------- the right bytes


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_a_range_is_read_from_wherever_it_starts(
    reader: FileReader, file: SourceFile, offset: int, nbytes: int
) -> None:
    assert read(reader, file, offset, nbytes) == CONTENT[offset : offset + nbytes]


def test_reading_nothing_is_fine(reader: FileReader, file: SourceFile) -> None:
    assert read(reader, file, SIZE, 0) == b""


def test_a_read_that_stops_early_is_gone_on_with(reader: FileReader, file: SourceFile, kernel: Kernel) -> None:
    kernel.answer = kernel.at_most(1000)
    assert read(reader, file, 500, 50_000) == CONTENT[500:50_500]
    assert len(kernel.reads) == 50


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_what_lies_in_the_page_cache_is_copied_from_there(
    reader: FileReader, file: SourceFile, kernel: Kernel, offset: int, nbytes: int
) -> None:
    assert read_aligned(reader, file, offset, nbytes) == CONTENT[offset : offset + nbytes]
    assert kernel.nowait == 1
    assert kernel.reads == []
    assert kernel.direct == set()


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_what_does_not_is_read_past_it_in_whole_pages(
    reader: FileReader, file: SourceFile, cold: Kernel, offset: int, nbytes: int
) -> None:
    assert read_aligned(reader, file, offset, nbytes) == CONTENT[offset : offset + nbytes]
    assert cold.reads
    for descriptor, *place in cold.reads:
        assert descriptor in cold.direct
        assert [number % DIRECT_ALIGNMENT for number in place] == [0, 0, 0]


def test_the_kernel_itself_accepts_our_direct_reads(
    reader: FileReader, file: SourceFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the temporary folder has no direct reads")
    monkeypatch.setattr(FileReader, "_read_cached", lambda *_: False)
    monkeypatch.setattr(FileReader, "read", lambda *_: pytest.fail("a buffered read"))
    for offset, nbytes in RANGES:
        assert read_aligned(reader, file, offset, nbytes) == CONTENT[offset : offset + nbytes]


@pytest.mark.parametrize("most", [DIRECT_ALIGNMENT, 3 * DIRECT_ALIGNMENT, 2 * DIRECT_ALIGNMENT + 512])
@pytest.mark.parametrize(("offset", "nbytes"), [(5000, 50_000), (7, SIZE - 7)])
def test_a_direct_read_that_stops_early_goes_on_from_a_page(
    reader: FileReader, file: SourceFile, cold: Kernel, most: int, offset: int, nbytes: int
) -> None:
    cold.answer = cold.at_most(most)
    assert read_aligned(reader, file, offset, nbytes) == CONTENT[offset : offset + nbytes]
    assert len(cold.reads) > 1
    assert all(place % DIRECT_ALIGNMENT == 0 for _, *places in cold.reads for place in places)


@pytest.mark.parametrize("partly", [1, 4096, 9999])
def test_a_range_that_lies_in_the_page_cache_only_in_part_is_read_whole(
    reader: FileReader, file: SourceFile, kernel: Kernel, partly: int
) -> None:
    kernel.answer_cached = kernel.at_most(partly)
    assert read_aligned(reader, file, 5000, 10_000) == CONTENT[5000:15_000]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_kernel_that_cannot_ask_the_page_cache_reads_directly(
    reader: FileReader, file: SourceFile, kernel: Kernel, number: int
) -> None:
    kernel.answer_cached = failing(number)
    assert read_aligned(reader, file, 5000, 10_000) == CONTENT[5000:15_000]
    assert kernel.direct


def test_a_python_that_cannot_ask_the_page_cache_reads_directly(
    reader: FileReader, file: SourceFile, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "RWF_NOWAIT")
    assert read_aligned(reader, file, 5000, 10_000) == CONTENT[5000:15_000]
    assert kernel.nowait == 0
    assert kernel.direct


def test_a_file_system_without_direct_reads_is_read_through_the_page_cache(
    reader: FileReader, file: SourceFile, path: Path, cold: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def open_buffered(name: str | os.PathLike[str], flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            refused.append(name)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return cold.open(name, flags, *args)

    monkeypatch.setattr(os, "open", open_buffered)
    for offset, nbytes in RANGES:
        assert read_aligned(reader, file, offset, nbytes) == CONTENT[offset : offset + nbytes]
    assert refused == [path], "it is asked once a file, not once a read"


def failing_where_direct(cold: Kernel, number: int, meanwhile: Callable[[], object] = int) -> list[int]:
    """Let direct reads fail, once `meanwhile` has been called; the list gets the descriptor of each."""
    real, asked = cold.answer, list[int]()

    def buffered_only(descriptor: int, target: memoryview, offset: int) -> int:
        if descriptor in cold.direct:
            asked.append(descriptor)
            meanwhile()
            raise OSError(number, os.strerror(number))
        return real(descriptor, target, offset)

    cold.answer = buffered_only
    return asked


def test_a_file_system_that_opens_for_direct_reads_and_then_refuses_them_is_read_through_the_page_cache(
    reader: FileReader, file: SourceFile, path: Path, cold: Kernel
) -> None:
    # Some file systems (FUSE, network) take the flag and give EINVAL to each read.
    asked = failing_where_direct(cold, errno.EINVAL)
    for _ in range(2):
        assert read_aligned(reader, file, 5000, 10_000) == CONTENT[5000:15_000]
    assert len(asked) == 1, "it is asked once a file, not once a read"
    reader.close()
    assert descriptors_of(path) == 0


def test_direct_reads_of_two_threads_that_are_both_refused_are_both_made_again(
    reader: FileReader, file: SourceFile, path: Path, cold: Kernel
) -> None:
    def read_in_another_thread() -> None:
        if len(asked) == 1:
            other = threading.Thread(target=lambda: found.append(read_aligned(reader, file, 100, 5000)))
            other.start()
            other.join()
            assert descriptors_of(path) >= 2, "the number of ours must not become another file's"

    found: list[bytes] = []
    asked = failing_where_direct(cold, errno.EINVAL, meanwhile=read_in_another_thread)
    assert read_aligned(reader, file, 5000, 10_000) == CONTENT[5000:15_000]
    assert found == [CONTENT[100:5100]]
    assert len(asked) == 2
    reader.close()
    assert descriptors_of(path) == 0


def test_a_direct_read_that_fails_otherwise_is_an_error(reader: FileReader, file: SourceFile, cold: Kernel) -> None:
    failing_where_direct(cold, errno.EIO)
    with pytest.raises(CheckpointReadError, match="Input/output error"):
        read_aligned(reader, file, 5000, 10_000)


def test_a_descriptor_is_handed_out_while_the_file_is_what_it_was(
    reader: FileReader, file: SourceFile, path: Path
) -> None:
    assert os.pread(reader.descriptor(file), 10, 100) == CONTENT[100:110]
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(CheckpointChangedError, match=f"it had {SIZE} bytes and has {SIZE - 1}"):
        reader.descriptor(file)


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("way", [read, read_aligned])
def test_a_failed_read_names_file_and_range_and_the_next_one_works(
    reader: FileReader, file: SourceFile, path: Path, cold: Kernel, way: Callable[..., bytes]
) -> None:
    works, cold.answer = cold.answer, failing(errno.EIO)
    with pytest.raises(CheckpointReadError, match=r"at offset \d+ of .*Input/output error.*Check the disk") as caught:
        way(reader, file, 4096, 8192)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    cold.answer = works
    assert way(reader, file, 4096, 8192) == CONTENT[4096 : 4096 + 8192]


def test_a_failed_look_into_the_page_cache_is_named(
    reader: FileReader, file: SourceFile, path: Path, kernel: Kernel
) -> None:
    kernel.answer_cached = failing(errno.EIO)
    with pytest.raises(CheckpointReadError, match="Input/output error") as caught:
        read_aligned(reader, file, 4096, 8192)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("way", [read, read_aligned])
def test_a_file_that_ends_early_has_changed(
    reader: FileReader, file: SourceFile, path: Path, cold: Kernel, way: Callable[..., bytes]
) -> None:
    # After its size was checked: the check cannot see it.
    cold.before_read = lambda: os.truncate(path, 10_000)
    with pytest.raises(CheckpointChangedError, match=rf"{SIZE} bytes") as caught:
        way(reader, file, 5000, 50_000)
    assert str(path) in str(caught.value)


def _truncate(path: Path) -> None:
    os.truncate(path, SIZE - 1)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"!")


def _rewrite(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(bytes(SIZE))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # whatever the clock's resolution


@pytest.mark.parametrize("way", [read, read_aligned])
@pytest.mark.parametrize("change", [_truncate, _append, _rewrite])
@pytest.mark.parametrize("opened_before", [True, False])
def test_a_file_that_changed_is_not_read(
    reader: FileReader,
    file: SourceFile,
    path: Path,
    way: Callable[..., bytes],
    change: Callable[[Path], None],
    opened_before: bool,
) -> None:
    if opened_before:
        assert way(reader, file, 0, 100) == CONTENT[:100]
    change(path)
    with pytest.raises(CheckpointChangedError, match="Load the model again") as caught:
        way(reader, file, 0, 100)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("way", [read, read_aligned])
def test_a_file_that_is_rewritten_between_its_check_and_its_read_is_noticed(
    reader: FileReader, file: SourceFile, path: Path, cold: Kernel, way: Callable[..., bytes]
) -> None:
    cold.before_read = lambda: _rewrite(path)
    with pytest.raises(CheckpointChangedError, match="Load the model again"):
        way(reader, file, 0, 100)


@pytest.mark.parametrize("way", [read, read_aligned])
def test_another_file_in_its_place_is_not_read(
    reader: FileReader, file: SourceFile, path: Path, way: Callable[..., bytes]
) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(SIZE))
    other.replace(path)
    with pytest.raises(CheckpointChangedError, match="another file"):
        way(reader, file, 0, 100)
    assert descriptors_of(path) == 0


@pytest.mark.parametrize("way", [read, read_aligned])
@pytest.mark.parametrize("replaced", [True, False])
def test_an_open_file_is_read_on_after_it_was_deleted_or_replaced(
    reader: FileReader, file: SourceFile, path: Path, cold: Kernel, way: Callable[..., bytes], replaced: bool
) -> None:
    read(reader, file, 0, 1)
    path.unlink()
    if replaced:
        path.write_bytes(bytes(SIZE))
    assert way(reader, file, 5000, 20_000) == CONTENT[5000:25_000]


@pytest.mark.parametrize("way", [read, read_aligned])
def test_a_file_that_was_deleted_before_it_was_opened_is_named(
    reader: FileReader, file: SourceFile, path: Path, way: Callable[..., bytes]
) -> None:
    path.unlink()
    with pytest.raises(CheckpointReadError, match=r"No such file.*Put the file back") as caught:
        way(reader, file, 0, 1)
    assert str(path) in str(caught.value)


# ---------------------------------------------------------------- descriptors


@pytest.mark.parametrize("way", [read, read_aligned])
def test_threads_that_read_at_once_open_the_file_once(
    reader: FileReader, file: SourceFile, path: Path, cold: Kernel, way: Callable[..., bytes]
) -> None:
    start, wrong = threading.Barrier(8), list[int]()

    def work(index: int) -> None:
        start.wait(timeout=10)
        offsets = range(index, SIZE - 5000, 9001)
        wrong.extend(at for at in offsets if way(reader, file, at, 5000) != CONTENT[at : at + 5000])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []
    assert cold.opened_times(path, direct=False) == 1
    assert cold.opened_times(path, direct=True) == (1 if way is read_aligned else 0)


def test_close_closes_and_the_next_read_opens_again(
    reader: FileReader, file: SourceFile, path: Path, cold: Kernel
) -> None:
    read_aligned(reader, file, 0, 10)
    assert descriptors_of(path) == 2  # the buffered one and the direct one
    reader.close()
    assert descriptors_of(path) == 0
    reader.close()
    assert read(reader, file, 3, 10) == CONTENT[3:13]


def test_a_reader_that_is_gone_leaves_no_descriptor(file: SourceFile, path: Path, cold: Kernel) -> None:
    reader = FileReader()
    read_aligned(reader, file, 0, 10)
    assert descriptors_of(path) == 2
    del reader
    gc.collect()
    assert descriptors_of(path) == 0
