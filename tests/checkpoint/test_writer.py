"""What the writer promises of a file before its first byte, and that the file keeps it."""

import errno
import math
import os
import stat
import weakref
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from overspill.checkpoint import open_checkpoint, writer
from overspill.checkpoint.safetensors_header import DTYPES
from overspill.checkpoint.writer import FileLayout, SafetensorsWriter, by_alignment, lay_out, write_all
from overspill.errors import CheckpointError
from overspill.tensors import TensorSpec

UNNAMED = [torch.complex128, torch.complex32, torch.float4_e2m1fn_x2, torch.quint8]
SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 5), (0,), (4, 0, 2)]


def random_bytes(spec: TensorSpec) -> bytes:
    high = 2 if spec.dtype is torch.bool else 256
    return bytes(torch.randint(0, high, (spec.nbytes,), dtype=torch.uint8).tolist())


def write_file(path: Path, layout: FileLayout, values: dict[str, bytes]) -> None:
    with SafetensorsWriter(path, layout) as file:
        for name in layout.specs:
            file.write(name, [memoryview(values[name])])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new.safetensors"


# ---------------------------------------------------------------- what readers find


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_of_the_format_is_read_back_by_safetensors_and_by_us(shape: tuple[int, ...], path: Path) -> None:
    specs = {name: TensorSpec(shape, dtype) for name, dtype in DTYPES.items()}
    values = {name: random_bytes(spec) for name, spec in specs.items()}
    layout = lay_out(specs.items())
    write_file(path, layout, values)

    for found in (load_file(path), load_file(path, backend="pread")):
        assert {name: TensorSpec.of(tensor) for name, tensor in found.items()} == specs
        assert {name: bytes_of(tensor) for name, tensor in found.items()} == values
    ours = open_checkpoint(path)
    assert {name: (tensor.spec, tensor.offset) for name, tensor in ours.items()} == {
        name: (specs[name], layout.offsets[name]) for name in specs
    }
    raw = path.read_bytes()
    assert {name: raw[layout.offsets[name] :][: spec.nbytes] for name, spec in specs.items()} == values
    assert len(raw) == layout.nbytes


@pytest.mark.parametrize("dtype", UNNAMED, ids=str)
def test_a_dtype_that_the_format_cannot_name_is_kept_as_bytes(dtype: torch.dtype, path: Path) -> None:
    spec = TensorSpec((2, 3), dtype)
    value = random_bytes(spec)
    write_file(path, lay_out([("x", spec)]), {"x": value})
    found = load_file(path)["x"]
    assert TensorSpec.of(found) == TensorSpec((spec.nbytes,), torch.uint8)
    assert bytes_of(found) == value


def test_a_file_without_tensors_can_be_read(path: Path) -> None:
    write_file(path, lay_out([]), {})
    assert load_file(path) == {}


def test_metadata_and_names_in_any_script_arrive(path: Path) -> None:
    names = ["größe.权重", 'with "quotes" and \\', "new\nline", "", "a b"]
    write_file(
        path,
        lay_out([(name, TensorSpec((1,), torch.uint8)) for name in names], {"format": "pt"}),
        dict.fromkeys(names, b"x"),
    )
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == sorted(names)
        assert file.metadata() == {"format": "pt"}


# ---------------------------------------------------------------- where tensors lie


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_the_data_starts_on_a_page_however_long_the_header_is(count: int) -> None:
    layout = lay_out([(f"tensor.{index}", TensorSpec((2,), torch.float32)) for index in range(count)])
    assert len(layout.header) % 4096 == 0
    assert layout.header.rstrip(b" ").endswith(b"}")
    assert list(layout.offsets.values()) == [len(layout.header) + 8 * index for index in range(count)]
    assert layout.nbytes == len(layout.header) + 8 * count


def test_tensors_lie_in_the_order_in_which_they_are_given() -> None:
    layout = lay_out([(name, TensorSpec((size,), torch.uint8)) for name, size in [("b", 3), ("a", 4096), ("c", 64)]])
    assert list(layout.specs) == ["b", "a", "c"]
    assert [offset - len(layout.header) for offset in layout.offsets.values()] == [0, 3, 4099]


SPECS = st.builds(
    TensorSpec,
    st.tuples(st.sampled_from([0, 1, 3, 8, 64, 1000, 4096, 12288])),
    st.sampled_from([*DTYPES.values(), *UNNAMED]),
)


