"""What open_checkpoint finds, and that it lies where the index says."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from overspill.checkpoint import SourceFile, StoredTensor, open_checkpoint
from overspill.checkpoint.index import FileSpan
from overspill.checkpoint.safetensors_header import DTYPES
from overspill.errors import CheckpointChangedError, CheckpointCorruptError
from overspill.tensors import TensorSpec


def read(stored: StoredTensor) -> torch.Tensor:
    """The tensor, from nothing but what the index says of it."""
    with stored.file.path.open("rb") as file:
        file.seek(stored.offset)
        raw = file.read(stored.nbytes)
    if not raw:
        return torch.empty(stored.spec.shape, dtype=stored.spec.dtype)
    return torch.frombuffer(bytearray(raw), dtype=stored.spec.dtype).reshape(stored.spec.shape)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert TensorSpec.of(actual) == TensorSpec.of(expected)
    assert torch.equal(as_bytes(actual), as_bytes(expected))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (TensorSpec(shape, dtype).nbytes,), dtype=torch.uint8).view(dtype).reshape(shape)


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder of two shards with their index: a = 1, b = 2."""
    save_file({"a": torch.full((2,), 1.0)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.full((2,), 2.0)}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write_index(tmp_path / "model.safetensors.index.json", weight_map)
    return tmp_path


# ---------------------------------------------------------------- safetensors


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_safetensors_tensor_of_any_dtype_is_found_where_it_lies(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"w": random_bits((3, 5), dtype), "scalar": random_bits((), dtype), "last": random_bits((7,), dtype)}
    save_file(tensors, tmp_path / "x.safetensors")
    index = open_checkpoint(tmp_path / "x.safetensors")
    assert set(index) == set(tensors)
    for name, tensor in tensors.items():
        assert_same_bits(read(index[name]), tensor)


def test_empty_tensors_and_empty_files_are_fine(tmp_path: Path) -> None:
    tensors = {"none": torch.empty(0, 3), "some": torch.arange(4), "no_columns": torch.empty(5, 0)}
    save_file(tensors, tmp_path / "x.safetensors")
    index = open_checkpoint(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        assert_same_bits(read(index[name]), tensor)
    save_file({}, tmp_path / "nothing.safetensors")
    assert dict(open_checkpoint(tmp_path / "nothing.safetensors")) == {}


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert list(open_checkpoint(tmp_path / "x.safetensors")) == ["a"]


def test_values_are_never_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    nbytes = 1 << 40  # a sparse file: no disk and no memory could hold what it claims
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + nbytes)
    assert open_checkpoint(path)["w"].nbytes == nbytes


def test_five_thousand_tensors_are_indexed_in_a_blink(tmp_path: Path) -> None:
    save_file({f"model.layers.{i}.mlp.weight": torch.ones(2, 2) for i in range(5000)}, tmp_path / "x.safetensors")
    start = time.perf_counter()
    index = open_checkpoint(tmp_path)
    assert time.perf_counter() - start < 2  # 0.03 s where it was written; this only catches what grows as n²
    assert len(index) == 5000


def test_a_tensor_is_one_span_of_its_file_and_an_empty_one_is_none(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(0), "c": torch.ones(5)}, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    for name, nbytes in {"a": 12, "c": 20}.items():
        assert found[name].spans == (FileSpan(found[name].file, found[name].offset, nbytes),)
        assert found[name].files == (SourceFile.at(tmp_path / "model.safetensors"),)
    assert found["b"].spans == ()
    [span] = found["c"].spans
    assert span.part(4, 12) == FileSpan(span.file, span.offset + 4, 8)


def test_the_folder_of_a_checkpoint_is_that_of_its_files(sharded: Path) -> None:
    for path in (sharded, sharded / "model.safetensors.index.json", sharded / "model-00001-of-00002.safetensors"):
        assert open_checkpoint(path).folder == sharded
    assert repr(open_checkpoint(sharded)) == f"CheckpointIndex({str(sharded)!r}, 2 tensors in 2 files)"
    (sharded / "empty").mkdir()
    save_file({}, sharded / "empty" / "model.safetensors")
    assert open_checkpoint(sharded / "empty").folder == sharded / "empty"


def test_the_index_is_a_mapping_that_knows_its_files(sharded: Path) -> None:
    index = open_checkpoint(sharded)
    assert list(index) == ["a", "b"]
    assert "a" in index
    assert "c" not in index
    assert [file.path.name for file in index.files] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert all(tensor.file in index.files for tensor in index.values())
    assert index.path == sharded


# ---------------------------------------------------------------- folders

FOLDER_PREFERENCE = [
    "model.safetensors.index.json",
    "model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "adapter_model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "weights.pt",
]


def write_checkpoint(path: Path) -> None:
    """A checkpoint at `path` that holds one tensor, which has the file's name."""
    shard = path
    if path.name.endswith(".index.json"):
        shard = path.parent / "shards" / path.name.removesuffix(".index.json")
        shard.parent.mkdir(exist_ok=True)
        write_index(path, {path.name: f"shards/{shard.name}"})
    save = save_file if shard.suffix == ".safetensors" else torch.save
    save({path.name: torch.ones(1)}, shard)


@pytest.mark.parametrize("best", range(len(FOLDER_PREFERENCE)), ids=lambda best: FOLDER_PREFERENCE[best])
def test_a_folder_is_read_in_the_documented_order(tmp_path: Path, best: int) -> None:
    for name in FOLDER_PREFERENCE[best:]:
        write_checkpoint(tmp_path / name)
    assert list(open_checkpoint(tmp_path)) == [FOLDER_PREFERENCE[best]]


def test_safetensors_without_an_index_are_read_together(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    index = open_checkpoint(sharded)
    assert [read(index[name])[0].item() for name in ("a", "b")] == [1, 2]


def test_an_index_is_a_path_too(sharded: Path) -> None:
    assert dict(open_checkpoint(sharded / "model.safetensors.index.json")) == dict(open_checkpoint(str(sharded)))


@pytest.mark.parametrize("name", ["index.json", "mine.index.json"])
def test_an_index_that_was_written_by_hand_may_be_the_map_alone(sharded: Path, name: str) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / "parts").mkdir()
    for number in (1, 2):
        (sharded / f"model-0000{number}-of-00002.safetensors").rename(sharded / "parts" / f"{number}.safetensors")
    (sharded / name).write_text(json.dumps({"a": "parts/1.safetensors", "b": "parts/2.safetensors"}))
    assert list(open_checkpoint(sharded)) == ["a", "b"]
    (sharded / name).write_text(json.dumps({"a": "parts/1.safetensors", "b": 2}))
    with pytest.raises(CheckpointCorruptError, match="maps tensor 'b' to 2, not to a file"):
        open_checkpoint(sharded)
    (sharded / name).write_text(json.dumps({"a": 1, "weight_map": "parts/1.safetensors"}))
    with pytest.raises(CheckpointCorruptError, match='has no "weight_map" that maps tensors to files'):
        open_checkpoint(sharded)


def test_the_weight_map_says_which_of_two_tensors_counts(sharded: Path) -> None:
    save_file({"b": torch.full((2,), 2.0), "a": torch.zeros(9), "c": torch.zeros(9)}, sharded / "second.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "second.safetensors"}
    write_index(sharded / "model.safetensors.index.json", weight_map)
    index = open_checkpoint(sharded)
    assert list(index) == ["a", "b"]
    assert [read(index[name])[0].item() for name in ("a", "b")] == [1, 2]


def test_the_links_of_a_hugging_face_cache_are_followed(
    sharded: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    snapshot = cache / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        shutil.copy(file, cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    index = open_checkpoint(snapshot)
    assert [read(index[name])[0].item() for name in ("a", "b")] == [1, 2]


def test_a_relative_path_still_leads_there_after_a_change_of_folder(
    sharded: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sharded)
    index = open_checkpoint(".")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert read(index["b"])[0] == 2


# ---------------------------------------------------------------- torch.save


def test_a_pickled_tensor_is_found_where_it_lies(tmp_path: Path) -> None:
    tensors = {f"w{i}": random_bits((i, 3), dtype) for i, dtype in enumerate(DTYPES.values())}
    tensors |= {"scalar": torch.tensor(2.5), "view": torch.arange(10)[3:6], "p": nn.Parameter(torch.randn(3))}
    torch.save(tensors, tmp_path / "x.bin")
    index = open_checkpoint(tmp_path / "x.bin")
    assert list(index) == list(tensors)
    for name, tensor in tensors.items():
        assert_same_bits(read(index[name]), tensor)


def test_a_tie_in_a_pickle_lies_at_one_place(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    torch.save({"embed": weight, "head": weight, "row": weight[1], "other": torch.ones(2)}, tmp_path / "x.pt")
    index = open_checkpoint(tmp_path / "x.pt")
    assert index["embed"].offset == index["head"].offset == index["row"].offset - 16
    assert_same_bits(read(index["row"]), weight[1])
    assert_same_bits(read(index["other"]), torch.ones(2))


def test_a_trainers_state_dict_is_found_beside_its_other_entries(tmp_path: Path) -> None:
    trained = {"epoch": 3, "state_dict": nn.Linear(2, 2).state_dict(), "optimizer": {"lr": 0.1, "m": [torch.ones(5)]}}
    torch.save(trained, tmp_path / "x.pth")
    assert list(open_checkpoint(tmp_path / "x.pth")) == ["weight", "bias"]


def test_pickled_shards_are_read_by_their_index(tmp_path: Path) -> None:
    for number in (1, 2):
        torch.save({f"t{number}": torch.full((2,), float(number))}, tmp_path / f"pytorch_model-{number}.bin")
    write_index(tmp_path / "pytorch_model.bin.index.json", {f"t{n}": f"pytorch_model-{n}.bin" for n in (2, 1)})
    index = open_checkpoint(tmp_path)
    assert [read(index[name])[0].item() for name in ("t1", "t2")] == [1, 2]


def test_a_pickle_from_a_gpu_is_read_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(3)
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        torch.save({"w": weight}, tmp_path / "x.pt")
    assert b"cuda:7" in (tmp_path / "x.pt").read_bytes()
    assert_same_bits(read(open_checkpoint(tmp_path / "x.pt")["w"]), weight)


# ---------------------------------------------------------------- files that change


@pytest.fixture
def source(tmp_path: Path) -> SourceFile:
    (tmp_path / "x.safetensors").write_bytes(b"0123456789")
    os.utime(tmp_path / "x.safetensors", ns=(1, 1))
    return SourceFile.at(tmp_path / "x.safetensors")


def check(source: SourceFile) -> None:
    with source.path.open("rb") as file:
        source.check(file.fileno())


def test_a_file_that_stays_as_it_was_passes_its_check(source: SourceFile) -> None:
    check(source)
    os.utime(source.path, ns=(5, 1))  # reading it changes the time of access only
    check(source)


def test_a_file_that_is_written_to_is_noticed(source: SourceFile) -> None:
    source.path.write_bytes(b"9876543210")
    with pytest.raises(CheckpointChangedError, match=r"x\.safetensors changed .* written to\. Load the model again"):
        check(source)


def test_a_file_that_grows_is_noticed_even_if_its_time_is_set_back(source: SourceFile) -> None:
    source.path.write_bytes(b"01234567890")
    os.utime(source.path, ns=(1, 1))
    with pytest.raises(CheckpointChangedError, match="it had 10 bytes and has 11"):
        check(source)


def test_another_file_in_its_place_is_noticed_even_if_size_and_time_agree(source: SourceFile) -> None:
    other = source.path.with_name("other")
    shutil.copy2(source.path, other)
    other.replace(source.path)
    with pytest.raises(CheckpointChangedError, match="another file now"):
        check(source)


def test_the_index_identifies_the_file_it_has_read(sharded: Path) -> None:
    index = open_checkpoint(sharded)
    assert index["a"].file == SourceFile.at(sharded / "model-00001-of-00002.safetensors")
