import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from overspill.checkpoint import index as checkpoint_index
from overspill.checkpoint import open_checkpoint
from overspill.checkpoint.inspection import inspect_checkpoint
from overspill.errors import CheckpointError, CheckpointNotFoundError

INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def sharded(folder: Path) -> Path:
    """Two shards with two tensors each, and their index."""
    folder.mkdir(exist_ok=True)
    parts = {A: {"a.0": torch.ones(4), "a.1": torch.ones(2, 3)}, B: {"b.0": torch.ones(5), "b.1": torch.ones(1)}}
    for name, tensors in parts.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in parts.items() for tensor in tensors}
    write_index(folder, weight_map, total=16 * 4)
    return folder


def write_index(folder: Path, weight_map: dict[str, str], *, total: int) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def change_index(folder: Path, **changes: str) -> None:
    document = json.loads((folder / INDEX).read_text())
    document["weight_map"].update({name.replace("_", "."): shard for name, shard in changes.items()})
    (folder / INDEX).write_text(json.dumps(document))


def raw(header: str, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + data


def truncate(folder: Path) -> None:
    with (folder / B).open("r+b") as file:
        file.truncate((folder / B).stat().st_size - 3)


def overlap(folder: Path) -> None:
    entries = [f'"b.{n}":{{"dtype":"F32","shape":[1],"data_offsets":[{n * 2},{n * 2 + 4}]}}' for n in range(2)]
    (folder / B).write_bytes(raw(f"{{{','.join(entries)}}}", bytes(6)))


def repeat_key(folder: Path) -> None:
    entry = '"b.0":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    (folder / B).write_bytes(raw(f"{{{entry},{entry}}}", bytes(4)))


def unindexed(folder: Path) -> None:
    (folder / INDEX).unlink()
    save_file({"a.1": torch.zeros(2)}, folder / B)


ERRORS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "is truncated: tensor"),
    "overlapping": (overlap, "lets tensor 'b.1' overlap tensor 'b.0'"),
    "a key twice in a header": (repeat_key, "the key 'b.0' occurs more than once"),
    "a shard is missing": (lambda folder: (folder / B).unlink(), f"names the shard '{B}' for 'b.0', 'b.1', and there"),
    "an LFS pointer": (
        lambda folder: (folder / B).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "is a Git LFS pointer",
    ),
    "an unsafe name": (lambda folder: change_index(folder, b_0="../evil.safetensors"), "which lies outside"),
    "a tensor that no shard has": (
        lambda folder: change_index(folder, c_0=A),
        f"says that '{A}' holds 'c.0', but no shard does",
    ),
    "a tensor of another shard": (
        lambda folder: change_index(folder, b_0=A),
        "holds 'b.0', but another shard holds it",
    ),
    "an index that is no index": (lambda folder: (folder / INDEX).write_text("{}"), 'has no "weight_map"'),
    "a tensor twice, without an index": (unindexed, "both hold 'a.1', and no index.json says which counts"),
}


def test_a_checkpoint_without_problems_has_none(tmp_path: Path) -> None:
    found = inspect_checkpoint(sharded(tmp_path))
    assert found.problems == []
    assert found.ok
    assert list(found.tensors) == list(open_checkpoint(tmp_path))
    assert [shard.path.name for shard in found.shards] == [A, B]


@pytest.mark.parametrize(("damage", "message"), ERRORS.values(), ids=ERRORS)
def test_what_a_load_would_refuse_is_an_error_with_its_reason(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(sharded(tmp_path))
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert not found.ok
    assert any(message in problem.message for problem in found.problems if problem.severity == "error")


def test_all_problems_are_found_at_once(tmp_path: Path) -> None:
    sharded(tmp_path)
    change_index(tmp_path, c_0=A, d_0="missing.safetensors", e_0="/etc/passwd")
    truncate(tmp_path)
    messages = " ".join(problem.message for problem in inspect_checkpoint(tmp_path).problems)
    for expected in ("holds 'c.0', but no shard does", "missing.safetensors", "/etc/passwd", "is truncated"):
        assert expected in messages


def test_an_unsafe_shard_is_not_even_opened(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "checkpoint")
    save_file({"b.0": torch.ones(5)}, tmp_path / "secret.safetensors")
    change_index(folder, b_0="../secret.safetensors")
    found = inspect_checkpoint(folder)
    assert "b.0" not in found.tensors
    assert all(shard.path.parent == folder for shard in found.shards)


def _unlisted(folder: Path) -> None:
    save_file({"a.0": torch.ones(4), "a.1": torch.ones(2, 3), "extra": torch.ones(1)}, folder / A)


def _repeated(folder: Path) -> None:
    save_file({"a.0": torch.ones(4), "a.1": torch.ones(2, 3), "b.0": torch.ones(5)}, folder / A)


WARNINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor that the index leaves out": (
        _unlisted,
        "holds 'extra', which model.safetensors.index.json does not list",
    ),
    "a tensor in two shards": (_repeated, f"'{A}' holds 'b.0', which {INDEX} has in another shard"),
    "a total that is not": (
        lambda folder: write_index(folder, json.loads((folder / INDEX).read_text())["weight_map"], total=1),
        "says that the tensors take 1 bytes, and they take 64",
    ),
    "a file that the index leaves out": (
        lambda folder: save_file({"x": torch.ones(1)}, folder / "old.safetensors"),
        "holds 'old.safetensors', which",
    ),
}


@pytest.mark.parametrize(("oddity", "message"), WARNINGS.values(), ids=WARNINGS)
def test_what_a_load_would_pass_over_is_a_warning(
    tmp_path: Path, oddity: Callable[[Path], object], message: str
) -> None:
    oddity(sharded(tmp_path))
    found = inspect_checkpoint(tmp_path)
    assert found.ok
    assert [problem.severity for problem in found.problems] == ["warning"]
    assert message in found.problems[0].message
    assert list(found.tensors) == list(open_checkpoint(tmp_path))


def test_what_holds_nothing_is_a_warning(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    assert [problem.message for problem in inspect_checkpoint(tmp_path).problems] == [
        f"{tmp_path / 'model.safetensors'} holds no tensors. Remove it, or save the checkpoint again"
    ]
    (tmp_path / "model.safetensors").unlink()
    write_index(tmp_path, {}, total=0)
    assert [problem.message for problem in inspect_checkpoint(tmp_path).problems] == [
        f"{tmp_path / INDEX} lists no tensors. Save the checkpoint again"
    ]


def test_five_thousand_tensors_are_inspected_by_one_look_at_each_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {f"model.layers.{n}.weight": torch.zeros(1) for n in range(5000)}
    shards = [dict(list(names.items())[start : start + 1000]) for start in range(0, 5000, 1000)]
    for number, shard in enumerate(shards):
        save_file(shard, tmp_path / f"{number}.safetensors")
    write_index(tmp_path, {name: f"{n}.safetensors" for n, s in enumerate(shards) for name in s}, total=20_000)
    looks = []
    read_header = checkpoint_index._FORMATS[".safetensors"]

    def counting(*given: Any) -> Any:
        looks.append(given[1])
        return read_header(*given)

    monkeypatch.setitem(checkpoint_index._FORMATS, ".safetensors", counting)
    found = inspect_checkpoint(tmp_path)
    assert found.problems == []
    assert len(found.tensors) == 5000
    assert len(looks) == 5


def test_where_there_is_nothing_to_inspect_near_names_are_told(tmp_path: Path) -> None:
    sharded(tmp_path / "model")
    with pytest.raises(CheckpointNotFoundError, match="there is 'model'"):
        inspect_checkpoint(tmp_path / "modle")