@given(st.lists(SPECS, max_size=12))
def test_sorted_by_alignment_every_tensor_starts_as_aligned_as_its_size_allows(specs: list[TensorSpec]) -> None:
    tensors = [(str(number), spec) for number, spec in enumerate(specs)]
    ordered = by_alignment(tensors)
    assert sorted(ordered, key=lambda tensor: int(tensor[0])) == tensors
    offsets = lay_out(ordered).offsets
    for name, spec in tensors:
        assert offsets[name] % math.gcd(spec.nbytes, 4096) == 0
        assert offsets[name] % spec.dtype.itemsize == 0


def test_sorting_by_alignment_keeps_the_order_of_equals() -> None:
    spec = TensorSpec((64,), torch.float32)
    assert [name for name, _ in by_alignment((name, spec) for name in "cab")] == ["c", "a", "b"]


# ---------------------------------------------------------------- writing


def test_the_file_is_new_and_its_owners_alone(path: Path) -> None:
    before = os.umask(0)
    try:
        write_file(path, lay_out([]), {})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("taken_by", ["a file", "a link", "a dangling link"])
def test_nothing_that_exists_is_written_to(taken_by: str, path: Path, tmp_path: Path) -> None:
    target = tmp_path / "theirs"
    if taken_by != "a dangling link":
        target.write_text("theirs")
    if taken_by == "a file":
        target.rename(path)
        target = path
    else:
        path.symlink_to(target)
    with pytest.raises(FileExistsError):
        SafetensorsWriter(path, lay_out([]))
    assert taken_by == "a dangling link" or target.read_text() == "theirs"
    assert taken_by != "a dangling link" or not target.exists()


