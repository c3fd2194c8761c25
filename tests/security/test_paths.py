"""Shards that are not what their names promise, and files that are swapped behind our back."""

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fuzzing import as_read
from overspill.checkpoint import CheckpointIndex, index, open_checkpoint
from overspill.checkpoint.reader import FileReader
from overspill.errors import (
    CheckpointChangedError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CheckpointUnsafeError,
)

SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded checkpoint, beside a file that it must not lead to."""
    save_file({"w": torch.full((64,), 7.0)}, tmp_path / "secret.safetensors")
    (tmp_path / "model").mkdir()
    save_file({"w": torch.arange(64.0)}, tmp_path / "model" / SHARD)
    name_shard(tmp_path / "model", SHARD)
    return tmp_path / "model"


def name_shard(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))


# ---------------------------------------------------------------- names

LEAVING = ["../secret.safetensors", "x/../../secret.safetensors", "..\\secret.safetensors", "C:secret.safetensors"]
LEAVING += [
    "\\\\host\\share\\secret.safetensors",
    "\\\\?\\C:\\secret.safetensors",
    "//host/secret.safetensors",
    "/dev/zero",
]
NOWHERE = [
    "no\0.safetensors",
    f"{SHARD}\0",
    f"{SHARD}/",
    f"{SHARD}/.",
    "\udcff.safetensors",
    "x" * 5000 + ".safetensors",
]
NOWHERE += [
    "",
    ".",
    "sub",
    "~/secret.safetensors",
    "$HOME/secret.safetensors",
    "file:secret.safetensors",
    "*.safetensors",
]


@pytest.mark.parametrize("name", LEAVING)
def test_a_shards_name_does_not_leave_the_folder(name: str, folder: Path) -> None:
    name_shard(folder, name)
    with pytest.raises(CheckpointUnsafeError, match=r"index\.json names the shard .* outside"):
        open_checkpoint(folder)


def test_an_absolute_path_is_refused_also_where_it_leads_back(folder: Path) -> None:
    name_shard(folder, str(folder / SHARD))
    with pytest.raises(CheckpointUnsafeError, match="lies outside"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", NOWHERE)
def test_a_shards_name_that_no_file_has_is_our_error(name: str, folder: Path) -> None:
    name_shard(folder, name)
    if name == f"{SHARD}/." or name == f"{SHARD}/":
        assert set(open_checkpoint(folder)) == {"w"}  # pathlib's spelling of the very file
        return
    with pytest.raises((CheckpointNotFoundError, CheckpointReadError)):
        open_checkpoint(folder)


# ---------------------------------------------------------------- what is there is no file


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def an_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_terminal(path: Path) -> None:
    path.symlink_to("/dev/tty")


def a_process_file(path: Path) -> None:
    path.symlink_to("/proc/self/environ")  # a regular file that says to have no bytes, and has some


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def a_socket(path: Path) -> None:
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{short}/s")  # the name of a socket may have a hundred bytes
        Path(f"{short}/s").rename(path)


KINDS = [a_fifo, a_folder, an_endless_device, a_terminal, a_process_file, a_loop, a_dangling_link, a_socket]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", [SHARD, "model.safetensors.index.json", "model.safetensors"])
def test_what_is_no_file_is_refused_and_not_waited_for(make: Callable[[Path], None], name: str, folder: Path) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    make(path)
    for given in {path, folder} if name == SHARD else {path}:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(given)
        assert str(folder) in str(caught.value)


def test_a_link_to_a_file_that_is_no_checkpoint_shows_nothing_of_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hunter2 " * 10)
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(tmp_path / "password")
    with pytest.raises(CheckpointCorruptError) as caught:
        open_checkpoint(folder)
    assert "hunter2" not in str(caught.value)


def test_a_link_is_followed_since_the_hubs_cache_is_made_of_them(folder: Path, tmp_path: Path) -> None:
    (folder / SHARD).rename(tmp_path / "blob")
    (folder / SHARD).symlink_to(tmp_path / "blob")
    assert set(open_checkpoint(folder)) == {"w"}


# ---------------------------------------------------------------- races


def swap_before_opening(monkeypatch: pytest.MonkeyPatch, path: Path, make: Callable[[Path], None]) -> None:
    """Put something else at `path` between the look at it and the opening of it."""
    really_open = os.open

    def late_open(target: os.PathLike[str], *arguments: int, **others: int) -> int:
        if Path(target) == path and not done:
            done.append(True)
            path.unlink()
            make(path)
        return really_open(target, *arguments, **others)

    done: list[bool] = []
    monkeypatch.setattr(index.os, "open", late_open)


@pytest.mark.parametrize("make", KINDS)
def test_a_shard_that_is_swapped_before_it_is_opened_is_refused(
    make: Callable[[Path], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_before_opening(monkeypatch, folder / SHARD, make)
    with pytest.raises(CheckpointError, match="model-00001"):
        open_checkpoint(folder)


def values(checkpoint: CheckpointIndex) -> bytes:
    return as_read(checkpoint)["w"][2]


def test_a_shard_that_is_swapped_for_a_link_after_it_was_indexed_is_noticed(folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder)
    before = (folder / SHARD).stat()
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(tmp_path / "secret.safetensors")
    os.utime(tmp_path / "secret.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (folder / SHARD).stat().st_size == before.st_size  # neither size nor time gives it away
    with pytest.raises(CheckpointChangedError, match=rf"{SHARD} changed after it was opened: it is another file now"):
        values(checkpoint)


@pytest.mark.parametrize("make", KINDS)
def test_a_shard_that_is_swapped_for_no_file_is_noticed_and_not_waited_for(
    make: Callable[[Path], None], folder: Path
) -> None:
    checkpoint = open_checkpoint(folder)
    (folder / SHARD).unlink()
    make(folder / SHARD)
    with pytest.raises((CheckpointChangedError, CheckpointReadError), match=SHARD):
        values(checkpoint)


def test_a_folder_that_is_swapped_for_a_link_is_noticed(folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder)
    folder.rename(tmp_path / "moved")
    (tmp_path / "other").mkdir()
    save_file({"w": torch.full((64,), 7.0)}, tmp_path / "other" / SHARD)
    folder.symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointChangedError, match="another file"):
        values(checkpoint)


def test_a_file_that_is_open_is_read_on_whatever_takes_its_name(folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder)
    reader = FileReader()
    stored = checkpoint["w"]
    reader.read(stored.file, stored.offset, memoryview(bytearray(4)))
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(tmp_path / "secret.safetensors")
    target = bytearray(stored.nbytes)
    reader.read(stored.file, stored.offset, memoryview(target))
    assert torch.equal(torch.frombuffer(target, dtype=torch.float32), torch.arange(64.0))


@pytest.mark.parametrize("change", ["cut short", "written to", "longer"])
def test_a_file_that_is_changed_while_it_is_open_is_noticed(change: str, folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    reader = FileReader()
    stored = checkpoint["w"]
    reader.read(stored.file, stored.offset, memoryview(bytearray(stored.nbytes)))
    with (folder / SHARD).open("r+b") as file:
        if change == "cut short":
            file.truncate(stored.offset)
        else:
            file.seek(0 if change == "written to" else stored.file.size)
            file.write(b"x")
    os.utime(folder / SHARD)  # file systems count time in steps
    with pytest.raises(CheckpointChangedError, match=SHARD):
        reader.read(stored.file, stored.offset, memoryview(bytearray(stored.nbytes)))
