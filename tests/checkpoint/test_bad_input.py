"""Checkpoints that are absent, damaged, lying or hostile: each is refused with an error that names culprit and cure."""

import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import nn

from overspill.checkpoint import CheckpointIndex, open_checkpoint, safetensors_header
from overspill.checkpoint.safetensors_header import DTYPES, read_header
from overspill.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CheckpointUnsafeError,
)


def file_of(header: object, data: bytes = b"") -> bytes:
    """The bytes of a safetensors file with `header`, as JSON or as it is."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(begin: int, end: int, *, dtype: str = "F32", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def open_bytes(content: bytes, suffix: str = ".safetensors") -> CheckpointIndex:
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        return open_checkpoint(file.name)


# ---------------------------------------------------------------- nothing there


def test_a_path_that_is_not_there_suggests_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "llama-8b").mkdir()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint at .*lama-8b\. In .* there is 'llama-8b'$"):
        open_checkpoint(tmp_path / "lama-8b")
    with pytest.raises(CheckpointNotFoundError, match=r"Nothing in .* has a name like it"):
        open_checkpoint(tmp_path / "zzz")
    with pytest.raises(CheckpointNotFoundError, match=r"Its folder .*no/such does not exist either"):
        open_checkpoint(tmp_path / "no" / "such" / "folder")


def test_a_folder_without_a_checkpoint_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no \*\.safetensors, .* It holds no files"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"It holds 'config\.json'\. Give the folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("names", [("optimizer.pt", "training_args.bin"), ("a.safetensors.index.json",) * 2])
def test_a_folder_where_several_files_may_be_meant_names_them(tmp_path: Path, names: tuple[str, str]) -> None:
    for number, name in enumerate(names):
        (tmp_path / f"{number}.{name}").touch()
    with pytest.raises(CheckpointNotFoundError, match=f"'0.{names[0]}', '1.{names[1]}', .* Give the path of one"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("count", [8, 9, 12])
def test_a_long_list_of_names_is_cut(tmp_path: Path, count: int) -> None:
    names = [f"{number:02}.pt" for number in range(count)]
    for name in names:
        (tmp_path / name).touch()
    listed = ", ".join(map(repr, names[:8])) + (f" and {count - 8} more" if count > 8 else "")
    with pytest.raises(CheckpointNotFoundError) as error:
        open_checkpoint(tmp_path)
    assert f"holds {listed}, and any may be meant" in str(error.value)


def test_a_file_of_another_kind_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointNotFoundError, match=r"model\.gguf is not a checkpoint by its name"):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_git_lfs_pointer_is_told_from_a_corrupt_file(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(pointer)
        with pytest.raises(CheckpointNotFoundError, match=f"{name} is a Git LFS pointer.* `git lfs pull`"):
            open_checkpoint(tmp_path / name)


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="not a regular file"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_what_the_operating_system_cannot_read_is_named(tmp_path: Path) -> None:
    loop = tmp_path / "model.safetensors"
    loop.symlink_to(loop)
    with pytest.raises(CheckpointReadError, match=r"model\.safetensors cannot be read: .*symbolic links"):
        open_checkpoint(loop)
    with pytest.raises(CheckpointReadError, match="cannot be read: File name too long"):
        open_checkpoint(tmp_path / ("x" * 300 + ".safetensors"))


def test_two_files_with_one_tensor_are_both_named(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"w": torch.ones(1)}, tmp_path / name)
    with pytest.raises(CheckpointCorruptError, match=r"a\.safetensors and .*b\.safetensors both hold tensor 'w'"):
        open_checkpoint(tmp_path)


# ---------------------------------------------------------------- safetensors headers

LYING_HEADERS = {
    "a size that its bytes contradict": ({"w": entry(0, 8, shape=[3])}, 8, r"'w', float32\[3\], .* takes 12 bytes"),
    "an end before its begin": ({"w": entry(8, 0, shape=[0])}, 8, "'w', .* bytes 8 to 0; it takes 0 bytes"),
    "a range past the end of the file": ({"w": entry(0, 16)}, 8, "truncated: tensor 'w' ends 8 bytes after the file"),
    "an overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "tensor 'b' overlap tensor 'a'"),
    "two tensors in one place": ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "tensor 'b' overlap tensor 'a'"),
    "a hole": ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "4 unused bytes before tensor 'b'"),
    "a hole at the start": ({"a": entry(4, 8)}, 8, "4 unused bytes before tensor 'a'"),
    "bytes that no tensor owns": ({"a": entry(0, 4)}, 8, "4 bytes after its last tensor"),
    "a dtype that is unknown": ({"w": entry(0, 4, dtype="F31")}, 4, "'w' the dtype 'F31', which is none of F64, F32"),
    "a dtype that is no name": ({"w": {**entry(0, 4), "dtype": ["F32"]}}, 4, r"'w' the dtype \['F32'\]"),
    "a negative size": ({"w": entry(0, 4, shape=[-1])}, 4, r"'w' the shape \[-1\]"),
    "a fractional size": ({"w": entry(0, 4, shape=[1.0])}, 4, r"'w' the shape \[1.0\]"),
    "a size of true": ({"w": entry(0, 4, shape=[True])}, 4, r"'w' the shape \[True\]"),
    "a shape that is no list": ({"w": entry(0, 4, shape=1)}, 4, "'w' the shape 1"),
    "a size beyond 64 bits": ({"w": entry(0, 4, shape=[2**64])}, 4, "'w' the shape"),
    "sizes whose product overflows": ({"w": entry(0, 4, shape=[2**32, 2**32])}, 4, "'w' .* than memory can address"),
    "an overflow hidden by a zero": ({"w": entry(0, 0, shape=[0, 2**62, 2**62])}, 0, "'w' .* memory can address"),
    "one offset": ({"w": {**entry(0, 4), "data_offsets": [0]}}, 4, r"'w' the data_offsets \[0\]"),
    "three offsets": ({"w": {**entry(0, 4), "data_offsets": [0, 4, 8]}}, 4, r"'w' the data_offsets \[0, 4, 8\]"),
    "a negative offset": ({"w": {**entry(0, 4), "data_offsets": [-4, 0]}}, 4, r"'w' the data_offsets \[-4, 0\]"),
    "offsets that are text": ({"w": {**entry(0, 4), "data_offsets": ["0", "4"]}}, 4, "'w' the data_offsets"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [1]}}, 4, "'w' the data_offsets None"),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 4]}}, 4, "'w' the shape None"),
    "no dtype": ({"w": {"shape": [1], "data_offsets": [0, 4]}}, 4, "'w' the dtype None"),
    "a size of minus zero": (b'{"w":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', 0, r"'w' the shape \[-0.0\]"),
    "an offset of minus zero": (b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[-0,0]}}', 0, "'w' the data_offsets"),
    "a field that is unknown": ({"w": {**entry(0, 4), "scale": 2}}, 4, "tensor 'w' by 'scale', which no reader"),
    "a tensor that is no object": ({"w": [1]}, 0, r"tensor 'w' by \[1\]"),
    "metadata that are not all texts": ({"__metadata__": {"format": "pt", "step": 3}}, 0, "__metadata__"),
    "metadata that are no texts": ({"__metadata__": {"step": 3}}, 0, "__metadata__"),
    "metadata that are no Unicode": (
        b'{"__metadata__": {"a": "\\ud800"}}',
        0,
        "__metadata__ that is not valid Unicode",
    ),
    "metadata that are no object": ({"__metadata__": "pt"}, 0, "__metadata__"),
    "a name that is no Unicode": (b'{"\\ud800": {}}', 0, "not valid Unicode"),
    "a name twice": (b'{"w": {}, "v": {}, "w": {}}', 0, "key 'w' occurs more than once"),
    "a field twice": (b'{"w": {"dtype": "F32", "dtype": "F32"}}', 0, "key 'dtype' occurs more than once"),
    "no JSON": (b"{not json}", 0, "not valid JSON"),
    "no UTF-8": (b'{"\xff": {}}', 0, "not valid JSON"),
    "a NaN": (b'{"__metadata__": {"x": NaN}}', 0, "NaN is not JSON"),
    "a number of a million digits": (b'{"w": ' + b"9" * 1_000_000 + b"}", 0, "not valid JSON"),
    "lists a million deep": (b'{"w": ' + b"[" * 1_000_000, 0, "not valid JSON"),
    "a list": (b"[]", 0, "a JSON list, not an object"),
    "nothing": (b"", 0, "not valid JSON"),
}


@pytest.mark.parametrize(("header", "data", "message"), LYING_HEADERS.values(), ids=LYING_HEADERS)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: object, data: int, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(file_of(header, bytes(data)))
    with pytest.raises(CheckpointCorruptError, match=rf"model\.safetensors (?s:.*){message}(?s:.*) again"):
        open_checkpoint(tmp_path)


def test_a_length_of_the_header_that_lies_is_refused() -> None:
    with pytest.raises(CheckpointCorruptError, match="has 7 bytes, too few"):
        open_bytes(bytes(7))
    with pytest.raises(CheckpointCorruptError, match="truncated: it claims a header of 1000 bytes"):
        open_bytes((1000).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointCorruptError, match="truncated: it claims a header of 3 bytes, and has 10 bytes"):
        open_bytes((3).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointCorruptError, match="claims a header of 18446744073709551615 bytes"):
        open_bytes(b"\xff" * 8 + b"{}")


def test_a_file_that_is_cut_while_its_header_is_read_is_refused() -> None:
    content = file_of({"w": entry(0, 4)}, bytes(4))
    with pytest.raises(CheckpointCorruptError, match=r"x\.safetensors ended after 12 of the header's \d+ bytes"):
        read_header(io.BytesIO(content[:20]), Path("x.safetensors"), len(content))


def test_a_header_as_long_as_the_format_allows_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    content = file_of({"w": entry(0, 4)}, bytes(4))
    monkeypatch.setattr(safetensors_header, "MAX_HEADER", len(content) - 8 - 4)
    assert list(open_bytes(content)) == ["w"]
    monkeypatch.setattr(safetensors_header, "MAX_HEADER", len(content) - 8 - 5)
    with pytest.raises(CheckpointCorruptError, match="safetensors allows"):
        open_bytes(content)


def test_an_empty_tensor_may_have_any_size_that_memory_can_address() -> None:
    found = open_bytes(file_of({"w": entry(0, 0, dtype="U8", shape=[0, 1, 2**63 - 1])}))
    assert found["w"].spec.shape == (0, 1, 2**63 - 1)


def test_an_index_too_large_to_be_one_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").touch()
    os.truncate(tmp_path / "model.safetensors.index.json", 100_000_001)
    with pytest.raises(CheckpointCorruptError, match=r"index\.json has 100000001 bytes, too many for an index"):
        open_checkpoint(tmp_path)


def test_a_header_over_the_formats_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    os.truncate(path, 200_000_000)
    with pytest.raises(CheckpointCorruptError, match="safetensors allows 100000000"):
        open_checkpoint(path)


def test_a_product_of_very_many_sizes_is_given_up_early() -> None:
    shape = [2**62] * 200_000  # multiplied out, a number of twelve million bits, in quadratic time
    with pytest.raises(CheckpointCorruptError, match="than memory can address"):
        open_bytes(file_of({"w": entry(0, 4, shape=shape)}, bytes(4)))


@pytest.mark.parametrize("kept", [0, 7, 8, 20, -1])
def test_a_truncated_safetensors_file_is_refused(tmp_path: Path, kept: int) -> None:
    whole = save({"w": torch.randn(10)})
    (tmp_path / "x.safetensors").write_bytes(whole[:kept])
    with pytest.raises(CheckpointCorruptError, match=r"x\.safetensors .*again"):
        open_checkpoint(tmp_path)


# ---------------------------------------------------------------- against the safetensors package

offsets = st.integers(-1, 24) | st.sampled_from([2**63, 2**64])
sizes = st.integers(-1, 4) | st.sampled_from([2**32, 2**64, 1.0, None, "1"])
wild_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F31", 4]),
        "shape": st.lists(sizes, max_size=3),
        "data_offsets": st.lists(offsets, min_size=1, max_size=3),
    }
)


@st.composite
def tiled_entries(draw: st.DrawFn) -> dict[str, object]:
    """Headers that are right, but for one tensor at most: pure noise would never get past the first check."""
    header: dict[str, object] = {}
    position = 0
    for name in draw(st.lists(st.text(max_size=3), max_size=4, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(DTYPES))), draw(st.lists(st.integers(0, 3), max_size=3))
        nbytes = DTYPES[dtype].itemsize
        for extent in shape:
            nbytes *= extent
        header[name] = entry(position, position + nbytes, dtype=dtype, shape=shape)
        position += nbytes
    if draw(st.booleans()):
        header[draw(st.text(max_size=3))] = draw(wild_entries)
    header["__data__"] = position
    return header


def accepted_by_safetensors(content: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    try:
        found = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return None
    return {name: (info["dtype"], info["shape"], bytes(info["data"])) for name, info in found}


def accepted_by_overspill(content: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    try:
        index = open_bytes(content)
    except CheckpointCorruptError:
        return None
    return {
        name: (names[stored.spec.dtype], list(stored.spec.shape), content[stored.offset :][: stored.nbytes])
        for name, stored in index.items()
    }


@settings(max_examples=300, deadline=None)
@given(header=tiled_entries(), excess=st.sampled_from([0, 0, 0, 0, -1, 1]))
def test_what_is_accepted_is_what_the_safetensors_package_accepts(header: dict[str, object], excess: int) -> None:
    data = header.pop("__data__")
    assert isinstance(data, int)
    content = file_of(header, bytes(range(256)) * 32)[: len(file_of(header)) + data + excess]
    assert accepted_by_overspill(content) == accepted_by_safetensors(content)


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 10_000), patch=st.binary(max_size=4), cut=st.integers(0, 3))
def test_a_damaged_file_is_refused_or_read_as_the_safetensors_package_reads_it(
    position: int, patch: bytes, cut: int
) -> None:
    whole = save({"a": torch.arange(4), "b": torch.ones(2, 3)}, metadata={"format": "pt"})
    position %= len(whole)
    content = whole[:position] + patch + whole[position + cut :]
    accepted = accepted_by_overspill(content)
    # One way only: the package lets the last of two equal keys win, and we refuse both.
    assert accepted is None or accepted == accepted_by_safetensors(content)


# ---------------------------------------------------------------- index.json


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


UNSAFE_NAMES = [
    "/etc/passwd",
    "../secret.safetensors",
    "sub/../../secret.safetensors",
    "..",
    "..\\secret.safetensors",
    "C:\\secret.safetensors",
    "C:secret.safetensors",
    "\\\\server\\share\\secret.safetensors",
]


@pytest.mark.parametrize("name", UNSAFE_NAMES)
def test_a_shard_whose_name_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    save_file({"w": torch.ones(1)}, tmp_path / "secret.safetensors")
    write_index(folder, {"w": name})
    with pytest.raises(
        CheckpointUnsafeError, match=r"index\.json names the shard .* outside .*model: .* Put the shard"
    ):
        open_checkpoint(folder)


def test_all_missing_shards_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "1.safetensors")
    (tmp_path / "4.safetensors").mkdir()
    shards = ["2.safetensors", "3.safetensors", "4.safetensors", "nul\0l.safetensors", "\ud800.safetensors", ""]
    write_index(tmp_path, {"a": "1.safetensors"} | {f"t{i}": shard for i, shard in enumerate(shards)})
    with pytest.raises(CheckpointNotFoundError) as caught:
        open_checkpoint(tmp_path)
    assert all(repr(shard) in str(caught.value) for shard in shards)
    assert "6 of 7 shards" in str(caught.value)
    assert "1.safetensors" not in str(caught.value)


def test_keys_that_their_shard_lacks_are_listed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "1.safetensors")
    write_index(tmp_path, dict.fromkeys(("a", "b", "c"), "1.safetensors"))
    with pytest.raises(CheckpointCorruptError, match=r"not in their shards: 'b' \(1\.safetensors\), 'c' \("):
        open_checkpoint(tmp_path)


def test_a_shard_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    write_index(tmp_path, {"a": "weights.gguf"})
    with pytest.raises(CheckpointNotFoundError, match=r"weights\.gguf is named as a shard, but does not end in"):
        open_checkpoint(tmp_path)


BAD_INDEXES = {
    "no JSON": ("{", "not valid JSON"),
    "a list": ("[]", "not an object"),
    "no weight_map": ('{"metadata": {}}', 'no "weight_map"'),
    "a weight_map that is a list": ('{"weight_map": ["w"]}', 'no "weight_map"'),
    "a shard that is no name": ('{"weight_map": {"w": 3}}', "maps tensor 'w' to 3"),
    "a tensor mapped twice": ('{"weight_map": {"w": "a", "w": "b"}}', "key 'w' occurs more than once"),
}


@pytest.mark.parametrize(("text", "message"), BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointCorruptError, match=rf"index\.json .*{message}"):
        open_checkpoint(tmp_path)


# ---------------------------------------------------------------- torch.save


class Touch:
    """An object whose unpickling runs code: it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def repack(path: Path, edit: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Write the archive anew with each record as `edit` returns it; torch then looks offsets up in the archive."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist() if not name.endswith(".format_version")}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, edit(name, content))


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    torch.save({"w": torch.arange(4.0), "v": torch.arange(6)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_no_code_of_a_pickle_runs(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Touch(tmp_path / "ran")}, tmp_path / "model.bin")
    with pytest.raises(
        CheckpointUnsafeError, match=r"model\.bin may run code .* posix\.mkdir\. If you trust .*safetens"
    ):
        open_checkpoint(tmp_path / "model.bin")
    assert not (tmp_path / "ran").exists()


def test_a_pickled_module_is_refused_as_unsafe(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(CheckpointUnsafeError, match=r"torch\.nn\.modules\.linear\.Linear"):
        open_checkpoint(tmp_path)


def test_a_torchscript_program_is_refused_as_unsafe(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "model.pt")
    with pytest.raises(CheckpointUnsafeError, match=r"model\.pt is a TorchScript program"):
        open_checkpoint(tmp_path)


def test_a_file_of_before_torch_1_6_is_refused_with_a_remedy(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"model\.pt is not a zip archive.* Convert it to safetensors"):
        open_checkpoint(tmp_path)


ODD_PICKLES = {
    "a transposed tensor": ({"w": torch.randn(3, 4).t()}, r"'w', which is not contiguous \(shape \[4, 3\]"),
    "an expanded tensor": ({"w": torch.ones(1).expand(5)}, "'w', which is not contiguous"),
    "a conjugated view": ({"w": torch.ones(2, dtype=torch.complex64).conj()}, "'w', which is a lazily conjugated"),
    "a negated view": ({"w": torch.ones(2, dtype=torch.complex64).conj().imag}, "'w', which is a lazily conjugated"),
    "a sparse tensor": (
        {"w": torch.eye(3).to_sparse()},
        "('w', which is of layout torch.sparse_coo|a kind of tensor that cannot be read in place)",
    ),
    "a meta tensor": ({"w": torch.empty(3, device="meta")}, "holds no values for tensor 'w'"),
    "a number": ({"w": torch.ones(2), "step": 3}, "entry 'step' of type int"),
    "a dict within": ({"model": {"w": torch.ones(2)}}, "entry 'model' of type dict"),
    "a number for a name": ({3: torch.ones(2)}, "entry 3 of type Tensor"),
    "a list": ([torch.ones(2)], "holds a list, not a dict"),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch 2.11, once a process
@pytest.mark.parametrize(("content", "message"), ODD_PICKLES.values(), ids=ODD_PICKLES)
def test_what_cannot_be_read_in_place_is_refused_by_name(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=rf"model\.pt .*{message}.* [Ss]ave"):
        open_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning", "ignore:TypedStorage:UserWarning")
def test_a_quantized_tensor_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt holds a kind of tensor that cannot be read in place"):
        open_checkpoint(tmp_path)


def test_a_compressed_record_is_refused(pickled: Path) -> None:
    repack(pickled, lambda name, content: content, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"model\.pt holds the record 'model/data\.pkl' compressed"):
        open_checkpoint(pickled)


def test_a_record_too_short_for_its_tensor_is_refused(pickled: Path) -> None:
    repack(pickled, lambda name, content: content[:-1] if name.endswith("/data/1") else content)
    with pytest.raises(CheckpointCorruptError, match=r"tensor 'v', int64\[6\], .* a record of 47 bytes"):
        open_checkpoint(pickled)


def test_a_record_at_another_place_than_torch_computes_is_refused(pickled: Path) -> None:
    original = pickled.read_bytes()
    repack(pickled, lambda name, content: content)
    assert set(open_checkpoint(pickled)) == {"w", "v"}  # without .format_version, torch looks the places up …
    pickled.write_bytes(original)
    with zipfile.ZipFile(pickled) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(pickled, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    with pytest.raises(CheckpointCorruptError, match="no record where tensor 'v' should start"):
        open_checkpoint(pickled)  # … with it, torch assumes the layout of its own writer


def test_a_big_endian_pickle_is_refused(pickled: Path) -> None:
    repack(pickled, lambda name, content: b"big" if name.endswith("/byteorder") else content)
    with pytest.raises(CheckpointError, match="written on a big-endian machine"):
        open_checkpoint(pickled)


@settings(max_examples=100, deadline=None)
@given(kept=st.floats(0, 1, exclude_max=True))
def test_a_truncated_pickle_is_refused(kept: float) -> None:
    with tempfile.TemporaryFile() as file:
        torch.save({"w": torch.arange(4.0), "v": torch.arange(6)}, file)
        file.seek(0)
        whole = file.read()
    with pytest.raises(CheckpointError):
        open_bytes(whole[: int(kept * len(whole))], ".pt")


@settings(max_examples=200, deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), patch=st.binary(min_size=1, max_size=4))
def test_a_damaged_pickle_is_refused_or_read_within_its_file(position: float, patch: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        torch.save({"w": torch.arange(4.0), "v": torch.arange(6)}, file)
        file.seek(0)
        content = bytearray(file.read())
    start = int(position * len(content))
    content[start : start + len(patch)] = patch
    try:
        index = open_bytes(bytes(content), ".pt")
    except CheckpointError:
        return
    assert all(0 <= stored.offset <= len(content) - stored.nbytes for stored in index.values())