@pytest.mark.parametrize("chunk", [1, 7, 1000, 5000])
def test_a_tensor_may_come_in_chunks_of_any_size(chunk: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_WRITTEN_AT_ONCE", 3)
    spec = TensorSpec((500,), torch.int64)
    value = random_bytes(spec)
    with SafetensorsWriter(path, lay_out([("x", spec)])) as file:
        file.write("x", (memoryview(value)[start : start + chunk] for start in range(0, len(value), chunk)))
    assert bytes_of(load_file(path)["x"]) == value


def test_chunks_need_not_be_views_of_bytes(path: Path) -> None:
    values = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    with SafetensorsWriter(path, lay_out([("x", TensorSpec.of(values))])) as file:
        file.write("x", [memoryview(b""), memoryview(torch.empty(0, 3).numpy()), memoryview(values.numpy())])
    assert torch.equal(load_file(path)["x"], values)


def test_a_chunk_is_let_go_before_the_next_one_is_made(path: Path) -> None:
    alive: list[weakref.ref[memoryview]] = []

    def chunks() -> Iterator[memoryview]:
        for _ in range(4):
            assert all(chunk() is None for chunk in alive)
            yield fresh()

    def fresh() -> memoryview:
        chunk = memoryview(bytes(10))
        alive.append(weakref.ref(chunk))
        return chunk

    with SafetensorsWriter(path, lay_out([("x", TensorSpec((40,), torch.uint8))])) as file:
        file.write("x", chunks())
    assert len(alive) == 4


class ShortWrites(FileIO):
    """A file to which the system writes two bytes at a time."""

    def write(self, data: memoryview) -> int:  # type: ignore[override]  # any buffer, says FileIO
        return super().write(data[:2])


def test_a_write_that_does_only_a_part_is_continued(path: Path) -> None:
    with ShortWrites(path, "wb") as file:
        write_all(file, memoryview(b"hello, world"))
        write_all(file, memoryview(torch.tensor([[1], [2], [3]], dtype=torch.int16).numpy()))
    assert path.read_bytes() == b"hello, world\1\0\2\0\3\0"


@pytest.mark.parametrize("refused_from", [0, 3, 100])
def test_the_disk_is_told_to_write_each_byte_once_however_it_came(
    refused_from: int, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(64)
    (tmp_path / "source").write_bytes(content)
    told: list[tuple[int, int]] = []
    copied = 0
    copy_file_range = os.copy_file_range

    def refusing(source: int, target: int, nbytes: int, offset: int) -> int:
        nonlocal copied
        copied += 1
        if copied > refused_from:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return copy_file_range(source, target, min(nbytes, 4), offset)

    monkeypatch.setattr(writer, "_BEHIND", 16)
    monkeypatch.setattr(writer, "start_writing", lambda descriptor, offset, nbytes: told.append((offset, nbytes)))
    monkeypatch.setattr(os, "copy_file_range", refusing)
    layout = lay_out([(name, TensorSpec((length,), torch.uint8)) for name, length in [("a", 15), ("b", 49), ("c", 15)]])
    with (tmp_path / "source").open("rb") as source, SafetensorsWriter(path, layout) as file:
        file.write("a", [memoryview(content[at : at + 5]) for at in range(0, 15, 5)])
        assert told == [], "each call has its price"
        file.copy("b", [(source.fileno(), 15, 20), (source.fileno(), 35, 29)])
        file.write("c", [memoryview(content[:15])])
    assert path.read_bytes()[len(layout.header) :] == content + content[:15]
    assert copied <= refused_from + 1, "what was refused once is not tried again"
    reached = len(layout.header)
    for offset, nbytes in told:
        assert offset == reached
        assert nbytes >= 16
        reached += nbytes
    assert layout.nbytes - reached < 16


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("chunks", "given"),
    [([], "0 of"), ([b"1234567"], "7 of"), ([b"123456789"], "more than"), ([b"12345678", b"9"], "more than")],
)
def test_another_number_of_bytes_than_promised_is_refused_by_name(
    chunks: Iterable[bytes], given: str, path: Path
) -> None:
    spec = TensorSpec((2,), torch.float32)
    layout = lay_out([("blocks.0.weight", spec), ("next", spec)])
    with (
        pytest.raises(
            CheckpointError, match=rf"new\.safetensors.*blocks\.0\.weight, float32\[2\].*{given} the 8 bytes"
        ),
        SafetensorsWriter(path, layout) as file,
    ):
        file.write("blocks.0.weight", map(memoryview, chunks))
    assert path.stat().st_size <= layout.offsets["next"], "what follows was written over"


@pytest.mark.parametrize("copies_ranges", [True, False])
def test_a_source_that_is_cut_short_is_an_error(
    copies_ranges: bool, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    if not copies_ranges:
        monkeypatch.delattr(os, "copy_file_range")
    with (
        (tmp_path / "source").open("rb") as source,
        pytest.raises(CheckpointError, match="the file that x is read from ends at 5: it was cut short"),
        SafetensorsWriter(path, lay_out([("x", TensorSpec((8,), torch.uint8))])) as file,
    ):
        file.copy("x", [(source.fileno(), 0, 8)])


def test_a_copy_that_fails_is_not_tried_in_another_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "copy_file_range", fail)
    layout = lay_out([("x", TensorSpec((8,), torch.uint8))])
    with pytest.raises(OSError, match="Input/output error"), SafetensorsWriter(path, layout) as file:
        file.copy("x", [(0, 0, 8)])


def test_tensors_out_of_turn_and_missing_ones_are_our_own_mistakes(path: Path, tmp_path: Path) -> None:
    layout = lay_out([(name, TensorSpec((1,), torch.uint8)) for name in "ab"])
    with pytest.raises(AssertionError, match="the turn of a, not of b"), SafetensorsWriter(path, layout) as file:
        file.write("b", [memoryview(b"x")])
    with (
        pytest.raises(AssertionError, match=r"\['b'\] were not written"),
        SafetensorsWriter(tmp_path / "second", layout) as file,
    ):
        file.write("a", [memoryview(b"x")])
    with pytest.raises(AssertionError, match="a is given twice"):
        lay_out([("a", TensorSpec((1,), torch.uint8))] * 2)


@pytest.mark.parametrize("name", ["__metadata__", "half \ud800"])
def test_a_name_that_the_format_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="Rename the tensor") as error:
        lay_out([(name, TensorSpec((1,), torch.uint8))])
    assert repr(name) in str(error.value)


def test_a_header_beyond_the_formats_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_HEADER", 4096 - 8)
    lay_out([("as long as it may be", TensorSpec((1,), torch.uint8))])
    with pytest.raises(CheckpointError, match=r"100 tensors need a header of \d+ bytes.*several files"):
        lay_out([(str(number), TensorSpec((1,), torch.uint8)) for number in range(100)])


def test_what_the_system_fails_to_put_on_the_disk_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, lay_out([]), {})


def test_every_way_out_closes_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[FileIO] = []
    real = writer.new_file

    def remembered(path: Path, mode: int) -> FileIO:
        opened.append(real(path, mode))
        return opened[-1]

    monkeypatch.setattr(writer, "new_file", remembered)
    layout = lay_out([("x", TensorSpec((1,), torch.uint8))])
    with pytest.raises(KeyboardInterrupt), SafetensorsWriter(path, layout):
        raise KeyboardInterrupt
    path.unlink()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "write_all", fail)
    with pytest.raises(KeyboardInterrupt):
        SafetensorsWriter(path, layout)
    assert [file.closed for file in opened] == [True, True]
